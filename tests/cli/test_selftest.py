# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`selftest` passes on a right op, names what is wrong with a wrong one, and leaves its note."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from te_grouped_mlp.cli import frontend_releases, main, selftest
from te_grouped_mlp.measure import step
from te_grouped_mlp.measure.selftest import cases, checks, exact, record
from te_grouped_mlp.op import environment, selection
from te_grouped_mlp.op.activations import Activation
from te_grouped_mlp.op.backends.reference import capability
from te_grouped_mlp.op.backends.reference.backend import ReferenceBackend
from te_grouped_mlp.op.environment import Environment, Switches
from te_grouped_mlp.op.formats import MXFP8, UNQUANTIZED
from te_grouped_mlp.op.layout import Kernel, Output
from te_grouped_mlp.op.packages import Absent
from te_grouped_mlp.op.plan import Reason
from tests.cli.conftest import Shell, python
from tests.op.backends.cudnn.simulated import simulation
from tests.support import backends

OUTPUTS = {"y", "dx", "dprob", "dW1", "dW2"}
BIASES = {"db1", "db2"}
SMALL = ("selftest", "--quick", "--activation", "srelu", "--runs", "2")
VERSIONS: dict[str, str | Absent] = {
    "torch": "2.13.0",
    "transformer_engine": "2.20.2",
    "cudnn_frontend": "1.32.0",
    "cutlass_dsl": "4.8.1",
    "quack": "0.6.5",
    "triton": "3.6.0",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's caches, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "te-grouped-mlp" / "selftest.json"


def blackwell(**changes: Any) -> Environment:
    """A B200 with everything installed."""
    found = Environment((10, 0), VERSIONS, Absent("not asked"), Switches(fused=True), False)
    return dataclasses.replace(found, **changes)


class Whole(NamedTuple):
    """A run over every activation: the exit code, the report, and what every case gave."""

    code: int
    report: dict[str, Any]
    results: dict[cases.Case, checks.Result | None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder, results = tmp_path_factory.mktemp("whole"), {}
    run_all = selftest._run_all

    def keep(found: Sequence[cases.Case], runs: int) -> dict[cases.Case, checks.Result | None]:
        results.update(run_all(found, runs))
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(selftest, "_run_all", keep)
        code = main(["selftest", "--quick", "--json", str(folder / "report")])
    report = json.loads((folder / "report").read_text())
    assert report["note"] == str(folder / "te-grouped-mlp" / "selftest.json")
    return Whole(code, report, results)


@pytest.fixture
def replayed(whole: Whole, monkeypatch: pytest.MonkeyPatch) -> None:
    """`selftest` gives the results of the whole run, without running it again."""
    monkeypatch.setattr(selftest, "_run_all", lambda found, runs: whole.results)


def test_cpu_passes_and_reports(whole: Whole) -> None:
    assert whole.code == 0
    found = whole.report
    assert found["ok"] is True
    assert found["schema"] == selftest.SCHEMA
    assert found["machine"]["gpu"] is None
    assert found["machine"]["versions"]["torch"] == torch.__version__
    wanted = set(
        itertools.product(
            [kind.value for kind in Activation], [False, True], ["one, padded", "several, padded"]
        )
    )
    assert {(row["activation"], row["bias"], row["layout"]) for row in found["cases"]} == wanted
    assert len(found["cases"]) == len(wanted)
    for row in found["cases"]:
        assert (row["backend"], row["device"], row["format"]) == ("reference", "cpu", "mxfp8")
        assert row["ok"] is row["deterministic"] is True
        assert row["failures"] == []
        assert row["error"] is row["declined"] is None
        assert set(row["outputs"]) == OUTPUTS | (BIASES if row["bias"] else set())
        for name, each in row["outputs"].items():
            assert each["padding_equal"] is True
            assert each["distinct"] == 1
            assert each["varies_because"] is None
            # MXFP8 rounds, so a result without any error was not compared with float64.
            assert each["float64"] > 1e-3 or name == "db2"
            assert each["float64_allowed"] is None or each["float64"] <= each["float64_allowed"]


def test_bf16_by_name_with_every_layout(shell: Shell) -> None:
    argv = ("--backend", "reference", "--activation", "swiglu", "--runs", "2")
    assert shell("selftest", *argv, "--json") == 0
    rows = shell.json()["cases"]
    assert {row["format"] for row in rows} == {"mxfp8", "unquantized"}
    full = [row for row in rows if row["layout"] == "one, full"]
    assert len(full) == 4
    assert all(row["padding_rows"] == 0 for row in full)
    assert all(each["padding_equal"] is None for row in full for each in row["outputs"].values())


def test_text_has_a_row_for_each_case_and_a_last_line(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert shell(*SMALL) == 0
    rows = [line for line in shell.out.splitlines() if line.rstrip().endswith(" ok")]
    assert len(rows) == 4
    assert all("ScaledSReLU" in row and "2 equal" in row for row in rows)
    assert shell.out.splitlines()[-1].startswith("All is well: 4 cases in ")
    assert "selftest: 1 of 4, " in shell.err


Spoil = Callable[[torch.Tensor], None]


def _scale(out: torch.Tensor) -> None:
    out.mul_(1.5)


def _one_column_of_one_expert(out: torch.Tensor) -> None:
    out[-256:-200, 3] = 4.0


def _nan(out: torch.Tensor) -> None:
    out[5, 5] = float("nan")


def _tail(out: torch.Tensor) -> None:
    out[-1, -1] = 1.0


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_scale, "against float64, relative error"),
        (_one_column_of_one_expert, "against float64, relative error"),
        (_nan, "against float64, not finite"),
        (_tail, "rows past the live ones are not zero"),
    ],
    ids=["scale", "column", "nan", "tail"],
)
@pytest.mark.parametrize(
    ("kernel", "name"), [(Kernel.FC1_DGRAD, "dx"), (Kernel.FC2_FORWARD, "y")], ids=["dx", "y"]
)
def test_wrong_backend_is_found_and_its_output_named(
    shell: Shell,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernel: Kernel,
    name: str,
    spoil: Spoil,
    text: str,
) -> None:
    honest = ReferenceBackend.gemm

    def wrong(self: Any, plan: Any, which: Kernel, a: Any, w: Any, out: Any, epilogue: Any) -> None:
        honest(self, plan, which, a, w, out, epilogue)
        if which is kernel:
            spoil(out)

    monkeypatch.setattr(ReferenceBackend, "gemm", wrong)
    assert shell(*SMALL) == 1
    failures = [line for line in shell.out.splitlines() if line.startswith("FAILED ")]
    assert any(f": {name}: " in line and text in line for line in failures), shell.out
    others = (OUTPUTS | BIASES) - {name}
    assert not any(f": {other}: " in line for line in failures for other in others)
    assert not cache.exists()


