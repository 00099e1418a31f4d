# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Fresh buffers, a way for tests to poison them, and the device on which the op runs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from te_grouped_mlp.op import emulated

F = TypeVar("F", bound=Callable[..., Any])

_fill_byte: int | None = None


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return an uninitialised contiguous tensor.

    Args:
        shape: Sizes, all >= 0.
        dtype: Any dtype with a byte view.
        device: Where the memory lies.

    Returns:
        A tensor the caller owns. Its content is whatever the allocator had, or the byte of the
        innermost `poisoned` block in every position. Never synchronises.
    """
    gpu = emulated.device()
    if gpu is None:
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
    else:
        out = gpu.empty(shape, dtype)
    if _fill_byte is not None and out.numel():
        out.view(-1).view(torch.uint8).fill_(_fill_byte)
    return out


@contextlib.contextmanager
def poisoned(byte: int | None) -> Iterator[None]:
    """Fill every buffer of `empty` with one byte while the block runs.

    Args:
        byte: 0 to 255, or None for the allocator's own content. 0xFF is NaN in E8M0, E4M3, bf16
            and fp32, so a value that no kernel wrote shows at once.
    """
    global _fill_byte
    if byte is not None and not 0 <= byte <= 0xFF:
        raise ValueError(f"byte is {byte}; allowed: None or 0 to 255")
    previous, _fill_byte = _fill_byte, byte
    try:
        yield
    finally:
        _fill_byte = previous


def current_of(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Make a device the current one while the block runs; nothing for a CPU.

    The cuDNN frontend, Transformer Engine's extension and Triton allocate and launch on the current
    device, whatever device their arguments are on.
    """
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    there: contextlib.AbstractContextManager[Any] = torch.cuda.device(device)
    return there


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
