# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`doctor` agrees with `assert_active`, imports nothing, and its table with what really runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from te_grouped_mlp.cli import doctor, frontend_releases, machine, paths
from te_grouped_mlp.cli.remedies import REMEDIES
from te_grouped_mlp.integration import installed_te
from te_grouped_mlp.integration.standalone import loader
from te_grouped_mlp.op.activations import Activation
from te_grouped_mlp.op.environment import Environment, Switches
from te_grouped_mlp.op.layout import Output
from te_grouped_mlp.op.packages import DISTRIBUTIONS, Absent
from te_grouped_mlp.op.plan import Reason
from te_grouped_mlp.op.problem import RecipeKind
from tests.cli import frontend_signatures
from tests.cli.conftest import ROOT, Shell, python

BLACKWELL = ("--assume", "sm=100,frontend=1.32.0,te=2.20.2")


@pytest.fixture(autouse=True)
def _no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests for a GPU set the switch where they are collected; an assumed machine has none."""
    monkeypatch.delenv(loader.SWITCH, raising=False)


BOTH = """
import sys, te_grouped_mlp
{before}
from te_grouped_mlp.cli import main
code = main(["doctor", "--assume", "sm=none,frontend=none"])
assert "torch" not in sys.modules and "transformer_engine" not in sys.modules
try:
    te_grouped_mlp.assert_active()
except (RuntimeError, ValueError) as error:
    print("REFUSED", error)
else:
    print("ACTIVE")
