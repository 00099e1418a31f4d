# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Grouped MXFP8 storage read: its groups as dense operands, and the values of all."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from te_grouped_mlp.integration.standalone import on_gpu
from te_grouped_mlp.integration.standalone.tex import mxfp8, rules, splits
from te_grouped_mlp.integration.standalone.tex.codes import (
    COLUMN,
    ROW,
    fp8_code,
    high_precision_dtype,
)
from te_grouped_mlp.integration.standalone.tex.contract import (
    Arguments,
    Refusal,
    TeDType,
    own,
    tex_function,
)
from te_grouped_mlp.op.tensors import memory


def member_scales(grouped: Any, axis: int) -> torch.Tensor:
    """Return the compact scales of equal groups as (groups, rows, columns), without copying.

    Padded to whole tiles for each group where the groups were quantized one by one, else cut
    from the scales of one matrix.
    """
    scale = rules.scale_of(grouped, axis)
    assert scale is not None
    groups, (rows, columns) = int(grouped.num_tensors), grouped.logical_shape
    padded = mxfp8.scale_shape(rows // groups, columns, axis)
    flat = scale.contiguous().view(torch.uint8).view(-1)
    if flat.numel() != groups * padded[0] * padded[1]:
        padded = (rows // groups if axis == ROW else rows // groups // mxfp8.BLOCK, padded[1])
    return flat[: groups * padded[0] * padded[1]].view(groups, *padded)


def members(grouped: Any, axis: int) -> Iterator[mxfp8.Operand]:
    """Yield each group of quantized grouped storage as a dense operand, without copying data.

    A group of 128-row multiples begins at a whole scale tile, in the compact layout and in the
    swizzled one. The scales of other equal groups are found by `member_scales`.
    """
    data = grouped.rowwise_data if axis == ROW else grouped.columnwise_data
    scale = rules.scale_of(grouped, axis)
    assert scale is not None
    rows, columns = grouped.logical_shape
    sizes = splits.split_sizes(int(grouped.num_tensors), rows, grouped.first_dims).tolist()
    each = 0 if grouped.first_dims is not None else member_scales(grouped, axis)[0].numel()
    scale = scale.contiguous()
    if each and sizes[0] % mxfp8.TILE:
        # Kernels read whole tiles, and the scales of one matrix end with the last member's rows.
        scale = scale.view(torch.uint8).view(-1)
        room = scale.new_zeros(math.prod(mxfp8.scale_shape(sizes[0], columns, axis)))
        scale = torch.cat((scale, room))
    start = scale_start = 0
    for size in sizes:
        yield mxfp8.Operand(
            data=data.contiguous(),
            scale=scale,
            rows=size,
            columns=columns,
            axis=axis,
            swizzled=bool(grouped._with_gemm_swizzled_scales),
            fp8=fp8_code(grouped.quantizer.dtype),
            data_offset=start * columns,
            scale_offset=scale_start,
        )
        start += size
        scale_start += each or math.prod(mxfp8.scale_shape(size, columns, axis))


def _dequantize_on_gpu(grouped: Any, axis: int, out: torch.Tensor) -> None:
    """Dequantize all groups by one launch."""
    data = grouped.rowwise_data if axis == ROW else grouped.columnwise_data
    scale = rules.scale_of(grouped, axis)
    assert scale is not None
    ends, groups = None, 1
    if grouped.first_dims is not None:
        ends = on_gpu.row_ends(grouped.first_dims, out.device)
    elif scale.numel() == mxfp8.grouped_scale_sizes(grouped, axis)[0]:
        groups = int(grouped.num_tensors)
    on_gpu.block_scale().dequantize(
        data.contiguous().view(torch.uint8),
        scale.contiguous().view(torch.uint8),
        ends,
        out,
        axis_column=axis == COLUMN,
        members=groups,
        swizzled=False,
        e5m2=bool(fp8_code(grouped.quantizer.dtype)),
    )


def _one_direction(a: Arguments) -> str | None:
    found = rules.directions(a["input"])
    if len(found) == 1:
        return None
    return f"input has data in {len(found)} directions; allowed: one"


def _quantized_input(a: Arguments) -> str | None:
    return rules.class_problem("input.quantizer", a["input"].quantizer)


def _compact_input(a: Arguments) -> str | None:
    swizzled = a["input"]._with_gemm_swizzled_scales
    return "the scales of input are swizzled; allowed: compact ones" if swizzled else None


@tex_function(
    Refusal("quantizer of input", "common/cast/dispatch/dequantize.cuh:79", _quantized_input),
    Refusal(
        "directions of input", "common/cast/mxfp8/group_dequantize_mxfp8.cuh:381", _one_direction
    ),
    rules.storage_tables("input"),
    rules.storage_scales("input"),
    rules.result_dtype("common/cast/mxfp8/group_dequantize_mxfp8.cuh:387"),
    own("order of scales", _compact_input),
    rules.storage_counts("input"),
)
def group_dequantize(input: Any, otype: TeDType) -> Any:  # the binding's name
    """Return grouped storage in high precision.

    Args:
        input: Grouped MXFP8 storage with data in one direction and compact scales; row counts only
            with offsets beside them.
        otype: TE's dtype of the result (fp32, fp16, bf16).

    Returns:
        A `GroupedTensor` without quantizer, with the input's shape, row counts and offsets, whose
        flat `rowwise_data` is unwritten past the groups.
    """
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor

    dtype = high_precision_dtype(otype)
    (axis,) = rules.directions(input)
    rows, columns = input.logical_shape
    data = input.rowwise_data if axis == ROW else input.columnwise_data
    out = memory.empty((rows, columns), dtype, data.device)
    if on_gpu.serves(out):
        _dequantize_on_gpu(input, axis, out)
    else:
        start = 0
        for member in members(input, axis):
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
