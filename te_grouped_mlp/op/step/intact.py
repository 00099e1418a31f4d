# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What a backward reads of the ops and of the state is what its own forward found and kept.

Between the two passes a program runs other steps, under other recipes or none, and may change the
ops. The state of the call keeps what the backward needs of them, or the backward refuses. A
parameter may be repointed through ``.data`` or freed, and a hook of autograd may give back another
tensor than it was given; autograd sees writes, and neither of these.

The backward reads at its own time, as upstream does, only where the result goes: a parameter's
``main_grad`` and the flags beside it (``overwrite_main_grad``, ``grad_added_to_main_grad``,
``zero_out_wgrad``), whether the ops' queues of delayed gradients are open, what the owner of a
distributed weight gathers, the announcement of the form of FC2's output gradient, and whether
determinism is demanded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from te_grouped_mlp.op.formats import MXFP8
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.problem import LinearSpec
from te_grouped_mlp.op.step.saved import OpsState, Owners, SavedState, Versions
from te_grouped_mlp.op.te import adapter, quantizers
from te_grouped_mlp.op.tensors import capacity, checks, experts, stacking
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    GroupedOperand,
    QuantizedCopy,
    torch_dtype,
)
from te_grouped_mlp.op.tensors.scale_layout import column_scale_shape, row_scale_shape
from te_grouped_mlp.op.tensors.stacking import Scattered, Stacked

_UNREAD = OpsState(None, (None, None), (None, None))

_VALUES = torch.bfloat16
"""What some backends keep of an fp16 model."""

_PROB_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def read_ops(plan: Plan, fc1: Any, fc2: Any, owners: Owners) -> OpsState:
    """Read the two GroupedLinears for a backward; nothing is read when none follows.

    Args:
        plan: Of the call.
        fc1, fc2: The ops.
        owners: Their weight parameters.
    """
    if not plan.call.needs_backward:
        return _UNREAD
    problem = plan.problem
    return OpsState(
        quantizers.copied(fc2, "backward", 0),
        (
            quantizers.copied(fc1, "forward", 1) if problem.fc1.distributed else None,
            quantizers.copied(fc2, "forward", 1) if problem.fc2.distributed else None,
        ),
        (_versions(plan, problem.fc1, owners[0]), _versions(plan, problem.fc2, owners[1])),
    )


def _versions(plan: Plan, spec: LinearSpec, weights: Sequence[torch.Tensor]) -> Versions:
    """Return how often the weights of a linear were written, if the state holds memory of theirs.

    Autograd counts the writes to plain parameters, which are saved themselves. What lies inside a
    parameter of one of TE's classes counts none when the parameter is written.
    """
    quantized, scaled = spec.quantized_weight, plan.call.format.is_block_scaled
    if spec.distributed or quantized is not scaled or (scaled and plan.reads_values):
        return None
    cast = plan.problem.dtype is not plan.call.dtype
    if not quantized and (cast or not spec.single_grouped_weight):
        return None
    return _written(weights)


def require(
    state: SavedState, owners: Owners, grad_output: torch.Tensor, grad_input: torch.Tensor | None
) -> None:
    """Check every tensor of a state against its plan, and what is given beside it.

    Args:
        state: Of the call.
        owners: The weight parameters of FC1 and of FC2, as the forward used them.
        grad_output: (..., FC2 out features) or a GroupedTensor.
        grad_input: The caller's buffer, checked by the forward; or None.

    Raises:
        ValueError: One has another shape, dtype or device than the forward kept, or less memory
            than that takes.
        TypeError: The gradient is of no floating-point dtype.
        RuntimeError: A parameter was written in place, or holds matrices of another kind.
    """
    _require_unwritten(state, owners)
    plan, device = state.plan, state.splits.sizes.device
    _require_gradient(plan, grad_output, grad_input, device)
    problem, rows, groups = plan.problem, plan.call.rows, plan.problem.num_groups
    dtype = torch_dtype(plan.call.dtype)
    # The op's own tensors can come back as others, but nobody else has them to free their memory.
    splits, kind = state.splits, capacity.require_kind
    kind("saved splits", splits.sizes, (groups,), (torch.int64,), device)
    kind("saved group_end_offsets", splits.group_end_offsets, (groups,), (torch.int32,), device)
    kind("saved group_offsets", splits.group_offsets, (groups + 1,), (torch.int64,), device)
    for width, offsets in splits.element_offsets.items():
        name = f"saved offsets of {width} features"
        kind(name, offsets, (groups + 1,), (torch.int64,), device)
    if splits.group_offsets_int32 is not None:
        kind(
            "saved group_offsets_int32",
            splits.group_offsets_int32,
            (groups + 1,),
            (torch.int32,),
            device,
        )
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


def _require_unwritten(state: SavedState, owners: Owners) -> None:
    """Check that the saved weights are what the forward saved.

    The ``data`` of a plain parameter may be another tensor of the same kind: frameworks that shard
    parameters gather them anew before the backward, and autograd follows.

    Args:
        state: Of the call.
        owners: The weight parameters of FC1 and of FC2, as the forward used them.

    Raises:
        RuntimeError: A parameter was written in place, or holds matrices of another kind.
    """
    for label, weights, before, saved in (
        ("FC1", owners[0], state.ops.versions[0], state.w1),
        ("FC2", owners[1], state.ops.versions[1], state.w2),
    ):
        if saved is None:
            continue
        if before and (now := _written(weights)) != before:
            index = next(i for i, count in enumerate(before) if now[i] != count)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {label} weight{index} is at version {now[index]}; expected "
                f"{before[index]}"
            )
        if not saved.format.is_block_scaled and not isinstance(saved.data, Stacked):
            _require_same_kind(label, saved.data, saved.shape, state.plan)


def _written(weights: Sequence[torch.Tensor]) -> tuple[int, ...]:
    # TE's classes make PyTorch look for an override at each question.
    with torch._C.DisableTorchFunctionSubclass():
        return tuple([weight._version for weight in weights])


def _require_same_kind(label: str, weights: Scattered, shape: tuple[int, int], plan: Plan) -> None:
    dtype = torch_dtype(plan.call.dtype)
    alike = stacking.uniform_stride(weights) is not None
    for index, weight in enumerate(weights[:1] if alike else weights):
        if weight.dtype != dtype or weight.shape != shape:
            raise RuntimeError(
                f"{label} weight{index} is {weight.dtype} of shape {tuple(weight.shape)} now; "
                f"expected {dtype} of shape {shape}, as in the forward of this backward"
            )
