# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Zeros in the rows past the live ones, whose number is read on the device.

    out[r, :] = 0 for r >= ends[-1]

Blocks of live rows end after one load. In Triton, which every torch that can drive a GPU brings.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS, _COLS = 8, 1024


@triton.jit
def _zero_tail(out, ends, rows, cols, stride, groups, ROWS: tl.constexpr, COLS: tl.constexpr):  # noqa: N803
    live = tl.load(ends + groups - 1)
    first = tl.program_id(0) * ROWS
    if first + ROWS > live:
        row = first + tl.arange(0, ROWS)
        kept = (row < live) | (row >= rows)
        base = out + row.to(tl.int64)[:, None] * stride
        zeros = tl.zeros((ROWS, COLS), dtype=out.dtype.element_ty)
        for start in range(0, cols, COLS):
            col = start + tl.arange(0, COLS)
            tl.store(base + col[None, :], zeros, mask=~kept[:, None] & (col < cols)[None, :])


def zero_tail(out: torch.Tensor, ends: torch.Tensor) -> None:
    """Write zeros past the live rows; never synchronises.

    Args:
        out: (rows, N), any floating dtype, last dimension dense.
        ends: int32 (G,), end rows of the experts.
    """
    rows, cols = out.shape
    if rows and cols:
        grid = (triton.cdiv(rows, _ROWS),)
        _zero_tail[grid](out, ends, rows, cols, out.stride(0), ends.numel(), _ROWS, _COLS)
