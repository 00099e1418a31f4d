# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`bench` times nothing that is wrong, and says what it cannot take."""

from __future__ import annotations

import pytest
import torch

from te_grouped_mlp.cli import step
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
