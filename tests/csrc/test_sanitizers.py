# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Ten thousand random calls over an extension built with the address and the UB sanitizer."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLS, SEED = 10_000, 20261130

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="the tests lie outside a checkout"),
]


@pytest.fixture(scope="module")
def runtime() -> str:
    """The libraries to preload: the sanitizer's runtime first, then the one that it wraps."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++ and its sanitizers")
    found = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [compiler, f"-print-file-name={name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found.append(done.stdout.strip())
    if not all(map(os.path.isabs, found)):
        pytest.skip("needs g++'s address sanitizer")
    return " ".join(found)


@pytest.fixture(scope="module")
def extension(runtime: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extension with sanitizers, in a folder of its own."""
    del runtime
    pybind11 = pytest.importorskip("pybind11")
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("needs cmake")
    folder = tmp_path_factory.mktemp("sanitized")
    options = [
        "-DTE_GROUPED_MLP_SANITIZE=ON",
        "-DCMAKE_CXX_COMPILER=g++",
        # Optimised as it is used, since that decides how far a loop reads.
        "-DCMAKE_BUILD_TYPE=Release",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
    ]
    subprocess.run([cmake, "-S", ROOT, "-B", folder, *options], check=True)
    subprocess.run([cmake, "--build", folder, "--parallel", "2"], check=True)
    (built,) = folder.glob("_C.*")
    return built


def run(extension: Path, runtime: str, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": runtime,
        # Python keeps what it allocates; and whoever asks for too much memory gets an exception.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "NVTE_GROUPED_MLP_STANDALONE": "1",
    }
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def test_random_calls(extension: Path, runtime: str) -> None:
    arguments = (str(extension), str(CALLS), str(SEED))
    done = run(extension, runtime, "-m", "tests.csrc.sanitized", *arguments)
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout[-2000:]}\n{done.stderr[-8000:]}"
    told = ast.literal_eval(done.stdout.splitlines()[-1])
    sys.stdout.write(f"seed {SEED}: {told}\n")
    assert told["_C refused"] + told["_C computed"] == CALLS
    assert min(told.values()) > CALLS // 10


def test_the_sanitizer_sees_an_access_past_a_buffer(extension: Path, runtime: str) -> None:
    """A span that claims more than there is: what every other test is worth."""
    code = (
        "import sys; from tests.csrc.sanitized import use; use(sys.argv[1]); import torch\n"
        "from te_grouped_mlp import _C\n"
        "src, out = torch.zeros(64), torch.zeros(8)\n"
        "_C.column_sums((src.data_ptr(), 512), 0, 16, 8, 8, None, 0, (out.data_ptr(), 32), 1)\n"
        "print('not seen')\n"
    )
    done = run(extension, runtime, "-c", code, str(extension))
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "not seen" not in done.stdout