def test_output_that_depends_on_the_padding_or_on_the_run_is_found(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = step.Model.run, itertools.count()

    def wrong(self: step.Model, given: step.Batch, **options: Any) -> dict[str, torch.Tensor]:
        found = honest(self, given, **options)
        found["dW1"][0, 0, 0] += 1e-3 * len(given.x)
        found["dprob"] *= 1 + 1e-5 * next(calls)
        return found

    monkeypatch.setattr(step.Model, "run", wrong)
    assert shell(*SMALL, "--json") == 1
    for row in shell.json()["cases"]:
        found = {text.split(":")[0]: text for text in reversed(row["failures"])}
        assert set(found) == {"dW1", "dprob"}
        assert found["dW1"] == "dW1: differs from the exact-size call"
        assert "dprob: 2 values in 2 runs" in row["failures"]
        assert row["outputs"]["dW1"]["padding_equal"] is False
        assert row["outputs"]["dprob"]["distinct"] == 2


def test_exception_fails_its_case_and_the_rest_goes_on(
    shell: Shell, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = ReferenceBackend.wgrad

    def broken(self: Any, plan: Any, *arguments: Any) -> None:
        if plan.problem.fc1.has_bias:
            raise OSError("an illegal\naddress")
        honest(self, plan, *arguments)

    monkeypatch.setattr(ReferenceBackend, "wgrad", broken)
    # One layout of every activation, since fewer activations leave no note.
    layouts = cases.layouts
    monkeypatch.setattr(cases, "layouts", lambda *a, **options: layouts(*a, **options)[:1])
    assert shell("selftest", "--quick", "--runs", "2", "--json") == 1
    assert len(shell.json()["cases"]) == 2 * len(Activation)
    for row in shell.json()["cases"]:
        assert row["ok"] is not row["bias"]
        assert row["error"] == ("OSError: an illegal address" if row["bias"] else None)
    assert json.loads(cache.read_text())["entries"][0]["ok"] is False
    shell("doctor")
    assert "selftest --quick: reference mxfp8 FAILED here on " in shell.out


def test_what_a_plan_does_not_promise_may_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then numbers are checked in the default mode, and that output's bits are not."""
    honest, calls = capability.plan, itertools.count(1)

    def weak(problem: Any, call: Any, env: Any) -> Any:
        plan = honest(problem, call, env)
        sums = frozenset({Output.DPROB})
        launches = tuple(
            dataclasses.replace(each, deterministic=each.deterministic - sums, cause="atomics")
            if Output.DPROB in each.outputs
            else each
            for each in plan.launches
        )
        return dataclasses.replace(plan, launches=launches)

    run = step.Model.run

    def varying(self: step.Model, given: step.Batch, **options: Any) -> dict[str, torch.Tensor]:
        found = run(self, given, **options)
        found["dprob"] *= 1 + 1e-5 * next(calls)
        return found

    (case, *_), _ = cases.find("reference", ["cpu"], [Activation.SRELU], quick=True)
    assert checks.run(case, 2).good
    monkeypatch.setattr(capability, "plan", weak)
    monkeypatch.setattr(step.Model, "run", varying)
    selection._plans.clear()
    monkeypatch.setattr(selection, "_latest", None)
    result = checks.run(case, 3)
    selection._plans.clear()
    assert result.failures == []
    assert result.good
    assert result.deterministic is False
    assert result.varying == {"dprob": "atomics"}
    assert result.distinct["dprob"] == 3
    assert result.padding["dprob"] is False


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--backend", "magic"], ["--backend", "magic", "auto", "cudnn", "reference"]),
        (["--backend", "upstream"], ["--backend", "upstream", "auto", "cudnn", "reference"]),
        (["--runs", "1"], ["--runs", "1", "at least 2"]),
        (["--activation", "relu"], ["--activation", "relu", "ScaledSReLU"]),
    ],
    ids=" ".join,
)
def test_bad_arguments(shell: Shell, argv: list[str], parts: list[str]) -> None:
    assert shell("selftest", *argv) == 2
    assert shell.out == ""
    assert all(part in shell.err for part in parts)


