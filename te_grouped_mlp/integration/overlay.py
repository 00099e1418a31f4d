# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Which file Python loads for Transformer Engine's fused grouped MLP, and whether it is ours.

The finder of `_bootstrap` asks `find_spec` for every module of TE. One of them is answered with
the forked file, all others go to the standalone finder and then to Python's own. Upstream's file
stays loadable under a private name. Nothing here imports torch or TE by itself, apart from
`load_upstream`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from te_grouped_mlp import _bootstrap
from te_grouped_mlp.integration.installed_te import (
    HOST_NAMES,
    PACKAGE,
    PATCH_MARKER,
    SUPPORTED,
    TARGET,
    carries_patch,
    fork_file,
    is_fork,
    is_supported,
    te_root,
    te_version,
    version_refusal,
)
from te_grouped_mlp.op.environment import (
    FUSED_SWITCH,
    current_switches,
    emulation_requested,
    interpret_triton,
)

__all__ = [
    "HOST_NAMES",
    "PACKAGE",
    "PATCH_MARKER",
    "TARGET",
    "UPSTREAM_NAME",
    "Status",
    "activate",
    "assert_active",
    "find_spec",
    "fork_file",
    "is_fork",
    "load_upstream",
    "refusal",
    "require_in_place",
    "status",
]

# Inside TE's package, so that the relative imports of upstream's file hold.
UPSTREAM_NAME = f"{PACKAGE}._te_grouped_mlp_upstream"


@dataclass(frozen=True)
class Status:
    """Whether the fork runs in this interpreter, and why.

    Attributes:
        active: True if TE's module is the forked file, or will be when TE is imported.
        switched_on: Whether TE's own switch of the fused op is on; without it every step runs
            unfused, in whichever module.
        reason: One sentence that says why.
        remedy: What to do so that the fork runs, the switch included; empty if it does.
        te_version: Version of the installed TE, or None if it is absent or has no metadata.
        te_imported: Whether TE's module is loaded already, so that nothing can change any more.
        fork_file: The forked file of this installation, or None if it is missing.
    """

    active: bool
    switched_on: bool
    reason: str
    remedy: str
    te_version: str | None
    te_imported: bool
    fork_file: Path | None


_NO_FORK_FILE = "this installation lacks its forked file"

# Why the finder left upstream's module alone, once it has been asked; None if it did not.
_refusal: str | None = None
_standalone: Any = None
_lock = threading.RLock()


