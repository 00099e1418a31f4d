# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The Blackwell backend: MXFP8 on the grouped-GEMM kernels of the cuDNN frontend.

With PACKED rows every operation is one grouped launch, which ends at the last valid row. With
BUFFER rows (one expert that fills its buffer) the two launches through the activation compute every
row, and the other products are Transformer Engine's dense one.

Rounding points: products accumulate in fp32; the pre-activation is kept in bf16, but the forward's
activation is evaluated on the unrounded values; gradients are quantized once, from fp32. The
probability's gradient leaves in fp32, FC1's bias gradient in bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from te_grouped_mlp.op.activations import wrappers
from te_grouped_mlp.op.backends.base import (
    DactEpilogue,
    DactResult,
    Fc1Epilogue,
    Fc1Result,
    GemmEpilogue,
)
from te_grouped_mlp.op.backends.cudnn import (
    alignment,
    arguments,
    outputs,
    streams,
    te_calls,
    views,
)
from te_grouped_mlp.op.backends.cudnn.launch import WrapperLaunch
from te_grouped_mlp.op.layout import Kernel
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    GroupedOperand,
    QuantizedCopy,
    Splits,
    WeightOperand,
)

_WGRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class CudnnBackend:
    """See `backends.base.Backend` for the contract of every method."""

    def fc1_act(
        self, plan: Plan, x: GroupedOperand, w: WeightOperand, epilogue: Fc1Epilogue
    ) -> Fc1Result:
        """Compute ``act(x W1^T + b1) * prob``."""
        spec, rows = plan.problem.activation, plan.layout.buffer_rows
        tokens = _row(x, "x")
        device = tokens.data.device
        if not rows:
            return outputs.no_rows_fc1(plan, x.splits, w, epilogue, device)

        launch = WrapperLaunch(plan, wrappers(spec.is_gated)[0], device)
        a = views.tokens("x", tokens, x.shape, launch.group_end_offsets(x.splits))
        b = views.weights(w)
        bias = _bias(epilogue.bias)
        prob = outputs.probability(epilogue.prob)
        if spec.is_gated:
            keywords = arguments.glu(launch.shared, a, b, spec, bias=bias, prob=prob)
        else:
            # The unary kernels multiply by a probability whatever happens.
            prob = launch.ones(rows) if prob is None else prob
            keywords = arguments.srelu(launch.shared, a, b, spec, bias=bias, prob=prob)

        out = launch.run(keywords, keep=b)
        row = views.quantized_copy(out["d_tensor"], out["sfd_row_tensor"], Axis.ROW)
        column = None
        if epilogue.want_column:
            column = views.quantized_copy(out["d_col_tensor"], out["sfd_col_tensor"], Axis.COLUMN)
        pre = out["c_tensor"].squeeze(-1) if epilogue.want_pre_activation else None
        return Fc1Result(outputs.operand(plan, x.splits, row, column), pre)

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
        forward, rows = kernel is Kernel.FC2_FORWARD, plan.layout.buffer_rows
        if not rows:
            return
        target = alignment.writable(out)
        if plan.layout.use_dense_single_group:
            product = te_calls.dense_forward if forward else te_calls.dense_dgrad
            product(_row(a, "a"), w, target)
            outputs.add_bias(target, epilogue)
        else:
            launch = WrapperLaunch(plan, "quant", out.device)
            scale = None if epilogue.bias is None else outputs.probability(epilogue.bias_scale)
            tokens = views.tokens("a", _row(a, "a"), a.shape, launch.group_end_offsets(a.splits))
            b = views.weights(w)
            keywords = arguments.quant(
                launch.shared,
                tokens,
                b,
                target,
                bias=_bias(epilogue.bias),
                bias_scale=scale,
            )
            launch.run(keywords, keep=b)
        if target is not out:
            out.copy_(target)
        if epilogue.zero_tail and not plan.call.rows_are_full:
            outputs.zero_tail(out, a.splits)

    def dact_dgrad(
        self,
        plan: Plan,
        dy: GroupedOperand,
        w: WeightOperand,
        pre_activation: torch.Tensor,
        epilogue: DactEpilogue,
    ) -> DactResult:
        """Compute the gradient of FC1's output from ``dy W2`` and the pre-activation."""
        spec, rows = plan.problem.activation, plan.layout.buffer_rows
        if pre_activation.dtype is not torch.bfloat16:
            raise ValueError(f"pre_activation is {pre_activation.dtype}; allowed: torch.bfloat16")
        if epilogue.want_activated and spec.is_gated:
            raise ValueError(f"want_activated is set; {spec.kind.value} does not recompute it")
        tokens = _row(dy, "dy")
        device = tokens.data.device
        if not rows:
            return outputs.no_rows_dact(plan, dy.splits, w, epilogue, device)

        launch = WrapperLaunch(plan, wrappers(spec.is_gated)[1], device)
        prob = None if epilogue.prob is None else alignment.readable(epilogue.prob.float())
        dprob = None
        if epilogue.want_dprob or not spec.is_gated:
            # The kernel adds to what it finds, and leaves the rows past the valid ones.
            dprob = torch.zeros(rows, dtype=torch.float32, device=device)
        if not spec.is_gated and prob is None:
            prob = launch.ones(rows)
        b = views.weights(w)
        build = arguments.dglu if spec.is_gated else arguments.dsrelu
        keywords = build(
            launch.shared,
            views.tokens("dy", tokens, dy.shape, launch.group_end_offsets(dy.splits)),
            b,
            spec,
            arguments.Derivative(
                pre_activation=alignment.readable(pre_activation),
                prob=prob,
                dprob=dprob,
                want_bias_grad=epilogue.want_bias_grad,
                deterministic=_keeps_order(plan),
            ),
        )

        out = launch.run(keywords, keep=b)
        return _dact_result(plan, dy.splits, epilogue, out, dprob)

    def wgrad(
        self, plan: Plan, kernel: Kernel, x: GroupedOperand, dy: GroupedOperand, target: WgradTarget
    ) -> None:
        """Write or add ``dy_g^T x_g`` for every expert."""
        members = target.members()
        if len(members) != plan.layout.num_groups:
            raise ValueError(
                f"target has {len(members)} members; the plan has {plan.layout.num_groups} groups"
            )
        for member in members:
            if tuple(member.shape) != (shape := (dy.shape[1], x.shape[1])):
                raise ValueError(f"target has shape {tuple(member.shape)}; allowed: {shape}")
            if member.dtype not in _WGRAD_DTYPES or member.dtype is not members[0].dtype:
                allowed = ", ".join(str(dtype) for dtype in _WGRAD_DTYPES)
                raise ValueError(f"target is {member.dtype}; allowed: one of {allowed} for all")
        if not plan.layout.buffer_rows:
            for member in members if not target.accumulate else ():
                member.zero_()
            return
        written = [alignment.writable(member) for member in members]
        if plan.layout.use_dense_single_group:
            te_calls.dense_wgrad(
                _column(x, "x"), _column(dy, "dy"), written[0], accumulate=target.accumulate
            )
        else:
            _grouped_wgrad(plan, kernel, x, dy, target, written)
        for member, result in zip(members, written, strict=True):
            if result is not member:
                member.copy_(result)


