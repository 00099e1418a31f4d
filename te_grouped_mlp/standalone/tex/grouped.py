# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex functions over grouped MXFP8 storage: groups packed by rows, all buffers flat.

Group g of a (rows, columns) matrix holds `splits[g]` rows from row `start[g]` on. Rows past the
sum of the splits belong to no group: their data and scales are never read or written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from te_grouped_mlp.op import memory
from te_grouped_mlp.standalone import column_sums, on_gpu
from te_grouped_mlp.standalone.tex import mxfp8
from te_grouped_mlp.standalone.tex.codes import COLUMN, ROW, fp8_code, high_precision_dtype
from te_grouped_mlp.standalone.tex.guard import tex_function_on_gpu_too
from te_grouped_mlp.standalone.tex.splits import split_sizes


def _check_matrix(function: str, tensor: torch.Tensor) -> None:
    mxfp8.check_source(function, tensor)
    if tensor.dim() != 2:
        raise ValueError(f"{function}: tensor has {tensor.dim()} dimensions; allowed: 2")
    rows, columns = tensor.shape
    if rows % mxfp8.TILE or columns % mxfp8.BLOCK:
        raise ValueError(
            f"{function}: tensor is {rows} x {columns}; allowed: rows a multiple of {mxfp8.TILE}, "
            f"columns of {mxfp8.BLOCK}"
        )


def _no_last_dims(function: str, last_dims: torch.Tensor | None) -> None:
    if last_dims is not None:
        raise NotImplementedError(f"{function} with last_dims; standalone groups by rows only")


@tex_function_on_gpu_too
def group_quantize(
    tensor: torch.Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None,
    noop_flag: torch.Tensor | None = None,
    output: Any = None,
) -> Any:
    """Quantize each group of a matrix's rows.

    Args:
        tensor: (rows, columns) fp32, fp16 or bf16; rows a multiple of 128, columns of 32.
        quantizer: TE's MXFP8Quantizer; the result keeps this object, not a copy.
        num_tensors: Number of groups, 1 to 64.
        first_dims: (groups,) row counts, multiples of 128, or None for equal groups.
        last_dims: None.
        tensor_offsets: (groups + 1,) element offsets, or None.
        noop_flag: One number; if it is 1, nothing is written. On a GPU the kernel reads it.
        output: Grouped storage to write instead of a new one.

    Returns:
        `output`, or a new `GroupedTensorStorage` (internal quantizer) or `GroupedTensor` of
        logical shape (rows, columns). The column-wise scales restart for each group if swizzled.
    """
    mxfp8.check_quantizer("group_quantize", quantizer)
    _check_matrix("group_quantize", tensor)
    _no_last_dims("group_quantize", last_dims)
    shape = (tensor.shape[0], tensor.shape[1])
    splits = split_sizes(
        "group_quantize", num_tensors, shape, first_dims, tensor_offsets, device=tensor.device
    )
    buffers = mxfp8.allocate(shape, quantizer, flat=True, device=tensor.device)
    if output is None:
        output = _make_grouped(tensor, quantizer, num_tensors, buffers, first_dims, tensor_offsets)
    else:
        _reuse(output, buffers, quantizer)
    mxfp8.run_quantize(tensor.detach(), buffers, quantizer, splits, noop_flag)
    return output


def _make_grouped(
    tensor: torch.Tensor,
    quantizer: Any,
    num_tensors: int,
    buffers: mxfp8.Buffers,
    first_dims: torch.Tensor | None,
    tensor_offsets: torch.Tensor | None,
) -> Any:
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor
    from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import (
        GroupedTensorStorage,
    )

    grouped_class = GroupedTensorStorage if quantizer.internal else GroupedTensor
    return grouped_class(
        shape=list(tensor.shape),
        dtype=tensor.dtype,
        num_tensors=num_tensors,
        quantizer=quantizer,
        data=buffers.row_data,
        columnwise_data=buffers.column_data,
        scale_inv=buffers.row_scale,
        columnwise_scale_inv=buffers.column_scale,
        first_dims=first_dims,
        tensor_offsets=tensor_offsets,
        with_gemm_swizzled_scales=bool(quantizer.optimize_for_gemm),
    )


def _reuse(output: Any, buffers: mxfp8.Buffers, quantizer: Any) -> None:
    """Put the output's own buffers where they fit into `buffers`, and the rest into the output."""
    names = {
        "row_data": "rowwise_data",
        "row_scale": "scale_inv",
        "column_data": "columnwise_data",
        "column_scale": "columnwise_scale_inv",
    }
    for field, name in names.items():
        fresh, old = getattr(buffers, field), getattr(output, name)
        if fresh is not None and old is not None and old.numel() == fresh.numel():
            setattr(buffers, field, old.view(torch.uint8).view(-1))
        else:
            setattr(output, name, fresh)
    output._with_gemm_swizzled_scales = bool(quantizer.optimize_for_gemm)


