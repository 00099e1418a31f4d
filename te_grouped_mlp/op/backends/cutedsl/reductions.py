# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Bias gradients and the gradient of a bias's scale on a GPU, in Triton, in a fixed order.

No result depends on a buffer's length or on other experts' rows: the order of a sum follows from
constants and from the rows of the one expert. None of these synchronises. CUDA tensors only.
"""

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


def column_sums(dy: torch.Tensor, scale: torch.Tensor | None, ends: torch.Tensor) -> torch.Tensor:
    """Return ``sum over the rows of an expert of dy[i] (* scale[i])``, fp32 (G, N), new.

    Args:
        dy: (rows, N), row-major.
        scale: (rows,) or None for one.
        ends: int32 (G,), inclusive prefix sums of the experts' rows.

    Raises:
        ValueError: A shape, dtype or device is another, or there is less memory than it takes.
    """
    groups, cols = _check(dy, ends)
    if scale is not None:
        capacity.require("scale", scale, dy.shape[:1], _FLOATS, dy.device)
    out = memory.empty((groups, cols), torch.float32, dy.device)
    parts = memory.empty((_SEGMENTS, groups, cols), torch.float32, dy.device)
    grid = (triton.cdiv(cols, _COLUMNS), groups, _SEGMENTS)
    _partial_sums[grid](
        dy, dy if scale is None else scale, ends, parts, dy.shape[0], cols, dy.stride(0), groups,
        scale is not None, _SEGMENTS, _ROWS, _COLUMNS, num_warps=4,
    )  # fmt: skip
    total = groups * cols
    _join_parts[(triton.cdiv(total, 256),)](parts, out, total, _SEGMENTS, 256, num_warps=4)
    return out


def row_dots(dy: torch.Tensor, bias: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return ``sum_j dy[i, j] * bias[expert of i, j]``, fp32 (rows,), new; zero past the live rows.

    Args:
        dy: (rows, N), row-major.
        bias: (G, N), contiguous.
        ends: int32 (G,), inclusive prefix sums of the experts' rows.

    Raises:
        ValueError: As `column_sums`.
    """
    groups, cols = _check(dy, ends)
    rows = dy.shape[0]
    capacity.require("bias", bias, (groups, cols), _FLOATS, dy.device)
    out = memory.empty((rows,), torch.float32, dy.device)
    _row_dots[(triton.cdiv(rows, 16),)](
        dy, bias, ends, out, rows, cols, dy.stride(0), groups, triton.next_power_of_2(groups),
        16, 128, num_warps=4,
    )  # fmt: skip
    return out


def _check(dy: torch.Tensor, ends: torch.Tensor) -> tuple[int, int]:
    """Check the rows and their division; returns the numbers of experts and columns."""
    if dy.dim() != 2 or (dy.shape[1] > 1 and dy.stride(1) != 1):
        raise ValueError(
            f"dy has shape {tuple(dy.shape)} and strides {dy.stride()}; allowed: row-major matrices"
        )
    capacity.require("dy", dy, dy.shape, _FLOATS, dy.device)
    groups = ends.numel()
    capacity.require("ends", ends, (groups,), (torch.int32,), dy.device)
    return groups, dy.shape[1]


_RUN_TIME = ["rows", "cols", "stride", "groups", "total"]


@triton.jit(do_not_specialize=_RUN_TIME)
def _partial_sums(
    dy, scale, ends, parts, rows, cols, stride, groups, SCALED: tl.constexpr,
    SEGMENTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    col = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    group, segment = tl.program_id(1), tl.program_id(2)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    # Nobody has read these numbers: whatever they say, the loop ends where the matrix does.
    start = tl.maximum(start, 0)
    end = tl.minimum(tl.load(ends + group), rows)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(start + segment * ROWS, end, SEGMENTS * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row[:, None] < end) & (col[None, :] < cols)
        at = dy + row[:, None].to(tl.int64) * stride + col[None, :]
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            factor = tl.load(scale + row, mask=row < end, other=0.0).to(tl.float32)
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
    dy, bias, ends, out, rows, cols, stride, groups, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    live = tl.minimum(tl.load(ends + groups - 1), rows)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    each = tl.arange(0, GROUPS)
    end = tl.load(ends + each, mask=each < groups, other=2147483647)
    group = tl.sum((end[None, :] <= row[:, None]).to(tl.int32), 1)
    total = tl.zeros((BLOCK, WIDE), tl.float32)
    for start in range(0, cols, WIDE):
        col = start + tl.arange(0, WIDE)
        inside = (row[:, None] < live) & (col[None, :] < cols)
        at = row[:, None].to(tl.int64) * stride + col[None, :]
        left = tl.load(dy + at, mask=inside, other=0.0)
        at = group[:, None].to(tl.int64) * cols + col[None, :]
        right = tl.load(bias + at, mask=inside, other=0.0)
        total += left.to(tl.float32) * right.to(tl.float32)
    tl.store(out + row, tl.sum(total, 1), mask=row < rows)
