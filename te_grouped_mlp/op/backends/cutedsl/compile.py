# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels: once per process in memory, once per machine on disk, several at a time.

CuTe DSL compiles one kernel of a process at a time, so concurrency means forked workers. A worker
never touches CUDA: the target is fixed before the fork, and a compiled kernel leaves it as an
object file. Processes that want the same kernel at the same time, as the ranks of a node do, wait
for the first one. Where the folder cannot be used, every process compiles for itself and says why.
Nothing here holds a token count.
"""

from __future__ import annotations

import contextlib
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

from te_grouped_mlp.op import emulated
from te_grouped_mlp.op.backends.cutedsl import disk, library
from te_grouped_mlp.op.backends.cutedsl.keys import KernelKey
from te_grouped_mlp.op.backends.cutedsl.library import deprecations_ignored
from te_grouped_mlp.op.environment import cache_home

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
_said: set[str] = set()


def kernel(key: KernelKey) -> Callable[..., None]:
    """Return the compiled kernel of `key`, from memory, from disk, or by compiling it.

    Raises:
        ImportError: A package of the extra `kernels` is absent.
        RuntimeError: The kernel does not compile; the message names the key.
    """
    function = _loaded.get(key)
    if function is None:
        with _one_at_a_time:
            function = _loaded.get(key) or _stored_or_compiled(key)
            _loaded[key] = function
    return function


def _stored_or_compiled(key: KernelKey) -> Callable[..., None]:
    gpu = emulated.device()
    if gpu is not None:
        # A kernel from disk would not carry its PTX.
        return gpu.compiled(_compile(key))
    folder = _folder()
    if folder is None:
        return _compile(key)
    function = _from_disk(key, folder)
    if function is None:
        with disk.locked(folder, _name(key)):
            # Another process may have compiled it while this one waited.
            function = _from_disk(key, folder)
            if function is None:
                function = _compile(key)
                _export(function, key, folder)
    return function


def compile_ahead(keys: Iterable[KernelKey], workers: int | None = None) -> int:
    """Compile what is not on disk yet, several kernels at a time.

    Args:
        keys: Kernels that will be needed.
        workers: Processes at a time; None for the number of cores, at most 16.

    Returns:
        How many kernels were compiled. A worker that fails or does not end costs nothing but time:
        `kernel` then compiles in this process and shows the error.
    """
    if emulated.device() is not None:
        return 0
    with _one_at_a_time:
        return _compile_ahead(keys, workers)


def _compile_ahead(keys: Iterable[KernelKey], workers: int | None) -> int:
    missing = missing_of(keys)
    if not missing:
        return 0
    folder = _folder()
    workers = min(len(missing), workers or os.cpu_count() or 1, 16)
    if workers == 1 or folder is None:
        for key in missing:
            kernel(key)
        return len(missing)
    _builder()  # imported here, so that the workers need not; it also fixes the target
    context = multiprocessing.get_context("fork")
    shares = [missing[i::workers] for i in range(workers)]
    with warnings.catch_warnings():
        # A worker compiles and leaves; it takes no lock that another thread may hold.
        warnings.filterwarnings("ignore", ".*multi-threaded.*fork.*", DeprecationWarning)
        processes = [
            context.Process(target=_work, args=(share, folder), daemon=True) for share in shares
        ]
        for process in processes:
            process.start()
    for process in processes:
        process.join(_WORKER_SECONDS)
        if process.is_alive():
            process.kill()
    return sum(disk.entry(folder, _name(key)) is not None for key in missing)


def missing_of(keys: Iterable[KernelKey]) -> list[KernelKey]:
    """Return the different kernels of `keys` that are neither in memory nor whole on disk."""
    return [key for key in not_stored(keys) if key not in _loaded]


def not_stored(keys: Iterable[KernelKey]) -> list[KernelKey]:
    """Return the different kernels of `keys` that are not whole on disk."""
    folder = _folder()
    return [key for key in dict.fromkeys(keys) if folder is None or not _entry(key, folder)]


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
    """Return the folder of this version's objects; it need not exist.

    Raises:
        RuntimeError: This user has no home folder, and none is named.
    """
    named = os.environ.get(CACHE_SWITCH)
    return (Path(named).expanduser() if named else cache_home()) / _fingerprint()


def usable_folder() -> Path:
    """Return the real path of `cache_folder`, made if it is missing.

    Raises:
        OSError, RuntimeError: It cannot be made, or another user could change what lies there;
            the message says why.
    """
    return disk.trusted_folder(cache_folder())


def _folder() -> Path | None:
    try:
        return usable_folder()
    except (OSError, RuntimeError) as error:
        _warn(f"the kernel cache is not used, so each process compiles its kernels: {error}")
        return None


def _warn(text: str) -> None:
    """Warn, once for each text."""
    if text not in _said:
        _said.add(text)
        warnings.warn(f"{text} ({CACHE_SWITCH} names another folder)", stacklevel=3)


@functools.cache
def _fingerprint() -> str:
    """Hash what generated code and its form depend on: our sources, the compilers and Python."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {target()}".encode())
    for package in _PACKAGES:
        digest.update(f"{package}={importlib.metadata.version(package)}".encode())
    here = Path(__file__).parent
    sources = (
        *(here / f"{name}.py" for name in ("compile", "disk", "library", "keys", "config")),
        *sorted((here / "kernels").glob("*.py")),
    )
    for source in sources:
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:24]


