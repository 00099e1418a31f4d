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

from te_grouped_mlp.op.formats import Format
from te_grouped_mlp.op.layout import GroupLayout
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.te import quantizers
from te_grouped_mlp.op.tensors import dequantized_tokens, requantize, scale_layout
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    GroupedOperand,
    QuantizedCopy,
    Splits,
    torch_dtype,
)


def tokens(
    tensor: torch.Tensor,
    quantizer: Any,
    plan: Plan,
    splits: Splits,
    *,
    row: bool,
    column: bool,
    keep_quantized_for_backward: bool,
) -> GroupedOperand:
    """Make the operand of a token tensor; the tensor and the quantizer stay as they are.

    Args:
        tensor: (rows, features), any strides and floating dtype, or a GroupedTensor.
        quantizer: TE's, of the op or kept by the forward; None for UNQUANTIZED.
        plan: Its layout says which rows are read and written.
        splits: Division of the rows.
        row, column: Which copies are wanted.
        keep_quantized_for_backward: The column copy is read by a later pass. A plan that reads
            values gets its bytes then, which take half the memory.

    Returns:
        An operand with new buffers, except that a GroupedTensor's own bytes are used as they are.
    """
    dtype, fmt, layout = torch_dtype(plan.call.dtype), plan.call.format, plan.layout
    if isinstance(tensor, GroupedTensor):
        own = quantizers.own(quantizer, row=row, column=column, swizzled=True)
        return _from_grouped(tensor, own, plan, splits, values=False)[0]
    plain = maybe_dequantize(tensor, dtype)
    if not fmt.is_block_scaled:
        shape = (int(plain.shape[0]), int(plain.shape[1]))
        return GroupedOperand(fmt, shape, layout, splits, plain=plain)
    if plan.reads_values:
        return dequantized_tokens.operand(
            plain, plan, splits, row=row, column=column,
            keep_quantized_for_backward=keep_quantized_for_backward,
        )  # fmt: skip
    own = quantizers.own(quantizer, row=row, column=column, swizzled=True)
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


def gradient(
    tensor: torch.Tensor,
    quantizer: Any,
    plan: Plan,
    splits: Splits,
    *,
    values: bool,
    **usages: bool,
) -> tuple[GroupedOperand, torch.Tensor | None]:
    """Make the operand of an output gradient, and its values for sums over them.

    Args:
        tensor, quantizer, plan, splits: As in `tokens`.
        values: Whether the values are wanted.
        **usages: The other keywords of `tokens`.

    Returns:
        The operand; and (rows, features) in the compute dtype or None: a new tensor or `tensor`
        itself. Rows past the valid ones are unwritten where `tensor` is a GroupedTensor.
    """
    if not values:
        return tokens(tensor, quantizer, plan, splits, **usages), None
    dtype = torch_dtype(plan.call.dtype)
    if not isinstance(tensor, GroupedTensor):
        plain = maybe_dequantize(tensor, dtype)
        return tokens(plain, quantizer, plan, splits, **usages), plain
    if tensor._with_gemm_swizzled_scales:
        known = _values_of_ready(tensor, dtype, splits)
        return tokens(tensor, quantizer, plan, splits, **usages), known
    own = quantizers.own(quantizer, row=usages["row"], column=usages["column"], swizzled=True)
    return _from_grouped(tensor, own, plan, splits, values=True)


def _values_of_ready(tensor: Any, dtype: torch.dtype, splits: Splits) -> torch.Tensor:
    """Return the values of a GroupedTensor whose scales are in tile order; TE has no call for it.

    TE dequantizes storage that has compact scales in one direction, and offsets where it has row
    counts.
    """
    rows, cols = (int(size) for size in tensor.logical_shape)
    compact = _regrouped(tensor, splits)
    compact.scale_inv = scale_layout.compact_rows(compact.scale_inv, rows, cols)
    compact._with_gemm_swizzled_scales = False
    compact.columnwise_data = None
    compact.columnwise_scale_inv = None
    plain = tex.group_dequantize(input=compact, otype=TE_DType[dtype])
    values = plain.rowwise_data.view(rows, cols)
    assert isinstance(values, torch.Tensor)
    return values


def _regrouped(tensor: Any, splits: Splits) -> Any:
    """Return a shallow copy of a GroupedTensor whose groups are those of the call.

    The caller's tensor may say nothing of its groups (equal ones), or only their row counts; TE's
    kernels want offsets beside these.
    """
    grouped = tensor.copy()
    grouped.first_dims = splits.sizes
    grouped.tensor_offsets = splits.element_offsets[int(tensor.shape[1])]
    return grouped


def _from_grouped(
    tensor: Any, quantizer: Any, plan: Plan, splits: Splits, *, values: bool
) -> tuple[GroupedOperand, torch.Tensor | None]:
    shape = (int(tensor.shape[0]), int(tensor.shape[1]))
    grouped = _regrouped(tensor, splits)
    otype, groups = TE_DType[torch_dtype(plan.call.dtype)], plan.layout.num_groups
    known = requantize.ready(grouped, quantizer, groups, otype, return_dequantized=values)
    return _from_storage(grouped, shape, plan.call.format, plan.layout, splits), known


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
