# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the forward keeps for the backward: named fields; flattened and restored in one way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from te_grouped_mlp.op.formats import Format
from te_grouped_mlp.op.layout import GroupLayout
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    GroupedOperand,
    QuantizedCopy,
    Splits,
    WeightOperand,
)
from te_grouped_mlp.op.tensors.stacking import Experts, Stacked
from te_grouped_mlp.op.tensors.tensor_dataclass import tensor_dataclass

STASH_MARK = "grouped_tensor_scale_inv"
"""Attribute by which Megatron's paged stash finds tensors whose valid part is a row prefix; True on
scale buffers. (Transformer Engine sets the same attribute on its own activations.)"""


Owners = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""The weight parameters of FC1 and of FC2."""
Versions = tuple[int, ...] | None
"""How often each weight of a linear was written; None where nobody asks."""


@tensor_dataclass
class OpsState:
    """What may change in the two GroupedLinears before the backward reads it; no tensors.

    Attributes:
        grad_quantizer: For FC2's output gradient; None for UNQUANTIZED.
        weight_quantizers: Of both, for a weight that the backward gathers anew; None for another.
        versions: Of the weights of both.
    """

    grad_quantizer: Any
    weight_quantizers: tuple[Any, Any]
    versions: tuple[Versions, Versions]


@tensor_dataclass
class SavedState:
    """The state of one call between its passes.

    Attributes:
        plan: What runs; the backward decides nothing.
        splits: Division of the rows.
        prob: (rows,) or None for one.
        x: FC1's input, only the copy that its weight gradient reads; None when that is not wanted.
        pre_activation: (rows, N1); None when nothing reads it.
        activated: FC2's input likewise; None when not wanted or recomputed.
        w1, w2: Weights for the backward products; None when not read, or when a distributed weight
            is gathered anew.
        owns_x: Whether the buffers of `x` were allocated by the op, so that it may free them.
        bias2: FC2's bias (G, N2), which the gradient of its scale reads; None without one.
        ops: Of the ops as the forward found them.
    """

    plan: Plan
    splits: Splits
    prob: torch.Tensor | None
    x: GroupedOperand | None
    pre_activation: torch.Tensor | None
    activated: GroupedOperand | None
    w1: WeightOperand | None
    w2: WeightOperand | None
    owns_x: bool
    bias2: torch.Tensor | None
    ops: OpsState


@tensor_dataclass
class Skeleton:
    """What remains of a state without its tensors.

    Attributes:
        plan, owns_x, ops: Of the state.
        sizes_on_host: Of the splits.
        widths: The feature widths that the splits have element offsets for.
        x, activated, w1, w2: The records without tensors, or None where there is none.
    """

    plan: Plan
    owns_x: bool
    sizes_on_host: tuple[int, ...] | None
    widths: tuple[int, ...]
    x: _Tokens | None
    activated: _Tokens | None
    w1: _Weight | None
    w2: _Weight | None
    ops: OpsState


# Format and shape, then axis and tile order of the column copy of a quantized operand.
_Tokens = tuple[Format, tuple[int, int], "tuple[Axis, bool] | None"]
# How many tensors, None for one of all experts; whether that is of reversed ones.
_Stacking = tuple["int | None", bool]
# Format, shape, axis, tile order; data and scales.
_Weight = tuple[Format, tuple[int, int], Axis, bool, _Stacking, _Stacking]


def flatten(state: SavedState) -> tuple[Skeleton, list[torch.Tensor | None]]:
    """Take the tensors out of a state, so that autograd (and its hooks) can keep them.

    Activations are marked for Megatron's paged stash; nothing else is changed.

    Returns:
        What remains, and the tensors in the order that `restore` expects.
    """
    for tensor, is_scale in _row_prefix_tensors(state):
        setattr(tensor, STASH_MARK, is_scale)
    splits = state.splits
    tensors: list[torch.Tensor | None] = [
        splits.sizes,
        splits.group_end_offsets,
        splits.group_offsets,
        splits.group_offsets_int32,
        splits.fault,
    ]
    tensors += splits.element_offsets.values()
    tensors += (state.prob, state.pre_activation, state.bias2)
    skeleton = Skeleton(
        state.plan,
        state.owns_x,
        splits.sizes_on_host,
        tuple(splits.element_offsets),
        _take_tokens(state.x, tensors),
        _take_tokens(state.activated, tensors),
        _take_weight(state.w1, tensors),
        _take_weight(state.w2, tensors),
        state.ops,
    )
    return skeleton, tensors


def restore(skeleton: Skeleton, tensors: Sequence[torch.Tensor | None]) -> SavedState:
    """Put the tensors back.

    Args:
        skeleton: The first result of `flatten`.
        tensors: The second, or what autograd's hooks made of it.
    """
    rest: Iterator[Any] = iter(tensors)
    sizes, group_end_offsets, group_offsets, group_offsets_int32, fault = islice(rest, 5)
    widths = skeleton.widths
    elements = dict(zip(widths, islice(rest, len(widths)), strict=True)) if widths else {}
    splits = Splits(
        sizes,
        group_end_offsets,
        group_offsets,
        elements,
        skeleton.sizes_on_host,
        group_offsets_int32,
        fault,
    )
    prob, pre_activation, bias2 = islice(rest, 3)
    layout = skeleton.plan.layout
    return SavedState(
        plan=skeleton.plan,
        splits=splits,
        prob=prob,
        x=_put_tokens(skeleton.x, rest, layout, splits),
        pre_activation=pre_activation,
        activated=_put_tokens(skeleton.activated, rest, layout, splits),
        w1=_put_weight(skeleton.w1, rest),
        w2=_put_weight(skeleton.w2, rest),
        owns_x=skeleton.owns_x,
        bias2=bias2,
        ops=skeleton.ops,
    )


def activations(state: SavedState) -> list[torch.Tensor]:
    """Return the saved tensors that may leave the GPU between the passes, as upstream names them.

    Data and scales of both inputs and the pre-activation; the probabilities are the caller's.
    """
    tensors = [tensor for tensor, _ in _row_prefix_tensors(state)]
    return [tensor for tensor in tensors if tensor is not state.prob]


def weight_copies(state: SavedState) -> list[torch.Tensor]:
    """Return the saved tensors of weights that are no parameters; none of them may leave the GPU.

    Parameters never do. What is a part of one, or kept for the next forward, lies there anyway.
    """
    tensors: list[torch.Tensor | None] = []
    for weight in (state.w1, state.w2):
        _take_weight(weight, tensors)
    return [
        tensor
        for tensor in tensors
        if tensor is not None and not isinstance(tensor, torch.nn.Parameter)
    ]


def _row_prefix_tensors(state: SavedState) -> list[tuple[torch.Tensor, bool]]:
    tensors = []
    for operand in (state.x, state.activated):
        if operand is not None and isinstance(operand.column, QuantizedCopy):
            tensors += [(operand.column.data, False), (operand.column.scale, True)]
        elif operand is not None and operand.plain is not None:
            tensors.append((operand.plain, False))
    tensors += [
        (tensor, False) for tensor in (state.pre_activation, state.prob) if tensor is not None
    ]
    return tensors


def _take_tokens(
    operand: GroupedOperand | None, tensors: list[torch.Tensor | None]
) -> _Tokens | None:
    if operand is None:
        return None
    column = operand.column
    if column is None:
        tensors.append(operand.plain)
        return operand.format, operand.shape, None
    assert isinstance(column, QuantizedCopy), "kept quantized for the backward"
    tensors += (column.data, column.scale)
    return operand.format, operand.shape, (column.axis, column.swizzled)


def _put_tokens(
    facts: _Tokens | None, rest: Iterator[Any], layout: GroupLayout, splits: Splits
) -> GroupedOperand | None:
    if facts is None:
        return None
    fmt, shape, copy = facts
    if copy is None:
        return GroupedOperand(fmt, shape, layout, splits, None, None, next(rest))
    column = QuantizedCopy(next(rest), next(rest), *copy)
    return GroupedOperand(fmt, shape, layout, splits, None, column)


def _take_weight(
    weight: WeightOperand | None, tensors: list[torch.Tensor | None]
) -> _Weight | None:
    if weight is None:
        return None
    stacking = _take_experts(weight.data, tensors), _take_experts(weight.scale, tensors)
    return weight.format, weight.shape, weight.axis, weight.swizzled, *stacking


def _take_experts(experts: Experts, tensors: list[torch.Tensor | None]) -> _Stacking:
    if isinstance(experts, Stacked):
        tensors.append(experts.values)
        return None, experts.reversed_experts
    tensors += experts
    return len(experts), False


def _put_weight(facts: _Weight | None, rest: Iterator[Any]) -> WeightOperand | None:
    if facts is None:
        return None
    fmt, shape, axis, swizzled, *stacking = facts
    data, scale = [_put_experts(how, rest) for how in stacking]
    return WeightOperand(fmt, shape, axis, data, scale, swizzled)


def _put_experts(stacking: _Stacking, rest: Iterator[Any]) -> Experts:
    count, reversed_experts = stacking
    return Stacked(next(rest), reversed_experts) if count is None else tuple(islice(rest, count))
