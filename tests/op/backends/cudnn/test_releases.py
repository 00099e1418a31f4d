# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Every launch through every published frontend, downloaded: by its own checks, or refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from te_grouped_mlp.cli.frontend_releases import RELEASES, wrappers
from te_grouped_mlp.emulator.launch_cases import cases
from te_grouped_mlp.op.activations import Activation
from te_grouped_mlp.op.plan import Reason
from tests.op.backends.cudnn import fake_cuda
from tests.op.backends.cudnn.launcher import ROOT, launch, require_frontend

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


_ASK = """
from te_grouped_mlp.op import environment
from te_grouped_mlp.op.backends.cudnn import capability
from tests.op.backends.cudnn.facts import problem
with environment.override(sm=(10, 0), standalone=False):
    print(capability.refusal(problem(), environment.current()))
"""


def refusal_with(folder: Path) -> str:
    """Return why the backend declines in a process that finds the package in `folder`."""
    path = os.pathsep.join((str(folder), str(ROOT)))
    child = subprocess.run(
        [sys.executable, "-c", _ASK],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return child.stdout


def test_an_older_one_is_declined(tmp_path: Path) -> None:
    """Too old, or unable to work with the CuTe DSL beside it."""
    found = refusal_with(package(TOO_OLD, tmp_path / "package"))
    assert Reason.PACKAGE.value in found
    assert "too old" in found or f"nvidia-cudnn-frontend {TOO_OLD} lacks a dependency" in found


def test_a_broken_one_is_declined(tmp_path: Path) -> None:
    folder = package(WORKING[-1], tmp_path / "package")
    folder.joinpath("cudnn", "__init__.py").write_text("raise OSError('half a package')")
    found = refusal_with(folder)
    assert Reason.PACKAGE.value in found
    assert "cannot be imported: half a package" in found
