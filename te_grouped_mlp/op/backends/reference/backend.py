# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The reference backend: exact arithmetic on the quantized operands, in the kernels' layouts.

Products and functions are evaluated in float64 and rounded where the GPU kernels round, so results
do not depend on thread counts, on the buffer length or on other groups. Writers with packed extent
leave the rest of a buffer unwritten, readers of one dense group read all of it: a disagreement
about the rows shows here as it does on a GPU. CUDA tensors are copied to the host and back, which
synchronises; planning refuses them unless the backend is named.
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
from te_grouped_mlp.op.backends.reference.arguments import moved
from te_grouped_mlp.op.backends.reference.kernels.dact_dgrad import dact_dgrad
from te_grouped_mlp.op.backends.reference.kernels.fc1_act import fc1_act
from te_grouped_mlp.op.backends.reference.kernels.gemm import gemm
from te_grouped_mlp.op.backends.reference.kernels.wgrad import wgrad
from te_grouped_mlp.op.layout import Kernel
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import GroupedOperand, WeightOperand

_HOST = torch.device("cpu")


class ReferenceBackend:
    """See `backends.base.Backend` for the contract of every method."""

    def fc1_act(
        self, plan: Plan, x: GroupedOperand, w: WeightOperand, epilogue: Fc1Epilogue
    ) -> Fc1Result:
        """Compute ``act(x W1^T + b1) * prob``."""
        device = x.splits.sizes.device
        if device == _HOST:
            return fc1_act(plan, x, w, epilogue)
        result = fc1_act(plan, moved(x, _HOST), moved(w, _HOST), moved(epilogue, _HOST))
        return moved(result, device)

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
        if a.splits.sizes.device == _HOST:
            gemm(plan, kernel, a, w, out, epilogue)
            return
        on_host = moved(out, _HOST)
        gemm(plan, kernel, moved(a, _HOST), moved(w, _HOST), on_host, moved(epilogue, _HOST))
        out.copy_(on_host)

    def dact_dgrad(
        self,
        plan: Plan,
        dy: GroupedOperand,
        w: WeightOperand,
        pre_activation: torch.Tensor,
        epilogue: DactEpilogue,
    ) -> DactResult:
        """Compute the gradient of FC1's output from ``dy W2`` and the pre-activation."""
        device = dy.splits.sizes.device
        if device == _HOST:
            return dact_dgrad(plan, dy, w, pre_activation, epilogue)
        dy, w, pre_activation = moved(dy, _HOST), moved(w, _HOST), moved(pre_activation, _HOST)
        return moved(dact_dgrad(plan, dy, w, pre_activation, moved(epilogue, _HOST)), device)

    def wgrad(
        self, plan: Plan, kernel: Kernel, x: GroupedOperand, dy: GroupedOperand, target: WgradTarget
    ) -> None:
        """Write or add ``dy_g^T x_g`` for every group."""
        del kernel
        members = target.members()
        if len(members) != plan.layout.num_groups:
            raise ValueError(
                f"target has {len(members)} members; the plan has {plan.layout.num_groups} groups"
            )
        for member in members:
            if tuple(member.shape) != (shape := (dy.shape[1], x.shape[1])):
                raise ValueError(f"target has shape {tuple(member.shape)}; allowed: {shape}")
        if x.splits.sizes.device == _HOST:
            wgrad(plan, x, dy, target)
            return
        on_host = WgradTarget(moved(members, _HOST), target.accumulate)
        wgrad(plan, moved(x, _HOST), moved(dy, _HOST), on_host)
        for member, result in zip(members, on_host.members(), strict=True):
            member.copy_(result)
