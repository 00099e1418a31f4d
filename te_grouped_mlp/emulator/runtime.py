# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The library that stands in for CuTe DSL's CUDA runtime, and the launches that reach it.

A compiled host function calls CUDA through `libcute_dsl_runtime.so`. Here it gets ours
(csrc/emulator), which has no driver behind it and hands every launch to Python.
"""

from __future__ import annotations

import ctypes
import functools
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from te_grouped_mlp.emulator.launch import Launch, parameter_sizes

ARCH = "sm_100a"
SM = (10, 0)
MULTIPROCESSORS = 148
"""Of a B200; what its driver would say."""

VERSIONS = "4.8.1 to 4.8.x"
"""Releases of nvidia-cutlass-dsl whose runtime calls are known."""

_NAME = "libcute_dsl_runtime.so"
_MISSING = re.compile(r"Symbols not found: \[\s*([^\]]*?)\s*\]")

_Dim3 = ctypes.c_uint * 3


class _Launch(ctypes.Structure):
    """`Launch` of csrc/emulator/runtime_shim.cpp, field by field."""

    _fields_ = (
        ("entry", ctypes.c_char_p),
        ("image", ctypes.c_void_p),
        ("grid", _Dim3),
        ("block", _Dim3),
        ("cluster", _Dim3),
        ("dynamic_shared_bytes", ctypes.c_uint64),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
    )


_Handler = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Launch))


def library_path() -> Path:
    """Return the built library.

    Raises:
        ImportError: This installation has none.
    """
    path = Path(__file__).with_name(_NAME)
    if not path.is_file():
        raise ImportError(f"{path} is missing; build the package: pip install . in a checkout")
    return path


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(library_path()), mode=ctypes.RTLD_GLOBAL)


_scratch = tempfile.TemporaryDirectory(prefix="te-grouped-mlp-ptx-")
"""Where CuTe DSL writes PTX; gone when the process ends."""


@functools.cache
def select() -> None:
    """Let CuTe DSL compile for sm_100a, keep the PTX, and call our library, from now on.

    For the rest of the process: a compiled function is bound to its library.

    Raises:
        ImportError: CuTe DSL, or the built library, is absent.
        RuntimeError: CuTe DSL has compiled for a driver already.
    """
    path = library_path()
    from cutlass.cutlass_dsl import CuTeDSL

    settings = CuTeDSL._get_dsl().envar
    settings.arch = ARCH
    settings.shared_libs = str(path)
    settings.keep_ptx = True
    settings.disable_file_caching = True
    settings.dump_dir = _scratch.name


@dataclass
class _Capture:
    """The call under way: whose PTX its launches belong to, and what became of them."""

    ptx: str
    take: Callable[[Launch], None]
    error: BaseException | None = None


_calls: list[_Capture] = []


def call(function: Callable[..., Any], ptx: str, take: Callable[[Launch], None], *args: Any) -> Any:
    """Call a compiled host function; each of its launches goes to `take` instead of a GPU.

    Args:
        function: Compiled after `select`.
        ptx: The text of its kernels.
        take: Called once for each launch, in order, before the host code goes on. After one that
            raises, the rest of the call's launches are dropped and its error is raised here.
        *args: Of the function.

    Raises:
        RuntimeError: The host code wants a function of the CUDA runtime that is not known here.
    """
    _install_handler()
    capture = _Capture(ptx, take)
    _calls.append(capture)
    try:
        result = explained(function, *args)
    finally:
        _calls.pop()
    if capture.error is not None:
        raise capture.error
    return result


def explained(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    """Call what compiles or runs host code; a symbol that our library lacks is named.

    Raises:
        RuntimeError: Naming the symbol and the releases whose symbols are known.
    """
    try:
        return function(*args, **keywords)
    except Exception as error:
        missing = _MISSING.search(str(error))
        if missing is None:
            raise
        raise RuntimeError(
            f"the emulator's CUDA runtime has no {missing[1]}, which this CuTe DSL "
            f"({_version()}) calls; allowed: nvidia-cutlass-dsl {VERSIONS}"
        ) from error


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("nvidia-cutlass-dsl")
    except metadata.PackageNotFoundError:
        return "unknown version"


@functools.cache
def _install_handler() -> None:
    setter = _library().te_grouped_mlp_set_launch_handler
    setter.argtypes, setter.restype = [_Handler], None
    setter(_handler)


@_Handler
def _handler(pointer: Any) -> int:
    """Take a launch. Nothing may be raised through the host code, so an error waits."""
    capture = _calls[-1]
    if capture.error is None:
        try:
            capture.take(_launch(pointer.contents, capture.ptx))
        except BaseException as error:
            capture.error = error
    return 0


def _launch(raw: Any, ptx: str) -> Launch:
    entry = raw.entry.decode()
    sizes = parameter_sizes(ptx, entry)
    parameters = tuple(ctypes.string_at(raw.parameters[i], n) for i, n in enumerate(sizes))
    return Launch(
        ptx, entry, tuple(raw.grid), tuple(raw.block), tuple(raw.cluster),
        int(raw.dynamic_shared_bytes), parameters,
    )  # fmt: skip
