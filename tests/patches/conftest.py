# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The published wheels, for the slow tests: downloaded once a session, unpacked for each test."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

Wheels = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    """Give the wheel file of a project's version."""
    known: dict[tuple[str, str], Path] = {}

    def get(project: str, version: str) -> Path:
        if (project, version) not in known:
            folder = tmp_path_factory.mktemp("wheel")
            # Megatron-Core's newer wheels ask for Python 3.12; their files run on older ones.
            options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
            command = [sys.executable, "-m", "pip", "download", "-q", *options]
            subprocess.run([*command, "-d", str(folder), f"{project}=={version}"], check=True)
            known[project, version] = next(folder.glob("*.whl"))
        return known[project, version]

    return get


@pytest.fixture
def unpacked(wheels: Wheels, tmp_path: Path) -> Wheels:
    """Unpack the wheel of a project's version into a folder of the test's own."""

    def unpack(project: str, version: str) -> Path:
        root = tmp_path / f"{project}-{version}"
        with zipfile.ZipFile(wheels(project, version)) as wheel:
            wheel.extractall(root)
        return root

    return unpack
