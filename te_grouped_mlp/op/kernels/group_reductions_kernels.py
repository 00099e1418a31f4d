# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`group_reductions` of CUDA tensors, in Triton. Nothing here synchronises or uses atomics."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from te_grouped_mlp.op.tensors import capacity, memory

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = 64
_COLUMNS = 64
_SEGMENTS = 16
"""Parts of an expert's rows that are summed side by side; a constant, so the order is fixed."""


def column_sums(
    values: torch.Tensor, weights: torch.Tensor | None, group_end_offsets: torch.Tensor
) -> torch.Tensor:
    """Return ``sum over the rows of an expert of values[i] (* weights[i])``, fp32 (G, N), new.

    Args:
        values: (rows, N), row-major.
        weights: (rows,), contiguous, or None for one.
        group_end_offsets: int32 (G,), inclusive prefix sums of the experts' rows.

    Raises:
        ValueError: A shape, dtype or device is another, or there is less memory than it takes.
    """
    groups, cols = _check(values, group_end_offsets)
    if weights is not None:
        capacity.require("weights", weights, values.shape[:1], _FLOATS, values.device)
    out = memory.empty((groups, cols), torch.float32, values.device)
    parts = memory.empty((_SEGMENTS, groups, cols), torch.float32, values.device)
    grid = (triton.cdiv(cols, _COLUMNS), groups, _SEGMENTS)
    _partial_sums[grid](
        values, values if weights is None else weights, group_end_offsets, parts, values.shape[0],
        cols, values.stride(0), groups, weights is not None, _SEGMENTS, _ROWS, _COLUMNS,
        num_warps=4,
    )  # fmt: skip
    total = groups * cols
    _join_parts[(triton.cdiv(total, 256),)](parts, out, total, _SEGMENTS, 256, num_warps=4)
    return out


def row_dots(
    values: torch.Tensor, table: torch.Tensor, group_end_offsets: torch.Tensor
) -> torch.Tensor:
    """Return ``sum_j values[i, j] * table[expert of i, j]``, fp32 (rows,), new.

    Zero past the experts' rows.

    Args:
        values: (rows, N), row-major.
        table: (G, N), contiguous.
        group_end_offsets: int32 (G,), inclusive prefix sums of the experts' rows.

    Raises:
        ValueError: As `column_sums`.
    """
    groups, cols = _check(values, group_end_offsets)
    rows = values.shape[0]
    capacity.require("table", table, (groups, cols), _FLOATS, values.device)
    out = memory.empty((rows,), torch.float32, values.device)
    _row_dots[(triton.cdiv(rows, 16),)](
        values, table, group_end_offsets, out, rows, cols, values.stride(0), groups,
        triton.next_power_of_2(groups), 16, 128, num_warps=4,
    )  # fmt: skip
    return out


def _check(values: torch.Tensor, group_end_offsets: torch.Tensor) -> tuple[int, int]:
    """Check the rows and their division; returns the numbers of experts and columns."""
    if values.dim() != 2 or (values.shape[1] > 1 and values.stride(1) != 1):
        raise ValueError(
            f"values has shape {tuple(values.shape)} and strides {values.stride()}; allowed: "
            "row-major matrices"
        )
    capacity.require("values", values, values.shape, _FLOATS, values.device)
    groups, int32 = group_end_offsets.numel(), (torch.int32,)
    capacity.require("group_end_offsets", group_end_offsets, (groups,), int32, values.device)
    return groups, values.shape[1]


_RUN_TIME = ["rows", "cols", "stride", "groups", "total"]


@triton.jit(do_not_specialize=_RUN_TIME)
def _partial_sums(
    values, weights, group_end_offsets, parts, rows, cols, stride, groups, WEIGHTED: tl.constexpr,
    SEGMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    group, segment = tl.program_id(1), tl.program_id(2)
    start = tl.load(group_end_offsets + group - 1, mask=group > 0, other=0)
    # Nobody has read these numbers: whatever they say, the loop ends where the matrix does.
    start = tl.maximum(start, 0)
    end = tl.minimum(tl.load(group_end_offsets + group), rows)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(start + segment * ROWS, end, SEGMENTS * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row[:, None] < end) & (col[None, :] < cols)
        at = values + row[:, None].to(tl.int64) * stride + col[None, :]
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            factor = tl.load(weights + row, mask=row < end, other=0.0).to(tl.float32)
            value = value * factor[:, None]
        total += value
    at = (segment * groups + group).to(tl.int64) * cols + col
    tl.store(parts + at, tl.sum(total, 0), mask=col < cols)


@triton.jit(do_not_specialize=_RUN_TIME)
def _join_parts(parts, out, total, SEGMENTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    joined = tl.zeros((BLOCK,), tl.float32)
    for segment in tl.static_range(SEGMENTS):
        joined += tl.load(parts + tl.cast(total, tl.int64) * segment + at, mask=at < total)
    tl.store(out + at, joined, mask=at < total)


@triton.jit(do_not_specialize=_RUN_TIME)
def _row_dots(
    values, table, group_end_offsets, out, rows, cols, stride, groups, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    valid_rows = tl.minimum(tl.load(group_end_offsets + groups - 1), rows)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.arange(0, GROUPS)
    end = tl.load(group_end_offsets + index, mask=index < groups, other=2147483647)
    group = tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)
    total = tl.zeros((BLOCK, WIDE), tl.float32)
    for start in range(0, cols, WIDE):
        col = start + tl.arange(0, WIDE)
        inside = (row[:, None] < valid_rows) & (col[None, :] < cols)
        at = row[:, None].to(tl.int64) * stride + col[None, :]
        left = tl.load(values + at, mask=inside, other=0.0)
        at = group[:, None].to(tl.int64) * cols + col[None, :]
        right = tl.load(table + at, mask=inside, other=0.0)
        total += left.to(tl.float32) * right.to(tl.float32)
    tl.store(out + row, tl.sum(total, 1), mask=row < rows)
