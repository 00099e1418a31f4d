# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of FC2's bias, and of the scale of that bias: which are wanted, and from what."""

from __future__ import annotations

import torch

from te_grouped_mlp.op.kernels import group_reductions
from te_grouped_mlp.op.layout import Output
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.problem import Call, LinearSpec
from te_grouped_mlp.op.step.saved import SavedState


def wanted(fc2: LinearSpec, call: Call) -> tuple[bool, bool]:
    """Return whether FC2's bias and the scale of that bias want gradients."""
    return call.wants(Output.DB2), fc2.has_bias and fc2.scale_bias and call.wants(Output.DPROB)


def to_save(bias2: torch.Tensor | None, plan: Plan) -> torch.Tensor | None:
    """Return what the backward reads of FC2's bias: a copy, or None if its scale has no gradient.

    Args:
        bias2: (G, N), new, or a view of one parameter for all experts.
        plan: Of the call.
    """
    spec = plan.problem.fc2
    if bias2 is None or not wanted(spec, plan.call)[1]:
        return None
    return bias2.clone() if spec.single_grouped_bias else bias2


def of_fc2(
    state: SavedState, values: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradient of FC2's bias, and of the scale of that bias.

    Args:
        state: Of the call.
        values: Of the output gradient, (rows, FC2 out features); None if neither is wanted.

    Returns:
        fp32 (G, N) and fp32 (rows,); each None where it is not wanted.
    """
    if values is None:
        return None, None
    plan, sizes, group_end_offsets = state.plan, state.splits.sizes, state.splits.group_end_offsets
    bias_grad = scale_grad = None
    if plan.call.wants(Output.DB2):
        bias_grad = group_reductions.column_sums(
            values,
            sizes,
            weights=state.prob if plan.problem.fc2.scale_bias else None,
            group_end_offsets=group_end_offsets,
        )
    if state.bias2 is not None:
        scale_grad = group_reductions.row_dots(
            values, state.bias2, sizes, group_end_offsets=group_end_offsets
        )
    return bias_grad, scale_grad
