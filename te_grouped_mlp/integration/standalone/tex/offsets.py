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

from te_grouped_mlp.integration.standalone import on_gpu
from te_grouped_mlp.integration.standalone.tex import rules, splits
from te_grouped_mlp.integration.standalone.tex.contract import (
    Arguments,
    Refusal,
    Size,
    own,
    tex_function,
)
from te_grouped_mlp.integration.standalone.torch_view import default_device
from te_grouped_mlp.op.tensors import memory

# Kernels on a GPU want 16-byte aligned offset tables; the views keep that here.
_ALIGNMENT = 16


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _a_dtype_each(a: Arguments) -> str | None:
    counts = len(a["shapes"]), len(a["dtypes"])
    if counts[0] == counts[1]:
        return None
    return f"{counts[0]} shapes, {counts[1]} dtypes; allowed: as many"


def _an_alignment_each(a: Arguments) -> str | None:
    if a["alignments"] is None or len(a["alignments"]) == len(a["shapes"]):
        return None
    return f"{len(a['shapes'])} shapes, {len(a['alignments'])} alignments; allowed: as many"


@tex_function(
    Refusal("number of dtypes", "extensions/allocate.cpp:31", _a_dtype_each),
    Refusal("number of alignments", "extensions/allocate.cpp:32", _an_alignment_each),
)
def bulk_allocate(
    shapes: Sequence[Sequence[Size]],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
    alignments: Sequence[Size] | None = None,
) -> list[torch.Tensor]:
    """Make several unwritten tensors that share one buffer.

    Args:
        shapes: One shape for each tensor.
        dtypes: One dtype for each tensor.
        device: Where the buffer lies; None for the CUDA device, or the CPU where there is none.
        alignments: Byte alignment of each tensor; None for the size of its elements.

    Returns:
        Contiguous views that keep the buffer alive.
    """
    if alignments is None:
        alignments = [dtype.itemsize for dtype in dtypes]
    return _carve(shapes, dtypes, default_device() if device is None else device, alignments)


def _carve(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    alignments: Sequence[int],
    *,
    zero: bool = False,
) -> list[torch.Tensor]:
    """Do the work of `bulk_allocate`; `zero` fills the whole buffer by one launch."""
    starts: list[int] = []
    end = 0
    for shape, dtype, alignment in zip(shapes, dtypes, alignments, strict=True):
        multiple = max(alignment, dtype.itemsize)
        starts.append(-(-end // multiple) * multiple)
        end = starts[-1] + math.prod(shape) * dtype.itemsize
    widest = max([1, *alignments])
    raw = memory.empty((end + widest,), torch.uint8, device)
    if zero:
        raw.zero_()
    base = -raw.data_ptr() % widest
    return [
        raw[base + start : base + start + math.prod(shape) * dtype.itemsize]
        .view(dtype)
        .view(tuple(shape))
        for start, shape, dtype in zip(starts, shapes, dtypes, strict=True)
    ]


def _int64(a: Arguments) -> str | None:
    dtype = a["first_dims"].dtype
    return None if dtype == torch.int64 else f"first_dims is {dtype}; allowed: int64"


def _positive_stride(a: Arguments) -> str | None:
    found = a["logical_last_dim"]
    return None if found > 0 else f"logical_last_dim is {found}; allowed: at least 1"


def _some_groups(a: Arguments) -> str | None:
    return None if a["first_dims"].numel() else "first_dims is empty; allowed: at least 1 group"


@tex_function(
    Refusal("dtype of first_dims", "extensions/misc.cpp:26", _int64),
    rules.dimensions("first_dims", 1, "extensions/misc.cpp:27"),
    Refusal("logical_last_dim", "extensions/misc.cpp:28", _positive_stride),
    Refusal("number of groups", "common/util/splits_to_offsets.cu:174", _some_groups),
)
def splits_to_offsets(first_dims: torch.Tensor, logical_last_dim: int) -> torch.Tensor:
    """Return int64 element offsets of packed groups, a leading 0 first.

    Args:
        first_dims: (groups,) int64 row counts.
        logical_last_dim: Elements in a row.
    """
    offsets = splits.element_offsets(first_dims, int(logical_last_dim))
    assert offsets is not None
    return offsets


_INTEGERS = frozenset({torch.int32, torch.int64})


def _as_many(a: Arguments) -> str | None:
    counts = len(a["strides"]), len(a["include_leading_zero"]), len(a["dtypes"])
    if len(set(counts)) == 1:
        return None
    return (
        f"{counts[0]} strides, {counts[1]} include_leading_zero, {counts[2]} dtypes; allowed: as "
        "many"
    )


def _a_row_of_splits(a: Arguments) -> str | None:
    table = a["split_sizes"]
    if not a["strides"] or (table.dim() == 1 and table.numel()):
        return None
    return f"split_sizes has shape {tuple(table.shape)}; allowed: one dimension, at least 1 group"


def _integer_results(a: Arguments) -> str | None:
    if _INTEGERS.issuperset(a["dtypes"]):
        return None
    return f"dtypes is {list(a['dtypes'])}; allowed: int32, int64"


def _integer_splits(a: Arguments) -> str | None:
    if a["split_sizes"].dtype in _INTEGERS:
        return None
    return f"split_sizes is {a['split_sizes'].dtype}; allowed: int32, int64"


@tex_function(
    Refusal("number of results", "extensions/misc.cpp:50", _as_many),
    Refusal("form of split_sizes", "common/util/splits_to_offsets.cu:253", _a_row_of_splits),
    Refusal("dtypes of results", "common/util/splits_to_offsets.cu:268", _integer_results),
    # Upstream converts any number, which cuts fractions off.
    own("dtype of split_sizes", _integer_splits),
    rules.contiguous("split_sizes"),
)
def splits_to_offsets_multi(
    split_sizes: torch.Tensor,
    device: torch.device,
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


@tex_function()
def copy_data_ptrs_to_device(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the tensors' addresses as int64; the caller keeps the tensors alive."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    if device.type == "cpu":
        return torch.tensor(addresses, dtype=torch.int64)
    return on_gpu.addresses(addresses, device)


@tex_function()
def get_grouped_gemm_setup_workspace_size(num_tensors: Size, /) -> int:
    """Return the bytes of pointer tables a grouped GEMM needs: none on a CPU."""
    del num_tensors
    return 0