@pytest.mark.parametrize("name", ["cudnn", "cutedsl"])
def test_backend_that_cannot_run_here_says_why(shell: Shell, name: str) -> None:
    assert shell("selftest", "--backend", name) == 1
    assert shell.out == ""
    assert f"nothing to test: {name}: {Reason.DEVICE.value}" in shell.err
    assert "Remedy: put parameters and tensors on a device of the path" in shell.err


def _found(env: Environment, requested: str) -> list[cases.Case]:
    fields = {each.name: getattr(env, each.name) for each in dataclasses.fields(env)}
    with environment.override(**fields):
        return cases.find(requested, ["cuda"], list(Activation), quick=False)[0]


@pytest.mark.parametrize(
    ("sm", "requested", "expected"),
    [
        ((10, 0), "auto", {("cudnn", MXFP8), ("cutedsl", MXFP8)}),
        ((10, 3), "auto", {("cudnn", MXFP8), ("cutedsl", MXFP8)}),
        ((10, 3), "cudnn", {("cudnn", MXFP8)}),
        ((10, 0), "cutedsl", {("cutedsl", MXFP8), ("cutedsl", UNQUANTIZED)}),
        ((9, 0), "auto", {("cutedsl", UNQUANTIZED)}),
        ((9, 0), "cudnn", set()),
        ((8, 0), "auto", set()),
        ((8, 0), "reference", {("reference", MXFP8), ("reference", UNQUANTIZED)}),
    ],
    # A set has no order of its own, and every process must name the tests alike.
    ids=lambda value: (
        " ".join(sorted(f"{name} {fmt.name}" for name, fmt in value)) or "none"
        if isinstance(value, set)
        else str(value)
    ),
)
def test_what_is_tested_on_a_gpu(
    sm: tuple[int, int], requested: str, expected: set[tuple[str, Any]]
) -> None:
    env = blackwell(sm=sm, wrappers=frontend_releases.wrappers("1.32.0"))
    found = _found(env, requested)
    assert {(case.backend, case.format) for case in found} == expected
    assert not any(case.declined for case in found)
    assert len(found) == 30 * len(expected)
    for case in found:
        if case.backend == "cudnn":
            assert all(size % 256 == 0 for size in (*case.layout.splits, case.layout.padding))
    assert {case.device for case in found} <= {"cuda"}


