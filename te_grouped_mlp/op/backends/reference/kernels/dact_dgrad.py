# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""FC2's data gradient through the activation, with the probability's and FC1's bias gradients.

Rounding points: the accumulator G to fp32; the pre-activation is read as stored; gradients are
evaluated in float64 and rounded to fp32, then quantized once. The row sums of the probability
gradient are of unrounded products in float64, the column sums of the bias gradient of the fp32
values; both leave in fp32.
"""

from __future__ import annotations

import torch

from te_grouped_mlp.op import activations
from te_grouped_mlp.op.backends.base import DactEpilogue, DactResult
from te_grouped_mlp.op.backends.reference import arguments
from te_grouped_mlp.op.kernels import group_reductions
from te_grouped_mlp.op.layout import Kernel
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors.operands import Axis, GroupedOperand, WeightOperand


def dact_dgrad(
    plan: Plan,
    dy: GroupedOperand,
    w: WeightOperand,
    pre_activation: torch.Tensor,
    epilogue: DactEpilogue,
) -> DactResult:
    """Compute the operation; see `backends.base.Backend.dact_dgrad`. CPU tensors only."""
    spec, layout, prob = plan.problem.activation, plan.layout, epilogue.prob
    cols = pre_activation.shape[1]
    grad = arguments.new_operand(plan, dy.splits, cols, row=True, column=epilogue.want_column)
    activated = dprob = bias_grad = None
    if epilogue.want_activated:
        activated = arguments.new_operand(plan, dy.splits, w.shape[1], row=False, column=True)
    if epilogue.want_dprob:
        dprob = torch.zeros(layout.buffer_rows, dtype=torch.float32)
    if epilogue.want_bias_grad:
        bias_grad = torch.zeros(layout.num_groups, cols, dtype=torch.float32)

    extent = layout.extent_written(plan.launch(Kernel.DACT_DGRAD))
    for segment in arguments.segments(layout, extent, dy.splits, dy.format):
        if not segment.rows:
            continue
        a = arguments.read(dy, Axis.ROW, segment, "dy")
        b = arguments.read_weight(w, Axis.COLUMN, segment.group, "w")
        g = (a @ b).float().double()
        x = pre_activation[segment.span].double()
        value, derivatives = activations.evaluate(torch, spec, x)
        if dprob is not None:
            dprob[segment.span] = (g * value).sum(1)
        if prob is not None:
            factor = prob[segment.span, None].double()
            g, value = g * factor, value * factor
        parts = tuple(g * part for part in derivatives(torch.mul))
        values = activations.join(torch, spec, parts).float()
        arguments.write(grad, values, segment)
        if bias_grad is not None:
            bias_grad[segment.group] = group_reductions.column_sums(values)[0]
        if activated is not None:
            arguments.write(activated, value.float(), segment)
    return DactResult(grad, dprob, bias_grad, activated)
