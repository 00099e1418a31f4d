# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The native backend: four operations as grouped kernels over packed rows, in bf16.

Block-scaled operands are read as the bf16 values that their bytes stand for, which is exact: the
products are those of a block-scaled kernel. FC2's input and the gradient of FC1's output leave
their kernels rounded to odd and are quantized by a pass of their own, to the bytes that an epilogue
would make of its registers.

Rounding points: products accumulate in fp32; FC1's activation is evaluated on the unrounded values
and rounded once with the probability; the backward reads the pre-activation as stored, in bf16; the
probability's gradient is summed from unrounded fp32 products; FC1's bias gradient is summed in fp32
from the gradient as stored, in bf16.

The pre-activation of a gated activation and its gradient are in pair order: column 2j belongs to
the gate, column 2j + 1 to the linear part. Only this backend reads them.
"""

from __future__ import annotations

import torch

from te_grouped_mlp.op.backends.base import (
    DactEpilogue,
    DactResult,
    Fc1Epilogue,
    Fc1Result,
    GemmEpilogue,
)
from te_grouped_mlp.op.backends.cutedsl import arguments, keys
from te_grouped_mlp.op.backends.cutedsl.compile import target_arch
from te_grouped_mlp.op.backends.cutedsl.config import Op
from te_grouped_mlp.op.backends.cutedsl.launch import (
    launcher_of,
    prepare,
    reduce_row_partials,
    zero_tail,
)
from te_grouped_mlp.op.formats import DType
from te_grouped_mlp.op.kernels import group_reductions
from te_grouped_mlp.op.layout import Kernel, Output
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors import dequantized_tokens, memory
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import Axis, GroupedOperand, Splits, WeightOperand

_DTYPES = {torch.bfloat16: DType.BFLOAT16, torch.float32: DType.FLOAT32}
_GEMMS = {Kernel.FC2_FORWARD: Op.FC2_FORWARD, Kernel.FC1_DGRAD: Op.FC1_DGRAD}
_WGRADS = {Kernel.FC1_WGRAD: Op.FC1_WGRAD, Kernel.FC2_WGRAD: Op.FC2_WGRAD}


class CuteDslBackend:
    """See `backends.base.Backend` for the contract of every method."""

    def fc1_act(
        self, plan: Plan, x: GroupedOperand, w: WeightOperand, epilogue: Fc1Epilogue
    ) -> Fc1Result:
        """Compute ``act(x W1^T + b1) * prob``."""
        spec, rows = plan.problem.activation, plan.layout.buffer_rows
        a = arguments.rows_of(x, Axis.ROW, "x")
        b = arguments.experts_of(w)
        activated = memory.empty((rows, w.shape[0] // spec.expansion), torch.bfloat16, a.device)
        pre = None
        if epilogue.want_pre_activation:
            pre = memory.empty((rows, w.shape[0]), torch.bfloat16, a.device)
        if rows:
            self._launch_fc1_act(plan, a, b, x.splits, epilogue, pre, activated)
        operand = _operand(
            plan, x.splits, activated,
            row=True, column=epilogue.want_column, keep_quantized_for_backward=True,
        )  # fmt: skip
        return Fc1Result(operand, pre)

    def _launch_fc1_act(
        self,
        plan: Plan,
        a: torch.Tensor,
        b: torch.Tensor,
        splits: Splits,
        epilogue: Fc1Epilogue,
        pre: torch.Tensor | None,
        activated: torch.Tensor,
    ) -> None:
        spec = plan.problem.activation
        prob, bias = arguments.per_row(epilogue.prob), epilogue.bias
        if plan.call.needs_backward:
            prepare(plan.problem, _dtype(prob), b.reversed_experts)
        if bias is not None:
            bias = arguments.in_pairs(bias, spec.interleave) if spec.is_gated else bias.float()
        launch = launcher_of(
            plan.problem, a.device.index, keys.fc1_act, target_arch(),
            bias is not None, _dtype(prob), pre is not None, b.reversed_experts,
        )  # fmt: skip
        launch(
            a, b.values, pre, None, arguments.int32_offsets(splits),
            activated=activated, bias=bias, prob=prob,
        )  # fmt: skip

    def gemm(
        self,
        plan: Plan,
        kernel: Kernel,
        a: GroupedOperand,
        w: WeightOperand,
        out: torch.Tensor,
        epilogue: GemmEpilogue,
    ) -> None:
        """Write ``a W^T`` (FC2_FORWARD) or ``a W`` (FC1_DGRAD) into `out`."""
        op = _GEMMS[kernel]
        arguments.require_bf16("out", out)
        left = arguments.rows_of(a, Axis.ROW, "a")
        right = arguments.experts_of(w)
        if not plan.layout.buffer_rows:
            return

        bias = None if epilogue.bias is None else epilogue.bias.float()
        scale = arguments.per_row(epilogue.bias_scale) if bias is not None else None
        launch = launcher_of(
            plan.problem, left.device.index, keys.gemm, target_arch(),
            op, bias is not None, _dtype(scale), right.reversed_experts,
        )  # fmt: skip
        target = arguments.addressable(out)
        launch(
            left, right.values, target, None, arguments.int32_offsets(a.splits),
            bias=bias, bias_scale=scale,
        )  # fmt: skip
        if epilogue.zero_tail and not plan.call.rows_are_full:
            zero_tail(target, a.splits.group_end_offsets)
        if target is not out:
            out.copy_(target)

    def dact_dgrad(
        self,
        plan: Plan,
        dy: GroupedOperand,
        w: WeightOperand,
        pre_activation: torch.Tensor,
        epilogue: DactEpilogue,
    ) -> DactResult:
        """Compute the gradient of FC1's output from ``dy W2`` and the pre-activation."""
        spec, rows, n = plan.problem.activation, plan.layout.buffer_rows, w.shape[1]
        arguments.require_bf16("pre_activation", pre_activation)
        if epilogue.want_activated and spec.is_gated:
            raise ValueError(f"want_activated is set; {spec.kind.value} does not recompute it")
        a = arguments.rows_of(dy, Axis.ROW, "dy")
        b = arguments.experts_of(w)
        prob = arguments.per_row(epilogue.prob)

        grad = memory.empty((rows, n * spec.expansion), torch.bfloat16, a.device)
        activated = partials = None
        if epilogue.want_activated:
            activated = memory.empty((rows, n), torch.bfloat16, a.device)
        launch = launcher_of(
            plan.problem, a.device.index, keys.dact_dgrad, target_arch(),
            _dtype(prob), epilogue.want_dprob, activated is not None, b.reversed_experts,
        )  # fmt: skip
        if epilogue.want_dprob:
            partials = memory.empty((-(-n // launch.tile.n), rows), torch.float32, a.device).t()
        if rows:
            launch(
                a, b.values, grad, arguments.addressable(pre_activation),
                arguments.int32_offsets(dy.splits),
                prob=prob, row_partials=partials, activated=activated,
            )  # fmt: skip
        return _finished(plan, dy.splits, grad, partials, activated, epilogue)

    def wgrad(
        self, plan: Plan, kernel: Kernel, x: GroupedOperand, dy: GroupedOperand, target: WgradTarget
    ) -> None:
        """Write or add ``dy_g^T x_g`` for every expert."""
        op, shape = _WGRADS[kernel], (dy.shape[1], x.shape[1])
        experts, members = arguments.target_of(target, plan.layout.num_groups, shape)
        d = experts.values
        left = arguments.rows_of(dy, Axis.COLUMN, "dy")
        right = arguments.rows_of(x, Axis.COLUMN, "x")
        out, adds = _dtype(d), arguments.kernel_adds(target, members)
        assert out is not None
        if plan.layout.buffer_rows:
            launch = launcher_of(
                plan.problem, left.device.index, keys.wgrad, target_arch(),
                op, out, adds, experts.reversed_experts,
            )  # fmt: skip
            launch(left.t(), right.t(), d, d if adds else None, arguments.int32_offsets(dy.splits))
        elif not adds:
            d.zero_()
        if members:
            arguments.deliver(d, members, target.accumulate and not adds)


def _finished(
    plan: Plan,
    splits: Splits,
    grad: torch.Tensor,
    partials: torch.Tensor | None,
    activated_values: torch.Tensor | None,
    epilogue: DactEpilogue,
) -> DactResult:
    """Reduce the row partials of `dact_dgrad`, and make its operands."""
    problem = plan.problem
    spec = problem.activation
    dprob = bias_grad = None
    if partials is not None:
        rows = plan.layout.buffer_rows
        dprob = (
            reduce_row_partials(partials, splits.group_end_offsets)
            if rows
            else partials.new_zeros(0)
        )
    if epilogue.want_bias_grad:
        bias_grad = group_reductions.column_sums(
            grad, splits.sizes, group_end_offsets=splits.group_end_offsets
        )
        if spec.is_gated:
            bias_grad = arguments.out_of_pairs(bias_grad, spec.interleave)
    activated = None
    if activated_values is not None:
        activated = _operand(
            plan, splits, activated_values,
            row=False, column=True, keep_quantized_for_backward=problem.fc2.delay_wgrad,
        )  # fmt: skip
    result = _operand(
        plan, splits, grad,
        row=Output.DX in plan.call.wanted, column=epilogue.want_column,
        keep_quantized_for_backward=problem.fc1.delay_wgrad, gate_linear_interleaved=spec.is_gated,
    )  # fmt: skip
    return DactResult(result, dprob, bias_grad, activated)


def _operand(plan: Plan, splits: Splits, values: torch.Tensor, **usages: bool) -> GroupedOperand:
    """Make what a kernel stored an operand: as it is, or quantized (see `dequantized_tokens`)."""
    if plan.reads_values:
        return dequantized_tokens.operand(
            values, plan, splits, nan_in_scale=True, consumes=True, **usages
        )
    shape = (values.shape[0], values.shape[1])
    return GroupedOperand(plan.call.format, shape, plan.layout, splits, plain=values)


def _dtype(tensor: torch.Tensor | None) -> DType | None:
    if tensor is None:
        return None
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"dtype is {tensor.dtype}; allowed: torch.bfloat16, torch.float32")
    return dtype
