# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the forward kept, checked before the backward does anything.

Between the passes a parameter may be repointed through ``.data`` or freed, and a hook of autograd
may give back another tensor than it was given. Autograd sees writes, and neither of these.
"""

from __future__ import annotations

import math

import torch

from te_grouped_mlp.op.formats import MXFP8
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.step.saved import SavedState
from te_grouped_mlp.op.te import adapter
from te_grouped_mlp.op.tensors import capacity, checks, experts
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    GroupedOperand,
    QuantizedCopy,
    torch_dtype,
)
from te_grouped_mlp.op.tensors.scale_layout import column_scale_shape, row_scale_shape

_VALUES = torch.bfloat16
"""What some backends keep of an fp16 model."""

_PROB_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def require(state: SavedState, grad_output: torch.Tensor, grad_input: torch.Tensor | None) -> None:
    """Check every tensor of a state against its plan, and what is given beside it.

    Args:
        state: Of the call.
        grad_output: (..., FC2 out features) or a GroupedTensor.
        grad_input: The caller's buffer, checked by the forward; or None.

    Raises:
        ValueError: One has another shape, dtype or device than the forward kept, or less memory
            than that takes.
        TypeError: The gradient is of no floating-point dtype.
    """
    plan, device = state.plan, state.splits.sizes.device
    _require_gradient(plan, grad_output, grad_input, device)
    problem, rows, groups = plan.problem, plan.call.rows, plan.problem.num_groups
    dtype = torch_dtype(plan.call.dtype)
    # The op's own tensors can come back as others, but nobody else has them to free their memory.
    splits, kind = state.splits, capacity.require_kind
    kind("saved splits", splits.sizes, (groups,), (torch.int64,), device)
    kind("saved ends", splits.ends, (groups,), (torch.int32,), device)
    kind("saved offsets", splits.offsets, (groups + 1,), (torch.int64,), device)
    for width, offsets in splits.element_offsets.items():
        name = f"saved offsets of {width} features"
        kind(name, offsets, (groups + 1,), (torch.int64,), device)
    if splits.starts is not None:
        kind("saved starts", splits.starts, (groups + 1,), (torch.int32,), device)
    if splits.fault is not None:
        kind("saved fault", splits.fault, (1,), (torch.int64,), device)
    if state.prob is not None:
        capacity.require("saved probabilities", state.prob, (rows,), _PROB_DTYPES, device)
    if state.pre_activation is not None:
        shape = (rows, problem.fc1.out_features)
        kind("saved pre-activation", state.pre_activation, shape, (dtype, _VALUES), device)
    if state.bias2 is not None:
        kind("saved bias", state.bias2, (groups, problem.fc2.out_features), (dtype,), device)
    for name, operand in (("input", state.x), ("activated", state.activated)):
        if operand is not None:
            _require_tokens(f"saved {name}", operand, dtype, device)
    for label, weight in (("fc1", state.w1), ("fc2", state.w2)):
        if weight is not None:
            dtypes = capacity.BYTES if len(weight.scale) else (dtype, _VALUES)
            names = f"{label}.weight{{}}", f"{label}.weight{{}}.scale"
            experts.require_operand(*names, weight, groups, dtypes, device)


def _require_gradient(
    plan: Plan, grad_output: torch.Tensor, grad_input: torch.Tensor | None, device: torch.device
) -> None:
    features = plan.problem.fc2.out_features
    checks.tokens("grad_output", grad_output, features, device)
    if isinstance(grad_output, adapter.GroupedTensor):
        shape = (plan.call.rows, features)
        experts.require_grouped_bytes("grad_output", grad_output, 1, shape, device)
    if grad_input is not None:
        capacity.require_memory("grad_input", grad_input)


def _require_tokens(
    name: str, operand: GroupedOperand, dtype: torch.dtype, device: torch.device
) -> None:
    copy = operand.column
    if isinstance(copy, QuantizedCopy):
        scale_shape = row_scale_shape if copy.axis is Axis.ROW else column_scale_shape
        count = math.prod(scale_shape(*operand.shape, MXFP8))
        capacity.require(name, copy.data, operand.shape, capacity.BYTES, device)
        capacity.require_bytes(f"{name}.scale", copy.scale, count, device)
    elif operand.plain is not None:
        capacity.require(name, operand.plain, operand.shape, (dtype,), device)
