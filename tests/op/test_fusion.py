# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The order: one of our backends, upstream's own fused op, unfused; each step with its reason."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import te_grouped_mlp
from te_grouped_mlp.op import decisions, selection
from te_grouped_mlp.op.backends.reference import capability
from te_grouped_mlp.op.plan import Reason, Reject
from tests.support import step
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch")

ROOT = Path(__file__).resolve().parents[2]
CASE = StepCase(splits=(256, 0, 512), hidden=256, ffn=128)
CASE_TEXT = "3 x 256 x 128 ScaledSwiGLU, mxfp8, bfloat16 on cpu"
# Upstream rounds the probabilities and their gradient to bf16, and differs in nothing else.
ROUNDED = CASE.but(prob_dtype=torch.bfloat16)
OTHER = Reject(Reason.OPTION, "declined by a test")


@pytest.fixture(autouse=True)
def fresh_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what was decided and said before, so that a test sees its own."""
    monkeypatch.setattr(decisions, "_decisions", type(decisions._decisions)(maxlen=256))
    monkeypatch.setattr(selection, "_reported", set())
    monkeypatch.setattr(selection, "_plans", type(selection._plans)())
    monkeypatch.setattr(selection, "_latest", None)


@pytest.fixture
def declined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the reference backend decline everything."""
    monkeypatch.setattr(capability, "refusal", lambda problem, env: OTHER)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "te_grouped_mlp"]


