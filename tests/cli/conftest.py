# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The command line in this process, and in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import te_grouped_mlp

te_grouped_mlp.activate()

ROOT = Path(te_grouped_mlp.__file__).resolve().parent.parent


class Shell:
    """Runs `main` in this process and keeps what it wrote."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *argv: str) -> int:
        """Run one command and return its exit code."""
        from te_grouped_mlp.cli import main

        code = main(list(argv))
        self.out, self.err = self._capsys.readouterr()
        return code

    def json(self) -> dict:
        """Parse what was written to standard output; NaN and infinities are no JSON."""

        def refuse(name: str) -> None:
            raise ValueError(f"{name} is no JSON")

        return json.loads(self.out, parse_constant=refuse)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def python(
    code: str, *options: str, path: tuple[str, ...] = (str(ROOT),), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run statements in an interpreter of their own, without the switches of this one."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NVTE_")}
    inherited = [] if "-S" in options else [each for each in sys.path if each]
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env={**clean, "PYTHONPATH": os.pathsep.join([*path, *inherited]), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