@tex_function_on_gpu_too
def bgrad_group_quantize(
    tensor: torch.Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor]:
    """Quantize each group of rows and sum it down its columns.

    Returns:
        What `group_quantize` returns, and (groups, columns) sums in `tensor.dtype`: added in fp32
        in the order of `column_sums`, rounded once. Rows past the groups are not read.
    """
    grouped = group_quantize(tensor, quantizer, num_tensors, first_dims, last_dims, tensor_offsets)
    shape = (tensor.shape[0], tensor.shape[1])
    splits = split_sizes(
        "bgrad_group_quantize", num_tensors, shape, first_dims, tensor_offsets, device=tensor.device
    )
    return grouped, column_sums.column_sums(tensor.detach(), splits).to(tensor.dtype)


@dataclass(frozen=True)
class Direction:
    """One direction of grouped storage, its buffers checked to be there."""

    data: torch.Tensor
    scale: torch.Tensor
    axis: int


def direction_of(function: str, grouped: Any, axis: int) -> Direction:
    data = grouped.rowwise_data if axis == ROW else grouped.columnwise_data
    scale = grouped.scale_inv if axis == ROW else grouped.columnwise_scale_inv
    if data is None or scale is None:
        words = "row-wise" if axis == ROW else "column-wise"
        raise ValueError(f"{function}: the grouped operand has no {words} data and scales")
    return Direction(data.contiguous(), scale.contiguous(), axis)


def grouped_splits(function: str, grouped: Any, multiple: int) -> torch.Tensor:
    """Return the row counts of grouped storage; ValueError if they are bad."""
    _no_last_dims(function, grouped.last_dims)
    rows, columns = grouped.logical_shape
    return split_sizes(
        function,
        grouped.num_tensors,
        (rows, columns),
        grouped.first_dims,
        grouped.tensor_offsets,
        multiple,
    )


def members(function: str, grouped: Any, axis: int) -> Iterator[mxfp8.Operand]:
    """Yield each group of quantized grouped storage as a dense operand, without copying.

    A group of 128-row multiples begins at a whole scale tile, in the compact layout and in the
    swizzled one. Equal groups of other sizes (weights) have scales padded one by one.
    """
    direction = direction_of(function, grouped, axis)
    uniform = grouped.first_dims is None
    splits = grouped_splits(function, grouped, mxfp8.BLOCK if uniform else mxfp8.TILE).tolist()
    columns = grouped.logical_shape[1]
    start = scale_start = 0
    for rows in splits:
        yield mxfp8.Operand(
            data=direction.data,
            scale=direction.scale,
            rows=rows,
            columns=columns,
            axis=axis,
            swizzled=bool(grouped._with_gemm_swizzled_scales),
            fp8=fp8_code(grouped.quantizer.dtype),
            data_offset=start * columns,
            scale_offset=scale_start,
        )
        start += rows
        padded = mxfp8.scale_shape(rows, columns, axis)
        scale_start += padded[0] * padded[1]


def uniform_members(grouped: Any) -> int:
    """Return the number of equal groups, 0 if row counts or offsets say what the groups are."""
    uniform = grouped.first_dims is None and grouped.tensor_offsets is None
    return int(grouped.num_tensors) if uniform else 0


def _dequantize_on_gpu(grouped: Any, direction: Direction, out: torch.Tensor) -> None:
    """Dequantize all groups by one launch."""
    count = uniform_members(grouped)
    ends = None
    if not count:
        splits = grouped_splits("group_dequantize", grouped, mxfp8.TILE)
        ends = on_gpu.row_ends(splits, out.device)
    on_gpu.block_scale().dequantize(
        direction.data.view(torch.uint8),
        direction.scale.view(torch.uint8),
        ends,
        out,
        axis_column=direction.axis == COLUMN,
        members=count or 1,
        swizzled=False,
        e5m2=bool(fp8_code(grouped.quantizer.dtype)),
    )


@tex_function_on_gpu_too
def group_dequantize(input: Any, otype: Any) -> Any:  # the binding's name
    """Return grouped storage in high precision: row-wise data if it has any, else column-wise.

    Args:
        input: Grouped MXFP8 storage with compact scales.
        otype: TE's dtype of the result (fp32, fp16, bf16).

    Returns:
        A `GroupedTensor` without quantizer, with the input's shape, row counts and offsets, whose
        flat `rowwise_data` is unwritten past the groups.
    """
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor

    mxfp8.check_quantizer("group_dequantize", input.quantizer)
    if input._with_gemm_swizzled_scales:
        raise ValueError("group_dequantize: the scales are swizzled; allowed: compact scales")
    dtype = high_precision_dtype(otype)
    axis = ROW if input.rowwise_data is not None else COLUMN
    rows, columns = input.logical_shape
    direction = direction_of("group_dequantize", input, axis)
    out = memory.empty((rows, columns), dtype, direction.data.device)
    if on_gpu.serves(out):
        _dequantize_on_gpu(input, direction, out)
    else:
        start = 0
        for member in members("group_dequantize", input, axis):
            member.dequantize(dtype, out[start : start + member.rows])
            start += member.rows
    return GroupedTensor(
        shape=[rows, columns],
        dtype=dtype,
        num_tensors=input.num_tensors,
        shapes=input.tensor_shapes,
        quantizer=None,
        data=out.view(-1),
        first_dims=input.first_dims,
        last_dims=input.last_dims,
        tensor_offsets=input.tensor_offsets,
    )