"""


@pytest.mark.parametrize(
    ("before", "environment", "active"),
    [
        ("", {}, False),
        ("te_grouped_mlp.activate()", {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"}, True),
        ("te_grouped_mlp.activate()", {}, False),
        ("te_grouped_mlp.activate()", {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "0"}, False),
        ("te_grouped_mlp.activate()", {"NVTE_GROUPED_MLP_FORK": "0"}, False),
        ("", {"NVTE_GROUPED_MLP_FORK": "0"}, False),
        ("", {"NVTE_GROUPED_MLP_FORK": "maybe"}, False),
    ],
    ids=[
        "plain",
        "activated",
        "switch-unset",
        "switch-off",
        "fork-0-activated",
        "fork-0",
        "fork-nonsense",
    ],
)
def test_first_line_agrees_with_assert_active(
    before: str, environment: dict[str, str], active: bool
) -> None:
    # Without site-packages' own `.pth` files, so that an installed copy does not activate itself.
    done = python(
        BOTH.format(before=before), "-S", path=tuple(filter(None, sys.path)), **environment
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert last.startswith("ACTIVE" if active else "REFUSED")
    assert first.startswith("overlay active: ") is active
    if not active:
        assert re.match("overlay (not active|in place, and switched off): ", first)
        reason = first.partition(": ")[2].split("; ")[0]
        assert reason in last


def test_report_names_versions_and_exit_code_follows_the_overlay(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    report = tmp_path / "report.json"
    monkeypatch.delenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", raising=False)
    assert shell("doctor") == 1
    assert shell.out.startswith("overlay in place, and switched off: ")
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")
    assert shell("doctor", "--json", str(report)) == 0
    assert shell.out.startswith("overlay active: ")
    assert torch.__version__ in shell.out
    found = json.loads(report.read_text())
    assert found["overlay"]["active"] is True
    assert found["versions"]["torch"] == torch.__version__


def test_works_with_nothing_installed(tmp_path: Path) -> None:
    import te_grouped_mlp

    (tmp_path / "te_grouped_mlp").symlink_to(Path(te_grouped_mlp.__file__).parent)
    code = "from te_grouped_mlp.cli import main; raise SystemExit(main(['doctor']))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.returncode == 1
    first = done.stdout.splitlines()[0]
    assert first.startswith("overlay not active: Transformer Engine is not installed")
    assert "torch is not installed" in done.stdout


@pytest.mark.parametrize(
    "body", ["raise OSError('libnothing.so is missing')", "import os; os._exit(11)"]
)
def test_broken_torch_breaks_nothing(tmp_path: Path, body: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(body)
    code = "from te_grouped_mlp.cli import main; raise SystemExit(main(['doctor', '--json']))"
    done = python(code, path=(str(tmp_path), str(doctor.__file__).rsplit("/te_grouped_mlp/", 1)[0]))
    assert done.stderr == ""
    cause = json.loads(done.stdout)["sm"]["absent"]
    assert "libnothing.so" in cause if "OSError" in body else "code 11" in cause


def test_every_reason_has_a_remedy() -> None:
    assert set(REMEDIES) == set(Reason)
    assert all(text and not text.endswith(".") for text in REMEDIES.values())


def _machine(**changes: object) -> Environment:
    values: dict[str, object] = {
        "sm": Absent("none"),
        "versions": dict.fromkeys(DISTRIBUTIONS, "2.20.2"),
        "wrappers": Absent("no frontend"),
        "switches": Switches(fused=True),
        "standalone": True,
    }
    return Environment(**{**values, **changes})


def _blackwell(release: str = "1.32.0", te: str = "2.20.2") -> Environment:
    versions = {**dict.fromkeys(DISTRIBUTIONS, "1.0"), "transformer_engine": te}
    wrappers = frontend_releases.wrappers(release)
    return _machine(sm=(10, 0), wrappers=wrappers, standalone=False, versions=versions)


def _question(**changes: object) -> paths.Question:
    values = {
        "activation": Activation.SWIGLU,
        "recipe": RecipeKind.MXFP8,
        "bias": paths.Bias.NONE,
        "groups": 1,
        "deterministic": False,
    }
    return paths.Question(**{**values, **changes})


@pytest.mark.parametrize("kind", Activation)
@pytest.mark.parametrize("groups", [1, 8])
def test_cpu_table_is_what_the_op_plans(kind: Activation, groups: int) -> None:
    bias = paths.Bias.BOTH
    question = _question(activation=kind, groups=groups, bias=bias, deterministic=True)
    found = paths.answer(question, _machine())
    assert found.path == "reference"
    assert found.repeats is True
    assert found.by(Output.DPROB) == "fc2_bias_grad, dact_dgrad"
    assert found.by(Output.DB1, Output.DB2) == "dact_dgrad, fc2_bias_grad"
    assert {output for output, _, _ in found.outputs} == set(Output)
    gated = kind not in (Activation.SRELU, Activation.TANH_SRELU)
    dense = gated and groups == 1  # written out: the extents of the newest frontend
    assert found.rows == ("buffer; padded: packed" if dense else "packed")


def test_cpu_table_agrees_with_a_real_fusion() -> None:
    from te_grouped_mlp.measure import step

    step.start()
    import te_grouped_mlp

    shape = step.Shape(1, 128, 128, 128)
    model = step.Model.build(Activation.SITU_GLU, shape, seed=0, device="cpu")
    with step.switches("auto"):
        model.run(step.batch(shape, 0, "cpu"))
    decision = te_grouped_mlp.explain()[-1]
    assert decision.path == paths.answer(_question(activation=Activation.SITU_GLU), _machine()).path


def test_upstream_conditions() -> None:
    named = _blackwell()
    upstream = Switches(fused=True, backend="upstream")

    def answer(env: Environment, **changes: object) -> paths.Answer:
        env = Environment(**{**vars(env), "switches": upstream})
        return paths.answer(_question(**changes), env)

    assert answer(named).path == "upstream"
    assert answer(named).repeats is False
    assert answer(named).rows == "buffer"
    assert answer(_blackwell("1.26.0")).rows == "packed"
    assert answer(named, activation=Activation.SRELU).rows == "packed"
    assert answer(named, deterministic=True).path == "raises"
    srelu = answer(named, activation=Activation.SRELU, deterministic=True)
    assert (srelu.path, srelu.repeats) == ("upstream", True)
    scaled, plain = (
        answer(named, activation=Activation.SRELU, deterministic=True, bias=bias)
        for bias in (paths.Bias.SCALED, paths.Bias.FC2)
    )
    assert (scaled.path, plain.path, plain.repeats) == ("raises", "upstream", None)
    assert answer(_blackwell("1.27.0"), activation=Activation.SRELU, deterministic=True).path == (
        "raises"
    )
    old = answer(_blackwell(te="2.19.0"), deterministic=True)
    assert old.path == "unfused"
    assert old.refusals[-1][1].reason is Reason.NOT_DETERMINISTIC
    tanh = answer(_blackwell("1.28.0"), activation=Activation.TANH_SRELU)
    assert tanh.refusals[-1][1].reason is Reason.WRAPPER
    assert answer(_machine(sm=(9, 0), standalone=False)).refusals[-1][1].reason is (
        Reason.ARCHITECTURE
    )


@pytest.mark.parametrize("te", ["2.20.2", "2.19.0"])
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("kind", Activation)
def test_one_expert_that_upstream_reads_densely_runs_unfused(
    kind: Activation, groups: int, te: str
) -> None:
    """As every step that upstream's op is known to get wrong, unless named or promised."""
    question = _question(activation=kind, recipe=RecipeKind.NVFP4, groups=groups)
    machine = vars(_blackwell(te=te))
    lacks = te == "2.19.0" and kind in (Activation.SITU_GLU, Activation.TANH_SRELU)
    for switches in (
        Switches(fused=True),
        Switches(fused=True, full_rows=True),
        Switches(fused=True, backend="upstream"),
    ):
        found = paths.answer(question, Environment(**{**machine, "switches": switches}))
        dense = groups == 1 and (kind.is_gated or te == "2.19.0")
        wrong = dense and not (switches.full_rows or switches.backend == "upstream")
        assert found.path == ("unfused" if wrong or lacks else "upstream")
        if wrong and not lacks:
            assert found.refusals[-1][1].reason is Reason.UPSTREAM_FAULT


