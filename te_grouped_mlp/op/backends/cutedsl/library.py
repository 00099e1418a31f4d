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


def beside(path: Path) -> Path:
    """Return where the library of an object lies."""
    return path.with_suffix(".so")


def link(path: Path) -> Path | None:
    """Link an object into a library beside it; call it where CuTe DSL is imported already.

    Returns:
        The library, or None where there is no C compiler or it fails.
    """
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return None
    import cutlass.cute as cute

    out = beside(path)
    needed = [Path(each) for each in cute.runtime.find_runtime_libraries(enable_tvm_ffi=True)]
    # By their folders, so that the loader finds them before anything has loaded them.
    folders = [f"-Wl,-rpath,{each.parent}" for each in needed]
    command = [compiler, "-shared", "-Wl,-Bsymbolic", "-o", out, path, *needed, *folders]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return out if done.returncode == 0 else None


def load(path: Path, entry: str) -> Callable[..., None]:
    """Return a kernel from the library beside an object; from the object itself without one.

    Args:
        path: The object.
        entry: Name under which it was exported.

    Raises:
        Exception: Neither can be loaded; of whatever type the loaders raise.
    """
    linked = beside(path)
    if linked.exists():
        # It names folders of an environment that may have moved; then the object serves.
        with contextlib.suppress(Exception):
            import tvm_ffi

            return tvm_ffi.load_module(str(linked.absolute()))[entry]  # type: ignore[no-any-return]
    with deprecations_ignored():
        import cutlass.cute as cute

    return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[entry]  # type: ignore[no-any-return]
