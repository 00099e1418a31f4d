# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Who runs on SM 10x: every row of the table in docs/determinism.md, and what is in the way.

`expected_backend` and `expected_sums` say the rules a second time, apart from the code.
"""

from __future__ import annotations

import dataclasses
import itertools
import platform
from typing import Any

import pytest

from te_grouped_mlp.cli import determinism, frontend_releases, paths
from te_grouped_mlp.cli.paths import Bias, Question
from te_grouped_mlp.op import selection
from te_grouped_mlp.op.activations import Activation
from te_grouped_mlp.op.environment import Environment, Switches
from te_grouped_mlp.op.formats import MXFP8, DType
from te_grouped_mlp.op.layout import Output, RowExtent
from te_grouped_mlp.op.packages import Absent
from te_grouped_mlp.op.plan import Plan, Reason
from te_grouped_mlp.op.problem import Call, Problem, RecipeKind
from tests.cli.conftest import ROOT

PAGE = ROOT / "docs" / "determinism.md"
# A copy of the tests beside an installed wheel has no docs.
TEXT = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""

GATED = (Activation.SWIGLU, Activation.CLAMPED_QGEGLU, Activation.SITU_GLU)
BIASES = {
    Bias.NONE: (False, False, False),
    Bias.FC1: (True, False, False),
    Bias.FC2: (False, True, False),
    Bias.SCALED: (False, True, True),
    Bias.BOTH: (True, True, True),
}
"""Whether FC1 has one, FC2 has one, and the latter is scaled."""
ROWS = list(itertools.product(Activation, Bias, (False, True)))
MACHINES = list(itertools.product(((10, 0), (10, 3)), ("x86_64", "aarch64")))

every_row = pytest.mark.parametrize(
    ("kind", "bias", "has_argument"),
    ROWS,
    ids=[f"{k.value}-{b.value}-{'flag' if flag else 'noflag'}" for k, b, flag in ROWS],
)
every_machine = pytest.mark.parametrize(
    ("sm", "processor"), MACHINES, ids=[f"sm{a}{b}-{name}" for (a, b), name in MACHINES]
)


@pytest.fixture(autouse=True)
def no_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "_plans", type(selection._plans)())
    monkeypatch.setattr(selection, "_latest", None)


def problem_of(kind: Activation, bias: Bias, **changes: Any) -> Problem:
    question = Question(kind, RecipeKind.MXFP8, Bias.NONE, 8, False)
    problem = paths.problem_of(question, determinism.environment(True))
    first, second, scaled = BIASES[bias]
    fc1 = dataclasses.replace(problem.fc1, has_bias=first)
    fc2 = dataclasses.replace(problem.fc2, has_bias=second, scale_bias=scaled)
    return dataclasses.replace(problem, fc1=fc1, fc2=fc2, **changes)


def call_of(bias: Bias, *without: Output, **changes: Any) -> Call:
    first, second, _ = BIASES[bias]
    absent = {Output.DB1} - {Output.DB1 if first else None}
    absent |= {Output.DB2} - {Output.DB2 if second else None}
    call = Call(
        rows=2048,
        dtype=DType.BFLOAT16,
        prob_dtype=DType.FLOAT32,
        rows_are_full=False,
        wanted=frozenset(Output) - absent - set(without),
        input_kind=paths.TensorKind.PLAIN,
        unit_scale=False,
        deterministic=False,
        format=MXFP8,
    )
    return dataclasses.replace(call, **changes)


def plan_of(kind: Activation, bias: Bias, env: Environment, *without: Output, **call: Any) -> Plan:
    return selection.make_plan(problem_of(kind, bias), call_of(bias, *without, **call), env)


def expected_backend(kind: Activation, bias: Bias, has_argument: bool, demanded: bool) -> str:
    kept = has_argument and not (kind in GATED and BIASES[bias][0])
    return "cudnn" if kept or not demanded else "cutedsl"


def launches_of(plan: Plan, output: Output) -> list[str]:
    return [each.kernel.value for each in plan.launches if output in each.outputs]


def sums_of(bias: Bias) -> dict[Output, list[str]]:
    """The launches that the sums over rows are made by."""
    first, second, scaled = BIASES[bias]
    found = {Output.DPROB: ["fc2_bias_grad", "dact_dgrad"] if scaled else ["dact_dgrad"]}
    if first:
        found[Output.DB1] = ["dact_dgrad"]
    if second:
        found[Output.DB2] = ["fc2_bias_grad"]
    return found


# The table --------------------------------------------------------------------------------------


@every_machine
@every_row
def test_every_row_is_planned_so(
    kind: Activation,
    bias: Bias,
    has_argument: bool,
    sm: tuple[int, int],
    processor: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: processor)
    env = determinism.environment(has_argument, sm=sm)
    assert selection.choose(problem_of(kind, bias), env) == "cudnn"
    assert selection.passed_over(problem_of(kind, bias), env) == []
    plain, strict = (plan_of(kind, bias, env, deterministic=each) for each in (False, True))
    assert plain.backend == "cudnn"
    assert set(plain.not_deterministic()) == {Output.DPROB, Output.DB1} & plain.call.wanted
    assert strict.backend == expected_backend(kind, bias, has_argument, True)
    assert strict.not_deterministic() == {}
    if strict.backend == "cutedsl":
        assert strict.layout.extent is RowExtent.PACKED
    for plan in (plain, strict):
        for output, launches in sums_of(bias).items():
            assert launches_of(plan, output) == launches
        assert all(launches_of(plan, output) for output in plan.call.wanted)


@every_row
def test_every_row_of_the_page_is_what_is_planned(
    kind: Activation, bias: Bias, has_argument: bool
) -> None:
    if not TEXT:
        pytest.skip("there is no page beside an installed wheel")
    start = ("gated" if kind in GATED else "unary", bias.value, "yes" if has_argument else "no")
    lines = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in TEXT.splitlines()
        if line.startswith("| " + " | ".join(start) + " |")
    ]
    assert len(lines) == 1, lines
    _, _, _, one_writer, db1, db2, dprob, promised, because = lines[0]
    env = determinism.environment(has_argument)
    plain, strict = (plan_of(kind, bias, env, deterministic=each) for each in (False, True))
    assert one_writer == plain.backend
    for output, cell in ((Output.DB1, db1), (Output.DB2, db2), (Output.DPROB, dprob)):
        if output not in plain.call.wanted:
            assert cell == "-"
            continue
        varies = ", **varies**" if output in plain.not_deterministic() else ""
        assert cell == f"{plain.backend} {' + '.join(launches_of(plain, output))}{varies}"
    assert promised == strict.backend
    if strict.backend == "cudnn":
        assert because == "-"
    else:
        weak = {Output.DPROB, Output.DB1} & plain.call.wanted
        names = ", ".join(sorted(each.value for each in weak))
        assert because == f"cudnn would be nondeterministic in {names}"


def test_the_page_has_the_table_as_it_is_printed() -> None:
    table = determinism.markdown({})
    assert table in TEXT or not TEXT
    assert len(determinism.rows({})) == 2 * len(Bias) * 2


@every_row
def test_doctor_names_the_path_of_every_row(
    kind: Activation, bias: Bias, has_argument: bool
) -> None:
    env = determinism.environment(has_argument)
    for demanded, groups in itertools.product((False, True), (1, 8)):
        question = Question(kind, RecipeKind.MXFP8, bias, groups, demanded)
        found = paths.answer(question, env)
        assert found.path == expected_backend(kind, bias, has_argument, demanded)
        assert found.repeats is demanded
        if found.path == "cutedsl":
            assert found.text.startswith("cutedsl, since cudnn would be nondeterministic in ")
            ((name, reject),) = found.refusals
            assert (name, reject.reason) == ("cudnn", Reason.NOT_DETERMINISTIC)
        else:
            assert (found.text, found.refusals) == ("cudnn", ())


# Where the native kernels are not there, or not wanted ------------------------------------------


@every_row
@pytest.mark.parametrize("way", ["no quack", "cudnn named"])
def test_without_the_native_kernels_the_demand_raises(
    way: str, kind: Activation, bias: Bias, has_argument: bool
) -> None:
    env = determinism.environment(has_argument)
    if way == "no quack":
        versions = {**env.versions, "quack": Absent("quack-kernels is not installed")}
        env, cause = dataclasses.replace(env, versions=versions), "quack-kernels is not installed"
    else:
        env, cause = named("cudnn", env), ""
    if expected_backend(kind, bias, has_argument, True) == "cudnn":
        assert plan_of(kind, bias, env, deterministic=True).backend == "cudnn"
        return
    with pytest.raises(RuntimeError, match="cannot be deterministic here") as raised:
        plan_of(kind, bias, env, deterministic=True)
    for output in {Output.DPROB, Output.DB1} & call_of(bias).wanted:
        assert f"{output.value} is computed by dact_dgrad" in str(raised.value)
    assert cause in str(raised.value)


def named(name: str, env: Environment) -> Environment:
    return dataclasses.replace(env, switches=Switches(fused=True, backend=name))


@pytest.mark.parametrize("kind", GATED, ids=lambda kind: kind.value)
def test_what_is_not_wanted_keeps_the_frontend(kind: Activation) -> None:
    """A frozen bias needs no sum, and frozen probabilities need none either."""
    env = determinism.environment(True)
    strict = {"deterministic": True}
    assert plan_of(kind, Bias.FC1, env, **strict).backend == "cutedsl"
    assert plan_of(kind, Bias.FC1, env, Output.DB1, **strict).backend == "cudnn"
    old = determinism.environment(False)
    assert plan_of(kind, Bias.NONE, old, **strict).backend == "cutedsl"
    assert plan_of(kind, Bias.NONE, old, Output.DPROB, **strict).backend == "cudnn"
    inference = call_of(Bias.NONE, wanted=frozenset({Output.Y}), **strict)
    assert selection.make_plan(problem_of(kind, Bias.NONE), inference, old).backend == "cudnn"


def test_a_call_that_neither_takes_says_why_each_does_not() -> None:
    """fp16 with a gated activation and FC1's bias: the native kernels are bf16 alone."""
    env = determinism.environment(True)
    with pytest.raises(RuntimeError, match="'cudnn'.*db1.*'cutedsl'.*float16.*'reference'"):
        plan_of(Activation.SWIGLU, Bias.FC1, env, dtype=DType.FLOAT16, deterministic=True)


