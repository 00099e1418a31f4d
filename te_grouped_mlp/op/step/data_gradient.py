# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The gradients of token tensors: back through FC2 and the activation, and through FC1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_grouped_mlp.op.backends.base import DactEpilogue, DactResult, GemmEpilogue
from te_grouped_mlp.op.backends.checked import CheckedBackend
from te_grouped_mlp.op.layout import Kernel, Output
from te_grouped_mlp.op.step.saved import SavedState
from te_grouped_mlp.op.tensors import memory, weights
from te_grouped_mlp.op.tensors.operands import GroupedOperand, torch_dtype

_NOTHING = DactResult(grad=None, dprob=None, bias_grad=None, activated=None)  # type: ignore[arg-type]


def through_activation(
    owners: Sequence[Any], run: CheckedBackend, state: SavedState, dy: GroupedOperand
) -> DactResult:
    """Return the gradient of FC1's output and what is summed on the way to it.

    Args:
        owners: FC2's weight parameters, as the forward had them.
        run: The device operations of the plan.
        state: Of the call.
        dy: The output gradient; its row copy is read.

    Returns:
        New tensors; every field is None when nothing before the activation needs a gradient, and
        then nothing is launched.
    """
    plan = state.plan
    problem, call = plan.problem, plan.call
    if not call.needs_dact:
        return _NOTHING
    quantizer = state.ops.weight_quantizers[1]
    w2 = weights.for_backward(owners, quantizer, problem.fc2, state.w2, plan)
    assert state.pre_activation is not None
    epilogue = DactEpilogue(
        prob=state.prob,
        want_dprob=Output.DPROB in call.wanted,
        want_bias_grad=Output.DB1 in call.wanted,
        want_column=Output.DW1 in call.wanted,
        want_activated=Output.DW2 in call.wanted and plan.recomputes_activated,
    )
    return run.dact_dgrad(dy, w2, state.pre_activation, epilogue)


def of_input(
    owners: Sequence[Any],
    run: CheckedBackend,
    state: SavedState,
    dh: GroupedOperand,
    buffer: torch.Tensor | None,
) -> torch.Tensor | None:
    """Return the gradient of the input, or None when it is not wanted.

    Args:
        owners: FC1's weight parameters, as the forward had them.
        run: The device operations of the plan.
        state: Of the call.
        dh: The gradient of FC1's output; its row copy is read.
        buffer: The caller's (rows, in features), whose tail is kept; or None for a new tensor,
            whose tail is zero.
    """
    problem, call = state.plan.problem, state.plan.call
    if Output.DX not in call.wanted:
        return None
    quantizer = state.ops.weight_quantizers[0]
    w1 = weights.for_backward(owners, quantizer, problem.fc1, state.w1, state.plan)
    dx = buffer
    if dx is None:
        shape = (call.rows, problem.fc1.in_features)
        dx = memory.empty(shape, torch_dtype(call.dtype), state.splits.sizes.device)
    run.gemm(Kernel.FC1_DGRAD, dh, w1, dx, GemmEpilogue(zero_tail=buffer is None))
    return dx
