# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Zeros in the rows past the valid ones, whose number is read on the device.

    out[r, :] = 0 for r >= group_end_offsets[-1]

Blocks of valid rows end after one load. In Triton, which every torch that can drive a GPU brings.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS, _COLS = 8, 1024


@triton.jit
def _zero_tail(
    out, group_end_offsets, rows, cols, stride, groups, ROWS: tl.constexpr, COLS: tl.constexpr
):
    valid_rows = tl.load(group_end_offsets + groups - 1)
    first = tl.program_id(0) * ROWS
    if first + ROWS > valid_rows:
        row = first + tl.arange(0, ROWS)
        keeps = (row < valid_rows) | (row >= rows)
        base = out + row.to(tl.int64)[:, None] * stride
        zeros = tl.zeros((ROWS, COLS), dtype=out.dtype.element_ty)
        for start in range(0, cols, COLS):
            col = start + tl.arange(0, COLS)
            tl.store(base + col[None, :], zeros, mask=~keeps[:, None] & (col < cols)[None, :])


def zero_tail(out: torch.Tensor, group_end_offsets: torch.Tensor) -> None:
    """Write zeros past the valid rows; never synchronises.

    Args:
        out: (rows, N), any floating dtype, last dimension dense.
        group_end_offsets: int32 (G,), end rows of the experts.
    """
    rows, cols = out.shape
    if rows and cols:
        grid = (triton.cdiv(rows, _ROWS),)
        _zero_tail[grid](
            out,
            group_end_offsets,
            rows,
            cols,
            out.stride(0),
            group_end_offsets.numel(),
            _ROWS,
            _COLS,
        )
