# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels: once per process in memory, once per machine on disk, several at a time.

CuTe DSL compiles one kernel of a process at a time, so concurrency means forked workers. A worker
never touches CUDA: the target is fixed before the fork, and a compiled kernel leaves it as an
object file. Nothing here holds a token count.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import multiprocessing
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from te_grouped_mlp.op.backends.cutedsl import library
from te_grouped_mlp.op.backends.cutedsl.keys import KernelKey
from te_grouped_mlp.op.backends.cutedsl.library import deprecations_ignored

CACHE_SWITCH = "NVTE_GROUPED_MLP_CACHE"
"""Folder of the disk cache; by default te-grouped-mlp in the user's cache folder."""

TARGET_SWITCH = "CUTE_DSL_ARCH"
"""CuTe DSL's own variable: the architecture to compile for, such as sm_90a."""

_PACKAGES = ("quack-kernels", "nvidia-cutlass-dsl", "apache-tvm-ffi")
_WORKER_SECONDS = 120.0

# A backward runs in a thread of autograd's, perhaps while another forward compiles.
_one_at_a_time = threading.RLock()
_loaded: dict[KernelKey, Callable[..., None]] = {}
_named_target: str | None = None


def kernel(key: KernelKey) -> Callable[..., None]:
    """Return the compiled kernel of `key`, from memory, from disk, or by compiling it.

    Raises:
        ImportError: A package of the extra `kernels` is absent.
        RuntimeError: The kernel does not compile; the message names the key.
    """
    found = _loaded.get(key)
    if found is None:
        with _one_at_a_time:
            found = _loaded.get(key) or _from_disk(key) or _compile(key)
            _loaded[key] = found
    return found


def compile_ahead(keys: Iterable[KernelKey], workers: int | None = None) -> int:
    """Compile what is not on disk yet, several kernels at a time.

    Args:
        keys: Kernels that will be needed.
        workers: Processes at a time; None for the number of cores, at most 16.

    Returns:
        How many kernels were compiled. A worker that fails or does not end costs nothing but time:
        `kernel` then compiles in this process and shows the error.
    """
    with _one_at_a_time:
        return _compile_ahead(keys, workers)


def _compile_ahead(keys: Iterable[KernelKey], workers: int | None) -> int:
    missing = missing_of(keys)
    if not missing:
        return 0
    workers = min(len(missing), workers or os.cpu_count() or 1, 16)
    if workers == 1:
        for key in missing:
            kernel(key)
        return len(missing)
    _builder()  # imported here, so that the workers need not; it also fixes the target
    context = multiprocessing.get_context("fork")
    shares = [missing[i::workers] for i in range(workers)]
    with warnings.catch_warnings():
        # A worker compiles and leaves; it takes no lock that another thread may hold.
        warnings.filterwarnings("ignore", ".*multi-threaded.*fork.*", DeprecationWarning)
        processes = [context.Process(target=_work, args=(share,), daemon=True) for share in shares]
        for process in processes:
            process.start()
    for process in processes:
        process.join(_WORKER_SECONDS)
        if process.is_alive():
            process.kill()
    return sum(_path(key).exists() for key in missing)


def missing_of(keys: Iterable[KernelKey]) -> list[KernelKey]:
    """Return the different kernels of `keys` that are neither in memory nor on disk."""
    return [key for key in dict.fromkeys(keys) if key not in _loaded and not _path(key).exists()]


def name_target(name: str) -> None:
    """Compile for `name`, such as sm_90a, from now on, whatever GPU this machine has."""
    global _named_target
    _named_target = name
    for cached in (target, target_arch, _fingerprint, _builder):
        cached.cache_clear()


@functools.cache
def target_arch() -> int:
    """Return the major compute capability that this process compiles for."""
    return int("".join(filter(str.isdigit, target()))) // 10


@functools.cache
def target() -> str:
    """Return the architecture that this process compiles for, such as sm_90a.

    CuTe DSL would find the same, but importing it takes longer than loading a layer's kernels.

    Raises:
        RuntimeError: There is no GPU, and none is named.
    """
    import torch

    named = _named_target or os.environ.get(TARGET_SWITCH)
    if named:
        return named
    if not torch.cuda.is_available():
        raise RuntimeError(f"no CUDA device is visible; allowed: name one by {TARGET_SWITCH}")
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def cache_folder() -> Path:
    """Return the folder of this version's objects; it need not exist."""
    root = os.environ.get(CACHE_SWITCH)
    if not root:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        root = str(Path(base) / "te-grouped-mlp")
    return Path(root) / _fingerprint()


@functools.cache
def _fingerprint() -> str:
    """Hash what generated code and its form depend on: our sources, the compilers and Python."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {target()}".encode())
    for package in _PACKAGES:
        digest.update(f"{package}={importlib.metadata.version(package)}".encode())
    here = Path(__file__).parent
    sources = (
        here / "compile.py",
        here / "keys.py",
        here / "config.py",
        *sorted((here / "kernels").glob("*.py")),
    )
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def _entry(path: Path) -> str:
    """Return a kernel's name: its own, so that a damaged object cannot find another's."""
    return f"kernel_{path.stem}"


def _path(key: KernelKey) -> Path:
    return cache_folder() / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.o"


@functools.cache
def _builder() -> Callable[[KernelKey], Any]:
    with deprecations_ignored():
        from cutlass.cutlass_dsl import CuTeDSL

        # Set, or a forked worker would ask the driver.
        CuTeDSL._get_dsl().envar.arch = target()
        from te_grouped_mlp.op.backends.cutedsl.kernels.build import build
    return build


def _from_disk(key: KernelKey) -> Callable[..., None] | None:
    """Load the library of a kernel, or else its object, which needs the compiler's packages."""
    path = _path(key)
    if not path.exists():
        return None
    try:
        return library.load(path, _entry(path))
    except Exception:  # a damaged object is a miss; compiling again replaces it
        path.unlink(missing_ok=True)
        return None


def _compile(key: KernelKey) -> Callable[..., None]:
    try:
        builder = _builder()
        with deprecations_ignored():
            compiled = builder(key)
    except ImportError:
        raise
    except Exception as error:
        raise RuntimeError(f"{key} does not compile: {error}") from error
    _export(compiled, _path(key))
    result: Callable[..., None] = compiled
    return result


def _export(compiled: Any, path: Path) -> None:
    """Write the object under a private name first: a killed process leaves no half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            draft = Path(folder) / path.name
            compiled.export_to_c(object_file_path=str(draft), function_name=_entry(path))
            linked = library.link(draft)
            if linked is not None:
                os.replace(linked, library.beside(path))
            os.replace(draft, path)
    except OSError as error:
        warnings.warn(f"{path} cannot be written, so it is compiled anew: {error}", stacklevel=2)


def _work(keys: Sequence[KernelKey]) -> None:
    for key in keys:
        _compile(key)
