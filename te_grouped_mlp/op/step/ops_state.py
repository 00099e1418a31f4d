# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What a backward reads of the ops is what its own forward found.

Between the two passes a program runs other steps, under other recipes or none, and may change the
ops. The state of the call keeps what the backward needs of them, or the backward refuses. It reads
at its own time, as upstream does, only where the result goes: a parameter's ``main_grad`` and the
flags beside it (``overwrite_main_grad``, ``grad_added_to_main_grad``, ``zero_out_wgrad``), whether
the ops' queues of delayed gradients are open, what the owner of a distributed weight gathers, the
announcement of the form of FC2's output gradient, and whether determinism is demanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.problem import LinearSpec
from te_grouped_mlp.op.step.saved import OpsState, Owners, SavedState, Versions
from te_grouped_mlp.op.te import quantizers
from te_grouped_mlp.op.tensors import stacking
from te_grouped_mlp.op.tensors.operands import torch_dtype
from te_grouped_mlp.op.tensors.stacking import Scattered, Stacked

_UNREAD = OpsState(None, (None, None), (None, None))


def read(plan: Plan, fc1: Any, fc2: Any, owners: Owners) -> OpsState:
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
        quantizers.kept(fc2, "backward", 0),
        (
            quantizers.kept(fc1, "forward", 1) if problem.fc1.distributed else None,
            quantizers.kept(fc2, "forward", 1) if problem.fc2.distributed else None,
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


def require_unwritten(state: SavedState, owners: Owners) -> None:
    """Check that the saved weights are what the forward saved.

    The ``data`` of a plain parameter may be another tensor of the same kind: frameworks that shard
    parameters gather them anew before the backward, and autograd follows.

    Args:
        state: Of the call.
        owners: The weight parameters of FC1 and of FC2, as the forward used them.

    Raises:
        RuntimeError: A parameter was written in place, or holds matrices of another kind.
    """
    for label, weights, before, kept in (
        ("FC1", owners[0], state.ops.versions[0], state.w1),
        ("FC2", owners[1], state.ops.versions[1], state.w2),
    ):
        if kept is None:
            continue
        if before and (now := _written(weights)) != before:
            index = next(i for i, count in enumerate(before) if now[i] != count)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {label} weight{index} is at version {now[index]}; expected "
                f"{before[index]}"
            )
        if not kept.format.is_block_scaled and not isinstance(kept.data, Stacked):
            _require_same_kind(label, kept.data, kept.shape, state.plan)


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