# Upstream's op, in a process of its own ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What the child process runs.

    Attributes:
        declined: The reference backend declines everything.
        allowed: Upstream's op may run over the stand-ins for its kernels.
        checks: Upstream's module has its own check of determinism, as 2.20 has and 2.19 has not.
        environ: Environment variables of both steps.
        later: Environment variables of the second step alone.
    """

    declined: bool = True
    allowed: bool = True
    checks: bool = True
    environ: tuple[tuple[str, str], ...] = ()
    later: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Question:
    """A model that is asked about and not run, while our backends decline it.

    Attributes:
        expected: Path, and upstream's reason where it is not taken.
        recipe: Name of TE's class, and the arguments.
        changes: To `CASE`.
        scale_bias: Of FC1.
        switches: Of the process.
        checks: As of `Scenario`.
        subclass: The recipe is of a subclass.
    """

    expected: tuple[str, str]
    recipe: tuple[str, dict[str, Any]] = ("NVFP4BlockScaling", {})
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    scale_bias: bool = False
    switches: dict[str, str] = dataclasses.field(default_factory=dict)
    checks: bool = True
    subclass: bool = False


TAKEN, FAULT = ("upstream", ""), ("unfused", "UPSTREAM_FAULT")
RECIPE = ("unfused", "RECIPE")
MXFP8: tuple[str, dict[str, Any]] = ("MXFP8BlockScaling", {})
ONE = {"splits": (256,)}
OVERRIDE = {"backward_override": "dequantized"}
FULL = {"NVTE_GROUPED_MLP_FULL_ROWS": "1"}
NAMED = {"NVTE_GROUPED_MLP_BACKEND": "upstream"}
QUESTIONS = {
    "nvfp4": Question(TAKEN),
    "nvfp4, scaled bias": Question(TAKEN, changes={"bias": True, "scale_bias": True}),
    "nvfp4, unary, one group": Question(TAKEN, changes={**ONE, "activation": "srelu"}),
    "mxfp8": Question(TAKEN, MXFP8),
    "mxfp8, one group": Question(FAULT, MXFP8, ONE),
    "mxfp8, unary, one group": Question(TAKEN, MXFP8, {**ONE, "activation": "srelu"}),
    "mxfp8, unary, one group, 2.19": Question(
        FAULT, MXFP8, {**ONE, "activation": "srelu"}, checks=False
    ),
    "mxfp8, one shared expert": Question(TAKEN, MXFP8, {**ONE, "unit_scale": True}),
    "mxfp8, one shared unary expert": Question(
        FAULT, MXFP8, {**ONE, "unit_scale": True, "activation": "srelu"}
    ),
    "nvfp4, one shared expert": Question(FAULT, changes={**ONE, "unit_scale": True}),
    "nvfp4, grouped weight": Question(
        FAULT, changes={"weight": "grouped"}, switches={"NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1"}
    ),
    "nvfp4, plain bias": Question(FAULT, changes={"bias": True}),
    "fc1's bias is scaled": Question(FAULT, MXFP8, {"bias": True}, scale_bias=True),
    "mxfp8, E5M2 gradients, 2.19": Question(
        ("unfused", "GRADIENT_FORMAT"), ("MXFP8BlockScaling", {"fp8_format": "HYBRID"}),
        checks=False,
    ),
    "mxfp8, override": Question(RECIPE, ("MXFP8BlockScaling", OVERRIDE)),
    "nvfp4, override": Question(RECIPE, ("NVFP4BlockScaling", OVERRIDE)),
    "nvfp4, 4 over 6": Question(RECIPE, ("NVFP4BlockScaling", {"nvfp4_4over6": "weights"})),
    "nvfp4, row-scaled": Question(RECIPE, ("NVFP4BlockScaling", {"row_scaled_activation": True})),
    "mxfp8 subclass": Question(RECIPE, MXFP8, subclass=True),
    "nvfp4 subclass": Question(RECIPE, subclass=True),
    "nvfp4 subclass, named": Question(TAKEN, subclass=True, switches=NAMED),
    **{
        f"nvfp4, {name}, one group{words}": Question(
            expected, changes={**ONE, "activation": name}, switches=switches
        )
        for name in step.GATED
        for words, switches, expected in (
            ("", {}, FAULT), (", full", FULL, TAKEN), (", named", NAMED, TAKEN)
        )
    },
}  # fmt: skip

DEMAND = (("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0"),)
SCENARIOS = {
    "named": Scenario(declined=False, environ=(("NVTE_GROUPED_MLP_BACKEND", "upstream"),)),
    "declined": Scenario(),
    "no wgrad kernel": Scenario(environ=(("NVTE_DISABLE_CUTEDSL_WGRAD_FUSED_GROUPED_MLP", "1"),)),
    "forbidden": Scenario(allowed=False),
    "demanded": Scenario(environ=DEMAND),
    "old upstream": Scenario(checks=False),
    "old upstream, demanded": Scenario(checks=False, environ=DEMAND),
    "old upstream, demanded later": Scenario(checks=False, later=DEMAND),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Any]]:
    """Run every scenario in one process that has stand-ins for the frontend's kernels."""
    code = "from tests.op import test_fusion; test_fusion.child()"
    kept = {key: value for key, value in os.environ.items() if not key.startswith("NVTE_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **kept,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def child() -> None:
    """Run all scenarios, and print what happened as one line of JSON."""
    from tests.support import frontend_stand_in

    te_grouped_mlp.activate()
    stand_in = frontend_stand_in.install("1.32.0", deterministic=False)
    import transformer_engine.pytorch  # noqa: F401

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("te_grouped_mlp").addHandler(handler)
    logging.getLogger("te_grouped_mlp").setLevel(logging.INFO)
    ours = step.run_step(ROUNDED)
    found = {}
    for name, scenario in SCENARIOS.items():
        said.clear()
        stand_in.calls.clear()
        decisions._decisions.clear()
        found[name] = {**run_scenario(scenario, stand_in, ours), "said": list(said)}
    found["questions"] = {name: ask(question) for name, question in QUESTIONS.items()}
    sys.stdout.write(json.dumps(found) + "\n")


def ask(question: Question) -> tuple[str, str]:
    """Return the path of a question's model, and upstream's reason."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    from te_grouped_mlp.integration import standalone
    from te_grouped_mlp.op.backends.upstream import capability as upstream

    name, options = question.recipe
    if "fp8_format" in options:
        options = {**options, "fp8_format": recipes.Format[options["fp8_format"]]}
    cls = getattr(recipes, name)
    if question.subclass:
        cls = type("Mine", (cls,), {})
    case = CASE.but(**question.changes)
    with pytest.MonkeyPatch.context() as patch, step.switches(**question.switches):
        model = step.make_model(case)
        if question.scale_bias:
            fc1 = te.ops.GroupedLinear(3, case.hidden, 2 * case.ffn, bias=True, scale_bias=True)
            model = te.ops.Sequential(fc1, *list(model)[1:])
        standalone.allow_upstream_fused(True)
        patch.setattr(capability, "refusal", lambda problem, env: OTHER)
        if not question.checks:
            patch.setattr(upstream, "OWN_CHECK", "a function that no version has")
        (decision,) = te_grouped_mlp.explain(model, recipe=cls(**options))
    reasons = [each.reason.name for path, each in decision.refusals if path == "upstream"]
    return decision.path, "".join(reasons)


def run_scenario(scenario: Scenario, stand_in: Any, ours: dict[str, Any]) -> dict[str, Any]:
    """Run two steps and describe them."""
    from transformer_engine.pytorch.ops.fused import grouped_mlp

    from te_grouped_mlp.integration import standalone
    from te_grouped_mlp.op.backends.upstream import capability as upstream

    error, found = "", {}
    with pytest.MonkeyPatch.context() as patch, step.switches(**dict(scenario.environ)):
        standalone.allow_upstream_fused(scenario.allowed)
        # Upstream remembers the switch; clearing ours clears its cache too.
        grouped_mlp.GroupedMLP_CuTeGEMMGLU.grouped_gemm_wgrad_kernel.cache_clear()
        if scenario.declined:
            patch.setattr(capability, "refusal", lambda problem, env: OTHER)
        if not scenario.checks:
            patch.setattr(upstream, "OWN_CHECK", "a function that no version has")
        model, inputs = step.make_model(ROUNDED), step.make_inputs(ROUNDED)
        try:
            step.run_model(model, ROUNDED, inputs)
            for tensor in (inputs.x, inputs.prob, *model.parameters()):
                tensor.grad = None
            with step.switches(**dict(scenario.later)):
                if scenario.later:
                    stand_in.calls.clear()
                found = step.collect(ROUNDED, model, inputs, step.run_model(model, ROUNDED, inputs))
        except RuntimeError as raised:
            error = str(raised)
    fused, last = type(step.fused_op(model)), te_grouped_mlp.explain()[-1]
    return {
        "error": error,
        "differ": [name for name in found if not step.same_bits(found[name], ours[name])],
        "fused": fused.__name__,
        "module": fused.__module__,
        "path": last.path,
        "refusals": [[name, reject.reason.name] for name, reject in last.refusals],
        "kernels": sorted({name for name, _ in stand_in.calls}),
    }


PRIVATE = "transformer_engine.pytorch.ops.fused._te_grouped_mlp_upstream"
UPSTREAM_KERNELS = ["dglu", "glu", "quant", "wgrad"]


def test_upstreams_op_runs_where_it_is_named(outcomes: dict[str, Any]) -> None:
    """From its own file under the private name, with our bits."""
    found = outcomes["named"]
    assert (found["fused"], found["module"]) == ("GroupedMLP_CuTeGEMMGLU", PRIVATE)
    assert (found["path"], found["refusals"]) == ("upstream", [])
    assert found["kernels"] == UPSTREAM_KERNELS
    assert found["differ"] == []
    assert found["said"] == [f"grouped MLP: {CASE_TEXT}: upstream"]


def test_upstreams_op_is_the_second_step(outcomes: dict[str, Any]) -> None:
    found = outcomes["declined"]
    assert (found["fused"], found["module"]) == ("GroupedMLP_CuTeGEMMGLU", PRIVATE)
    assert (found["path"], found["refusals"]) == ("upstream", [["reference", "OPTION"]])
    assert found["kernels"] == UPSTREAM_KERNELS
    assert len(found["said"]) == 1
    assert OTHER.detail in found["said"][0]


def test_weight_gradients_by_cublas_are_upstreams(outcomes: dict[str, Any]) -> None:
    """The switch that forbids the frontend's kernel of them is obeyed by upstream's own op."""
    found = outcomes["no wgrad kernel"]
    assert (found["path"], found["module"]) == ("upstream", PRIVATE)
    assert found["kernels"] == ["dglu", "glu", "quant"]
    assert found["differ"] == outcomes["declined"]["differ"] == []


def test_unfused_is_the_third_step(outcomes: dict[str, Any]) -> None:
    found = outcomes["forbidden"]
    assert found["fused"] == "GroupedLinear"
    assert found["path"] == "unfused"
    assert found["refusals"] == [["reference", "OPTION"], ["upstream", "PACKAGE"]]
    assert found["kernels"] == []
    assert len(found["said"]) == 1


def test_an_upstream_without_a_check_is_skipped_when_determinism_is_asked(
    outcomes: dict[str, Any],
) -> None:
    """2.19's module would sum dprob with atomics and say nothing."""
    found = outcomes["old upstream, demanded"]
    assert found["fused"] == "GroupedLinear"
    assert found["refusals"] == [["reference", "OPTION"], ["upstream", "NOT_DETERMINISTIC"]]
    assert found["kernels"] == []
    assert not found["error"]


def test_an_upstream_without_a_check_serves_without_a_demand(outcomes: dict[str, Any]) -> None:
    found = outcomes["old upstream"]
    assert (found["fused"], found["module"]) == ("GroupedMLP_CuTeGEMMGLU", PRIVATE)
    assert not found["error"]


def test_an_upstream_without_a_check_is_stopped_when_determinism_is_asked_later(
    outcomes: dict[str, Any],
) -> None:
    found = outcomes["old upstream, demanded later"]
    assert found["module"] == PRIVATE
    assert "float atomics" in found["error"]
    assert found["kernels"] == []


def test_an_upstream_with_a_check_refuses_by_itself(outcomes: dict[str, Any]) -> None:
    """The frontend's kernel has no deterministic mode here: upstream's own error stands."""
    found = outcomes["demanded"]
    assert found["module"] == PRIVATE
    assert "determinis" in found["error"]
    assert "wgrad" not in found["kernels"]


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_path_known_to_be_wrong_is_not_taken(name: str, outcomes: dict[str, Any]) -> None:
    """Upstream's op would take every one of these, and its result would be wrong for some."""
    assert tuple(outcomes["questions"][name]) == QUESTIONS[name].expected


# The same decisions without upstream's kernels --------------------------------------------------


@pytest.fixture
def no_upstream(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Forget upstream's module, so that it is loaded anew; returns the overlay."""
    import transformer_engine.pytorch  # noqa: F401

    from te_grouped_mlp.integration import overlay

    monkeypatch.delitem(sys.modules, overlay.UPSTREAM_NAME, raising=False)
    return overlay


def refusals() -> list[tuple[str, Reason]]:
    return [(name, reject.reason) for name, reject in te_grouped_mlp.explain()[-1].refusals]


def test_a_file_patched_to_use_the_fork_is_no_fallback(
    declined: None, no_upstream: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(no_upstream, "carries_patch", lambda file: True)
    step.run_step(CASE, fused=None)
    assert refusals() == [("reference", Reason.OPTION), ("upstream", Reason.PATCHED)]
    detail = te_grouped_mlp.explain()[-1].refusals[1][1].detail
    assert no_upstream.PATCH_MARKER in detail
    assert "patch revert" in detail


@pytest.mark.parametrize("error", [ImportError("gone"), SyntaxError("torn"), AttributeError("old")])
def test_a_broken_upstream_is_a_reason(
    error: Exception, declined: None, no_upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(no_upstream, "load_upstream", fail)
    step.run_step(CASE, fused=None)
    assert refusals() == [("reference", Reason.OPTION), ("upstream", Reason.PACKAGE)]
    assert str(error) in te_grouped_mlp.explain()[-1].refusals[1][1].detail


def test_an_unfused_step_is_close_to_the_fused_one(declined: None) -> None:
    found = step.run_step(CASE, fused=None)
    step.assert_close(CASE, found, step.reference(CASE))


# A backend that is named ------------------------------------------------------------------------


def test_a_named_backend_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step.run_step(CASE)
    monkeypatch.setenv("NVTE_GROUPED_MLP_BACKEND", "reference")
    step.assert_same(step.run_step(CASE), expected)
    assert te_grouped_mlp.explain()[-1].path == "reference"


def test_a_named_backend_runs_what_auto_leaves_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 without a recipe."""
    case = CASE.but(mxfp8=False, interleave=32)
    step.run_step(case, fused=None)
    assert refusals()[0] == ("reference", Reason.NOT_NAMED)
    monkeypatch.setenv("NVTE_GROUPED_MLP_BACKEND", "reference")
    step.assert_close(case, step.run_step(case), step.reference(case), 0.02)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("reference", {"hidden": 96}, "fc1.in_features is 96"),
        ("reference", {"interleave": None}, "interleave is None"),
        ("upstream", {}, "is_supported\\(\\) is False"),
    ],
)
def test_a_named_backend_that_cannot_run_raises(
    name: str, changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any work, with the reason; it is not replaced silently."""
    monkeypatch.setenv("NVTE_GROUPED_MLP_BACKEND", name)
    case = CASE.but(**changes)
    model, inputs = step.make_model(case), step.make_inputs(case)
    expected = f"NVTE_GROUPED_MLP_BACKEND is '{name}', which cannot run.*{words}.*allowed: unset it"
    with pytest.raises(ValueError, match=expected):
        step.forward(model, case, inputs)
    assert te_grouped_mlp.explain()[-1].path == "unfused"


def test_a_name_that_changes_after_fusion_is_obeyed_or_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs = step.make_model(CASE), step.make_inputs(CASE)
    step.forward(model, CASE, inputs)
    monkeypatch.setenv("NVTE_GROUPED_MLP_BACKEND", "reference")
    step.forward(model, CASE, inputs)
    monkeypatch.setenv("NVTE_GROUPED_MLP_BACKEND", "upstream")
    with pytest.raises(ValueError, match="NVTE_GROUPED_MLP_BACKEND names 'upstream' now"):
        step.forward(model, CASE, inputs)


# The switch -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, "0", "", "-1"])
def test_the_switch_off(
    value: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is said: it is what a user without the switch expects."""
    caplog.set_level(logging.DEBUG, logger="te_grouped_mlp")
    with step.switches(NVTE_CUTEDSL_FUSED_GROUPED_MLP=value):
        step.run_step(CASE, fused=None)
    assert refusals() == [("fused", Reason.SWITCH_OFF)]
    assert lines(caplog) == []


@pytest.mark.parametrize("value", ["1", "2"])
def test_the_switch_is_read_when_a_fuser_first_fuses(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long after the import; a fuser that ran before keeps its choice."""
    monkeypatch.delenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP")
    early, late = step.make_model(CASE), step.make_model(CASE)
    inputs = step.make_inputs(CASE)
    step.forward(early, CASE, inputs)
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", value)
    step.forward(early, CASE, inputs)
    step.forward(late, CASE, inputs)
    assert type(step.fused_op(early)).__name__ == "GroupedLinear"
    assert type(step.fused_op(late)).__name__ == "GroupedMLP_CuTeGEMMGLU"
    assert [each.path for each in te_grouped_mlp.explain()] == ["unfused", "reference"]


# What is kept and said --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "spoken"), [(None, True), ("0", True), ("1", False), ("7", False)]
)
def test_the_first_rank_speaks_once(
    rank: str | None,
    spoken: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line for the decision and one for each kind of plan, whatever the number of calls."""
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    caplog.set_level(logging.INFO, logger="te_grouped_mlp")
    for rows in (None, 1024, 896):
        for _ in range(2):
            step.run_step(CASE.but(buffer_rows=rows))
    assert len(te_grouped_mlp.explain()) == 1, "every rank keeps the decision"
    expected = [
        f"grouped MLP: {CASE_TEXT}: reference",
        "grouped MLP with 3 experts, ScaledSwiGLU, mxfp8: backend reference, packed rows",
    ]
    assert lines(caplog) == (expected if spoken else [])


def test_each_kind_of_plan_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="te_grouped_mlp")
    single = CASE.but(splits=(256,))
    step.run_step(single)
    step.run_step(single.but(buffer_rows=512))
    with step.switches(NVTE_ALLOW_NONDETERMINISTIC_ALGO="0"):
        step.run_step(single)
    endings = [line.rsplit("backend reference, ")[-1] for line in lines(caplog)[1:]]
    assert endings == ["buffer rows", "packed rows", "buffer rows, deterministic"]


def test_decisions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    record = functools.partial(decisions.Decision, None, "unfused")
    for index in range(1000):
        decisions.add(record((("fused", Reject(Reason.OPTION, str(index))),)))
    kept = te_grouped_mlp.explain()
    assert len(kept) == 256
    assert kept[-1].refusals[0][1].detail == "999"


def test_a_decision_reads_as_a_sentence() -> None:
    decision = decisions.Decision(None, "unfused", (("reference", OTHER),))
    assert str(decision) == f"unfused (not reference: {Reason.OPTION.value}: declined by a test)"
    assert str(decisions.Decision(None, "reference", ())) == "reference"


# Without our module -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refused", "reason"), [(None, Reason.FORK_OFF), ("TE 2.99 lacks x", Reason.HOST_VERSION)]
)
def test_explain_says_why_upstreams_module_runs(
    refused: str | None, reason: Reason, monkeypatch: pytest.MonkeyPatch
) -> None:
    from te_grouped_mlp.integration import overlay

    state = overlay.Status(False, True, refused or "switched off", "", "2.99", True, None)
    monkeypatch.setattr(overlay, "status", lambda: state)
    monkeypatch.setattr(overlay, "_refusal", refused)
    first = te_grouped_mlp.explain()[0]
    assert (first.problem, first.path) == (None, "upstream")
    assert first.refusals == (("fork", Reject(reason, state.reason)),)


def test_explain_without_the_fork_in_a_process_of_its_own() -> None:
    code = (
        "import te_grouped_mlp; te_grouped_mlp.activate()\n"
        "assert te_grouped_mlp.explain() == ()\n"
        "import transformer_engine.pytorch\n"
        "print(*te_grouped_mlp.explain())"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NVTE_GROUPED_MLP_FORK": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("upstream (not fork: the fork is not in place in this process: ")
    assert "NVTE_GROUPED_MLP_FORK=0" in done.stdout
