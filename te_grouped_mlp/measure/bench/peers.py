# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What else computes this layer on a GPU; each peer is one function of no arguments.

Every step computes y, dx, dW1, dW2 (bf16, overwritten) and dprob.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from te_grouped_mlp.measure.bench import te_layer
from te_grouped_mlp.measure.bench.interleaved import Step
from te_grouped_mlp.measure.bench.shapes import Inputs


def torch_step(given: Inputs, *, compiled: bool) -> Step:
    """`torch._grouped_mm` with autograd, eager or through torch.compile."""
    assert given.prob is not None
    w1 = given.w1_halves.requires_grad_()
    w2 = given.w2.clone().requires_grad_()
    x, prob = given.x.clone().requires_grad_(), given.prob.clone().requires_grad_()

    def layer(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, prob: torch.Tensor, ends: torch.Tensor
    ) -> Any:
        hidden = torch._grouped_mm(x, w1.transpose(-2, -1), offs=ends)
        gate, linear = hidden.chunk(2, dim=-1)
        activated = (F.silu(gate.float()) * linear.float() * prob[:, None]).to(x.dtype)
        return torch._grouped_mm(activated, w2.transpose(-2, -1), offs=ends)

    call = torch.compile(layer, dynamic=False) if compiled else layer

    def step() -> dict[str, torch.Tensor]:
        y = call(x, w1, w2, prob, given.ends)
        dx, dw1, dw2, dprob = torch.autograd.grad(y, (x, w1, w2, prob), given.dy)
        return {"y": y.detach(), "dx": dx, "dprob": dprob, "dw2": dw2}

    return step


def quack_step(given: Inputs) -> Step:
    """QuACK's own functions, untuned (its defaults), on weights stored as it likes them best."""
    from quack.gemm_interface import gemm, gemm_dgated, gemm_gated

    w1, w2, prob = given.w1_pairs, given.w2, given.prob
    assert prob is not None
    offsets = given.offsets.to(torch.int32)

    def step() -> dict[str, torch.Tensor]:
        pre, activated = gemm_gated(
            given.x, w1.mT, activation="swiglu", cu_seqlens_m=offsets, tuned=False
        )
        y = gemm(activated.mul_(prob[:, None]), w2.mT, cu_seqlens_m=offsets, tuned=False)
        dpre, again, dprob = gemm_dgated(
            given.dy, w2, pre, activation="swiglu", colvec_scale=prob, colvec_reduce=True,
            cu_seqlens_m=offsets, tuned=False,
        )  # fmt: skip
        dw2 = gemm(given.dy.mT, again, cu_seqlens_k=offsets, tuned=False)
        dx = gemm(dpre, w1, cu_seqlens_m=offsets, tuned=False)
        gemm(dpre.mT, given.x, cu_seqlens_k=offsets, tuned=False)
        return {"y": y, "dx": dx, "dprob": dprob, "dw2": dw2}

    return step


def te_ops_step(given: Inputs) -> Step:
    """Transformer Engine's three ops, unfused, over its own kernels.

    Raises:
        NotThere: Its compiled extension is not in this process.
    """
    te_layer.require_upstream()
    layer = te_layer.Layer(given, te_layer.Mode(mxfp8=False, backend=None))
    layer.step()
    layer.require_path()
    return layer.step
