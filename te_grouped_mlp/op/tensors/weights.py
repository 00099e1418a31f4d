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
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.problem import LinearSpec
from te_grouped_mlp.op.te import quantizers
from te_grouped_mlp.op.tensors import dequantized_weights, experts, stacking
from te_grouped_mlp.op.tensors.dequantized_weights import ExactWeights
from te_grouped_mlp.op.tensors.operands import Axis, Parts, WeightOperand, torch_dtype
from te_grouped_mlp.op.tensors.record import record


@record
class Members:
    """The weights of all experts of one linear, as the operands of its passes take them.

    The parts lie in parallel tuples, because a step handles hundreds of them on the host.

    Attributes:
        row, column: Data and scales of the copies, one each per expert; None for a copy that was
            not asked for. UNQUANTIZED has the values as both, and no scales; a plan that reads
            values has those of each copy, and no scales.
        swizzled: Whether the scales are in tile order.
    """

    row: tuple[Parts, Parts] | None
    column: tuple[Parts, Parts] | None
    swizzled: bool = False


def forward_members(
    weights: Sequence[Any], quantizer: Any, spec: LinearSpec, plan: Plan, *, column: bool
) -> Members:
    """Return the quantized (or plain) weights for the forward.

    Args:
        weights: The weight parameters of a GroupedLinear.
        quantizer: Its first expert's; None for UNQUANTIZED.
        spec: Its facts.
        plan: Says the format, and whether values are read.
        column: Also make the column copy, which the backward reads; not of distributed weights,
            which it gathers anew.

    Returns:
        New copies with compact scales; of quantized parameters their own data. For a plan that
        reads values, those, new or kept (`exact_weights`).

    Raises:
        RuntimeError: A quantized parameter lacks a copy that is asked for.
    """
    fmt, dtype, groups = plan.call.format, torch_dtype(plan.call.dtype), plan.problem.num_groups
    if spec.distributed:
        weights = materialize_weight_for_forward(list(weights))
        experts.require_weights("gathered", groups, spec, weights, weights[0].device)
        column = False
    if plan.reads_values:
        return _exact_members(weights, quantizer, spec, plan, row=True, column=column)
    if spec.single_grouped_weight:
        return _grouped_members(weights[0], groups, quantizer, spec, fmt, dtype, column=column)
    return _discrete_members(weights, quantizer, fmt, dtype, row=True, column=column)


def to_save(
    members: Members, spec: LinearSpec, fmt: Format, *, wanted: bool
) -> WeightOperand | None:
    """Return the operand of the backward, to be saved; None if unwanted or gathered anew."""
    if not wanted or spec.distributed:
        return None
    return operand(members, spec, fmt, Axis.COLUMN)


def for_backward(
    weights: Sequence[Any], quantizer: Any, spec: LinearSpec, kept: WeightOperand | None, plan: Plan
) -> WeightOperand:
    """Return the operand of the backward: the saved one, or a distributed weight gathered anew.

    Args:
        weights, quantizer, spec: As the forward had them.
        kept: What `to_save` returned.
        plan: Of the forward.
    """
    if kept is not None:
        return kept
    fmt, dtype, groups = plan.call.format, torch_dtype(plan.call.dtype), plan.problem.num_groups
    gathered = materialize_weight_for_backward(weights)
    experts.require_weights("gathered", groups, spec, gathered, gathered[0].device)
    if plan.reads_values:
        members = _exact_members(gathered, quantizer, spec, plan, row=False, column=True)
    else:
        members = _discrete_members(gathered, quantizer, fmt, dtype, row=False, column=True)
    return operand(members, spec, fmt, Axis.COLUMN)


def finalize_grads(weights: Sequence[Any], grads: Sequence[torch.Tensor]) -> None:
    """Hand full-size gradients to the owner of a distributed weight."""
    finalize_weight_grads(weights, list(grads))


def operand(members: Members, spec: LinearSpec, fmt: Format, axis: Axis) -> WeightOperand:
    """Return the operand of one pass over `members`; no data is copied."""
    copies = members.row if axis is Axis.ROW else members.column
    assert copies is not None
    shape = (spec.out_features, spec.in_features)
    return WeightOperand(fmt, shape, axis, *copies, members.swizzled)


def _exact_members(
    weights: Sequence[Any], quantizer: Any, spec: LinearSpec, plan: Plan, *, row: bool, column: bool
) -> Members:
    """Return the values that the quantized copies stand for, for a plan that reads values."""
    storages: Sequence[Any] = weights
    grouped = weights[0] if spec.single_grouped_weight else None
    if grouped is not None and grouped.quantizer is not None:
        storages = grouped.quantized_tensors or grouped.copy().split_into_quantized_tensors()
    if isinstance(storages[0], QuantizedTensorStorage):
        found = _members_of(storages, row=row, column=column)
        copies = {Axis.ROW: found.row, Axis.COLUMN: found.column}
        wanted = {axis: each for axis, each in copies.items() if each is not None}
        shape = (spec.out_features, spec.in_features)
        made = dequantized_weights.of_quantized(wanted, shape, swizzled=found.swizzled)
    else:
        made = _rounded(weights, quantizer, spec, plan, row=row, column=column)

    def members(values: torch.Tensor | None) -> tuple[Parts, Parts] | None:
        if values is None:
            return None
        return (values.unbind(0)[::-1] if made.descending else values), ()

    return Members(members(made.row), members(made.column))