def _grouped_wgrad(
    plan: Plan,
    kernel: Kernel,
    x: GroupedOperand,
    dy: GroupedOperand,
    target: WgradTarget,
    written: list[torch.Tensor],
) -> None:
    device = written[0].device
    launch = WrapperLaunch(plan, "wgrad", device)
    group_end_offsets = launch.group_end_offsets(dy.splits)
    stacked = None
    # A wrapper without a workspace of ours builds a kernel for every address of a stacked target.
    if isinstance(target.out, torch.Tensor) and "descriptor_workspace" in launch.shared.takes:
        stacked = target.out if alignment.readable(target.out) is target.out else None
    mode = "discrete" if stacked is None else "dense"
    launch.run(
        arguments.wgrad(
            launch.shared,
            _column(dy, "dy"),
            _column(x, "x"),
            group_end_offsets,
            te_calls.addresses(written, device) if stacked is None else stacked,
            dtype=written[0].dtype,
            accumulate=target.accumulate,
            workspace=streams.wgrad_workspace(
                kernel, plan.layout.num_groups, mode, device, launch.at
            ),
        )
    )


def _dact_result(
    plan: Plan,
    splits: Splits,
    epilogue: DactEpilogue,
    out: Mapping[str, Any],
    dprob: torch.Tensor | None,
) -> DactResult:
    row = views.quantized_copy(out["d_row_tensor"], out["sfd_row_tensor"], Axis.ROW)
    column = activated = bias_grad = None
    if epilogue.want_column:
        column = views.quantized_copy(out["d_col_tensor"], out["sfd_col_tensor"], Axis.COLUMN)
    if epilogue.want_activated:
        activated_copy = views.quantized_copy(
            out["d_srelu_tensor"], out["sfd_col_d_srelu_tensor"], Axis.COLUMN
        )
        activated = outputs.operand(plan, splits, None, activated_copy)
    if epilogue.want_bias_grad:
        bias_grad = out["dbias_tensor"].squeeze(-1).float()
    return DactResult(
        outputs.operand(plan, splits, row, column),
        dprob if epilogue.want_dprob else None,
        bias_grad,
        activated,
    )


def _keeps_order(plan: Plan) -> bool:
    """Whether the plan promises the order of the sums of `dact_dgrad`."""
    planned = plan.launch(Kernel.DACT_DGRAD)
    return plan.call.deterministic and planned.outputs == planned.deterministic != frozenset()


def _row(operand: GroupedOperand, name: str) -> QuantizedCopy:
    if not isinstance(operand.row, QuantizedCopy):
        raise ValueError(f"{name} has no row copy, which the kernel reads")
    return alignment.readable_scales(operand.row)


def _column(operand: GroupedOperand, name: str) -> QuantizedCopy:
    if not isinstance(operand.column, QuantizedCopy):
        raise ValueError(f"{name} has no column copy, which the kernel reads")
    return alignment.readable_scales(operand.column)


def _bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else alignment.readable(bias)
