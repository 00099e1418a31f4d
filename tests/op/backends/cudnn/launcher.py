# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts the process that makes launches on a fake GPU."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from te_grouped_mlp.emulator.launch_cases import LaunchCase
from tests.op.backends.cudnn.fake_cuda import Report

REQUIRE = "TE_GROUPED_MLP_REQUIRE_KERNELS"
ROOT = Path(__file__).resolve().parents[4]

Job = tuple[LaunchCase, str]
"""A launch, and the name of a fault or ""."""


def require_frontend() -> None:
    """Skip where the frontend is not installed, unless it has to be."""
    missing = [name for name in ("cudnn", "cutlass") if importlib.util.find_spec(name) is None]
    if missing and os.environ.get(REQUIRE) != "1":
        pytest.skip(f"{' and '.join(missing)} not installed ({REQUIRE}=1 makes that an error)")
    assert not missing, f"{missing} not installed"


def launch(level: str, jobs: Sequence[Job], folder: Path, *path: Path) -> Report:
    """Make launches in a process of their own.

    Args:
        level: Of `fake_cuda`.
        jobs: What to launch.
        folder: For what the processes tell each other.
        *path: Folders that are searched for packages before all others.
    """
    source, target = folder / "jobs", folder / "results"
    source.write_bytes(pickle.dumps(list(jobs)))
    found = os.pathsep.join(str(each) for each in (*path, ROOT))
    child = subprocess.run(
        [sys.executable, "-m", "tests.op.backends.cudnn.launch_child", level, source, target],
        env={**os.environ, "PYTHONPATH": found, "OMP_NUM_THREADS": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    report = pickle.loads(target.read_bytes())
    assert isinstance(report, Report)
    return report
