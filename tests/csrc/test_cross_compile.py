# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The kernels compile for aarch64 with a cross compiler, without Python's headers."""

import subprocess
import sys
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-trapping-math")
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror")


@pytest.mark.slow
@pytest.mark.skipif(not CSRC.is_dir(), reason="the tests lie outside a checkout")
def test_kernels_compile_for_aarch64(tmp_path):
    pytest.importorskip("ziglang", reason="ziglang comes with the dev extra")
    sources = [s for s in CSRC.glob("*.cpp") if s.name != "bindings.cpp"]
    sources.append(CSRC / "simd" / "level_baseline.cpp")
    assert len(sources) == 7
    for source in sources:
        out = tmp_path / f"{source.stem}.o"
        command = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu"]
        subprocess.run([*command, *FLAGS, *WARNINGS, "-c", source, "-o", out], check=True)
        # ELF, and the machine number of aarch64.
        header = out.read_bytes()[:20]
        assert header[:4] == b"\x7fELF"
        assert int.from_bytes(header[18:20], "little") == 183
