# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The current CUDA device while the op runs: that of its tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def current_of(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one while the block runs; nothing for a CPU.

    The cuDNN frontend, Transformer Engine's extension and Triton allocate and launch on the current
    device, whatever device their arguments are on.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def on_device_of_tensor(run: F) -> F:
    """Run a pass of the op, ``(self, contexts, tensor, ...)``, on the device of that tensor.

    Autograd's threads have the device of the nodes that they run; a forward, a recomputation and a
    weight gradient that was put off run in whatever thread their caller has.
    """

    @functools.wraps(run)
    def run_there(self: Any, contexts: Any, tensor: torch.Tensor, **keywords: Any) -> Any:
        with current_of(tensor.device):
            return run(self, contexts, tensor, **keywords)

    return run_there  # type: ignore[return-value]