def test_mxfp8_is_tested_on_hopper_where_it_runs() -> None:
    """Beside Transformer Engine's extension the recipe is refused there."""
    found = _found(blackwell(sm=(9, 0), standalone=True), "auto")
    assert {(case.backend, case.format) for case in found} == {
        ("cutedsl", MXFP8),
        ("cutedsl", UNQUANTIZED),
    }


def test_fallback_is_tested_for_every_activation_and_bias() -> None:
    """Also for an activation that the frontend lacks, and without native packages for none."""
    wrappers = frontend_releases.wrappers("1.28.0")
    found = _found(blackwell(wrappers=wrappers), "auto")
    native = [case for case in found if case.backend == "cutedsl"]
    assert {(case.activation, case.bias) for case in native if not case.declined} == set(
        itertools.product(Activation, [False, True])
    )
    without = blackwell(wrappers=wrappers, versions={**VERSIONS, "quack": Absent("no quack")})
    assert {case.backend for case in _found(without, "auto")} == {"cudnn"}


def test_activation_that_a_frontend_lacks_is_declined_and_is_no_failure(shell: Shell) -> None:
    found = _found(blackwell(wrappers=frontend_releases.wrappers("1.28.0")), "auto")
    declined = {(case.backend, case.activation) for case in found if case.declined}
    assert declined == {("cudnn", Activation.TANH_SRELU)}
    results = {case: None for case in found if case.declined}
    selftest._print(results, True, 2, {"gpu": "B200", "sm": "100", "driver": None})
    out = shell._capsys.readouterr().out
    assert "B200, SM 100" in out
    assert "declined: cudnn, mxfp8, ScaledTanhSReLU" in out
    assert {selftest._row(case, None)["ok"] for case in results} == {None}


def test_bound_of_a_stripe_is_not_diluted() -> None:
    wanted = torch.ones(384, 256, dtype=torch.float64)
    found = wanted.clone()
    found[130:200, 17] = 0.0
    splits = (128, 0, 256)
    assert exact.agreement(found, wanted) < 0.03
    assert exact.error("y", found, wanted, splits) == pytest.approx((70 / (256 * 16)) ** 0.5)
    assert exact.error("dprob", found[:, 0], wanted[:, 0], splits) == 0.0
    assert exact.error("dW1", wanted, torch.zeros_like(wanted), splits) == 1.0


