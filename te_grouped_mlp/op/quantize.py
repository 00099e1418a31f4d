# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Token tensors become operands here, and nowhere else."""

from __future__ import annotations

from typing import Any

import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.ops._common import maybe_dequantize
from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor

from te_grouped_mlp.op import exact_tokens, scale_layout
from te_grouped_mlp.op.formats import Format
from te_grouped_mlp.op.layout import GroupLayout
from te_grouped_mlp.op.operands import (
    Axis,
    GroupedOperand,
    QuantizedCopy,
    Splits,
    torch_dtype,
)
from te_grouped_mlp.op.plan import Plan


def tokens(
    tensor: torch.Tensor,
    quantizer: Any,
    plan: Plan,
    splits: Splits,
    *,
    row: bool,
    column: bool,
    waits: bool,
) -> GroupedOperand:
    """Make the operand of a token tensor; the tensor and the quantizer stay as they are.

    Args:
        tensor: (rows, features), any strides and floating dtype, or a GroupedTensor.
        quantizer: TE's quantizer of the slot; None for UNQUANTIZED.
        plan: Its layout says which rows are read and written.
        splits: Division of the rows.
        row, column: Which copies are wanted.
        waits: The column copy is read by a later pass. A plan that reads values gets its bytes
            then, which take half the memory.

    Returns:
        An operand with new buffers, except that a GroupedTensor's own bytes are used as they are.
    """
    dtype, fmt, layout = torch_dtype(plan.call.dtype), plan.call.format, plan.layout
    if isinstance(tensor, GroupedTensor):
        own = _own_quantizer(quantizer, row, column)
        return _from_grouped(tensor, own, dtype, fmt, layout, splits)
    plain = maybe_dequantize(tensor, dtype)
    if not fmt.is_block_scaled:
        shape = (int(plain.shape[0]), int(plain.shape[1]))
        return GroupedOperand(fmt, shape, layout, splits, plain=plain)
    if plan.reads_values:
        return exact_tokens.operand(plain, plan, splits, row=row, column=column, waits=waits)
    own = _own_quantizer(quantizer, row, column)
    if layout.use_dense_single_group:
        return _from_dense(tex.quantize(tensor=plain, quantizer=own), plain, fmt, layout, splits)
    grouped = tex.group_quantize(
        tensor=plain,
        quantizer=own,
        num_tensors=layout.num_groups,
        first_dims=splits.sizes,
        tensor_offsets=splits.element_offsets[plain.shape[1]],
    )
    return _from_storage(grouped, tuple(plain.shape), fmt, layout, splits)


def dequantized(tensor: torch.Tensor, dtype: torch.dtype, splits: Splits) -> torch.Tensor:
    """Return the values of a token tensor as (rows, features), for sums over them.

    Args:
        tensor: A plain tensor, or a GroupedTensor with a row copy in compact or tile order.
        dtype: Of the result.
        splits: Division of the rows.

    Returns:
        A new tensor, or `tensor` itself where nothing is to be done; rows past the live ones are
        unwritten when the tensor was a GroupedTensor.
    """
    if not isinstance(tensor, GroupedTensor):
        return maybe_dequantize(tensor, dtype)
    compact = tensor.copy()
    if compact._with_gemm_swizzled_scales:
        rows, cols = (int(size) for size in compact.logical_shape)
        compact.scale_inv = scale_layout.compact_rows(compact.scale_inv, rows, cols)
        compact._with_gemm_swizzled_scales = False
    compact.columnwise_data = None
    compact.columnwise_scale_inv = None
    compact.first_dims = splits.sizes
    plain = tex.group_dequantize(input=compact, otype=TE_DType[dtype])
    values = plain.rowwise_data.view(tuple(tensor.shape))
    assert isinstance(values, torch.Tensor)
    return values


def _own_quantizer(quantizer: Any, row: bool, column: bool) -> Any:
    """Return a copy with the usages of this call, so that the op's own quantizer is not changed."""
    own = quantizer.copy()
    own.set_usage(rowwise=row, columnwise=column)
    own.optimize_for_gemm = True
    own.internal = True
    return own


def _from_grouped(
    tensor: Any,
    quantizer: Any,
    dtype: torch.dtype,
    fmt: Format,
    layout: GroupLayout,
    splits: Splits,
) -> GroupedOperand:
    shape = (int(tensor.shape[0]), int(tensor.shape[1]))
    grouped = tensor.copy()
    tex.group_requantize_inplace(
        grouped_x=grouped,
        quantizer=quantizer,
        num_tensors=layout.num_groups,
        first_dims=splits.sizes,
        otype=TE_DType[dtype],
        tensor_offsets=splits.element_offsets[shape[1]],
        return_dequantized=False,
    )
    return _from_storage(grouped, shape, fmt, layout, splits)


def _from_dense(
    storage: Any, plain: torch.Tensor, fmt: Format, layout: GroupLayout, splits: Splits
) -> GroupedOperand:
    swizzled = bool(storage._with_gemm_swizzled_scales)
    row = column = None
    if storage._rowwise_data is not None:
        row = _copy(storage._rowwise_data, storage._rowwise_scale_inv, Axis.ROW, swizzled)
    if storage._columnwise_data is not None:
        column = _copy(
            storage._columnwise_data, storage._columnwise_scale_inv, Axis.COLUMN, swizzled
        )
    shape = (int(plain.shape[0]), int(plain.shape[1]))
    return GroupedOperand(fmt, shape, layout, splits, row, column)


def _from_storage(
    storage: Any, shape: tuple[int, ...], fmt: Format, layout: GroupLayout, splits: Splits
) -> GroupedOperand:
    rows, cols = shape
    swizzled = bool(storage._with_gemm_swizzled_scales)
    row = column = None
    if storage.rowwise_data is not None:
        data = storage.rowwise_data.view(rows, cols)
        row = _copy(data, storage.scale_inv, Axis.ROW, swizzled)
    if storage.columnwise_data is not None:
        data = storage.columnwise_data.view(rows, cols)
        column = _copy(data, storage.columnwise_scale_inv, Axis.COLUMN, swizzled)
    return GroupedOperand(fmt, (rows, cols), layout, splits, row, column)


def _copy(data: torch.Tensor, scale: torch.Tensor, axis: Axis, swizzled: bool) -> QuantizedCopy:
    return QuantizedCopy(data.view(torch.uint8), scale.view(torch.uint8).view(-1), axis, swizzled)
