# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps to run in a process that emulates, and what they gave."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.step import StepCase

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class StepJob:
    """A step to run.

    Attributes:
        backend: By name.
        case: The step.
        options: Of the executions.
        deterministic: Ask for it.
    """

    backend: str
    case: StepCase
    options: tuple[tuple[str, Any], ...] = ()
    deterministic: bool = False


@dataclass
class StepResult:
    """What a step gave.

    Attributes:
        outputs: By name, cut to the live rows.
        launches: Names of the emulated kernels.
        error: What was raised instead.
    """

    outputs: dict[str, Any] = field(default_factory=dict)
    launches: list[str] = field(default_factory=list)
    error: str = ""


def run(jobs: Sequence[StepJob], folder: Path, seconds: int = 1500) -> list[StepResult]:
    """Run steps, one after the other, in one process."""
    source, target = folder / "jobs", folder / "results"
    source.write_bytes(pickle.dumps(list(jobs)))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
    child = subprocess.run(
        [sys.executable, "-m", "tests.emulator.child", str(source), str(target)],
        env={
            **kept,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "NVTE_GROUPED_MLP_EMULATE": "sm100",
            "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1",
            "NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    found: list[StepResult] = pickle.loads(target.read_bytes())
    return found
