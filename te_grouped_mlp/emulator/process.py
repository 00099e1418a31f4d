# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A process whose grouped MLPs run on an emulated Blackwell GPU: `NVTE_GROUPED_MLP_EMULATE=sm100`.

Transformer Engine's own Python code runs over CPU tensors, as everywhere without its extension; the
backends `cudnn` and `cutedsl` take them, compile their kernels for sm_100a and launch them here.
Passes that are written in Triton run through its interpreter.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from te_grouped_mlp.op import emulated
from te_grouped_mlp.op.environment import EMULATE_SWITCH, interpret_triton, set_emulation
from te_grouped_mlp.op.packages import WRAPPERS

_PACKAGES = {"cutlass": "nvidia-cutlass-dsl", "quack": "quack-kernels", "triton": "triton"}
_REMEDY = "pip install 'te-grouped-mlp[emulate]'"


def start() -> Any:
    """Import Transformer Engine in emulation and return the emulated GPU, whatever the shell says.

    Raises:
        ImportError, RuntimeError: As `enter`.
    """
    set_emulation()
    from te_grouped_mlp.integration import overlay

    overlay.activate()
    importlib.import_module("transformer_engine.pytorch")
    return enter()


@functools.cache
def enter() -> Any:
    """Make the emulated GPU that of this process, and return it; a second call changes nothing.

    Returns:
        The `EmulatedGpu`.

    Raises:
        ImportError: A package is missing; all are named, with the remedy.
        RuntimeError: There is a CUDA device, or Transformer Engine runs with its extension, or
            kernels have been loaded for another device.
    """
    _require_a_place()
    interpret_triton()
    from te_grouped_mlp.emulator.host import EmulatedGpu

    gpu = EmulatedGpu(strict=False)
    _watch_host_code(gpu)
    if importlib.util.find_spec("cudnn") is not None:
        from te_grouped_mlp.emulator.frontend import EmulatedFrontend

        EmulatedFrontend(gpu).replace(dict(WRAPPERS))
    from te_grouped_mlp.op.backends.cutedsl import compile as kernels

    kernels.name_target("sm_100a")
    emulated.enter(gpu)
    sys.stderr.write(
        f"te-grouped-mlp: {EMULATE_SWITCH}=sm100: grouped MLPs run on an emulated Blackwell GPU.\n"
    )
    return gpu


def _require_a_place() -> None:
    missing = [name for module, name in _PACKAGES.items() if not importlib.util.find_spec(module)]
    if missing:
        raise ImportError(f"{EMULATE_SWITCH} needs {', '.join(missing)}: {_REMEDY}")
    import torch

    from te_grouped_mlp.integration import standalone

    if torch.cuda.is_available():
        raise RuntimeError(
            f"{EMULATE_SWITCH} is set and a CUDA device is visible; allowed: none "
            '(CUDA_VISIBLE_DEVICES="" hides it)'
        )
    if not standalone.is_active():
        raise RuntimeError(
            f"{EMULATE_SWITCH} is set and Transformer Engine runs with its extension; allowed: "
            "its pure-Python wheel"
        )


def _watch_host_code(gpu: Any) -> None:
    """Let the emulator notice what our C++ functions and Triton's interpreter write."""
    import torch
    from triton.runtime.interpreter import GridExecutor

    from te_grouped_mlp import _C

    def addresses(values: Iterable[Any]) -> Iterator[int]:
        for value in values:
            if isinstance(value, torch.Tensor):
                yield value.data_ptr()
            elif isinstance(value, tuple) and value and isinstance(value[0], int):
                yield value[0]  # a span: address and bytes

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def call(*args: Any, **kwargs: Any) -> Any:
            with gpu.watch(addresses((*args, *kwargs.values()))):
                return run(*args, **kwargs)

        return call

    GridExecutor.__call__ = watched(GridExecutor.__call__)
    for name, function in inspect.getmembers(_C, inspect.isbuiltin):
        setattr(_C, name, watched(function))