def test_weight_gradients_by_cublas_are_upstreams() -> None:
    switches = Switches(fused=True, no_frontend_wgrad=True)
    machine = Environment(**{**vars(_blackwell()), "switches": switches})
    found = paths.answer(_question(groups=8), machine)
    assert found.path == "upstream"
    assert found.refusals[0][1].reason is Reason.WGRAD_SWITCH


def test_assumed_machine_is_asked_without_torch(shell: Shell) -> None:
    assert shell("doctor", *BLACKWELL, "--json") == 0
    found = shell.json()
    assert found["sm"] == "100"
    assert found["versions"]["cudnn_frontend"] == "1.32.0"
    assert found["assumed"] == {"sm": "100", "frontend": "1.32.0", "te": "2.20.2"}
    assert len(found["paths"]) == len(Activation) * 3 * len(paths.Bias) * 2 * 2
    for row in found["paths"]:
        assert row["path"] not in ("reference", "")
        assert bool(row["since"]) == (row["path"] == "cutedsl")
        ours = row["path"] in ("cudnn", "cutedsl")
        assert set(row["outputs"]) >= ({"y", "dx", "dW1", "dW2", "dprob"} if ours else set())
        assert ours or row["outputs"] == {}
        for refusal in row["refusals"]:
            assert refusal["reason"] in Reason.__members__
            assert refusal["remedy"]