def test_float64_step_is_the_formula() -> None:
    """Against a loop over tokens, with derivatives from differences."""
    step.start()
    layout = cases.Layout("tiny", (2, 0, 1), 0)
    case = cases.Case(
        "reference", "cpu", UNQUANTIZED, Activation.CLAMPED_QGEGLU, True, layout, 64, 64
    )
    model, given = checks._model(case), checks._batch(case)
    found = exact.step(model, given, case.spec, layout.splits)

    @torch.no_grad()
    def y_of(x: torch.Tensor, prob: torch.Tensor) -> torch.Tensor:
        rows = []
        for row, expert in enumerate((0, 0, 2)):
            w1, w2 = (getattr(op, f"weight{expert}").double() for op in (model.fc1, model.fc2))
            b1, b2 = (getattr(op, f"bias{expert}").double() for op in (model.fc1, model.fc2))
            pre = w1 @ x[row] + b1
            acts = []
            for feature in range(64):
                block, lane = divmod(feature, 32)
                gate = min(float(pre[64 * block + lane]), 1.5)
                linear = max(-1.5, min(float(pre[64 * block + 32 + lane]), 1.5))
                acts.append(gate / (1 + math.exp(-1.3 * gate)) * (linear + 0.5))
            rows.append((w2 @ torch.tensor(acts, dtype=torch.float64) + b2) * prob[row])
        return torch.stack(rows)

    x, prob, dy = given.x.double(), given.prob.double(), given.dy.double()
    torch.testing.assert_close(found["y"], y_of(x, prob).detach())
    per_row = (y_of(x, torch.ones_like(prob)).detach() * dy).sum(1)
    torch.testing.assert_close(found["dprob"], per_row)
    nudge = torch.zeros_like(x)
    nudge[1, 7] = 1e-6
    slope = ((y_of(x + nudge, prob) - y_of(x - nudge, prob)) * dy).sum() / 2e-6
    torch.testing.assert_close(found["dx"][1, 7], slope.detach(), rtol=1e-5, atol=1e-8)
    assert not found["dW1"][1].any()
    torch.testing.assert_close(found["db2"][2], dy[2] * prob[2])


def test_reference_is_compared_where_another_backend_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second name for the reference backend, a little wrong: too little for float64 to show."""

    class Other(ReferenceBackend):
        factor = 1.0
        refusal = staticmethod(capability.refusal)

        @staticmethod
        def plan(*facts: Any) -> Any:
            return dataclasses.replace(capability.plan(*facts), backend="cutedsl")

        def gemm(self, plan: Any, kernel: Any, a: Any, w: Any, out: Any, epilogue: Any) -> None:
            super().gemm(plan, kernel, a, w, out, epilogue)
            if kernel is Kernel.FC2_FORWARD:
                out.mul_(self.factor)

    backends.install(monkeypatch, "cutedsl", Other(), Other)
    (case, *_), _ = cases.find("cutedsl", ["cpu"], [Activation.SRELU], quick=True)
    assert (case.backend, case.format) == ("cutedsl", MXFP8)
    good = checks.run(case, 2)
    assert good.good, good
    assert set(good.reference.values()) == {0.0}
    monkeypatch.setattr(Other, "factor", 1.04)
    bad = checks.run(case, 2)
    assert len(bad.failures) == 1
    assert bad.failures[0].startswith("y: deterministic, against the reference backend, relative")


def test_cudnn_over_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a Blackwell GPU, with the frontend's wrappers replaced."""
    layouts = cases.layouts
    monkeypatch.setattr(
        cases, "layouts", lambda device, fmt, quick: layouts("cuda", fmt, quick=quick)
    )
    kinds = [Activation.SWIGLU, Activation.SRELU]
    with simulation(monkeypatch) as frontend:
        found, _ = cases.find("cudnn", ["cpu"], kinds, quick=True)
        assert len(found) == 8
        for case in found:
            assert (case.backend, case.format, case.declined) == ("cudnn", MXFP8, None)
            before = len(frontend.calls)
            result = checks.run(case, 2)
            assert result.good, (case.label, result)
            assert len(frontend.calls) > before
            # The stand-ins compute what the reference backend does.
            assert set(result.reference.values()) == {0.0}
            gated_sum = case.bias and case.activation.is_gated
            assert set(result.varying) == ({"dprob", "db1"} if gated_sum else set())
            assert result.deterministic is not gated_sum


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "sm": "100",
        "backend": "cudnn",
        "format": "mxfp8",
        "ok": True,
        "date": "2026-11-01",
        "quick": False,
        "versions": record.versions(blackwell()),
        **changes,
    }


