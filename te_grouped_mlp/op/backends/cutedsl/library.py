# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Objects of compiled kernels as shared libraries, which load without the kernels' compiler.

CuTe DSL loads an object by its own linker, and so has to be imported first, which takes a second.
The system loader takes milliseconds. A machine without a C compiler keeps to the objects.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

_COMPILERS = ("cc", "gcc", "clang")
_SECONDS = 30


@contextlib.contextmanager
def deprecations_ignored() -> Iterator[None]:
    """Keep the deprecation warnings that the kernel packages cause in each other from our user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def link(path: Path) -> Path | None:
    """Link an object into a library beside it; call it where CuTe DSL is imported already.

    Returns:
        The library, or None where there is no C compiler or it fails.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return None
    import cutlass.cute as cute

    out = path.with_suffix(".so")
    needed = [Path(library) for library in cute.runtime.find_runtime_libraries(enable_tvm_ffi=True)]
    # By their folders, so that the loader finds them before anything has loaded them.
    folders = [f"-Wl,-rpath,{library.parent}" for library in needed]
    files = [str(file) for file in (out, path, *needed)]
    command = [compiler, "-shared", "-Wl,-Bsymbolic", "-o", *files, *folders]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return out if done.returncode == 0 else None


def load(path: Path, symbol: str) -> Callable[..., None]:
    """Return a kernel from a library, or from an object.

    Args:
        path: What `link` made, or an object.
        symbol: Name under which the kernel was exported.

    Raises:
        Exception: It cannot be loaded; of whatever type the loaders raise.
    """
    if path.suffix == ".so":
        import tvm_ffi

        kernel: Callable[..., None] = tvm_ffi.load_module(str(path))[symbol]
        return kernel
    with deprecations_ignored():
        import cutlass.cute as cute

    return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[symbol]  # type: ignore[no-any-return]
