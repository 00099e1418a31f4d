# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A `cudnn` package for a CPU: the frontend's grouped-GEMM wrappers, of a chosen release.

For a child process: TE caches what it learns about the frontend, so one process has one release.
Wrappers carry the release's signature and refuse any other argument; the kernels keep the
documented contract (rows written, scale layouts, what is accumulated and what is left unwritten).
"""

from __future__ import annotations

import atexit
import functools
import inspect
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.support import frontend_kernels
from tests.support.frontend_machine import Machine
from tests.support.frontend_signatures import WRAPPERS, number, signature

_WORKSPACE_SINCE = "1.30.0"

# Keyword of `install` -> (wrapper, argument) that it adds or takes away.
_FEATURES: dict[str, tuple[tuple[str, str], ...]] = {
    "runtime_offsets": tuple(
        (wrapper, "use_single_group_runtime_offsets") for wrapper in ("glu", "dglu", "quant")
    ),
    "deterministic": (("dglu", "deterministic"), ("dsrelu", "deterministic")),
    "tanh": (("srelu", "tanh_clamp_scale"), ("dsrelu", "tanh_clamp_scale")),
    "situ": tuple(
        (wrapper, beta)
        for wrapper in ("glu", "dglu", "glu_hadamard")
        for beta in ("situ_beta1", "situ_beta2")
    ),
}


@dataclass
class StandIn:
    """What `install` put in place.

    Attributes:
        module: The package, also `sys.modules["cudnn"]`.
        machine: How the kernels treat memory; may be changed between calls.
        calls: (short wrapper name, the arguments given) of every call, in order.
    """

    module: ModuleType
    machine: Machine
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


def build(
    version: str = "1.32.0",
    *,
    runtime_offsets: bool | None = None,
    deterministic: bool | None = None,
    tanh: bool | None = None,
    situ: bool | None = None,
    spill_256: bool | str = False,
    unwritten_byte: int = 0xFF,
    unwritten_scale_byte: int | None = None,
) -> StandIn:
    """Return a `cudnn` package that nothing else sees.

    Args:
        version: Release whose signatures to show.
        runtime_offsets, deterministic, tanh, situ: Whether the wrappers have the arguments of that
            feature; None for what the release has.
        spill_256: Whether 256-row tiles run past an expert that ends on an odd multiple of 128:
            "first" or "last" says when the spilled rows are stored, True is "first".
        unwritten_byte: Content of fresh buffers.
        unwritten_scale_byte: Content of fresh scale buffers, None for `unwritten_byte`.

    Raises:
        ValueError: `version` is not known, or `spill_256` is none of the above.
    """
    wanted = {
        "runtime_offsets": runtime_offsets,
        "deterministic": deterministic,
        "tanh": tanh,
        "situ": situ,
    }
    changes: dict[str, dict[str, bool]] = {}
    for feature, present in wanted.items():
        for wrapper, argument in _FEATURES[feature] if present is not None else ():
            changes.setdefault(wrapper, {})[argument] = bool(present)
    spill = "first" if spill_256 is True else spill_256 or None
    machine = Machine(unwritten_byte, unwritten_scale_byte, spill)
    stand_in = StandIn(ModuleType("cudnn"), machine)
    public: dict[str, Any] = {"__version__": version}
    for name in WRAPPERS:
        shown = signature(name, version, changes.get(name))
        public[f"grouped_gemm_{name}_wrapper_sm100"] = _wrapper(name, shown, stand_in)
    if number(version) >= number(_WORKSPACE_SINCE):
        public["get_grouped_gemm_wgrad_workspace_size_sm100"] = frontend_kernels.workspace_size
    vars(stand_in.module).update(public)
    return stand_in


def install(version: str = "1.32.0", **options: Any) -> StandIn:
    """Put a `cudnn` package and its metadata in place; call it before TE is imported.

    Args:
        version: Release whose signatures and metadata to show.
        **options: Of `build`.

    Raises:
        RuntimeError: A `cudnn` package is loaded already.
        ValueError, TypeError: Of `build`.
    """
    if "cudnn" in sys.modules:
        raise RuntimeError("cudnn is loaded already; a process can have one release only")
    stand_in = build(version, **options)
    _show_metadata(version)
    sys.modules["cudnn"] = stand_in.module
    return stand_in


def _wrapper(name: str, shown: inspect.Signature, stand_in: StandIn) -> Callable[..., Any]:
    kernel = getattr(frontend_kernels, name, _unserved)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = shown.bind(*args, **kwargs)
        stand_in.calls.append((name, dict(bound.arguments)))
        bound.apply_defaults()
        _require_aligned(bound.arguments)
        return kernel(SimpleNamespace(**bound.arguments), stand_in.machine)

    functools.update_wrapper(wrapper, kernel)
    wrapper.__name__ = f"grouped_gemm_{name}_wrapper_sm100"
    wrapper.__signature__ = shown  # type: ignore[attr-defined]
    return wrapper


def _require_aligned(arguments: dict[str, Any]) -> None:
    """Refuse what the built kernels refuse, and what they would read at another address.

    TVM-FFI compares every tensor's address with what its kernel was built for: 16 bytes (frontend
    1.32.0, dsrelu/api.py:1179 to 1182), 8 for tables of addresses, which go in by address
    (quant/api.py:1104 and 1173), any for the offsets of a weight gradient. No memory of a CPU is
    aligned to the 128 bytes that a workspace wants.
    """
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor) or name == "offsets_tensor":
            continue
        table = name.endswith("_ptrs")
        if value.data_ptr() % (8 if table else 16):
            raise ValueError(f"Misaligned Tensor data: {name}")
        if table and (value % 16).any():
            raise ValueError(f"Misaligned Tensor data: an entry of {name}")


def _unserved(k: SimpleNamespace, machine: Machine) -> Any:
    """Refuse a kernel that MXFP8 does not use."""
    raise NotImplementedError("this wrapper has no stand-in")


def _show_metadata(version: str) -> None:
    """Let `importlib.metadata` find the release."""
    folder = Path(tempfile.mkdtemp(prefix="frontend-stand-in-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    info = folder / f"nvidia_cudnn_frontend-{version}.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: nvidia-cudnn-frontend\nVersion: {version}\n"
    info.joinpath("METADATA").write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