def test_rows_off_the_frontends_tile_go_elsewhere_on_demand_alone() -> None:
    env = determinism.environment(True)
    words = "'cudnn'.*is 128; allowed: multiples of 256.*'cutedsl'.*only when it is named"
    with pytest.raises(ValueError, match=words):
        plan_of(Activation.SWIGLU, Bias.NONE, env, split_multiple=128)
    strict = {"split_multiple": 128, "deterministic": True}
    assert plan_of(Activation.SWIGLU, Bias.NONE, env, **strict).backend == "cutedsl"


# By name ----------------------------------------------------------------------------------------


@every_row
def test_the_native_kernels_by_name_take_every_row(
    kind: Activation, bias: Bias, has_argument: bool
) -> None:
    for sm, demanded in itertools.product(((10, 0), (10, 3)), (False, True)):
        env = named("cutedsl", determinism.environment(has_argument, sm=sm))
        assert selection.choose(problem_of(kind, bias), env) == "cutedsl"
        plan = plan_of(kind, bias, env, deterministic=demanded)
        assert plan.backend == "cutedsl"
        assert plan.not_deterministic() == {}


@pytest.mark.parametrize("kind", Activation, ids=lambda kind: kind.value)
def test_upstream_by_name_leaves_none_of_ours(kind: Activation) -> None:
    env = named("upstream", determinism.environment(True))
    assert selection.choose(problem_of(kind, Bias.NONE), env) is None
    question = Question(kind, RecipeKind.MXFP8, Bias.NONE, 8, False)
    assert paths.answer(question, env).path == "upstream"


