# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums over the rows or columns of a grouped matrix, in one fixed order.

On a CPU the order is the C++ kernels': down each 128-row tile of a group, then the tiles in order.
It depends on no thread count and on no row past the groups. On a GPU the order is another one,
fixed too: it follows from the rows of the one group.
"""

from __future__ import annotations

import torch

from te_grouped_mlp import _C
from te_grouped_mlp.integration.standalone import on_gpu
from te_grouped_mlp.integration.standalone.tex.codes import source_code
from te_grouped_mlp.op.tensors import memory
from te_grouped_mlp.op.tensors.capacity import span


def _matrix(src: torch.Tensor) -> torch.Tensor:
    """Return `src` with unit stride along its columns; a copy only if it has not."""
    return src if src.shape[1] <= 1 or src.stride(1) == 1 else src.contiguous()


def column_sums(src: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
    """Return fp32 (groups, columns): the sum of each group's rows."""
    src = _matrix(src)
    if on_gpu.serves(src):
        return on_gpu.column_sums(src, None, splits)
    out = memory.empty((splits.numel(), src.shape[1]), torch.float32, src.device)
    if out.numel():
        _C.column_sums(
            span(src),
            source_code(src.dtype),
            src.shape[0],
            src.shape[1],
            src.stride(0),
            span(splits),
            splits.numel(),
            span(out),
            0,
        )
    return out


def weighted_column_sums(
    src: torch.Tensor, weights: torch.Tensor, splits: torch.Tensor
) -> torch.Tensor:
    """Return fp32 (groups, columns): the sum of each group's rows times their fp32 weights."""
    src, weights = _matrix(src), weights.to(torch.float32).contiguous()
    if on_gpu.serves(src):
        return on_gpu.column_sums(src, weights, splits)
    out = memory.empty((splits.numel(), src.shape[1]), torch.float32, src.device)
    if out.numel():
        _C.weighted_column_sums(
            span(src),
            source_code(src.dtype),
            src.shape[0],
            src.shape[1],
            src.stride(0),
            span(weights),
            span(splits),
            splits.numel(),
            span(out),
            0,
        )
    return out


def row_dots(src: torch.Tensor, table: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
    """Return fp32 (rows,): each row times its group's row of `table`; other rows unwritten."""
    src, table = _matrix(src), table.to(torch.float32).contiguous()
    if on_gpu.serves(src):
        return on_gpu.row_dots(src, table, splits)
    out = memory.empty((src.shape[0],), torch.float32, src.device)
    if src.numel():
        _C.row_dots(
            span(src),
            source_code(src.dtype),
            src.shape[0],
            src.shape[1],
            src.stride(0),
            span(table),
            span(splits),
            splits.numel(),
            span(out),
            0,
        )
    return out
