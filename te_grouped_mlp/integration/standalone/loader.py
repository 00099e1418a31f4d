# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The import hook that gives Transformer Engine (TE) a tex where its extension is absent.

Importing this module imports neither torch nor TE. `StandaloneFinder` decides when
`transformer_engine.common` is looked up, the first TE module of every import; when TE's own
`__init__` imports its torch part it is too late.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.abc
import importlib.machinery
import importlib.util
import os
import platform
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SWITCH = "NVTE_GROUPED_MLP_STANDALONE"
TEX = "transformer_engine_torch"
COMMON = "transformer_engine.common"
TRITON = "transformer_engine.pytorch.triton"

# TE's import checks that its libraries are installed unless a build of it is under way.
_IMPORT_ENVIRONMENT = {"NVTE_PROJECT_BUILDING": "1", "NVTE_RELEASE_BUILD": "0"}
_EXTENSION_SUFFIX = {"Linux": ".so", "Darwin": ".dylib", "Windows": ".dll"}
# A CUDA device on Linux shows as one of these (bare metal, WSL, Tegra).
_DEVICE_NODES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu/*")

_active = False
# Names being looked up by this thread, so that asking the other finders does not come back here.
_asking = threading.local()


def is_active() -> bool:
    """Return whether TE runs, or is being imported, over our tex in this process."""
    return _active


def transformer_engine_root() -> Path | None:
    """Return the folder that holds TE's package, or None where TE is not installed.

    A folder `transformer_engine` without `__init__` is a namespace, not TE.
    """
    module = sys.modules.get("transformer_engine")
    try:
        spec = importlib.util.find_spec("transformer_engine") if module is None else module.__spec__
    except (ImportError, ValueError):
        return None
    origin = getattr(spec, "origin", None) or getattr(module, "__file__", None)
    return None if origin is None else Path(origin).parent.parent


def extension_location() -> Path | None:
    """Return TE's compiled torch extension if it lies in a folder that TE searches.

    The folders: TE's parent, `transformer_engine/`, `transformer_engine/wheel_lib/`, and the same
    under the interpreter's purelib. Loads nothing.

    Returns:
        The first file found, or None.
    """
    suffix = _EXTENSION_SUFFIX.get(platform.system(), ".so")
    te_root = transformer_engine_root()
    roots = [root for root in (te_root, Path(sysconfig.get_paths()["purelib"])) if root is not None]
    for root in roots:
        package = root / "transformer_engine"
        if not package.is_dir():
            continue
        for folder in (root, package, package / "wheel_lib"):
            for path in sorted(folder.glob(f"{TEX}*{suffix}")):
                return path
    return None


def cuda_device_visible() -> bool:
    """Return whether torch would find a CUDA device; imports torch only if one may be there."""
    if "torch" not in sys.modules:
        if platform.system() == "Linux" and not any(map(glob.glob, _DEVICE_NODES)):
            return False
        if importlib.util.find_spec("torch") is None:
            return False
    import torch

    return bool(torch.cuda.is_available())


def should_start(has_device: bool | None = None) -> tuple[bool, str]:
    """Decide whether standalone serves TE in this process.

    Args:
        has_device: Whether there is a CUDA device; None: look.

    Returns:
        The decision and its reason, a clause for a sentence.

    Raises:
        ValueError: NVTE_GROUPED_MLP_STANDALONE is set to anything but 0 or 1.
    """
    switch = os.environ.get(SWITCH, "")
    if switch not in ("", "0", "1"):
        raise ValueError(f"{SWITCH} is {switch!r}; allowed: 0, 1, or unset")
    if switch == "0":
        return False, f"{SWITCH}=0"
    extension = extension_location()
    if extension is not None:
        return False, f"Transformer Engine's extension is installed ({extension})"
    if switch == "1":
        return True, f"{SWITCH}=1 and Transformer Engine's extension is not installed"
    if cuda_device_visible() if has_device is None else has_device:
        return False, f"a CUDA device is visible and {SWITCH} is not 1"
    return True, "Transformer Engine's extension is not installed and no CUDA device is visible"


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for the block and put the old ones back after it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _WrappedLoader(importlib.abc.Loader):
    """Runs a module's own loader, and `after(module)` before anyone else sees the module."""

    def __init__(
        self,
        inner: importlib.abc.Loader,
        after: Callable[[ModuleType], None],
        environment: dict[str, str] | None = None,
    ) -> None:
        self._inner = inner
        self._after = after
        self._environment = environment or {}

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # inspect, linecache and pickling helpers ask the module for its real loader.
        module.__loader__ = self._inner
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        with _environment(self._environment):
            self._inner.exec_module(module)
        self._after(module)


class _StandInLoader(importlib.abc.Loader):
    """Fills one module of TE's triton subpackage with our functions."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        del spec
        return None  # Python's own module object will do

    def exec_module(self, module: ModuleType) -> None:
        from te_grouped_mlp.integration.standalone import triton_stand_in

        triton_stand_in.fill(module)


def _start(common: Any) -> None:
    """Take over `load_framework_extension` right after the body of TE's common package."""
    global _active
    _active = True
    upstream = common.load_framework_extension

    def load_framework_extension(framework: str) -> None:
        if framework != "torch":
            upstream(framework)
            return
        if TEX not in sys.modules:
            from te_grouped_mlp.integration.standalone.tex import module
            from te_grouped_mlp.op import extension

            if not cuda_device_visible():
                extension.require("Transformer Engine cannot run standalone on a CPU")
            sys.modules[TEX] = module.build()

    common.load_framework_extension = load_framework_extension
    reason = should_start()[1]
    sys.stderr.write(f"te-grouped-mlp: Transformer Engine runs standalone: {reason}.\n")


def _apply_overrides(module: ModuleType) -> None:
    from te_grouped_mlp.integration.standalone import overrides

    overrides.apply(module.__name__, module)


class StandaloneFinder(importlib.abc.MetaPathFinder):
    """Serves TE's imports where its extension is absent; leaves every other import alone.

    Creating one costs nothing. It decides when `transformer_engine.common` is looked up, and
    writes one line to the standard error stream when it starts.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("transformer_engine."):
            return None
        if fullname == COMMON:
            if is_active() or not should_start()[0]:
                return None
            return self._wrap(fullname, path, target, _start, _IMPORT_ENVIRONMENT)
        if not is_active():
            return None
        if fullname == TRITON or fullname.startswith(f"{TRITON}."):
            return self._stand_in(fullname)
        from te_grouped_mlp.integration.standalone import overrides

        if fullname in overrides.MODULES:
            return self._wrap(fullname, path, target, _apply_overrides)
        return None

    def _stand_in(self, fullname: str) -> importlib.machinery.ModuleSpec | None:
        from te_grouped_mlp.integration.standalone import triton_stand_in

        if fullname != TRITON and fullname.rpartition(".")[2] not in triton_stand_in.MODULES:
            return None
        return importlib.machinery.ModuleSpec(
            fullname, _StandInLoader(), is_package=fullname == TRITON
        )

    def _wrap(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None,
        after: Callable[[ModuleType], None],
        environment: dict[str, str] | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Wrap the loader that the other finders give (an editable install brings its own)."""
        asking = _asking.__dict__.setdefault("names", set())
        if fullname in asking:
            return None
        asking.add(fullname)
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec = None if find is None else find(fullname, path, target)
                if spec is not None and spec.loader is not None:
                    spec.loader = _WrappedLoader(spec.loader, after, environment)
                    wrapped: importlib.machinery.ModuleSpec = spec
                    return wrapped
        finally:
            asking.discard(fullname)
        return None
