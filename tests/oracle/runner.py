# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Run steps in a child process, over a chosen module inside a chosen TE."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from te_grouped_mlp.integration import installed_te
from tests.oracle.jobs import OURS, Job, Result, Setup

ROOT = Path(__file__).resolve().parents[2]
CACHE_VARIABLE = "TE_GROUPED_MLP_TEST_CACHE"
"""Folder that keeps downloaded TE wheels between runs; one in the temporary folder without it."""

_MODULE = Path("transformer_engine", "pytorch", "ops", "fused", "grouped_mlp.py")
_PREPARE_SECONDS = 300
_RUN_SECONDS = 1200


def run(setup: Setup, jobs: Sequence[Job]) -> list[Result]:
    """Run jobs one after another in a fresh process.

    Args:
        setup: What runs.
        jobs: Steps.

    Raises:
        AssertionError: The process failed as a whole; the message has its output.
    """
    with tempfile.TemporaryDirectory(prefix="oracle-") as folder:
        source, target = Path(folder, "jobs"), Path(folder, "results")
        source.write_bytes(pickle.dumps((setup, list(jobs))))
        child = subprocess.run(
            [sys.executable, "-m", "tests.oracle.child", str(source), str(target)],
            env=_environment(setup),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_RUN_SECONDS,
            check=False,
        )
        assert child.returncode == 0, child.stderr[-4000:]
        results: list[Result] = pickle.loads(target.read_bytes())
    return results


def _environment(setup: Setup) -> dict[str, str]:
    tree = _tree(setup)
    path = [str(ROOT)] if tree is None else [str(tree), str(ROOT)]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("NVTE_")}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": str(setup.threads),
        "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1",
        "NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1",
        "NVTE_GROUPED_MLP_FORK": "1" if setup.module == OURS else "0",
    }


def _tree(setup: Setup) -> Path | None:
    """Return the folder that holds the TE to import, or None for the installed one."""
    installed = importlib.metadata.version("transformer-engine")
    te = setup.te or installed
    if te != installed:
        assert setup.module in (OURS, te), "a wheel runs its own module or ours"
        return unpacked(te)
    if setup.module in (OURS, installed):
        return None
    return with_module(setup.module)


@functools.cache
def cache() -> Path:
    """Return the folder for wheels and trees."""
    chosen = os.environ.get(CACHE_VARIABLE)
    default = f"te-grouped-mlp-oracle-{getattr(os, 'getuid', int)()}"
    folder = Path(chosen) if chosen else Path(tempfile.gettempdir(), default)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def wheel(version: str) -> Path:
    """Return TE's pure-Python wheel of a release; skips the test where pip cannot get it."""
    name = f"transformer_engine-{version}-py3-none-any.whl"
    found = cache() / name
    if not found.is_file():
        command = ["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        outcome = subprocess.run(
            [sys.executable, *command, f"transformer-engine=={version}", "--dest", str(cache())],
            capture_output=True,
            text=True,
            timeout=_PREPARE_SECONDS,
            check=False,
        )
        if outcome.returncode:
            pytest.skip(
                f"pip cannot download transformer-engine {version}: {outcome.stderr[-300:]}"
            )
    assert found.is_file(), f"pip brought no {name}"
    return found


def unpacked(version: str) -> Path:
    """Return a folder with the wheel's content, metadata included."""
    return _made(f"te-{version}", lambda folder: _unzip(wheel(version), folder))


def with_module(version: str) -> Path:
    """Return a folder with the installed TE, its fused grouped MLP taken from another release."""

    def fill(folder: Path) -> None:
        root = installed_te.te_root()
        assert root is not None
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root, folder / "transformer_engine", ignore=ignore)
        with zipfile.ZipFile(wheel(version)) as archive:
            (folder / _MODULE).write_bytes(archive.read(_MODULE.as_posix()))

    installed = importlib.metadata.version("transformer-engine")
    return _made(f"te-{installed}-with-{version}", fill)


def _unzip(file: Path, folder: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        archive.extractall(folder)


def _made(name: str, fill: Callable[[Path], None]) -> Path:
    """Return a folder of the cache, filled at the first call; complete or not there at all."""
    final = cache() / name
    if not final.is_dir():
        half = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=cache()))
        fill(half)
        try:
            half.rename(final)
        except OSError:
            # Another process was faster; its folder is as good.
            shutil.rmtree(half)
    return final
