# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The newest QuACK that the package index offers, which `capability` does not allow yet.

The kernels use its internals, so one release is pinned. This says what a newer one breaks before
somebody moves the pin. `capability` is not asked here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.installation.site import CHECKOUT, Site
from tests.op.backends.cutedsl import compile_all

pytestmark = pytest.mark.slow

PACKAGES = ("quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi")
# What pip prints when an index does not answer, or knows no release at all.
NO_INDEX = "(from versions: none)"
NEEDED = ("quack", "cutlass", "triton")
ABSENT = [name for name in NEEDED if importlib.util.find_spec(name) is None]
VERSIONS = (
    "import importlib.metadata, json, sys\n"
    "print(json.dumps({name: importlib.metadata.version(name) for name in sys.argv[1:]}))\n"
)


def environment() -> dict[str, str]:
    """The user's environment with pip's settings, but without Python's and Transformer Engine's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("NVTE_", "PYTHON"))}
    # The checkout comes before an installation of another one.
    ours = {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**kept, **ours}


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout."""
    return subprocess.run(
        command, cwd=CHECKOUT, env=environment(), capture_output=True, text=True, timeout=1800
    )


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """An interpreter with the newest QuACK, and what it needs newer; the rest is this one's.

    Returns:
        The interpreter, and the versions that it imports.
    """
    if ABSENT and os.environ.get("TE_GROUPED_MLP_REQUIRE_KERNELS") != "1":
        pytest.skip(f"not installed: {', '.join(ABSENT)}")
    root = tmp_path_factory.mktemp("newest")
    made = Site(root / "site")
    # After the environment's own folder, so that what is installed there comes first.
    folders = [sysconfig.get_path("purelib"), *site.getsitepackages()]
    lines = "".join(f"site.addsitedir({folder!r}); " for folder in dict.fromkeys(folders))
    (made.purelib / "zz_this_environment.pth").write_text(f"import site; {lines}\n")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    found = run(*pip, "download", "--no-deps", "--dest", str(root / "wheel"), PACKAGES[0])
    if NO_INDEX in found.stdout + found.stderr:
        pytest.skip(f"the package index cannot be reached, so {PACKAGES[0]} cannot be had")
    assert found.returncode == 0, found.stderr[-4000:]
    (wheel,) = (root / "wheel").iterdir()
    done = run(*pip, "--python", str(made.python), "install", "--no-warn-conflicts", str(wheel))
    assert done.returncode == 0, done.stderr[-4000:]
    versions = run(str(made.python), "-c", VERSIONS, *PACKAGES)
    assert versions.returncode == 0, versions.stderr[-4000:]
    told = json.loads(versions.stdout)
    assert wheel.name.split("-")[1] == told[PACKAGES[0]], (wheel.name, told)
    return str(made.python), told


def test_every_kernel_compiles(newest: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    python, versions = newest
    done = run(python, "-m", compile_all.__name__, "sm_90a", str(tmp_path))
    broken = {path.stem: path.read_text()[-800:] for path in sorted(tmp_path.glob("*.txt"))}
    report = "\n".join(f"{name}: {text}" for name, text in broken.items()) or done.stderr[-4000:]
    assert not broken, f"{versions} breaks {len(broken)} kernels\n{report}"
    assert done.returncode == 0, f"{versions}\n{report}"
    for name in compile_all.wanted(9):
        assert ".target sm_90a" in (tmp_path / f"{name}.ptx").read_text(), f"{name} with {versions}"


def test_arguments_of_a_launch_are_as_we_pass_them(newest: tuple[str, dict[str, str]]) -> None:
    python, versions = newest
    module, names = "tests/op/backends/cutedsl/test_compile.py", "plain_tuples or main_loops"
    done = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", names, module)
    assert "2 passed" in done.stdout, f"{versions}\n{done.stdout[-4000:]}"
