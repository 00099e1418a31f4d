# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the tex functions do with CUDA tensors: Triton kernels, whose bytes are the CPU's.

Triton is imported by the first call only, so that a CPU machine needs none. Nothing here
synchronises; row counts on a device are not checked, because reading them would wait.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch

from te_grouped_mlp.op.packages import triton_needed
from te_grouped_mlp.op.tensors import memory

# Addresses that one launch of `store_addresses` takes.
_ADDRESSES = 8
_NEEDS = "standalone's tex functions on CUDA tensors"


def serves(tensor: torch.Tensor, device: torch.device | str | None = None) -> bool:
    """Whether a tensor, with results on `device`, is for this module and not for C++."""
    if not tensor.is_cuda:
        return False
    where = tensor.device if device is None else torch.device(device)
    return where.type == "cuda" and where.index in (None, tensor.get_device())


@functools.cache
def block_scale() -> Any:
    """Return the module of the MXFP8 kernels; ImportError with the remedy without Triton."""
    with triton_needed(_NEEDS):
        from te_grouped_mlp.op.kernels import block_scale
    return block_scale


@functools.cache
def _table_kernels() -> Any:
    with triton_needed(_NEEDS):
        from te_grouped_mlp.integration.standalone import table_kernels
    return table_kernels


def row_ends(splits: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return int32 inclusive prefix sums of row counts, on `device`."""
    return torch.cumsum(splits.to(device, non_blocking=True), 0, dtype=torch.int32)


def addresses(values: list[int], device: torch.device) -> torch.Tensor:
    """Return numbers as an int64 tensor on the device, without waiting for it.

    From pinned memory, which the allocator keeps until the copy is done. While a graph is captured
    the numbers are arguments of kernels instead: a replay copies nothing from the host.
    """
    if not torch.cuda.is_current_stream_capturing():
        _load_store_addresses(device)
        held = torch.tensor(values, dtype=torch.int64, pin_memory=True)
        return held.to(device, non_blocking=True)
    return _stored(values, device)


def _stored(values: list[int], device: torch.device) -> torch.Tensor:
    out = memory.empty((len(values),), torch.int64, device)
    with torch.cuda.device(device):
        for at in range(0, len(values), _ADDRESSES):
            some = values[at : at + _ADDRESSES]
            padded = some + [some[0]] * (_ADDRESSES - len(some))
            _table_kernels().store_addresses[(1,)](out, at, len(values), *padded, num_warps=1)
    return out


@functools.cache
def _load_store_addresses(device: torch.device) -> None:
    """Load the kernel that a captured call needs: a module must not be loaded in a capture."""
    with contextlib.suppress(ImportError):
        _stored([1 << 40], device)


def running_sums(
    counts: torch.Tensor,
    strides: Sequence[int],
    zeros: Sequence[bool],
    narrow: Sequence[bool],
) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
    """Return counts as int64 and, for each stride, the running sums of ``count * stride``.

    One launch. Each result lies in a buffer that they share, at a multiple of 16 bytes.

    Args:
        counts: int32 or int64 (groups,), CUDA.
        strides: One factor for each result.
        zeros: Whether a result begins with 0.
        narrow: Whether a result is int32 instead of int64.

    Returns:
        None if there are more results than the kernel has room for.
    """
    kernels = _table_kernels()
    counts, groups = counts.contiguous(), counts.numel()
    if len(strides) > kernels.RESULTS or groups == 0:
        return None
    # Words of 8 bytes in the place of one result; an even number keeps 16-byte multiples.
    slot = (groups + 2) // 2 * 2
    places = len(strides) + int(counts.dtype is torch.int32)
    held = memory.empty((places * slot,), torch.int64, counts.device)
    kernels.launch(counts, held, slot, strides, zeros, narrow)
    results = []
    short = held.view(torch.int32) if any(narrow) else held
    for index, (zero, small) in enumerate(zip(zeros, narrow, strict=True)):
        source, start = (short, 2 * index * slot) if small else (held, index * slot)
        results.append(source[start : start + groups + zero])
    if counts.dtype is torch.int32:
        start = (places - 1) * slot
        counts = held[start : start + groups]
    return counts, results
