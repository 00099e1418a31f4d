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

from te_grouped_mlp.op.formats import MXFP8, SCALE_TILE_OUTER
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.problem import LinearSpec
from te_grouped_mlp.op.te import quantizers
from te_grouped_mlp.op.tensors import dequantized_weights, experts, stacking
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    WeightCopies,
    WeightOperand,
    torch_dtype,
)
from te_grouped_mlp.op.tensors.stacking import Experts, Stacked


def for_forward(
    weights: Sequence[Any],
    held: WeightCopies | None,
    op: Any,
    spec: LinearSpec,
    plan: Plan,
    *,
    column: bool,
) -> WeightCopies:
    """Return the operands of the forward and of the backward.

    Args:
        weights: The weight parameters of a GroupedLinear.
        held: What `experts.read` returned of them.
        op: The GroupedLinear, whose first quantizer of weights serves all experts.
        spec: Its facts.
        plan: Says the format, and whether values are read.
        column: Also return the operand of the backward; not of distributed weights, which it
            gathers anew.

    Returns:
        New copies with compact scales; of quantized parameters their own data. For a plan that
        reads values, those, new or reused (`dequantized_weights`).

    Raises:
        RuntimeError: A quantized parameter lacks a copy that is asked for.
    """
    if spec.distributed:
        weights = materialize_weight_for_forward(list(weights))
        held = experts.read("gathered", plan.problem.num_groups, spec, weights, weights[0].device)
        column = False
    quantizer = op.get_quantizer("forward", 1)
    return _copies(weights, held, quantizer, spec, plan, row=True, column=column)


def for_backward(
    weights: Sequence[Any],
    quantizer: Any,
    spec: LinearSpec,
    saved: WeightOperand | None,
    plan: Plan,
) -> WeightOperand:
    """Return the operand of the backward: the saved one, or a distributed weight gathered anew.

    Args:
        weights, spec: As the forward had them.
        quantizer: Of the op, as the forward found it; None for UNQUANTIZED.
        saved: The forward's column copy.
        plan: Of the forward.
    """
    if saved is not None:
        return saved
    gathered = materialize_weight_for_backward(weights)
    held = experts.read("gathered", plan.problem.num_groups, spec, gathered, gathered[0].device)
    column = _copies(gathered, held, quantizer, spec, plan, row=False, column=True).column
    assert column is not None
    return column


def finalize_grads(weights: Sequence[Any], grads: Sequence[torch.Tensor]) -> None:
    """Hand full-size gradients to the owner of a distributed weight."""
    finalize_weight_grads(weights, list(grads))


def _copies(
    weights: Sequence[Any],
    held: WeightCopies | None,
    quantizer: Any,
    spec: LinearSpec,
    plan: Plan,
    *,
    row: bool,
    column: bool,
) -> WeightCopies:
    """Return the copies that are asked for, in the format of the plan."""
    plain = held is not None and held.row is not None and not held.row.format.is_block_scaled
    if not plan.call.format.is_block_scaled:
        dtype = torch_dtype(plan.call.dtype)
        held = (
            _in_dtype(held, dtype)
            if held is not None and plain
            else _ask_each(weights, spec, dtype)
        )
    elif plain or (held is None and not any(map(_is_quantized, weights))):
        source = held.row.data if held is not None and held.row is not None else tuple(weights)
        if plan.reads_values:
            return _rounded(weights, source, quantizer, spec, plan, row=row, column=column)
        held = _quantized(weights, source, quantizer, spec, row=row, column=column)
    else:
        if held is None:
            held = _quantized_each(weights, quantizer, spec, row=row, column=column, mixed=True)
        _require_copies(held, row=row, column=column)
        if plan.reads_values:
            of_quantized = dequantized_weights.of_quantized
            held = WeightCopies(
                of_quantized(held.row) if row and held.row is not None else None,
                of_quantized(held.column) if column and held.column is not None else None,
            )
    return WeightCopies(held.row if row else None, held.column if column else None)


def _is_quantized(weight: Any) -> bool:
    return isinstance(weight, QuantizedTensorStorage)


def _require_copies(held: WeightCopies, *, row: bool, column: bool) -> None:
    for wanted, copy, axis in ((row, held.row, Axis.ROW), (column, held.column, Axis.COLUMN)):
        if wanted and copy is None:
            raise RuntimeError(
                f"a quantized weight has no {axis.value}-wise copy; create the parameters with "
                "gradients enabled, so that both copies exist"
            )


