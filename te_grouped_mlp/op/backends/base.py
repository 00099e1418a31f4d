# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The interface of a backend: four device operations. What it can run says its `capability`."""

from __future__ import annotations

from typing import Protocol

import torch

from te_grouped_mlp.op.layout import Kernel
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import GroupedOperand, WeightOperand
from te_grouped_mlp.op.tensors.tensor_dataclass import tensor_dataclass


@tensor_dataclass
class Fc1Epilogue:
    """What `fc1_act` does to the accumulator.

    Attributes:
        bias: (G, N1) in the compute dtype, or None.
        prob: (rows,) in the dtype that the caller gave, or None for one.
        want_column: Make the column-quantized copy that FC2's weight gradient reads.
        want_pre_activation: Keep the pre-activation for the backward.
    """

    bias: torch.Tensor | None
    prob: torch.Tensor | None
    want_column: bool
    want_pre_activation: bool


@tensor_dataclass
class Fc1Result:
    """What `fc1_act` returns; all tensors are new and owned by the caller.

    Attributes:
        activated: FC2's input.
        pre_activation: (rows, N1) in the compute dtype, bias included, probability not; rows past
            the valid ones are unwritten. None when not wanted.
    """

    activated: GroupedOperand
    pre_activation: torch.Tensor | None


@tensor_dataclass
class GemmEpilogue:
    """What `gemm` does to the accumulator.

    Attributes:
        bias: (G, N), or None.
        bias_scale: (rows,) factor of the bias, or None for one.
        zero_tail: Write zeros to the rows past the valid ones (the op's own buffers), or leave
            them as they are (a caller's buffer).
    """

    bias: torch.Tensor | None = None
    bias_scale: torch.Tensor | None = None
    zero_tail: bool = True


@tensor_dataclass
class DactEpilogue:
    """What `dact_dgrad` does to the accumulator.

    Attributes:
        prob: (rows,) in the dtype that the caller gave, or None for one.
        want_dprob: Compute the gradient of `prob`.
        want_bias_grad: Compute FC1's bias gradient.
        want_column: Make the column-quantized copy that FC1's weight gradient reads.
        want_activated: Recompute FC2's input (column copy) from the pre-activation.
    """

    prob: torch.Tensor | None
    want_dprob: bool
    want_bias_grad: bool
    want_column: bool
    want_activated: bool = False


@tensor_dataclass
class DactResult:
    """What `dact_dgrad` returns; all tensors are new and owned by the caller.

    Attributes:
        grad: Gradient of the pre-activation, (rows, N1), FC1's output order.
        dprob: fp32 (rows,), zero past the valid rows; or None.
        bias_grad: fp32 (G, N1), summed in a fixed order; or None.
        activated: FC2's input, column copy only; or None.
    """

    grad: GroupedOperand
    dprob: torch.Tensor | None
    bias_grad: torch.Tensor | None
    activated: GroupedOperand | None


class Backend(Protocol):
    """Runs the four operations of a plan. Objects hold no state of a call.

    Operations are called through `checked.CheckedBackend`, which compares with the plan: layout,
    format, shape and copies of the token operands, axis and number of experts of the weights, the
    shape of `out` and of the pre-activation; and the kernel with the operation.
    """

    def fc1_act(
        self, plan: Plan, x: GroupedOperand, w: WeightOperand, epilogue: Fc1Epilogue
    ) -> Fc1Result:
        """Compute ``act(x W1^T + b1) * prob`` and what the backward needs of it."""

    def gemm(
        self,
        plan: Plan,
        kernel: Kernel,
        a: GroupedOperand,
        w: WeightOperand,
        out: torch.Tensor,
        epilogue: GemmEpilogue,
    ) -> None:
        """Write ``a W^T`` (FC2_FORWARD, row copies) or ``a W`` (FC1_DGRAD) into `out`.

        Args:
            plan: The plan of the call.
            kernel: FC2_FORWARD or FC1_DGRAD.
            a: Row copy is read.
            w: ROW axis for FC2_FORWARD, COLUMN axis for FC1_DGRAD.
            out: (rows, N), row-major, the caller's.
            epilogue: Bias and tail.
        """

    def dact_dgrad(
        self,
        plan: Plan,
        dy: GroupedOperand,
        w: WeightOperand,
        pre_activation: torch.Tensor,
        epilogue: DactEpilogue,
    ) -> DactResult:
        """Compute the gradient of FC1's output from ``dy W2`` and the pre-activation."""

    def wgrad(
        self, plan: Plan, kernel: Kernel, x: GroupedOperand, dy: GroupedOperand, target: WgradTarget
    ) -> None:
        """Write or add ``dy_g^T x_g`` for every group (column copies are read)."""
