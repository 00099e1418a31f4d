# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`replay` finds an output that does not repeat, and finds none in our op."""

from __future__ import annotations

import pytest
import torch

from te_grouped_mlp.cli import replay
from te_grouped_mlp.measure import step
from tests.cli.conftest import Shell

SMALL = ("--n", "3", "--shape", "128,128,384")


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("activation", "groups"), [("swiglu", 1), ("ScaledSReLU", 2)])
def test_our_op_repeats(shell: Shell, activation: str, groups: int, bias: bool) -> None:
    extra = ["--bias"] if bias else []
    argv = ["--activation", activation, "--groups", str(groups), *extra, "--json"]
    assert shell("replay", *SMALL, *argv) == 0
    found = shell.json()
    assert found["ok"] is True
    assert found["runs"] == 3
    assert found["path"].startswith("GroupedMLP_CuTeGEMM")
    names = set(replay.OUTPUTS) if bias else set(replay.OUTPUTS) - {"db1", "db2"}
    assert set(found["outputs"]) == names
    for value in found["outputs"].values():
        assert value["distinct"] == 1
        assert list(value["hashes"].values()) == [3]


def test_one_changed_bit_is_found(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = step.Model.run
    calls = []

    def varying(self: step.Model, given: step.Batch) -> dict[str, torch.Tensor]:
        found = honest(self, given)
        calls.append(torch.get_num_threads())
        if len(calls) == 3:
            found["dprob"].view(torch.int32)[7] ^= 1
        return found

    monkeypatch.setattr(step.Model, "run", varying)
    threads = torch.get_num_threads()
    assert shell("replay", *SMALL, "--groups", "1") == 1
    assert "Not every output repeats" in shell.out
    rows = {line.split()[0]: line.split()[1] for line in shell.out.splitlines() if " (" in line}
    assert rows["dprob"] == "2"
    assert rows["y"] == "1"
    assert len(set(calls)) == 2
    assert torch.get_num_threads() == threads


def test_inputs_and_weights_depend_on_the_seed(shell: Shell) -> None:
    hashes = []
    for seed in ("0", "1", "0"):
        assert shell("replay", "--n", "2", "--shape", "128,128,128", "--seed", seed, "--json") == 0
        hashes.append(list(shell.json()["outputs"]["y"]["hashes"]))
    assert hashes[0] == hashes[2]
    assert hashes[0] != hashes[1]


def test_splits_share_all_rows() -> None:
    assert step.Shape(3, 128, 128, 512).splits() == [256, 128, 128]
    assert step.Shape(4, 128, 128, 256).splits() == [128, 128, 0, 0]
