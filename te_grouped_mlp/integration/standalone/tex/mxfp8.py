# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""MXFP8 buffers and the kernels over them; what every tex function of the format shares.

Data are bytes of shape (rows, columns) in both directions. Scales are E8M0 bytes, one for each
1 x 32 block (row-wise) or 32 x 1 block (column-wise), padded to whole 128 x 4 tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_grouped_mlp.integration.standalone import on_gpu
from te_grouped_mlp.integration.standalone.tex.codes import COLUMN, ROW, fp8_code
from te_grouped_mlp.op.extension import _C
from te_grouped_mlp.op.tensors import memory
from te_grouped_mlp.op.tensors.capacity import source_code, span

BLOCK = 32
TILE = 128


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def scale_shape(rows: int, columns: int, axis: int) -> tuple[int, int]:
    """Return the padded shape of the scales of a (rows, columns) matrix."""
    if axis == ROW:
        return round_up(rows, TILE), round_up(columns // BLOCK, 4)
    return round_up(rows // BLOCK, 4), round_up(columns, TILE)


def grouped_scale_sizes(storage: Any, axis: int) -> tuple[int, ...]:
    """Return how many scales one direction of grouped MXFP8 storage may have.

    Groups of given row counts share the scales of one matrix, and so do equal groups that were
    quantized together. Equal groups that were quantized one by one (weights) have scales that are
    padded to whole tiles one by one.
    """
    rows, columns = (int(size) for size in storage.logical_shape)
    shared = math.prod(scale_shape(rows, columns, axis))
    if storage.first_dims is not None:
        return (shared,)
    groups = int(storage.num_tensors)
    return groups * math.prod(scale_shape(rows // groups, columns, axis)), shared


@dataclass
class Buffers:
    """The four buffers of a quantized matrix; a pair that is not wanted is None."""

    row_data: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None
    column_data: torch.Tensor | None = None
    column_scale: torch.Tensor | None = None


def allocate(
    shape: Sequence[int], quantizer: Any, *, flat: bool, device: torch.device | str = "cpu"
) -> Buffers:
    """Allocate the buffers of the directions that the quantizer wants.

    Args:
        shape: Shape of the data; all but the last dimension count as rows.
        quantizer: Its `rowwise_usage` and `columnwise_usage` are read.
        flat: One-dimensional buffers, as grouped storage has them.
        device: Where they lie.
    """
    columns = int(shape[-1])
    rows = 1
    for size in shape[:-1]:
        rows *= int(size)

    def pair(axis: int) -> tuple[torch.Tensor, torch.Tensor]:
        data_shape: Sequence[int] = (rows * columns,) if flat else shape
        scales = scale_shape(rows, columns, axis)
        scales_shape = (scales[0] * scales[1],) if flat else scales
        return (
            memory.empty(data_shape, torch.uint8, device),
            memory.empty(scales_shape, torch.uint8, device),
        )

    buffers = Buffers()
    if quantizer.rowwise_usage:
        buffers.row_data, buffers.row_scale = pair(ROW)
    if quantizer.columnwise_usage:
        buffers.column_data, buffers.column_scale = pair(COLUMN)
    return buffers


def run_quantize(
    matrix: torch.Tensor,
    buffers: Buffers,
    quantizer: Any,
    splits: torch.Tensor | None = None,
    noop: torch.Tensor | None = None,
    *,
    swizzled: bool,
) -> None:
    """Quantize a (rows, columns) matrix into buffers that exist.

    Args:
        matrix: fp32, fp16 or bf16.
        buffers: Contiguous bytes. With splits, those of rows past their sum keep what they hold.
        quantizer: Its format and 2-D choice are read.
        splits: int64 row counts per group, or None for one dense matrix.
        noop: One number beside the matrix; unless it is 0, nothing is written.
        swizzled: Whether the scales are written in the order that a GEMM reads.
    """
    rows, columns = matrix.shape
    wanted = (
        buffers.row_data,
        buffers.row_scale,
        buffers.column_data,
        buffers.column_scale,
    )
    if rows == 0 or columns == 0 or all(buffer is None for buffer in wanted):
        return
    for name, buffer in vars(buffers).items():
        if buffer is not None and buffer.device != matrix.device:
            raise ValueError(f"{name} is on {buffer.device}; allowed: {matrix.device}")
    if matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    if on_gpu.serves(matrix):
        _quantize_on_gpu(matrix, buffers, quantizer, splits, noop, swizzled)
        return
    if noop is not None and bool(noop.item()):
        return
    _C.mxfp8_quantize(
        span(matrix),
        source_code(matrix.dtype),
        rows,
        columns,
        matrix.stride(0),
        span(buffers.row_data),
        span(buffers.row_scale),
        span(buffers.column_data),
        span(buffers.column_scale),
        fp8_code(quantizer.dtype),
        swizzled,
        span(splits),
        0 if splits is None else splits.numel(),
        bool(getattr(quantizer, "with_2d_quantization", False)),
        False,
        0,
    )


def _quantize_on_gpu(
    matrix: torch.Tensor,
    buffers: Buffers,
    quantizer: Any,
    splits: torch.Tensor | None,
    noop: torch.Tensor | None,
    swizzled: bool,
) -> None:
    on_gpu.block_scale().quantize(
        matrix,
        None if splits is None else on_gpu.row_ends(splits, matrix.device),
        row_data=buffers.row_data,
        row_scale=buffers.row_scale,
        column_data=buffers.column_data,
        column_scale=buffers.column_scale,
        e5m2=bool(fp8_code(quantizer.dtype)),
        swizzled=swizzled,
        two_d=bool(getattr(quantizer, "with_2d_quantization", False)),
        noop=None if noop is None else noop.to(matrix.device, non_blocking=True),
    )


@dataclass(frozen=True)
class Operand:
    """One direction of a dense MXFP8 matrix, wherever its bytes lie.

    Attributes:
        data: Buffer that holds the matrix's bytes from `data_offset` on, row by row.
        scale: Buffer that holds its scales from `scale_offset` on.
        rows, columns: Shape of the matrix.
        axis: ROW or COLUMN: the direction of the scale blocks.
        swizzled: Whether the scales lie in the order that a GEMM reads.
        fp8: The kernels' code of the format.
    """

    data: torch.Tensor
    scale: torch.Tensor
    rows: int
    columns: int
    axis: int
    swizzled: bool
    fp8: int
    data_offset: int = 0
    scale_offset: int = 0

    def dequantize(self, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values as a contiguous (rows, columns) matrix, in `out` if given."""
        if out is None:
            out = memory.empty((self.rows, self.columns), dtype, self.data.device)
        if on_gpu.serves(out):
            data = self.data.view(torch.uint8).view(-1)[self.data_offset :]
            on_gpu.block_scale().dequantize(
                data,
                self.scale.view(torch.uint8).view(-1)[self.scale_offset :],
                None,
                out,
                axis_column=self.axis == COLUMN,
                swizzled=self.swizzled,
                e5m2=bool(self.fp8),
            )
        elif out.numel():
            _C.mxfp8_dequantize(
                span(self.data, self.data_offset),
                span(self.scale, self.scale_offset),
                self.fp8,
                self.axis,
                self.swizzled,
                self.rows,
                self.columns,
                span(out),
                source_code(dtype),
                None,
                0,
                0,
            )
        return out


def run_swizzle(
    scale: torch.Tensor,
    axis: int,
    rows: int,
    columns: int,
    splits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a swizzled copy of compact scales, in the same shape."""
    out = memory.empty(scale.shape, torch.uint8, scale.device)
    if on_gpu.serves(out):
        on_gpu.block_scale().swizzle(
            scale.contiguous(),
            None if splits is None else on_gpu.row_ends(splits, out.device),
            rows,
            columns,
            out,
            axis_column=axis == COLUMN,
        )
    elif out.numel():
        _C.swizzle_scales(
            span(scale.contiguous()),
            span(out),
            axis,
            rows,
            columns,
            span(splits),
            0 if splits is None else splits.numel(),
            False,
        )
    return out
