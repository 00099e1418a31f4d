# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums over the rows of each expert, and over each row, in a fixed order.

CPU tensors are summed in C++: down each tile of 128 rows of an expert, then the tiles in order.
CUDA tensors are summed by the Triton kernels of `group_reductions_kernels`: parts of an expert's
rows side by side, then the parts in order. Both orders follow from constants and from the expert's
own rows, so no result depends on threads, on other experts or on the buffer's length. On a CUDA
device nothing here synchronises.

The partial sums of a row that a backend's epilogue writes are added by a kernel of that backend,
which knows their layout (`reduce_row_partials`).
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch

from te_grouped_mlp.op.extension import _C
from te_grouped_mlp.op.packages import triton_needed
from te_grouped_mlp.op.tensors import memory
from te_grouped_mlp.op.tensors.capacity import Span, source_code, span

_DECIDE_THREADS = 0


def column_sums(
    values: torch.Tensor,
    sizes: torch.Tensor | None = None,
    *,
    weights: torch.Tensor | None = None,
    group_end_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``sum over the rows of an expert of values[i] (* weights[i])``.

    Args:
        values: (rows, N) fp32, fp16 or bf16, on a CPU also fp64; any strides. Rows past those of
            the experts are not read.
        sizes: int64 (G,), rows of each expert, on the device of `values`; None for one expert with
            all rows.
        weights: (rows,) of a floating-point dtype, any stride, taken as fp32; None for one.
        group_end_offsets: int32 (G,), inclusive prefix sums of `sizes`, where there are any.

    Returns:
        fp32 (G, N), new; zeros for an expert without rows.

    Raises:
        TypeError, ValueError: A dtype, shape or device is another, or there is less memory than
            the shape takes.
        ImportError: What sums on this device is not installed; with the remedy.
    """
    values = _row_major(values)
    weights = None if weights is None else weights.float().contiguous()
    kernels = _kernels(values)
    if kernels is not None:
        group_end_offsets = _end_offsets(values, sizes, group_end_offsets)
        return kernels.column_sums(values, weights, group_end_offsets)
    groups = 1 if sizes is None else sizes.numel()
    out = memory.empty((groups, values.shape[1]), torch.float32, values.device)
    if out.numel():
        tail = (span(sizes), 0 if sizes is None else groups, span(out), _DECIDE_THREADS)
        if weights is None:
            _C.column_sums(*_matrix(values), *tail)
        else:
            _C.weighted_column_sums(*_matrix(values), span(weights), *tail)
    return out


def row_dots(
    values: torch.Tensor,
    table: torch.Tensor,
    sizes: torch.Tensor,
    *,
    group_end_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``sum_j values[i, j] * table[expert of i, j]``.

    Args:
        values: As for `column_sums`.
        table: (G, N) of a floating-point dtype, any strides, taken as fp32.
        sizes, group_end_offsets: As for `column_sums`.

    Returns:
        fp32 (rows,), new; zero past the experts' rows.

    Raises:
        TypeError, ValueError, ImportError: As `column_sums`.
    """
    values, table = _row_major(values), table.float().contiguous()
    kernels = _kernels(values)
    if kernels is not None:
        group_end_offsets = _end_offsets(values, sizes, group_end_offsets)
        return kernels.row_dots(values, table, group_end_offsets)
    out = torch.zeros(values.shape[0], dtype=torch.float32, device=values.device)
    if values.numel():
        tail = (span(sizes), sizes.numel(), span(out), _DECIDE_THREADS)
        _C.row_dots(*_matrix(values), span(table), *tail)
    return out


def _row_major(values: torch.Tensor) -> torch.Tensor:
    """Return `values` with unit stride along its columns and rows apart; a copy if it has not."""
    rows, cols = values.shape
    rows_are_disjoint = rows <= 1 or values.stride(0) >= cols
    return (
        values
        if rows_are_disjoint and (cols <= 1 or values.stride(1) == 1)
        else values.contiguous()
    )


def _matrix(values: torch.Tensor) -> tuple[Span | None, int, int, int, int]:
    """Return a matrix as the functions of `_C` take it: memory, type, shape and row stride."""
    rows, cols = values.shape
    return span(values), source_code(values.dtype), rows, cols, values.stride(0)


def _end_offsets(
    values: torch.Tensor, sizes: torch.Tensor | None, group_end_offsets: torch.Tensor | None
) -> torch.Tensor:
    if group_end_offsets is not None:
        return group_end_offsets
    if sizes is None:
        return torch.full((1,), values.shape[0], dtype=torch.int32, device=values.device)
    return torch.cumsum(sizes.to(values.device, non_blocking=True), 0, dtype=torch.int32)


def _kernels(values: torch.Tensor) -> ModuleType | None:
    """Return the module that sums CUDA tensors; None for C++."""
    return _triton_kernels() if values.is_cuda else None


@functools.cache
def _triton_kernels() -> ModuleType:
    with triton_needed("sums over the rows of CUDA tensors"):
        from te_grouped_mlp.op.kernels import group_reductions_kernels
    return group_reductions_kernels
