# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Every launch for Blackwell, executed with every check, beside the reference backend.

The reference evaluates in float64 and rounds where the kernels do; its own tests compare it with
formulas of their own. All splits are ragged, one is empty, and all padding is NaN.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from te_grouped_mlp.emulator.launch_cases import cases, every_case, native_cases
from tests.emulator.packages import require_packages

_SECONDS = 3000


def test_the_names_are_distinct() -> None:
    assert len(every_case()) == len(cases()) + len(native_cases())
    assert len(cases()) == 88


@pytest.fixture(scope="module", params=["cudnn", "cutedsl"])
def executed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    require_packages()
    file = tmp_path_factory.mktemp("emulate") / "launches.json"
    command = ["-m", "te_grouped_mlp.cli", "emulate", f"{request.param}/*", "--json", str(file)]
    child = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=Path(file).parent,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert file.is_file(), child.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(file.read_text())["launches"]
    return found


@pytest.mark.slow
def test_every_launch_is_right(executed: list[dict[str, Any]]) -> None:
    wrong = {
        each["name"]: each["fault"] or [d for d in each["differences"] if not d["ok"]]
        for each in executed
        if not each["ok"]
    }
    assert not wrong
    total = sum(report["instructions"] for each in executed for report in each["reports"])
    seconds = sum(report["seconds"] for each in executed for report in each["reports"])
    print(f"{len(executed)} launches, {total} warp instructions, {total / seconds:.0f}/s")  # noqa: T201


@pytest.mark.slow
def test_nothing_is_written_twice_but_by_atomics(executed: list[dict[str, Any]]) -> None:
    """Stores of one launch never meet; only sums of float atomics add to one place."""
    for each in executed:
        if "dact" in each["name"]:
            continue
        for report in each["reports"]:
            doubled = [name for name, found in report["allocations"].items()
                       if found["doubly_written"] and "uint8" not in name]  # fmt: skip
            assert not doubled, (each["name"], doubled)
