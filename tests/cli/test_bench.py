# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`bench` times nothing that is wrong, and says what it cannot take."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from te_grouped_mlp.integration import standalone
from te_grouped_mlp.measure import step
from te_grouped_mlp.measure.bench import plot
from tests.cli.conftest import Shell

SMALL = ("--device", "cpu", "--shape", "2,128,128,256")


def test_the_reference_runs_beside_the_unfused_ops(shell: Shell) -> None:
    assert shell("bench", *SMALL, "--shape", "1,128,128,128", "--json") == 0
    found = shell.json()
    assert found["ok"] is True
    for label in ("2,128,128,256", "1,128,128,128"):
        check = found[f"check {label}"]
        assert check["green"] is check["bitwise"] is True
        assert set(check["errors"]) == {"y", "dx", "dprob", "dW1", "dW2"}
        # The reference rounds to MXFP8, so an error of zero would mean a comparison with itself.
        assert all(1e-3 < value < 0.1 for value in check["errors"].values())
        rows = found[f"steps {label}"]
        assert set(rows) == {"ours", "te unfused"}
        assert all(row["median"] > 0 for row in rows.values())
        assert rows["ours"]["ratio"] == 1


@pytest.mark.parametrize("name", ["y", "dx", "dprob", "dW1", "dW2"])
def test_a_wrong_result_is_not_timed(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    honest = step.Model.run

    def wrong(self: step.Model, given: step.Batch) -> dict[str, torch.Tensor]:
        found = honest(self, given)
        found[name] = found[name] * 1.2
        return found

    monkeypatch.setattr(step.Model, "run", wrong)
    assert shell("bench", *SMALL) == 1
    assert "RED CHECK" in shell.out
    assert "te unfused" not in shell.out


def test_a_varying_result_is_not_timed(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, calls = step.Model.run, []

    def varying(self: step.Model, given: step.Batch) -> dict[str, torch.Tensor]:
        found = honest(self, given)
        calls.append(1)
        found["dprob"].view(torch.int32)[7] ^= len(calls) & 1
        return found

    monkeypatch.setattr(step.Model, "run", varying)
    assert shell("bench", *SMALL, "--json") == 1
    check = shell.json()["check 2,128,128,256"]
    assert check["bitwise"] is check["green"] is False


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--shape", "2,128,128"], ["2,128,128", "EXPERTS,HIDDEN,FFN,TOKENS"]),
        (["--shape", "0,128,128,128"], ["'0'", "at least 1"]),
        (["--device", "cpu", "--shape", "2,128,100,128"], ["ffn is 100", "multiples of 128"]),
        (["--device", "tpu"], ["tpu", "cuda"]),
        (["--plot", "a.png"], ["a.png", ".svg"]),
        (["--from", "none.json"], ["none.json", "No such file"]),
        (["--from", __file__], ["not JSON"]),
        (["--from", "none.json", "--quick"], ["--quick", "--from"]),
        (["--from", "none.json", "--shape", "1,128,128,128"], ["--shape", "--from"]),
    ],
)
def test_bad_arguments_are_named(shell: Shell, argv: list[str], parts: list[str]) -> None:
    assert shell("bench", *argv) == 2
    assert shell.out == ""
    for part in parts:
        assert part in shell.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said_before_any_work(shell: Shell) -> None:
    assert shell("bench", "--device", "cuda") == 1
    assert "no CUDA device" in shell.err


REPORT = {
    "device": "a GPU",
    "torch": "2.0",
    "ceilings": {"bf16_tflops": 800.0, "copy_tbs": 4.0},
    "check 8,2048,4096,16384": {"green": True},
    "steps 8,2048,4096,16384": {
        "ours": {"median": 3.25, "spread": 0.01, "ratio": 1.0, "peak_gb": 0.8},
        "quack": {
            "median": 3.9, "spread": 0.02, "ratio": 1.2, "ratio_spread": 0.005, "peak_gb": 1.3,
        },
        "te.ops": {"absent": "there is no extension"},
        "torch eager": {"error": "RuntimeError()"},
    },
    "modes 8,2048,4096,16384": {
        "ours": {"median": 3.25, "spread": 0.01, "ratio": 1.0},
        "ours, deterministic": {
            "median": 3.26, "spread": 0.01, "ratio": 1.003, "ratio_spread": 0.004,
        },
    },
    "passes 8,2048,4096,16384": {
        "forward": {"median": 1.1}, "backward": {"median": 2.4},
        "backward_without_dprob": {"median": 2.35},
        "host_forward": {"median": 0.12}, "host_backward": {"median": 0.23},
        "held_gb": 0.4, "held_by_unit_probabilities_gb": 0.47,
    },
    "check mxfp8": {"green": True},
    "mxfp8 8,2048,4096,16384": {
        "bf16": {
            "median": 3.3, "spread": 0.01, "ratio": 1.0, "ratio_spread": 0.0, "held_gb": 0.4,
            "kept_gb": 0.0, "late": 0,
        },
        "mxfp8": {
            "median": 4.4, "spread": 0.03, "ratio": 1.333, "ratio_spread": 0.01, "held_gb": 0.7,
            "kept_gb": 0.1, "late": 2, "floor_ms": 4.2, "floor_ratio": 1.27, "over_floor": 1.05,
        },
        "mxfp8, weights kept": {"absent": "no copies"},
    },
    "steps 1,128,128,128": {"ours": {"median": 1.0, "spread": 0.1, "ratio": 1.0}},
    "ok": True,
}  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(REPORT))
    return file


