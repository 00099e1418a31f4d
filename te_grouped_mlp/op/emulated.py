# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What stands for a GPU in a process that has none, so that GPU kernels take CPU tensors.

There is nothing unless `NVTE_GROUPED_MLP_EMULATE` is set; then whoever loads the op enters it here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Device(Protocol):
    """An emulated GPU whose memory is the host's; what is launched on it has ended on return.

    Attributes:
        sm: Its compute capability.
    """

    sm: tuple[int, int]

    def compiled(self, function: Any) -> Callable[..., Any]:
        """Return a function that CuTe DSL compiled for `sm` as one that takes CPU tensors."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous CPU tensor of which no byte has a value yet."""

    def active_clusters(self, size: int) -> int:
        """Return how many clusters of `size` CTAs run at a time."""


_device: Device | None = None


def enter(device: Device) -> None:
    """Use `device` for the rest of the process, or until another takes its place."""
    global _device
    _device = device


def device() -> Device | None:
    """Return what stands for a GPU; None in every process that does not emulate one."""
    return _device
