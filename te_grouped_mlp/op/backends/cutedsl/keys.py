# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What is compiled: one key for each kernel variant. Keys hold no sizes, so no token counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.backends.cutedsl.config import ROW_OPS, Op, Tile, choose
from te_grouped_mlp.op.formats import DType
from te_grouped_mlp.op.problem import Problem, RecipeKind


@dataclass(frozen=True)
class KernelKey:
    """Everything that the code of a kernel depends on.

    Attributes:
        op: Which kernel.
        arch: Major compute capability, 9 or 10.
        tile: Its tile; None for kernels over rows.
        spec: The activation, reduced to what the code uses; None for plain products.
        bias: There is a bias.
        scale: Type of the value per row (the probability, or the scale of the bias), or None.
        pre_activation: FC1 stores the pre-activation.
        dprob: The probability's gradient is wanted.
        activated: FC2's input is made anew.
        out: Type of a weight gradient.
        accumulate: A weight gradient is added to.
        round_to_odd: FC2's input and the gradient of FC1's output are stored so, since they are
            quantized next.
        reversed_experts: The experts' matrices, read or written, lie with the last one first.
    """

    op: Op
    arch: int
    tile: Tile | None = None
    spec: ActivationSpec | None = None
    bias: bool = False
    scale: DType | None = None
    pre_activation: bool = False
    dprob: bool = False
    activated: bool = False
    out: DType = DType.BFLOAT16
    accumulate: bool = False
    round_to_odd: bool = False
    reversed_experts: bool = False


def fc1_act(
    problem: Problem,
    arch: int,
    bias: bool,
    scale: DType | None,
    pre: bool,
    reversed_experts: bool = False,
) -> KernelKey:
    """Return the key of FC1's product; `pre`: the pre-activation is stored."""
    n, k = problem.fc1.out_features, problem.fc1.in_features
    tile = choose(Op.FC1_ACT, arch, n=n, k=k, bias=bias)
    return KernelKey(
        Op.FC1_ACT, arch, tile, _reduced(problem.activation),
        bias=bias, scale=scale, pre_activation=pre, round_to_odd=_requantizes(problem),
        reversed_experts=reversed_experts,
    )  # fmt: skip


def gemm(
    problem: Problem,
    arch: int,
    op: Op,
    bias: bool = False,
    scale: DType | None = None,
    reversed_experts: bool = False,
) -> KernelKey:
    """Return the key of FC2_FORWARD or FC1_DGRAD."""
    if op is Op.FC2_FORWARD:
        n, k, order = problem.fc2.out_features, problem.fc2.in_features, None
    else:
        n, k = problem.fc1.in_features, problem.fc1.out_features
        order = _order(problem.activation)
    tile = choose(op, arch, n=n, k=k, bias=bias)
    return KernelKey(
        op, arch, tile, order, bias=bias, scale=scale, reversed_experts=reversed_experts
    )


def dact_dgrad(
    problem: Problem,
    arch: int,
    scale: DType | None,
    dprob: bool,
    activated: bool,
    reversed_experts: bool = False,
) -> KernelKey:
    """Return the key of FC2's data gradient; `activated`: FC2's input is made anew."""
    n, k = problem.fc2.in_features, problem.fc2.out_features
    tile = choose(Op.DACT_DGRAD, arch, n=n, k=k)
    return KernelKey(
        Op.DACT_DGRAD, arch, tile, _reduced(problem.activation),
        scale=scale, dprob=dprob, activated=activated, round_to_odd=_requantizes(problem),
        reversed_experts=reversed_experts,
    )  # fmt: skip


def wgrad(
    problem: Problem,
    arch: int,
    op: Op,
    out: DType,
    accumulate: bool,
    reversed_experts: bool = False,
) -> KernelKey:
    """Return the key of a weight gradient."""
    linear = problem.fc1 if op is Op.FC1_WGRAD else problem.fc2
    order = _order(problem.activation) if op is Op.FC1_WGRAD else None
    tile = choose(op, arch, n=linear.in_features, k=0)
    return KernelKey(
        op, arch, tile, order, out=out, accumulate=accumulate, reversed_experts=reversed_experts
    )


def of_problem(
    problem: Problem,
    arch: int,
    *,
    prob: DType | None = DType.FLOAT32,
    grad: DType = DType.FLOAT32,
    accumulate: bool = True,
    reversed_experts: bool = False,
) -> tuple[KernelKey, ...]:
    """Return every key that training with a problem needs, for compiling ahead.

    Args:
        problem: The facts of the fused op.
        arch: Major compute capability.
        prob: Type of the probabilities, None without any.
        grad: Type of the weight gradients.
        accumulate: Whether weight gradients are added to.
        reversed_experts: Whether weights and their gradients lie with the last expert first.
    """
    fc1, fc2 = problem.fc1, problem.fc2
    scale = prob if fc2.has_bias and fc2.scale_bias else None
    anew = problem.activation.recomputes_input
    return (
        fc1_act(problem, arch, fc1.has_bias, prob, True, reversed_experts),
        gemm(problem, arch, Op.FC2_FORWARD, fc2.has_bias, scale, reversed_experts),
        dact_dgrad(problem, arch, prob, prob is not None, anew, reversed_experts),
        wgrad(problem, arch, Op.FC2_WGRAD, grad, accumulate, reversed_experts),
        gemm(problem, arch, Op.FC1_DGRAD, reversed_experts=reversed_experts),
        wgrad(problem, arch, Op.FC1_WGRAD, grad, accumulate, reversed_experts),
        *(KernelKey(op, arch) for op in ROW_OPS),
    )


def _requantizes(problem: Problem) -> bool:
    return problem.recipe is not RecipeKind.NONE


def _reduced(spec: ActivationSpec) -> ActivationSpec:
    """Drop the parameters that the kind does not use, so that keys coincide."""
    used = spec.kind.row.parameters
    values: dict[str, Any] = {parameter.name: getattr(spec, parameter.name) for parameter in used}
    return ActivationSpec(spec.kind, spec.interleave, **values)


def _order(spec: ActivationSpec) -> ActivationSpec:
    """Keep what a plain product behind `spec` depends on: the order of FC1's rows."""
    kind = Activation.SWIGLU if spec.is_gated else Activation.SRELU
    return ActivationSpec(kind, spec.interleave)
