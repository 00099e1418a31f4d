# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex functions that make offsets, address tables and buffers, on a CPU or a GPU.

The native kernels take bf16 tokens on a GPU; these are the tex functions that such a step calls.
None of them synchronises with a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from te_grouped_mlp.op import memory
from te_grouped_mlp.standalone import on_gpu
from te_grouped_mlp.standalone.tex.guard import tex_function_on_gpu_too

# Kernels on a GPU want 16-byte aligned offset tables; the views keep that here.
_ALIGNMENT = 16


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@tex_function_on_gpu_too
def bulk_allocate(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    device: torch.device | str | None = None,
    alignments: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Make several unwritten tensors that share one buffer.

    Args:
        shapes: One shape for each tensor.
        dtypes: One dtype for each tensor.
        device: Where the buffer lies; None for the CPU.
        alignments: Byte alignment of each tensor; None for 256 each.

    Returns:
        Contiguous views that keep the buffer alive.
    """
    alignments = [256] * len(shapes) if alignments is None else list(alignments)
    if not len(shapes) == len(dtypes) == len(alignments):
        raise ValueError(
            f"bulk_allocate: {len(shapes)} shapes, {len(dtypes)} dtypes, {len(alignments)} "
            "alignments; allowed: equally many"
        )
    return _carve(shapes, dtypes, device, alignments)


def _carve(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    device: torch.device | str | None,
    alignments: Sequence[int],
    *,
    zero: bool = False,
) -> list[torch.Tensor]:
    """Do the work of `bulk_allocate`; `zero` fills the whole buffer by one launch."""
    starts: list[int] = []
    end = 0
    for shape, dtype, alignment in zip(shapes, dtypes, alignments, strict=True):
        starts.append(_round_up(end, max(alignment, dtype.itemsize)))
        end = starts[-1] + math.prod(shape) * dtype.itemsize
    widest = max([1, *alignments])
    raw = memory.empty((end + widest,), torch.uint8, device or "cpu")
    if zero:
        raw.zero_()
    base = -raw.data_ptr() % widest
    return [
        raw[base + start : base + start + math.prod(shape) * dtype.itemsize]
        .view(dtype)
        .view(tuple(shape))
        for start, shape, dtype in zip(starts, shapes, dtypes, strict=True)
    ]


@tex_function_on_gpu_too
def splits_to_offsets(first_dims: torch.Tensor, logical_last_dim: int) -> torch.Tensor:
    """Return int64 element offsets of packed groups, a leading 0 first.

    Args:
        first_dims: (groups,) int64 row counts.
        logical_last_dim: Elements in a row.
    """
    if first_dims.dtype != torch.int64 or first_dims.dim() != 1:
        raise ValueError(
            f"splits_to_offsets: first_dims is {first_dims.dtype} of shape "
            f"{tuple(first_dims.shape)}; allowed: int64, one-dimensional"
        )
    if on_gpu.serves(first_dims):
        found = on_gpu.running_sums(first_dims, [int(logical_last_dim)], [True], [False])
        if found is not None:
            return found[1][0]
    offsets = first_dims.new_zeros(first_dims.numel() + 1)
    torch.cumsum(first_dims * int(logical_last_dim), dim=0, out=offsets[1:])
    return offsets


@tex_function_on_gpu_too
def splits_to_offsets_multi(
    split_sizes: torch.Tensor,
    device: torch.device | str,
    *,
    strides: Sequence[int],
    include_leading_zero: Sequence[bool],
    dtypes: Sequence[torch.dtype],
    bulk_allocate: bool = False,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return row counts as int64 and, for each stride, the running sum of `count * stride`.

    Args:
        split_sizes: (groups,) int32 or int64.
        device: Where the results lie.
        strides: One factor for each result.
        include_leading_zero: Whether result i begins with 0 (and has one element more).
        dtypes: int32 or int64 for each result.
        bulk_allocate: Make the results views of one buffer, each aligned to 16 bytes; on a GPU
            they are that in any case.

    Returns:
        The int64 counts (`split_sizes` itself where it is int64) and the list of results.
    """
    if split_sizes.dtype not in (torch.int32, torch.int64) or split_sizes.dim() != 1:
        raise ValueError(
            f"splits_to_offsets_multi: split_sizes is {split_sizes.dtype} of shape "
            f"{tuple(split_sizes.shape)}; allowed: int32 or int64, one-dimensional"
        )
    if not len(strides) == len(include_leading_zero) == len(dtypes):
        raise ValueError(
            f"splits_to_offsets_multi: {len(strides)} strides, {len(include_leading_zero)} "
            f"include_leading_zero, {len(dtypes)} dtypes; allowed: equally many"
        )
    if any(dtype not in (torch.int32, torch.int64) for dtype in dtypes):
        raise ValueError(
            f"splits_to_offsets_multi: dtypes is {list(dtypes)}; allowed: int32, int64"
        )
    if on_gpu.serves(split_sizes, device):
        narrow = [dtype is torch.int32 for dtype in dtypes]
        found = on_gpu.running_sums(split_sizes, strides, include_leading_zero, narrow)
        if found is not None:
            return found
    counts = split_sizes.to(device=device, dtype=torch.int64)
    shapes = [(counts.numel() + int(zero),) for zero in include_leading_zero]
    if bulk_allocate:
        results = _carve(shapes, dtypes, device, [_ALIGNMENT] * len(shapes), zero=True)
    else:
        results = [memory.empty(s, d, device) for s, d in zip(shapes, dtypes, strict=True)]
    ends = torch.cumsum(counts, dim=0)
    for out, stride, zero in zip(results, strides, include_leading_zero, strict=True):
        if zero and not bulk_allocate:
            out[:1].zero_()
        part = out[1:] if zero else out
        # In int64, and only then to the result's type.
        if out.dtype is torch.int64:
            torch.mul(ends, int(stride), out=part)
        else:
            part.copy_(ends if stride == 1 else ends * int(stride))
    return counts, results


@tex_function_on_gpu_too
def copy_data_ptrs_to_device(
    tensors: Sequence[torch.Tensor], device: torch.device | str
) -> torch.Tensor:
    """Return the tensors' addresses as int64; the caller keeps the tensors alive."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    if torch.device(device).type == "cpu":
        return torch.tensor(addresses, dtype=torch.int64)
    return on_gpu.addresses(addresses, torch.device(device))


def get_grouped_gemm_setup_workspace_size(num_tensors: int) -> int:
    """Return the bytes of pointer tables a grouped GEMM needs: none on a CPU."""
    if num_tensors < 1:
        raise ValueError(f"num_tensors is {num_tensors}; allowed: at least 1")
    return 0