def test_lines_of_doctor() -> None:
    env = blackwell()
    absent = "selftest: has not run on this machine; run: te-grouped-mlp selftest"
    assert record.lines(env) == [absent]
    assert record.lines(blackwell(sm=(9, 0))) == record.lines(blackwell(sm=Absent("none"))) == []
    record.write([entry()])
    passed = "selftest: cudnn mxfp8 passed here on 2026-11-01 with these versions"
    assert record.lines(env) == [passed]
    assert record.lines(blackwell(sm=(10, 3))) == [absent]
    newer = blackwell(versions={**VERSIONS, "cudnn_frontend": "1.33.0", "quack": Absent("no")})
    (line,) = record.lines(newer)
    assert "passed here on 2026-11-01 with other versions" in line
    assert "(cudnn_frontend 1.32.0, now 1.33.0; quack 0.6.5, now absent)" in line
    assert line.endswith("; run again: te-grouped-mlp selftest")
    assert [each["current"] for each in record.here(newer)] == [False]
    record.write([entry(ok=False, date="2026-11-02", quick=True), entry(sm="90")])
    (line,) = record.lines(env)
    assert line.startswith("selftest --quick: cudnn mxfp8 FAILED here on 2026-11-02")
    assert len(record.read()) == 2


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"entries": 3}', '{"entries": [1, {"sm": []}, {"ok": true}]}']
)
def test_spoilt_note_counts_as_none(cache: Path, text: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    assert record.read() == []
    record.write([entry()])
    assert record.read() == [entry()]
    assert [file.name for file in cache.parent.iterdir()] == [cache.name]


@pytest.mark.usefixtures("replayed")
def test_doctor_shows_the_note(shell: Shell, tmp_path: Path) -> None:
    assert shell("selftest", "--quick", "--runs", "2") == 0
    report = tmp_path / "report.json"
    shell("doctor", "--json", str(report))
    line = "selftest --quick: reference mxfp8 passed here on "
    assert line in shell.out
    (found,) = json.loads(report.read_text())["selftest"]
    assert found["ok"] is found["current"] is True
    # Another machine has no notes here.
    assert shell("doctor", "--assume", "sm=none,frontend=none", "--json", str(report)) == 0
    assert json.loads(report.read_text())["selftest"] is None
    assert "selftest" not in shell.out


@pytest.mark.usefixtures("replayed")
def test_note_that_cannot_be_written_changes_nothing(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert shell("selftest", "--quick", "--runs", "2", "--json") == 0
    assert shell.json()["note"] is None
    assert "no note for doctor was left" in shell.err


@pytest.mark.gpu
def test_gpu(tmp_path: Path) -> None:
    """In a process of its own, since Transformer Engine may have to start standalone."""
    code = "from te_grouped_mlp.cli import main; raise SystemExit(main(['selftest', '--quick']))"
    switches = {"NVTE_GROUPED_MLP_STANDALONE": "1", "XDG_CACHE_HOME": str(tmp_path)}
    done = python(code, **switches)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All is well" in done.stdout
