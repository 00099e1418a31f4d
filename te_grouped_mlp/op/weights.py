# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""GroupedLinear parameters become weight operands. A parameter is never changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.distributed_weight import (
    finalize_weight_grads,
    materialize_weight_for_backward,
    materialize_weight_for_forward,
)
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage

from te_grouped_mlp.op.formats import SCALE_TILE_OUTER, Format
from te_grouped_mlp.op.operands import Axis, WeightOperand
from te_grouped_mlp.op.problem import LinearSpec
from te_grouped_mlp.op.te_adapter import parameters


def forward_members(
    op: Any, spec: LinearSpec, fmt: Format, dtype: torch.dtype, *, column: bool
) -> list[Any]:
    """Return one quantized (or plain) weight per expert for the forward.

    Args:
        op: The GroupedLinear.
        spec: Its facts.
        fmt: Format of the operands.
        dtype: Compute dtype, for UNQUANTIZED.
        column: Also make the column copy, which the backward reads.

    Returns:
        TE storages with compact scales, or tensors for UNQUANTIZED. Quantized parameters are
        returned themselves.
    """
    if spec.single_grouped_weight:
        return _grouped_members(op, spec, fmt, dtype, row=True, column=column)
    weights: list[Any] = parameters(op)
    if spec.distributed:
        weights = materialize_weight_for_forward(weights)
    return _discrete_members(op, weights, fmt, dtype, row=True, column=column)


def to_save(
    members: Sequence[Any], spec: LinearSpec, fmt: Format, *, wanted: bool
) -> WeightOperand | None:
    """Return the operand of the backward, to be saved; None if unwanted or gathered anew."""
    if not wanted or spec.distributed:
        return None
    return operand(members, spec, fmt, Axis.COLUMN)


def for_backward(
    op: Any, spec: LinearSpec, kept: WeightOperand | None, fmt: Format, dtype: torch.dtype
) -> WeightOperand:
    """Return the operand of the backward: the saved one, or a distributed weight gathered anew."""
    if kept is not None:
        return kept
    gathered = materialize_weight_for_backward(parameters(op))
    members = _discrete_members(op, gathered, fmt, dtype, row=False, column=True)
    return operand(members, spec, fmt, Axis.COLUMN)


def finalize_grads(op: Any, grads: Sequence[torch.Tensor]) -> None:
    """Hand full-size gradients to the owner of a distributed weight."""
    finalize_weight_grads(parameters(op), list(grads))


def operand(members: Sequence[Any], spec: LinearSpec, fmt: Format, axis: Axis) -> WeightOperand:
    """Return the operand of one pass over `members`; no data is copied.

    Raises:
        RuntimeError: A quantized parameter lacks the copy of that axis.
    """
    shape = (spec.out_features, spec.in_features)
    if not fmt.is_block_scaled:
        return WeightOperand(fmt, shape, axis, tuple(members))
    row = axis is Axis.ROW
    if row:
        data = [member._rowwise_data for member in members]
        scale = [member._rowwise_scale_inv for member in members]
    else:
        data = [member._columnwise_data for member in members]
        scale = [member._columnwise_scale_inv for member in members]
    if any(tensor is None for tensor in data):
        raise RuntimeError(
            f"a quantized weight has no {axis.value}-wise copy; create the parameters with "
            "gradients enabled, so that both copies exist"
        )
    swizzled = bool(members[0]._with_gemm_swizzled_scales)
    return WeightOperand(fmt, shape, axis, tuple(data), tuple(scale), swizzled)


def _discrete_members(
    op: Any, weights: Sequence[Any], fmt: Format, dtype: torch.dtype, *, row: bool, column: bool
) -> list[Any]:
    if not fmt.is_block_scaled:
        return [_plain(weight, dtype) for weight in weights]
    members = []
    for index, weight in enumerate(weights):
        if isinstance(weight, QuantizedTensorStorage):
            members.append(weight)
            continue
        quantizer = op.get_quantizer("forward", 2 * index + 1)
        quantizer.set_usage(rowwise=row, columnwise=column)
        members.append(quantizer(weight))
    return members


def _plain(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(weight, QuantizedTensorStorage):
        weight = weight.dequantize(dtype=dtype)
    detached = weight.detach()
    return detached if detached.dtype == dtype else detached.to(dtype)


def _grouped_members(
    op: Any, spec: LinearSpec, fmt: Format, dtype: torch.dtype, *, row: bool, column: bool
) -> list[Any]:
    weight = op.weight
    if weight.quantizer is not None:
        members = weight.quantized_tensors
        if members is None:
            members = weight.copy().split_into_quantized_tensors()
        return list(members) if fmt.is_block_scaled else [_plain(m, dtype) for m in members]
    values = weight.rowwise_data.view(op.num_groups, spec.out_features, spec.in_features)
    if not fmt.is_block_scaled:
        return [_plain(member, dtype) for member in values.unbind(0)]
    quantizer = op.get_quantizer("forward", 1).copy()
    quantizer.set_usage(rowwise=row, columnwise=column)
    quantizer.internal = True
    if spec.out_features % SCALE_TILE_OUTER:
        # The grouped kernel needs whole scale tiles for each member.
        return [tex.quantize(tensor=member, quantizer=quantizer) for member in values.unbind(0)]
    grouped = tex.group_quantize(
        tensor=values.view(-1, spec.in_features),
        quantizer=quantizer,
        num_tensors=op.num_groups,
        first_dims=None,
    )
    return list(grouped.split_into_quantized_tensors())