def _name(key: KernelKey) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()[:32]


def _symbol(key: KernelKey) -> str:
    """Return a kernel's name: its own, so that no object can be taken for another's."""
    return f"kernel_{_name(key)}"


@functools.cache
def _builder() -> Callable[[KernelKey], Any]:
    with deprecations_ignored():
        from cutlass.cutlass_dsl import CuTeDSL

        # Set, or a forked worker would ask the driver.
        CuTeDSL._get_dsl().envar.arch = target()
        from te_grouped_mlp.op.backends.cutedsl.kernels.build import build
    return build


def _entry(key: KernelKey, folder: Path) -> frozenset[str] | None:
    """Return the files of a kernel on disk; None if there are none, or none that can be taken."""
    try:
        return disk.entry(folder, _name(key))
    except disk.DistrustedError as error:
        _warn(f"a kernel of the cache is not used, but replaced: {error}")
        return None


def _from_disk(key: KernelKey, folder: Path) -> Callable[..., None] | None:
    """Load the library of a kernel, or else its object, which needs the compiler's packages."""
    files = _entry(key, folder)
    if files is None:
        return None
    paths = [folder / f"{_name(key)}{suffix}" for suffix in (".so", ".o")]
    for path in paths:
        # A library names folders of an environment that may have moved; then the object serves.
        if path.name in files:
            with contextlib.suppress(Exception):
                return library.load(path, _symbol(key))
    return None


def _compile(key: KernelKey) -> Callable[..., None]:
    try:
        builder = _builder()
        with deprecations_ignored():
            compiled: Callable[..., None] = builder(key)
    except ImportError:
        raise
    except Exception as error:
        raise RuntimeError(f"{key} does not compile: {error}") from error
    return compiled


def _export(compiled: Any, key: KernelKey, folder: Path) -> None:
    """Write a kernel's files under private names, then make them its entry."""
    try:
        with tempfile.TemporaryDirectory(dir=folder) as private:
            draft = Path(private) / f"{_name(key)}.o"
            compiled.export_to_c(object_file_path=str(draft), function_name=_symbol(key))
            linked = library.link(draft)
            disk.publish(folder, _name(key), [draft] if linked is None else [draft, linked])
    except OSError as error:
        # Without the name of the private folder, which differs every time.
        _warn(f"{folder} cannot be written to, so kernels are compiled anew: {error.strerror}")


def _work(keys: Sequence[KernelKey], folder: Path) -> None:
    # What goes wrong here goes wrong again where it is looked for, and is said there.
    warnings.simplefilter("ignore")
    for key in keys:
        with disk.locked(folder, _name(key)):
            if not _entry(key, folder):
                _export(_compile(key), key, folder)
