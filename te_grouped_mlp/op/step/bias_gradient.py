# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Gradients of FC2's bias, and of the scale of that bias, by sums of a fixed order."""

from __future__ import annotations

from types import ModuleType

import torch

from te_grouped_mlp import _C
from te_grouped_mlp.op.layout import Output
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.problem import Call, LinearSpec
from te_grouped_mlp.op.step.saved import SavedState
from te_grouped_mlp.op.tensors import memory
from te_grouped_mlp.op.tensors.capacity import span
from te_grouped_mlp.op.tensors.operands import Splits

_DECIDE_THREADS = 0
_SOURCE_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


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
    spec, call = state.plan.problem.fc2, state.plan.call
    wants_bias = call.wants(Output.DB2)
    if values is None:
        return None, None
    bias_grad = scale_grad = None
    if wants_bias:
        scale = state.prob if spec.scale_bias else None
        bias_grad = column_sums(values, scale, state.splits)
    if state.bias2 is not None:
        scale_grad = row_dots(values, state.bias2, state.splits)
    return bias_grad, scale_grad


def column_sums(dy: torch.Tensor, scale: torch.Tensor | None, splits: Splits) -> torch.Tensor:
    """Return ``sum over the rows of a group of dy[i] (* scale[i])``.

    Args:
        dy: (rows, N) bf16, fp16 or fp32, any strides.
        scale: (rows,), any stride, or None for one.
        splits: Division of the rows.

    Returns:
        fp32 (G, N), new. The order of the sum follows from constants and from the group's own rows,
        so the result does not depend on threads, on other groups or on the buffer's length. Never
        synchronises.
    """
    dy = dy.contiguous()
    scale = None if scale is None else scale.float().contiguous()
    if dy.is_cuda:
        return _gpu().column_sums(dy, scale, splits.ends)
    groups = splits.sizes.numel()
    out = memory.empty((groups, dy.shape[1]), torch.float32, dy.device)
    head = (span(dy), _SOURCE_DTYPES[dy.dtype], *dy.shape, dy.stride(0))
    tail = (span(splits.sizes), groups, span(out), _DECIDE_THREADS)
    if scale is None:
        _C.column_sums(*head, *tail)
    else:
        _C.weighted_column_sums(*head, span(scale), *tail)
    return out


def row_dots(dy: torch.Tensor, bias: torch.Tensor, splits: Splits) -> torch.Tensor:
    """Return ``sum_j dy[i, j] * bias[group of i, j]``, the gradient of the bias scale.

    Args:
        dy: (rows, N) bf16, fp16 or fp32, any strides.
        bias: (G, N).
        splits: Division of the rows.

    Returns:
        fp32 (rows,), new; zero past the live rows. The order of each row's sum is fixed. Never
        synchronises.
    """
    dy, table = dy.contiguous(), bias.float().contiguous()
    if dy.is_cuda:
        return _gpu().row_dots(dy, table, splits.ends)
    out = torch.zeros(dy.shape[0], dtype=torch.float32, device=dy.device)
    _C.row_dots(
        span(dy), _SOURCE_DTYPES[dy.dtype], *dy.shape, dy.stride(0), span(table),
        span(splits.sizes), splits.sizes.numel(), span(out), _DECIDE_THREADS,
    )  # fmt: skip
    return out


def _gpu() -> ModuleType:
    """Return the same sums for CUDA tensors; they need Triton, which a GPU torch brings."""
    from te_grouped_mlp.op.backends.cutedsl import reductions

    return reductions