def _rounded(
    weights: Sequence[Any], quantizer: Any, spec: LinearSpec, plan: Plan, *, row: bool, column: bool
) -> ExactWeights:
    """Round plain weights, or return what was made of them before."""
    two_d = bool(getattr(quantizer, "with_2d_quantization", False))
    # The tensor inside counts the writes that pass by the parameter around it.
    inside = [weights[0].rowwise_data] if spec.single_grouped_weight else weights
    counted = [*weights, *inside] if spec.single_grouped_weight else weights
    reuses = plan.reuses_weights and not spec.distributed
    name = dequantized_weights.content_name(inside, counted, two_d) if reuses else None
    made = dequantized_weights.kept(weights[0], name, row=row, column=column)
    if made is None:
        shape = (-1, spec.out_features, spec.in_features)
        stacked = inside[0].view(shape) if spec.single_grouped_weight else inside
        made = dequantized_weights.of_plain(stacked, row=row, column=column, two_d=two_d)
        dequantized_weights.keep(weights[0], name, inside, made)
    return made


def _discrete_members(
    weights: Sequence[Any], quantizer: Any, fmt: Format, dtype: torch.dtype,
    *, row: bool, column: bool,
) -> Members:  # fmt: skip
    if not fmt.is_block_scaled:
        return _plain_members(weights, dtype)
    # One for all experts.
    own = quantizers.own(quantizer, row=row, column=column, swizzled=False)
    storages = [
        weight
        if isinstance(weight, QuantizedTensorStorage)
        else tex.quantize(tensor=weight, quantizer=own)
        for weight in weights
    ]
    return _members_of(storages, row=row, column=column)


def _members_of(storages: Sequence[Any], *, row: bool, column: bool) -> Members:
    """Take the asked copies out of TE's storages.

    Raises:
        RuntimeError: A quantized parameter lacks one.
    """
    found: list[Any] = [None, None]
    for index, (wanted, axis) in enumerate(((row, Axis.ROW), (column, Axis.COLUMN))):
        if not wanted:
            continue
        if axis is Axis.ROW:
            data = tuple([each._rowwise_data for each in storages])
            scale = tuple([each._rowwise_scale_inv for each in storages])
        else:
            data = tuple([each._columnwise_data for each in storages])
            scale = tuple([each._columnwise_scale_inv for each in storages])
        if type(None) in map(type, data):
            raise RuntimeError(
                f"a quantized weight has no {axis.value}-wise copy; create the parameters with "
                "gradients enabled, so that both copies exist"
            )
        found[index] = (data, scale)
    return Members(*found, swizzled=bool(storages[0]._with_gemm_swizzled_scales))


def _plain_members(weights: Sequence[Any], dtype: torch.dtype) -> Members:
    step = stacking.distance(weights)
    if step is None or weights[0].dtype != dtype:
        values = tuple([_plain(weight, dtype) for weight in weights])
        return Members((values, ()), (values, ()))
    # The backward gets the parameters themselves: autograd watches each for changes.
    values = tuple(weights)
    whole = stacking.joined(weights, step)
    return Members((values if whole is None else whole, ()), (values, ()))


def _plain(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(weight, QuantizedTensorStorage):
        weight = weight.dequantize(dtype=dtype)
    # Not detached: a step records nothing, and hundreds of views would cost the host their time.
    plain = weight if weight.dtype == dtype else weight.detach().to(dtype)
    assert isinstance(plain, torch.Tensor)
    return plain


def _grouped_members(
    weight: Any, groups: int, quantizer: Any, spec: LinearSpec, fmt: Format, dtype: torch.dtype,
    *, column: bool,
) -> Members:  # fmt: skip
    if weight.quantizer is not None:
        members = weight.quantized_tensors
        if members is None:
            members = weight.copy().split_into_quantized_tensors()
        return (
            _members_of(members, row=True, column=column)
            if fmt.is_block_scaled
            else _plain_members(members, dtype)
        )
    values = weight.rowwise_data.view(groups, spec.out_features, spec.in_features)
    if not fmt.is_block_scaled:
        if values.dtype != dtype:
            values = values.detach().to(dtype)
        return Members((values, ()), (values, ()))
    if spec.out_features % SCALE_TILE_OUTER:
        # The grouped kernel needs whole scale tiles for each member.
        return _discrete_members(values.unbind(0), quantizer, fmt, dtype, row=True, column=column)
    grouped = tex.group_quantize(
        tensor=values.view(-1, spec.in_features),
        quantizer=quantizers.own(quantizer, row=True, column=column, swizzled=False),
        num_tensors=groups,
        first_dims=None,
    )

    def members_of(data: torch.Tensor, scale: torch.Tensor) -> Any:
        return data.view(values.shape), scale.view(groups, -1)

    return Members(
        members_of(grouped.rowwise_data, grouped.scale_inv),
        members_of(grouped.columnwise_data, grouped.columnwise_scale_inv) if column else None,
        swizzled=bool(grouped._with_gemm_swizzled_scales),
    )