def test_a_saved_report_is_shown(
    shell: Shell, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert shell("bench", "--from", str(saved)) == 0
    lines = [line.split() for line in shell.out.splitlines()]
    label = "8,2048,4096,16384"
    assert [label, "quack", "3.900", "0.020", "1.200x", "0.005", "1.30"] in lines
    assert [label, "ours,", "deterministic", "3.260", "0.010", "1.003x", "0.004"] in lines
    assert [label, "te.ops", "not", "there:", "there", "is", "no", "extension"] in lines
    assert [label, "forward", "1.100", "0.120", "0.40"] in lines
    assert [label, "backward", "2.400", "0.230"] in lines
    assert [label, "backward", "without", "dprob", "2.350"] in lines
    assert [label, "forward,", "unit", "probabilities", "0.47"] in lines
    # Two runs in which host time may be are not hidden.
    mxfp8 = "4.400 (2 late) 0.030 1.333x 0.010 4.200 1.270x 1.050x 0.70 0.10"
    assert [label, "mxfp8", *mxfp8.split()] in lines
    assert shell("bench", "--from", str(saved), "--json") == 0
    assert shell.json() == REPORT


def test_a_red_check_in_a_saved_report_is_shown(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "red.json"
    check = {"green": False, "error": "no such kernel"}
    file.write_text(json.dumps({"device": "a GPU", "check mxfp8": check, "ok": False}))
    assert shell("bench", "--from", str(file)) == 1
    assert "RED CHECK" in shell.out
    assert "no such kernel" in shell.out


def test_no_report_is_refused(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("[1]")
    assert shell("bench", "--from", str(file)) == 2
    assert "no report" in shell.err


def test_a_plot_has_a_bar_for_each_peer_and_shape(
    shell: Shell, saved: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for file in (first, second):
        assert shell("bench", "--from", str(saved), "--plot", str(file)) == 0
    assert first.read_bytes() == second.read_bytes()
    found = [element.get("id") for element in ElementTree.parse(first).iter()]
    drawn = sorted(name for name in found if name and name.startswith(("bar ", "line ")))
    label = "8,2048,4096,16384"
    bars = [f"bar steps {label} {name}" for name in ("ours", "quack")]
    bars += [f"bar mxfp8 {label} {name}" for name in ("bf16", "mxfp8")]
    lines = [f"line {kind} {label} operations floor" for kind in ("steps", "mxfp8")]
    lines += [f"line mxfp8 {label} floor of mxfp8", "line steps 1,128,128,128 operations floor"]
    assert drawn == sorted([*bars, "bar steps 1,128,128,128 ours", *lines])


def test_the_operations_floor_counts_six_products() -> None:
    (panel,) = (p for p in plot.panels(REPORT) if (p.kind, p.label[0]) == ("steps", "8"))
    # Forward, dgrad and wgrad of FC1 (gate and linear) and of FC2.
    operations = 3 * 2 * 16384 * (2048 * 8192 + 4096 * 2048)
    assert panel.floors == {"operations floor": pytest.approx(operations / 800e12 * 1e3)}


def test_a_plot_that_cannot_be_drawn_is_refused_first(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "start", lambda: pytest.fail("something was measured"))
    assert shell("bench", *SMALL, "--plot", str(tmp_path / "no" / "a.svg")) == 1
    assert f"no folder {tmp_path / 'no'}" in shell.err
    monkeypatch.setattr(plot, "is_possible", lambda: False)
    assert shell("bench", *SMALL, "--plot", str(tmp_path / "a.svg")) == 1
    assert "matplotlib is not installed; the extra `plot`" in shell.err
    assert not list(tmp_path.iterdir())


def test_a_report_without_times_is_not_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no times"):
        plot.draw({"device": "cpu", "steps 1,1,1,1": {"ours": {"error": "x"}}}, tmp_path / "a.svg")


@pytest.mark.gpu
@pytest.mark.sm90
def test_a_gpu_runs_both_formats(shell: Shell) -> None:
    label = "4,256,384,1280"
    argv = ("--device", "cuda", "--shape", label, "--quick", "--no-peers", "--parts", "--json")
    assert shell("bench", *argv) == 0
    found = shell.json()
    assert found[f"modes {label}"]["ours, deterministic"]["ratio"] > 0
    if not standalone.is_active():
        # Beside its extension, Transformer Engine has no MXFP8 on Hopper.
        assert "check mxfp8" not in found
        return
    assert found["check mxfp8"]["green"] is True
    rows = found[f"mxfp8 {label}"]
    assert list(rows) == ["bf16", "mxfp8", "mxfp8, weights kept"]
    assert all(row["median"] > 0 and row["bitwise"] for row in rows.values())
    kept = [row["kept_gb"] for row in rows.values()]
    # Row and column values of both weights, in bf16.
    assert kept[2] - kept[1] == pytest.approx(4 * 3 * 256 * 384 * 4 / 1e9, rel=0.05)
