# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Built once for all tests of this folder: the wheel, and a copy of the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.installation.site import CHECKOUT, clean_environment


@pytest.fixture(scope="session")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, because building writes into the tree."""
    if not (CHECKOUT / "setup.py").is_file():
        pytest.skip("the tests were copied without the source tree, so there is nothing to build")
    target = tmp_path_factory.mktemp("source") / "tree"
    ignored = shutil.ignore_patterns(
        ".git", ".venv*", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache"
    )
    shutil.copytree(CHECKOUT, target, ignore=ignored)
    return target


@pytest.fixture(scope="session")
def wheel(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the checkout, built with the tools of this environment."""
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "--isolated", "wheel", "--no-deps"]
    done = subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", str(target), str(source_tree)],
        env=clean_environment(TE_GROUPED_MLP_REQUIRE_EXTENSION="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(target.glob("*.whl"))
