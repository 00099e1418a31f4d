# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""FC1's grouped product with bias, activation, probability and requantization.

Rounding points: the accumulator to fp32; the bias is added in fp32; the pre-activation is stored in
the compute dtype, but the activation is evaluated on the unrounded fp32 values; activation times
probability to fp32; then one quantization (or one rounding to the compute dtype).
"""

from __future__ import annotations

import torch

from te_grouped_mlp.op import activations
from te_grouped_mlp.op.backends.base import Fc1Epilogue, Fc1Result
from te_grouped_mlp.op.backends.reference import arguments
from te_grouped_mlp.op.layout import Kernel
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors import memory
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    GroupedOperand,
    WeightOperand,
    torch_dtype,
)


def fc1_act(plan: Plan, x: GroupedOperand, w: WeightOperand, epilogue: Fc1Epilogue) -> Fc1Result:
    """Compute the operation; see `backends.base.Backend.fc1_act`. CPU tensors only."""
    spec, layout = plan.problem.activation, plan.layout
    features = w.shape[0] // spec.expansion
    activated = arguments.new_operand(
        plan, x.splits, features, row=True, column=epilogue.want_column
    )
    pre_activation = None
    if epilogue.want_pre_activation:
        dtype = torch_dtype(plan.call.dtype)
        pre_activation = memory.empty((layout.buffer_rows, w.shape[0]), dtype, "cpu")
    extent = layout.extent_written(plan.launch(Kernel.FC1_ACT))
    for segment in arguments.segments(layout, extent, x.splits, x.format):
        if not segment.rows:
            continue
        a = arguments.read(x, Axis.ROW, segment, "x")
        b = arguments.read_weight(w, Axis.ROW, segment.group, "w")
        values = (a @ b.T).float()
        if epilogue.bias is not None:
            values += epilogue.bias[segment.group].float()
        if pre_activation is not None:
            pre_activation[segment.span] = values
        result = activations.evaluate(torch, spec, values.double()).value
        if epilogue.prob is not None:
            result = result * epilogue.prob[segment.span, None].double()
        arguments.write(activated, result.float(), segment)
    return Fc1Result(activated, pre_activation)