def find_spec(
    fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Answer the import system for one module of TE.

    Args:
        fullname: The module's name; starts with `transformer_engine`.
        path: The parent package's `__path__`, or None for a top-level module.
        target: The module to be reloaded, if any.

    Returns:
        The forked file's spec under upstream's name, the standalone finder's spec, or None.

    Raises:
        ValueError: `NVTE_GROUPED_MLP_FORK` has a value that is not allowed.
    """
    if fullname == "transformer_engine" and emulation_requested():
        interpret_triton()  # before TE imports Triton
    if fullname == TARGET and emulation_requested():
        importlib.import_module("te_grouped_mlp.emulator.process").enter()
    if fullname == TARGET and te_root() is not None and _bootstrap.fork_enabled():
        spec = _fork_spec()
        if spec is not None:
            return spec
    return _standalone_spec(fullname, path, target)


def _fork_spec() -> ModuleSpec | None:
    global _refusal
    file = fork_file()
    _refusal = _NO_FORK_FILE if file is None else version_refusal()
    if _refusal is None:
        return importlib.util.spec_from_file_location(TARGET, file)
    warnings.warn(
        f"te-grouped-mlp leaves Transformer Engine's fused grouped MLP in place: {_refusal}",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def _standalone_spec(
    fullname: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """Ask the standalone finder; it decides by itself whether it serves this process."""
    global _standalone
    if _standalone is None:
        from te_grouped_mlp.integration.standalone.loader import StandaloneFinder

        _standalone = StandaloneFinder()
    spec: ModuleSpec | None = _standalone.find_spec(fullname, path, target)
    return spec


def load_upstream() -> ModuleType:
    """Return TE's own fused grouped MLP module, loading it at the first call.

    Upstream's file registers its fusions when it runs; those are taken out again, so that loading
    it changes nothing for the user. Imports TE.

    Returns:
        The module: TE's own where the overlay is not active, else a private copy whose name is
        UPSTREAM_NAME.

    Raises:
        ImportError: TE is absent, or has no such module.
        RuntimeError: the file carries our "use the fork" patch, so it is not upstream's code.
    """
    with _lock:
        package = importlib.import_module(PACKAGE)
        for name in (UPSTREAM_NAME, TARGET):
            module = sys.modules.get(name)
            if module is not None and not is_fork(module):
                return module
        spec = _upstream_spec(package.__path__)
        fuser = importlib.import_module("transformer_engine.pytorch.ops.fuser")
        fusions = fuser.OperationFuser.forward_backward_fusion_functions
        before = list(fusions)
        module = importlib.util.module_from_spec(spec)
        sys.modules[UPSTREAM_NAME] = module
        try:
            spec.loader.exec_module(module)  # type: ignore[union-attr]
        except BaseException:
            del sys.modules[UPSTREAM_NAME]
            raise
        finally:
            fusions[:] = before
        _apply_standalone_overrides(module)
        return module


def _apply_standalone_overrides(module: ModuleType) -> None:
    from te_grouped_mlp.integration import standalone

    if standalone.is_active():
        from te_grouped_mlp.integration.standalone import overrides

        overrides.apply(TARGET, module)


def _upstream_spec(path: Sequence[str]) -> ModuleSpec:
    found = PathFinder.find_spec(TARGET, path)
    if found is None or found.origin is None:
        raise ImportError(f"Transformer Engine has no module {TARGET} in {list(path)}", name=TARGET)
    if carries_patch(Path(found.origin)):
        raise RuntimeError(
            f"{found.origin} carries the patch '{PATCH_MARKER}', so upstream's own code is not "
            "there; revert it with `te-grouped-mlp patch revert`"
        )
    spec = importlib.util.spec_from_file_location(UPSTREAM_NAME, found.origin)
    if spec is None or spec.loader is None:
        raise ImportError(f"Python has no loader for {found.origin}", name=TARGET)
    return spec


def refusal() -> str | None:
    """Return why upstream's module was left in place although the fork was asked for, or None."""
    return _refusal


def status() -> Status:
    """Say whether the fork runs here. Changes nothing, and imports neither TE nor torch.

    Raises:
        ValueError: An environment variable of ours has a value that is not allowed.
    """
    loaded = sys.modules.get(TARGET)
    if loaded is not None:
        active, reason, remedy = _judge_loaded(loaded)
    else:
        active, reason, remedy = _foretell()
    switched_on = current_switches().fused
    if active and not switched_on:
        reason += f", but {FUSED_SWITCH} is not 1, so that every step runs unfused"
        remedy = f"set {FUSED_SWITCH}=1 before the first step"
    return Status(
        active, switched_on, reason, remedy, te_version(), loaded is not None, fork_file()
    )


def _judge_loaded(module: ModuleType) -> tuple[bool, str, str]:
    if is_fork(module):
        return True, f"TE's module is {module.__file__}", ""
    if _refusal is not None:
        return False, _refusal, f"install TE {SUPPORTED}"
    if not _bootstrap.fork_enabled():
        return False, *_SWITCHED_OFF
    return (
        False,
        "TE was imported before the overlay was in place",
        "call te_grouped_mlp.activate() before the first import of transformer_engine",
    )


_SWITCHED_OFF = (
    f"{_bootstrap.FORK_SWITCH}=0 keeps upstream's module",
    f"unset {_bootstrap.FORK_SWITCH}, and start a new process",
)


def _foretell() -> tuple[bool, str, str]:
    """Judge what an import of TE in this process would give."""
    root = te_root()
    version = te_version()
    if root is None:
        return False, "Transformer Engine is not installed", f"install TE {SUPPORTED}"
    if not root.joinpath("pytorch", "ops", "fused", "grouped_mlp.py").is_file():
        return False, f"TE {version} has no fused grouped MLP", f"install TE {SUPPORTED}"
    if fork_file() is None:
        return False, _NO_FORK_FILE, "reinstall te-grouped-mlp"
    if not _bootstrap.fork_enabled():
        return False, *_SWITCHED_OFF
    if not _bootstrap.is_installed():
        return (
            False,
            "the .pth file did not run in this interpreter",
            "call te_grouped_mlp.activate() before the first import of transformer_engine",
        )
    if not is_supported(version):
        return (
            False,
            f"TE {version} is not {SUPPORTED}; whether it has every name shows when it is imported",
            "import transformer_engine.pytorch, then ask again",
        )
    return True, f"TE {version}'s module will be the fork when it is imported", ""


def activate() -> None:
    """Put the overlay in place where no `.pth` file did (`--target`, `-S`, PEX, Bazel).

    Call it before the first import of `transformer_engine`. A second call changes nothing. With
    `NVTE_GROUPED_MLP_FORK=0` the standalone part alone is put in place.

    Raises:
        RuntimeError: TE's module is loaded already, and it is upstream's.
        ValueError: `NVTE_GROUPED_MLP_FORK` has a value that is not allowed.
    """
    loaded = sys.modules.get(TARGET)
    if loaded is not None and not is_fork(loaded) and _bootstrap.fork_enabled():
        _, reason, remedy = _judge_loaded(loaded)
        raise RuntimeError(f"te-grouped-mlp cannot be activated: {reason}; {remedy}")
    _bootstrap.install()


def require_in_place() -> None:
    """Return if TE's module is the fork, or will be, whatever the switch of the fused op says.

    Raises:
        RuntimeError: It is not; the message has the reason and the remedy.
        ValueError: An environment variable of ours has a value that is not allowed.
    """
    state = status()
    if not state.active:
        raise RuntimeError(f"te-grouped-mlp is not active: {state.reason}; {state.remedy}")


def assert_active() -> None:
    """Return if steps are asked of the fork: it is in place, or will be, and the switch is on.

    Whether a step was fused depends on its shapes, recipe and machine too: ask `assert_fused` after
    one.

    Raises:
        RuntimeError: They are not; the message has the reason and the remedy.
        ValueError: An environment variable of ours has a value that is not allowed.
    """
    require_in_place()
    state = status()
    if not state.switched_on:
        raise RuntimeError(f"te-grouped-mlp is not active: {state.reason}; {state.remedy}")
