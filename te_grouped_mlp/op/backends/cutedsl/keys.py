# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What is compiled: one key for each kernel variant. Keys hold no sizes, so no token counts."""

from __future__ import annotations

from dataclasses import dataclass

from te_grouped_mlp.op.backends.cutedsl.config import Op, Tile
from te_grouped_mlp.op.formats import DType
from te_grouped_mlp.op.problem import Activation, ActivationSpec

_PARAMETERS = {
    Activation.SWIGLU: (),
    Activation.CLAMPED_QGEGLU: ("limit", "alpha", "linear_offset"),
    Activation.SITU_GLU: ("beta1", "beta2"),
    Activation.SRELU: (),
    Activation.TANH_SRELU: ("clamp_scale",),
}


@dataclass(frozen=True)
class KernelKey:
    """Everything that the code of a kernel depends on.

    Attributes:
        op: Which kernel.
        arch: Major compute capability, 9 or 10.
        tile: Its tile.
        spec: The activation, reduced to what the code uses; None for plain products.
        bias: There is a bias.
        scale: Type of the value per row (the probability, or the scale of the bias), or None.
        pre_activation: FC1 stores the pre-activation.
        dprob: The probability's gradient is wanted.
        activated: FC2's input is made anew.
        out: Type of a weight gradient.
        accumulate: A weight gradient is added to.
    """

    op: Op
    arch: int
    tile: Tile
    spec: ActivationSpec | None = None
    bias: bool = False
    scale: DType | None = None
    pre_activation: bool = False
    dprob: bool = False
    activated: bool = False
    out: DType = DType.BFLOAT16
    accumulate: bool = False


def reduced(spec: ActivationSpec) -> ActivationSpec:
    """Return `spec` without the parameters that its kind does not use, so that keys coincide."""
    used = {name: getattr(spec, name) for name in _PARAMETERS[spec.kind]}
    return ActivationSpec(spec.kind, spec.interleave, **used)


def order_only(spec: ActivationSpec) -> ActivationSpec:
    """Return what a plain product behind `spec` depends on: the order of FC1's rows."""
    kind = Activation.SWIGLU if spec.is_gated else Activation.SRELU
    return ActivationSpec(kind, spec.interleave)