# Where nothing of ours is fused -----------------------------------------------------------------

NO_FRONTEND = Absent("nvidia-cudnn-frontend is not installed")
BROKEN = Absent("nvidia-cudnn-frontend 1.32.0 cannot be imported: libcudnn.so.9: no such file")
NO_DSL = Absent("nvidia-cudnn-frontend 1.32.0 lacks a dependency: No module named 'cutlass'")
TOO_OLD = [
    release
    for release in frontend_releases.RELEASES
    if tuple(int(part) for part in release.split(".")) < (1, 27)
]

UNUSABLE = {
    "absent": ({"wrappers": NO_FRONTEND}, "unfused", "is not installed"),
    "broken": ({"wrappers": BROKEN}, "unfused", "libcudnn.so.9"),
    "no CuTe DSL": ({"wrappers": NO_DSL}, "unfused", "No module named 'cutlass'"),
    "standalone": ({"standalone": True}, "unfused", "extension is not installed"),
    **{
        release: ({"wrappers": frontend_releases.wrappers(release)}, "upstream", "too old")
        for release in TOO_OLD
    },
}


@every_machine
@pytest.mark.parametrize("demanded", [False, True], ids=["default", "demanded"])
@pytest.mark.parametrize("kind", [Activation.SWIGLU, Activation.SRELU], ids=["gated", "unary"])
@pytest.mark.parametrize("what", UNUSABLE)
def test_without_a_usable_frontend_nothing_of_ours_is_fused(
    what: str,
    kind: Activation,
    demanded: bool,
    sm: tuple[int, int],
    processor: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The native kernels are no default on this chip, demand or not."""
    monkeypatch.setattr(platform, "machine", lambda: processor)
    changes, path, text = UNUSABLE[what]
    env = determinism.environment(True, sm=sm, **changes)
    problem = problem_of(kind, Bias.NONE)
    assert selection.choose(problem, env) is None
    passed = dict(selection.passed_over(problem, env))
    assert list(passed) == ["cudnn", "cutedsl", "reference"]
    assert passed["cudnn"].reason is Reason.PACKAGE
    assert text in passed["cudnn"].detail
    assert passed["cutedsl"].reason is passed["reference"].reason is Reason.NOT_NAMED
    question = Question(kind, RecipeKind.MXFP8, Bias.NONE, 8, demanded)
    found = paths.answer(question, env)
    # These releases have dSReLU's argument nowhere, so that upstream's own op raises.
    assert found.path == ("raises" if demanded and path == "upstream" else path)
    assert found.refusals[0] == ("cudnn", passed["cudnn"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"recipe": RecipeKind.NVFP4}, Reason.RECIPE),
        ({"recipe": RecipeKind.NONE}, Reason.RECIPE),
        ({"recipe_detail": "the recipe is hybrid"}, Reason.GRADIENT_FORMAT),
        ({"num_groups": 65}, Reason.OPTION),
    ],
    ids=["nvfp4", "bf16", "hybrid", "65 groups"],
)
def test_what_the_frontend_does_not_take_is_left_to_upstream_or_unfused(
    changes: dict[str, Any], reason: Reason
) -> None:
    env = determinism.environment(True)
    problem = problem_of(Activation.SWIGLU, Bias.NONE, **changes)
    assert selection.choose(problem, env) is None
    passed = dict(selection.passed_over(problem, env))
    assert passed["cudnn"].reason is reason
    assert passed["cutedsl"].reason is Reason.NOT_NAMED


@pytest.mark.parametrize("release", ["1.27.0", "1.28.0"])
def test_an_activation_that_a_frontend_lacks_is_not_fused(release: str) -> None:
    env = determinism.environment(True, wrappers=frontend_releases.wrappers(release))
    problem = problem_of(Activation.TANH_SRELU, Bias.NONE)
    assert selection.choose(problem, env) is None
    assert selection.refusals(problem, env)["cudnn"].reason is Reason.WRAPPER


@pytest.mark.parametrize("release", frontend_releases.RELEASES[5:])
def test_every_usable_release_has_an_answer_to_a_demand(release: str) -> None:
    """Whatever its wrappers lack, each step that is fused can be made deterministic."""
    env = determinism.environment(True, wrappers=frontend_releases.wrappers(release))
    fused = 0
    for kind, bias in itertools.product(Activation, Bias):
        if selection.choose(problem_of(kind, bias), env) is None:
            continue
        fused += 1
        plan = plan_of(kind, bias, env, deterministic=True)
        assert plan.not_deterministic() == {}
        wrapper = "dglu" if kind in GATED else "dsrelu"
        flag = "deterministic" in frontend_releases.wrappers(release)[wrapper]
        assert plan.backend == expected_backend(kind, bias, flag, True)
    assert fused >= 3 * len(Bias)
