# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernel of docs/emulator.md runs, and the race in it is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulator.packages import require_packages

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "emulator_example.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.skipif(not EXAMPLE.is_file(), reason="a copy of the tests alone has no docs")
def test_the_example_is_right_and_its_race_is_found() -> None:
    require_packages()
    right, race = run(), run("--race")
    assert right.returncode == 0, right.stderr
    assert "2 clusters" in right.stdout
    assert race.returncode == 1, race.stderr
    assert race.stdout.startswith("Race: shared memory ")