def _rounded(
    weights: Sequence[Any], source: Experts, quantizer: Any, spec: LinearSpec, plan: Plan,
    *, row: bool, column: bool,
) -> WeightCopies:  # fmt: skip
    """Round plain weights, or return the copies that were made of them before."""
    two_d = bool(getattr(quantizer, "with_2d_quantization", False))
    # The tensor inside counts the writes that pass by the parameter around it.
    inside = [weights[0].rowwise_data] if spec.single_grouped_weight else weights
    counted = [*weights, *inside] if spec.single_grouped_weight else weights
    reuses = plan.reuses_weights and not spec.distributed
    content = dequantized_weights.content_name(inside, counted, two_d) if reuses else None
    copies = dequantized_weights.reusable(weights[0], content, row=row, column=column)
    if copies is None:
        shape = (spec.out_features, spec.in_features)
        copies = dequantized_weights.of_plain(source, shape, row=row, column=column, two_d=two_d)
        dequantized_weights.keep_for_reuse(weights[0], content, inside, copies)
    return copies


def _quantized(
    weights: Sequence[Any], source: Experts, quantizer: Any, spec: LinearSpec,
    *, row: bool, column: bool,
) -> WeightCopies:  # fmt: skip
    """Quantize plain weights to bytes and compact scales."""
    if not isinstance(source, Stacked) or not spec.single_grouped_weight:
        return _quantized_each(weights, quantizer, spec, row=row, column=column)
    if spec.out_features % SCALE_TILE_OUTER:
        # The grouped kernel needs whole scale tiles for each member.
        return _quantized_each(tuple(source), quantizer, spec, row=row, column=column)
    groups, shape = len(source), (spec.out_features, spec.in_features)
    grouped = tex.group_quantize(
        tensor=source.values.view(-1, spec.in_features),
        quantizer=quantizers.own(quantizer, row=row, column=column, swizzled=False),
        num_tensors=groups,
        first_dims=None,
    )
    swizzled = bool(grouped._with_gemm_swizzled_scales)

    def copy(axis: Axis, data: torch.Tensor | None, scale: Any) -> WeightOperand | None:
        if data is None:
            return None
        stacked = Stacked(data.view(groups, *shape)), Stacked(scale.view(groups, -1))
        return WeightOperand(MXFP8, shape, axis, *stacked, swizzled)

    return WeightCopies(
        copy(Axis.ROW, grouped.rowwise_data, grouped.scale_inv),
        copy(Axis.COLUMN, grouped.columnwise_data, grouped.columnwise_scale_inv),
    )


def _quantized_each(
    weights: Sequence[Any], quantizer: Any, spec: LinearSpec,
    *, row: bool, column: bool, mixed: bool = False,
) -> WeightCopies:  # fmt: skip
    """Quantize weights expert by expert; if they are mixed, those that are plain."""
    # One for all experts.
    own = quantizers.own(quantizer, row=row, column=column, swizzled=False)
    storages = [
        weight if mixed and _is_quantized(weight) else tex.quantize(tensor=weight, quantizer=own)
        for weight in weights
    ]
    copies = experts.of_storages(storages, (spec.out_features, spec.in_features))
    if copies is None:
        kinds = ", ".join(sorted({type(weight).__name__ for weight in storages}))
        raise TypeError(f"quantized weights are {kinds}; allowed: MXFP8 tensors")
    return copies


def _in_dtype(held: WeightCopies, dtype: torch.dtype) -> WeightCopies:
    """Return plain weights in a dtype: stacked or as they are, or one new set for both axes."""
    assert held.row is not None
    data, shape = held.row.data, held.row.shape
    if data[0].dtype == dtype:
        # The backward gets the parameters themselves: autograd watches each for changes.
        return experts.plain(shape, stacking.as_stacked_view(data) or data, data)
    values: Experts
    if isinstance(data, Stacked):
        values = Stacked(data.values.detach().to(dtype), data.reversed_experts)
    else:
        values = tuple([weight.detach().to(dtype) for weight in data])
    return experts.plain(shape, values, values)


def _ask_each(weights: Sequence[Any], spec: LinearSpec, dtype: torch.dtype) -> WeightCopies:
    """Return the values of weights of several kinds, or quantized ones, in a dtype."""
    storages = experts.storages_in(weights[0]) if spec.single_grouped_weight else weights
    values = tuple([_value(weight, dtype) for weight in storages])
    return experts.plain((spec.out_features, spec.in_features), values, values)


def _value(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    if _is_quantized(weight):
        weight = weight.dequantize(dtype=dtype)
    # Not detached: a step records nothing, and hundreds of views would cost the host their time.
    value = weight if weight.dtype == dtype else weight.detach().to(dtype)
    assert isinstance(value, torch.Tensor)
    return value
