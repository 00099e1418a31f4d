# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the native path's host time runs, on a machine without a GPU too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.skipif(not (ROOT / "benchmarks").is_dir(), reason="the tests lie outside a checkout")
def test_a_few_steps():
    command = [sys.executable, "-m", "benchmarks.native_host", "--runs", "3", "--experts", "3"]
    ran = subprocess.run(
        [*command, "--packed"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    found = json.loads(ran.stdout.splitlines()[-1])
    assert set(found) == {"forward", "backward"}
    assert all(row["whole_ms"] > 0 for row in found.values())
