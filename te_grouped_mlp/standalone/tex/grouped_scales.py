# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex functions that make grouped MXFP8 storage ready for a GEMM, in place."""

from __future__ import annotations

from typing import Any

import torch

from te_grouped_mlp.op import memory
from te_grouped_mlp.standalone import on_gpu
from te_grouped_mlp.standalone.tex import mxfp8
from te_grouped_mlp.standalone.tex.codes import COLUMN, ROW
from te_grouped_mlp.standalone.tex.grouped import (
    direction_of,
    group_dequantize,
    grouped_splits,
)
from te_grouped_mlp.standalone.tex.guard import tex_function_on_gpu_too
from te_grouped_mlp.standalone.tex.splits import split_sizes


def _swizzle_direction(grouped: Any, axis: int) -> torch.Tensor:
    """Return swizzled scales: per group in new tiles, 2-D for equal groups, else flat."""
    direction = direction_of("grouped_swizzle_for_gemm", grouped, axis)
    scale = direction.scale.view(torch.uint8)
    rows, columns = grouped.logical_shape
    if grouped.first_dims is not None:
        splits = grouped_splits("grouped_swizzle_for_gemm", grouped, mxfp8.TILE)
        return mxfp8.run_swizzle(scale, axis, rows, columns, splits)
    if on_gpu.serves(scale):
        return _swizzle_members_on_gpu(grouped, scale.reshape(-1), axis)
    each = rows // grouped.num_tensors
    shape = mxfp8.scale_shape(each, columns, axis)
    flat = scale.reshape(-1)[: grouped.num_tensors * shape[0] * shape[1]]
    parts = flat.view(grouped.num_tensors, *shape)
    swizzled = torch.stack([mxfp8.run_swizzle(part, axis, each, columns) for part in parts])
    # The outer index of a swizzled layout is the data's column for column-wise scales.
    outer = shape[0] if axis == ROW else shape[1]
    return swizzled.view(grouped.num_tensors * outer, -1)


def _swizzle_members_on_gpu(grouped: Any, scale: torch.Tensor, axis: int) -> torch.Tensor:
    """Do the same for equal groups by one launch."""
    rows, columns = grouped.logical_shape
    shape = mxfp8.scale_shape(rows // grouped.num_tensors, columns, axis)
    outer = shape[0] if axis == ROW else shape[1]
    size = grouped.num_tensors * shape[0] * shape[1]
    out = memory.empty(
        (grouped.num_tensors * outer, shape[0] * shape[1] // outer), torch.uint8, scale.device
    )
    on_gpu.block_scale().swizzle(
        scale[:size], None, rows, columns, out, axis_column=axis == COLUMN,
        members=grouped.num_tensors,
    )  # fmt: skip
    return out


@tex_function_on_gpu_too
def grouped_swizzle_for_gemm(tensor: Any, rowwise: bool, columnwise: bool) -> None:
    """Swizzle the wanted directions of grouped MXFP8 storage, in place.

    The storage gets new scale buffers; a direction that is not swizzled is set to None, since one
    flag tells the layout of both. Nothing happens for other formats, for scales that are swizzled
    already, or if no wanted direction has scales.
    """
    if tensor._with_gemm_swizzled_scales or not _holds_mxfp8(tensor):
        return
    rowwise = rowwise and tensor.scale_inv is not None
    columnwise = columnwise and tensor.columnwise_scale_inv is not None
    if not rowwise and not columnwise:
        return
    row = _swizzle_direction(tensor, ROW) if rowwise else None
    column = _swizzle_direction(tensor, COLUMN) if columnwise else None
    tensor.scale_inv, tensor.columnwise_scale_inv = row, column
    tensor._with_gemm_swizzled_scales = True


def _holds_mxfp8(grouped: Any) -> bool:
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    return isinstance(grouped.quantizer, MXFP8Quantizer)


def _check_requantize(grouped: Any, quantizer: Any) -> None:
    name = "group_requantize_inplace"
    mxfp8.check_quantizer(name, quantizer)
    if grouped.rowwise_data is None or grouped.scale_inv is None:
        raise ValueError(f"{name}: grouped_x has no row-wise data and scales")
    own = grouped.quantizer
    if own is None or type(own) is not type(quantizer) or own.dtype != quantizer.dtype:
        raise ValueError(
            f"{name}: grouped_x was quantized by {own!r}; allowed: the format of {quantizer!r}"
        )


@tex_function_on_gpu_too
def group_requantize_inplace(
    grouped_x: Any,
    quantizer: Any,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    otype: Any,
    tensor_offsets: torch.Tensor | None = None,
    return_dequantized: bool = False,
) -> torch.Tensor | None:
    """Make row-wise MXFP8 storage ready for the GEMMs: swizzle it, add column-wise data if wanted.

    Args:
        grouped_x: Storage with row-wise data and compact scales and no column-wise data (or one
            that is ready: then nothing happens). Its buffers are not written; it gets new ones.
        quantizer: Says whether column-wise data are wanted. Not changed.
        num_tensors, first_dims, tensor_offsets: The groups, as in `group_quantize`.
        otype: TE's dtype through which the values pass.
        return_dequantized: Also return the values.

    Returns:
        None, or the (rows, columns) values, unwritten past the groups.
    """
    _check_requantize(grouped_x, quantizer)
    if grouped_x._with_gemm_swizzled_scales:
        if quantizer.columnwise_usage and grouped_x.columnwise_data is None:
            raise ValueError("group_requantize_inplace: swizzled grouped_x has no column-wise data")
        if return_dequantized:
            raise ValueError("group_requantize_inplace: return_dequantized with swizzled scales")
        return None
    if grouped_x.columnwise_data is not None:
        raise ValueError("group_requantize_inplace: grouped_x has compact column-wise data")
    rows, columns = grouped_x.logical_shape
    if rows % mxfp8.TILE or columns % mxfp8.TILE:
        raise ValueError(
            f"group_requantize_inplace: grouped_x is {rows} x {columns}; allowed: multiples of "
            f"{mxfp8.TILE}"
        )
    splits = split_sizes(
        "group_requantize_inplace", num_tensors, (rows, columns), first_dims, tensor_offsets
    )
    values = None
    if quantizer.columnwise_usage or return_dequantized:
        values = group_dequantize(grouped_x, otype).rowwise_data.view(rows, columns)
    row_scale = grouped_x.scale_inv.contiguous().view(torch.uint8)
    grouped_x.scale_inv = mxfp8.run_swizzle(row_scale.view(-1), ROW, rows, columns, splits)
    grouped_x._with_gemm_swizzled_scales = True
    if quantizer.columnwise_usage:
        column_only = quantizer.copy()
        column_only.set_usage(rowwise=False, columnwise=True)
        column_only.optimize_for_gemm = True
        device = row_scale.device
        buffers = mxfp8.allocate((rows, columns), column_only, flat=True, device=device)
        mxfp8.run_quantize(values, buffers, column_only, splits)
        grouped_x.columnwise_data = buffers.column_data
        grouped_x.columnwise_scale_inv = buffers.column_scale
    return values if return_dequantized else None
