# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A backend whose every device call first compares the operands with the plan."""

from __future__ import annotations

import functools
import math

import torch

from te_grouped_mlp.op.backends.base import (
    Backend,
    DactEpilogue,
    DactResult,
    Fc1Epilogue,
    Fc1Result,
    GemmEpilogue,
)
from te_grouped_mlp.op.formats import MXFP8
from te_grouped_mlp.op.layout import Kernel, LayoutMismatchError
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.step import split_guard
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    DequantizedCopy,
    GroupedOperand,
    QuantizedCopy,
    WeightOperand,
)
from te_grouped_mlp.op.tensors.scale_layout import column_scale_shape, row_scale_shape


class CheckedBackend:
    """Runs a plan on its backend; raises LayoutMismatchError before a launch that would misread.

    A kernel that an operation does not have is a ValueError. What a caller gets of splits that did
    not fit is NaN (`split_guard`).
    """

    def __init__(self, backend: Backend, plan: Plan) -> None:
        self._backend = backend
        self._plan = plan

    def fc1_act(self, x: GroupedOperand, w: WeightOperand, epilogue: Fc1Epilogue) -> Fc1Result:
        """Run `Backend.fc1_act`."""
        self._rows("x", x, Axis.ROW, w.shape[1])
        self._weights("w", w, Axis.ROW)
        return self._backend.fc1_act(self._plan, x, w, epilogue)

    def gemm(
        self,
        kernel: Kernel,
        a: GroupedOperand,
        w: WeightOperand,
        out: torch.Tensor,
        epilogue: GemmEpilogue,
    ) -> None:
        """Run `Backend.gemm`."""
        _require_kernel(kernel, Kernel.FC2_FORWARD, Kernel.FC1_DGRAD)
        forward = kernel is Kernel.FC2_FORWARD
        wide, deep = w.shape if forward else w.shape[::-1]
        self._rows("a", a, Axis.ROW, deep)
        self._weights("w", w, Axis.ROW if forward else Axis.COLUMN)
        self._shape("out", out, wide)
        self._backend.gemm(self._plan, kernel, a, w, out, epilogue)
        split_guard.poison(a.splits.fault, out)

    def dact_dgrad(
        self,
        dy: GroupedOperand,
        w: WeightOperand,
        pre_activation: torch.Tensor,
        epilogue: DactEpilogue,
    ) -> DactResult:
        """Run `Backend.dact_dgrad`."""
        self._rows("dy", dy, Axis.ROW, w.shape[0])
        self._weights("w", w, Axis.COLUMN)
        wide = w.shape[1] * self._plan.problem.activation.expansion
        self._shape("pre_activation", pre_activation, wide)
        result = self._backend.dact_dgrad(self._plan, dy, w, pre_activation, epilogue)
        split_guard.poison(dy.splits.fault, result.dprob, result.bias_grad)
        return result

    def wgrad(
        self, kernel: Kernel, x: GroupedOperand, dy: GroupedOperand, target: WgradTarget
    ) -> None:
        """Run `Backend.wgrad`."""
        _require_kernel(kernel, Kernel.FC1_WGRAD, Kernel.FC2_WGRAD)
        self._rows("x", x, Axis.COLUMN, x.shape[1])
        self._rows("dy", dy, Axis.COLUMN, dy.shape[1])
        self._backend.wgrad(self._plan, kernel, x, dy, target)
        if dy.splits.fault is not None:
            split_guard.poison(dy.splits.fault, *target.pieces())

    def _rows(self, name: str, operand: GroupedOperand, axis: Axis, features: int) -> None:
        layout, fmt = self._plan.layout, self._plan.call.format
        if operand.layout is not layout:
            layout.require(operand.layout, name)
        if operand.shape != (layout.buffer_rows, features):
            raise LayoutMismatchError(
                f"{name} has shape {operand.shape}; allowed: {(layout.buffer_rows, features)}"
            )
        if operand.format is not fmt and operand.format != fmt:
            raise LayoutMismatchError(f"{name} is {operand.format.name}; allowed: {fmt.name}")
        present = operand.row if axis is Axis.ROW else operand.column
        if not operand.format.is_block_scaled:
            present = operand.plain
        if present is None:
            raise LayoutMismatchError(f"{name} lacks its {axis.value} copy, which is read here")
        _require_elements(name, present, operand.shape)

    def _weights(self, name: str, weight: WeightOperand, axis: Axis) -> None:
        if weight.axis is not axis and weight.format.is_block_scaled:
            raise LayoutMismatchError(
                f"{name} is quantized along {weight.axis.value}; allowed: {axis.value}"
            )
        groups = self._plan.problem.num_groups
        if len(weight.data) != groups:
            raise LayoutMismatchError(f"{name} has {len(weight.data)} experts; allowed: {groups}")

    def _shape(self, name: str, tensor: torch.Tensor, features: int) -> None:
        allowed = self._plan.layout.buffer_rows, features
        if tensor.shape != allowed:
            raise LayoutMismatchError(f"{name} has shape {tuple(tensor.shape)}; allowed: {allowed}")


def _require_kernel(kernel: Kernel, *allowed: Kernel) -> None:
    if kernel not in allowed:
        words = ", ".join(other.value for other in allowed)
        raise ValueError(f"kernel is {kernel.value}; allowed: {words}")


@functools.lru_cache(maxsize=256)
def _scales(row: bool, rows: int, cols: int) -> int:
    return math.prod((row_scale_shape if row else column_scale_shape)(rows, cols, MXFP8))


def _require_elements(
    name: str, copy: QuantizedCopy | DequantizedCopy | torch.Tensor, shape: tuple[int, int]
) -> None:
    """Check that a copy has the shape of its operand, and a scale for each of its blocks."""
    if isinstance(copy, QuantizedCopy):
        count = _scales(copy.axis is Axis.ROW, *shape)
        if copy.scale.numel() < count:
            raise LayoutMismatchError(
                f"{name} has {copy.scale.numel()} {copy.axis.value} scales; allowed: {count}"
            )
        data = copy.data
    else:
        data = copy.values if isinstance(copy, DequantizedCopy) else copy
    if data.shape != shape:
        raise LayoutMismatchError(
            f"{name} has elements of shape {tuple(data.shape)}; allowed: {shape}"
        )
