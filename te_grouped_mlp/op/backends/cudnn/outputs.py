# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What surrounds a launch: operands of its outputs, the rows that it leaves."""

from __future__ import annotations

import torch

from te_grouped_mlp.op.backends.base import (
    DactEpilogue,
    DactResult,
    Fc1Epilogue,
    Fc1Result,
    GemmEpilogue,
)
from te_grouped_mlp.op.backends.cudnn import alignment
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors import memory
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    GroupedOperand,
    QuantizedCopy,
    Splits,
    WeightOperand,
)

_PROB_DTYPES = (torch.float32, torch.bfloat16)


def operand(
    plan: Plan, splits: Splits, row: QuantizedCopy | None, column: QuantizedCopy | None
) -> GroupedOperand:
    """Return the operand of one or two copies of equal shape."""
    copy = column if row is None else row
    assert copy is not None
    rows, cols = copy.data.shape
    return GroupedOperand(plan.call.format, (rows, cols), plan.layout, splits, row, column)


def no_rows_fc1(
    plan: Plan, splits: Splits, w: WeightOperand, epilogue: Fc1Epilogue, device: torch.device
) -> Fc1Result:
    """Return what `fc1_act` gives for a buffer without rows."""
    width = w.shape[0] // plan.problem.activation.expansion
    row = _no_rows(width, Axis.ROW, device)
    column = _no_rows(width, Axis.COLUMN, device) if epilogue.want_column else None
    pre = None
    if epilogue.want_pre_activation:
        pre = memory.empty((0, w.shape[0]), torch.bfloat16, device)
    return Fc1Result(operand(plan, splits, row, column), pre)


def no_rows_dact(
    plan: Plan, splits: Splits, w: WeightOperand, epilogue: DactEpilogue, device: torch.device
) -> DactResult:
    """Return what `dact_dgrad` gives for a buffer without rows."""
    width = w.shape[1] * plan.problem.activation.expansion
    row = _no_rows(width, Axis.ROW, device)
    column = _no_rows(width, Axis.COLUMN, device) if epilogue.want_column else None
    activated = bias_grad = dprob = None
    if epilogue.want_activated:
        activated = operand(plan, splits, None, _no_rows(w.shape[1], Axis.COLUMN, device))
    if epilogue.want_bias_grad:
        bias_grad = torch.zeros(w.num_groups, width, dtype=torch.float32, device=device)
    if epilogue.want_dprob:
        dprob = torch.zeros(0, dtype=torch.float32, device=device)
    return DactResult(operand(plan, splits, row, column), dprob, bias_grad, activated)


def _no_rows(width: int, axis: Axis, device: torch.device) -> QuantizedCopy:
    data = memory.empty((0, width), torch.uint8, device)
    return QuantizedCopy(data, memory.empty((0,), torch.uint8, device), axis, swizzled=True)


def probability(values: torch.Tensor | None) -> torch.Tensor | None:
    """Return a value per row as the forward kernels read it: fp32 and bf16 stay what they are."""
    if values is None:
        return None
    return alignment.readable(values if values.dtype in _PROB_DTYPES else values.float())


def add_bias(out: torch.Tensor, epilogue: GemmEpilogue) -> None:
    """Add the one expert's bias to a dense product, in the dtype of `out`."""
    if epilogue.bias is None:
        return
    added = epilogue.bias.to(out.dtype)
    if epilogue.bias_scale is not None:
        added = added * epilogue.bias_scale[:, None]
    out += added


def zero_tail(out: torch.Tensor, splits: Splits) -> None:
    """Write zeros to the rows past the valid ones; reads their number where it lies."""
    if out.device.type == "cpu":
        out[int(splits.group_end_offsets[-1]) :] = 0
        return
    # Imported where it is used: Triton is not there without a GPU.
    from te_grouped_mlp.op.backends.cudnn.kernels.zero_tail import zero_tail as launch

    launch(out, splits.group_end_offsets)
