# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Every launch through every published frontend, downloaded: by its own checks, or refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from te_grouped_mlp.cli.frontend_releases import RELEASES, wrappers
from te_grouped_mlp.op.problem import Activation
from tests.op.backends.cudnn import fake_cuda
from tests.op.backends.cudnn.launch_cases import cases
from tests.op.backends.cudnn.launcher import launch, require_frontend

pytestmark = pytest.mark.slow

TOO_OLD = "1.26.0"
WORKING = RELEASES[RELEASES.index("1.27.0") :]
SINCE = {Activation.SITU_GLU: "1.28.0", Activation.TANH_SRELU: "1.29.0"}


@pytest.fixture(scope="module", autouse=True)
def _frontend() -> None:
    require_frontend()


def package(release: str, folder: Path) -> Path:
    """Return a folder with a release of the frontend and nothing that it needs."""
    command = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    outcome = subprocess.run(
        [sys.executable, *command, f"nvidia-cudnn-frontend=={release}", "--target", str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if outcome.returncode:
        pytest.skip(f"pip cannot install nvidia-cudnn-frontend {release}: {outcome.stderr[-300:]}")
    return folder


@pytest.mark.parametrize("release", WORKING)
def test_every_launch(release: str, tmp_path: Path) -> None:
    found = package(release, tmp_path / "package")
    report = launch(fake_cuda.RECORD, [(case, "") for case in cases()], tmp_path, found)
    assert report.wrappers == wrappers(release)
    for case, result in zip(cases(), report.results, strict=True):
        since = SINCE.get(case.kind, WORKING[0])
        if RELEASES.index(release) < RELEASES.index(since):
            assert "has no argument" in result.error, case.id
        else:
            assert result.error == "", (case.id, result.error)
            assert len(result.launches) == 1, case.id


def test_an_older_one_is_refused(tmp_path: Path) -> None:
    found = package(TOO_OLD, tmp_path / "package")
    report = launch(fake_cuda.RECORD, [(case, "") for case in cases()], tmp_path, found)
    assert all("too old" in result.error for result in report.results)
