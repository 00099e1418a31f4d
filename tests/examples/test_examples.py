# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The examples in a short form: they learn, repeat and resume bit for bit."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from te_grouped_mlp.op import decisions
from tests.cli.conftest import ROOT

FOLDER = ROOT / "examples"
# A copy of the tests beside an installed wheel has no examples.
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="no examples beside the tests")
SMALL = ("--batch", "2", "--length", "24", "--ffn", "64")
CPU = torch.device("cpu")


@pytest.fixture
def moe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the example as its own process does."""
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Its gate looks at the whole process, where other tests leave steps that ran unfused.
    monkeypatch.setattr(decisions, "_not_ours", [])
    return importlib.import_module("train_moe")


def test_the_language_model_repeats_and_resumes(moe: Any, tmp_path: Path) -> None:
    # Another run saves half of the way, and a third goes on from there.
    file, options = tmp_path / "half.pt", (*SMALL, "--steps", "12")
    saving = ("--save", str(file), "--save-at", "6")
    runs = [
        moe.train(moe.parse([*options, *more]), CPU)
        for more in ((), saving, ("--resume", str(file)))
    ]
    assert len({found for found, _ in runs}) == 1
    assert runs[0][1] == runs[2][1]
    assert len(runs[0][1]) == 12
    assert runs[0][1][-1] < 0.9 * runs[0][1][0]
    other = moe.train(moe.parse([*options, "--seed", "1"]), CPU)
    assert other[0] != runs[0][0]
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_the_loss_is_drawn(moe: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    moe.plot([3.0, 2.0, 1.5], tmp_path / "loss.svg")
    assert "<svg" in (tmp_path / "loss.svg").read_text(encoding="utf-8")


RANKS = 2
_CHILD = """
import json, sys
from pathlib import Path
import torch, torch.distributed as dist
import common, train_expert_parallel as example

folder, meeting, rank, world = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
small = ["--steps", "6", "--tokens", "96,0", "--ffn", "64"]
variants = {
    "plain": [],
    "repeat": ["--save", str(folder), "--save-at", "3"],
    "resumed": ["--resume", str(folder)],
    "capacity": ["--capacity", "300"],
    "too few": ["--capacity", "40"],
}
found = {}
with common.determinism(asked=True):
    for name, more in variants.items():
        found[name] = example.train(example.parse(small + more), torch.device("cpu"))
if dist.get_rank() == 0:
    print("found", json.dumps(found))
dist.destroy_process_group()
"""


def test_expert_parallel_ranks_agree_whatever_the_capacity(tmp_path: Path) -> None:
    """Two processes, of which one has no token: a repeated run, a resumed one and one with longer
    buffers end in the same bits; one whose buffers are too short does not."""
    script = tmp_path / "child.py"
    script.write_text(_CHILD, encoding="utf-8")
    saved = tmp_path / "saved"
    # As torchrun starts them; without torchrun, which imports torch in a third process.
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]),
        "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(script), str(saved), str(tmp_path / "meeting")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [each.communicate(timeout=300) for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0] * RANKS, said
    out = said[0][0]
    (line,) = (each for each in out.splitlines() if each.startswith("found "))
    found = json.loads(line.removeprefix("found "))
    plain, losses = found["plain"]
    assert {found[name][0] for name in ("repeat", "resumed", "capacity")} == {plain}
    assert found["too few"][0] != plain
    assert found["resumed"][1] == losses
    assert losses[4] < losses[0]
    assert len(list(saved.iterdir())) == RANKS