def test_fallback_is_named_with_its_cause(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a frontend whose dGLU cannot be told to keep its order."""
    monkeypatch.setenv("COLUMNS", "400")
    packages = "quack=0.6.5,cutlass_dsl=4.8.1,triton=3.6.0"
    assumed = ("--assume", f"sm=100,frontend=1.30.0,te=2.20.2,{packages}")
    assert shell("doctor", *assumed) == 0
    cause = "cutedsl, since cudnn would be nondeterministic in "
    assert f"{cause}dprob " in shell.out
    assert f"{cause}db1, dprob " in shell.out
    assert "all but dprob" in shell.out
    assert shell("doctor", *assumed, "--json") == 0
    rows = [row for row in shell.json()["paths"] if row["recipe"] == "mxfp8"]
    assert len(rows) == len(Activation) * len(paths.Bias) * 2 * 2
    for row in rows:
        gated = Activation(row["activation"]).is_gated
        stands_in = gated and row["deterministic"] == "yes"
        assert row["path"] == ("cutedsl" if stands_in else "cudnn")
        assert row["repeats"] is (row["deterministic"] == "yes")
        varying = "db1, dprob" if row["bias"] in ("FC1", "both") else "dprob"
        since = f"cudnn would be nondeterministic in {varying}"
        assert row["since"] == (since if stands_in else "")
        assert row["outputs"]["dprob"]["repeats"] is row["repeats"]
        assert row["outputs"]["dx"] == {"by": "fc1_dgrad", "repeats": True}


def test_an_assumed_gpu_runs_standalone_where_the_switch_says_so(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "extension_location", lambda: None)
    assumed = "sm=90,frontend=none,te=2.20.2,quack=0.6.5,cutlass_dsl=4.8.1,triton=3.6.0"
    for switch, standalone in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(loader.SWITCH, switch)
        assert shell("doctor", "--assume", assumed, "--json") == 0
        found = shell.json()
        assert found["standalone"] is standalone
        taken = {row["path"] for row in found["paths"] if row["recipe"] == "mxfp8"}
        assert taken == {"cutedsl" if standalone else "unfused"}
        assert {row["path"] for row in found["paths"] if row["recipe"] == "none"} == {"cutedsl"}


def test_without_the_native_kernels_the_demand_raises(shell: Shell) -> None:
    assert shell("doctor", "--assume", "sm=103,frontend=1.30.0,te=2.20.2,quack=none", "--json") == 0
    rows = [row for row in shell.json()["paths"] if row["recipe"] == "mxfp8"]
    raising = [row for row in rows if row["path"] == "raises"]
    assert {row["activation"] for row in raising} == {
        kind.value for kind in Activation if kind.is_gated
    }
    for row in raising:
        assert row["deterministic"] == "yes"
        reasons = {each["step"]: each["reason"] for each in row["refusals"]}
        assert (reasons["cudnn"], reasons["cutedsl"]) == ("NOT_DETERMINISTIC", "PACKAGE")


def test_determinism_prints_the_table_and_examines_nothing(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "examine", None)
    assert shell("doctor", "--determinism") == 0
    heading, rule, *rows = shell.out.splitlines()
    assert heading.startswith("| activation | bias | `deterministic` |")
    assert set(rule) <= set("|- ")
    assert len(rows) == 20


def test_merged_table_covers_every_question() -> None:
    found = {question: paths.answer(question, _blackwell()) for question in paths.questions()}
    answers = {question: doctor._shown(answer) for question, answer in found.items()}
    rows = doctor.merged(answers)
    assert len(rows) < len(answers) / 10
    for question, answer in answers.items():
        key = doctor._texts(question)
        hits = [
            found
            for texts, found in rows
            if all(
                text == "any" or value in text.split(", ")
                for text, value in zip(texts, key, strict=True)
            )
        ]
        assert hits == [answer]


def test_frontend_table_has_the_facts_that_decide() -> None:
    having = {
        wrapper: [
            release
            for release in frontend_releases.RELEASES
            if "deterministic" in frontend_releases.wrappers(release)[wrapper]
        ]
        for wrapper in ("dglu", "dsrelu", "glu")
    }
    assert having["dglu"] == ["1.29.1", "1.31.0", "1.32.0"]
    assert having["dsrelu"] == ["1.28.0", "1.29.0", "1.29.1", "1.30.0", "1.31.0", "1.32.0"]
    assert having["glu"] == []
    assert frontend_releases.wrappers("0.1") == {}
    known = {name for each in frontend_releases.ARGUMENTS.values() for name in each}
    assert known == frontend_signatures.DECIDING


@pytest.mark.slow
def test_frontend_table_is_what_the_wheels_hold(tmp_path: Path) -> None:
    release = frontend_releases.RELEASES[-1]
    command = ["pip", "download", "--quiet", "--no-deps", f"nvidia-cudnn-frontend=={release}"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "-d", str(tmp_path)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("the wheel cannot be downloaded here")
    (wheel,) = tmp_path.glob("*.whl")
    assert frontend_signatures.signatures(wheel) == frontend_releases.wrappers(release)


def test_missing_imports_of_standalone_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_te, "STANDALONE_IMPORTS", ("json", "no_such_module"))
    env = Environment(Absent("x"), {"transformer_engine": "2.20.2"}, {}, Switches(), True)
    offer = doctor._offer("transformer_engine", env)
    assert offer.endswith("; not installed: no_such_module; " + installed_te.STANDALONE_REMEDY)
    monkeypatch.setattr(installed_te, "STANDALONE_IMPORTS", ("json",))
    assert "not installed" not in doctor._offer("transformer_engine", env)


def test_the_extra_standalone_names_the_imports() -> None:
    file = ROOT / "pyproject.toml"
    if not file.is_file():
        pytest.skip("a copy of the tests without the repository")
    (line,) = re.findall(r"^standalone = (\[.*\])$", file.read_text(encoding="utf-8"), re.M)
    assert json.loads(line) == list(installed_te.STANDALONE_IMPORTS)
