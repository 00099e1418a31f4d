# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The scaled activations: one row for each, with all that backends, standalone and commands know.

Formulas are written over arrays: `xp` is the namespace of their functions (torch, as a rule), so
that this module imports nothing. With g the gate and u the linear half of a gated activation, x
the input of a unary one, and s(z) = 1 / (1 + exp(-z)):

    ScaledSwiGLU          g s(g) u
    ScaledClampedQGeGLU   gc s(alpha gc) (uc + offset),  gc = min(g, limit), uc = clamp(u, +-limit)
    ScaledSiTUGLU         b1 tanh(g / b1) s(g) b2 tanh(u / b2)
    ScaledSReLU           r^2,                           r = max(x, 0)
    ScaledTanhSReLU       (c tanh(r / c))^2

The probability is not part of these. A clamp passes the gradient at its bounds. NaN enters
the unary ones as 0, because the kernels compare with zero instead of taking a maximum.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

Array = Any
Parts = tuple[Array, ...]
Cut = Callable[[Array, Array], Array]
"""(derivative, mask) -> the derivative where a clamp lets it through, zero elsewhere. The caller's,
for a NaN that meets a clamp: a product with the mask keeps it, a selection does not."""


class Evaluated(NamedTuple):
    """An activation at a point.

    Attributes:
        value: (rows, features).
        derivatives: Computes its partial derivatives when asked, as the forward does not: one for a
            unary activation, (gate, linear) for a gated one, each (rows, features).
    """

    value: Array
    derivatives: Callable[[Cut], Parts]


@dataclass(frozen=True)
class ActivationSpec:
    """An activation with its parameters. The fields' defaults are Transformer Engine's.

    Attributes:
        kind: Which one.
        interleave: Width of the alternating gate and linear blocks in FC1's output; None for two
            halves. Unary activations have None.
        limit, alpha, linear_offset, beta1, beta2, clamp_scale: The parameters of all kinds; a
            kind's row names those that it reads.
        recompute: Whether the user asked not to keep FC2's input.
    """

    kind: Activation
    interleave: int | None = None
    limit: float = 7.0
    alpha: float = 1.702
    linear_offset: float = 1.0
    beta1: float = 4.0
    beta2: float = 25.0
    clamp_scale: float = 1.0
    recompute: bool = False

    @functools.cached_property
    def is_gated(self) -> bool:
        """Whether FC1 makes two values for each activated one."""
        return self.kind.is_gated

    @functools.cached_property
    def recomputes_input(self) -> bool:
        """Whether the backward makes FC2's input anew."""
        return self.recompute and self.kind.row.takes_recompute

    @functools.cached_property
    def expansion(self) -> int:
        """FC1 output features for each FC2 input feature."""
        return 2 if self.is_gated else 1


@dataclass(frozen=True)
class Parameter:
    """A number that an activation reads.

    Attributes:
        name: Of its field in `ActivationSpec`.
        attribute: Of Transformer Engine's op; the last part is the keyword of the op's constructor.
        frontend: The cuDNN frontend's arguments, and the factor with which each takes the number.
        trial: What tests of a backend take: away from the default, and within the values' range.
        is_divisor: A kernel divides by it, so it must be positive.
        in_every_te: Every supported Transformer Engine has the attribute; else an op without it
            computes the default.
    """

    name: str
    attribute: str
    frontend: Mapping[str, int] = field(hash=False)
    trial: float
    is_divisor: bool = False
    in_every_te: bool = True

    @property
    def default(self) -> float:
        """Transformer Engine's default."""
        return float(getattr(ActivationSpec, self.name))

    @property
    def keyword(self) -> str:
        """The keyword of the constructor of Transformer Engine's op."""
        return self.attribute.rpartition(".")[2]

    def read(self, op: Any) -> float:
        """Return the number of Transformer Engine's op."""
        try:
            value: float = operator.attrgetter(self.attribute)(op)
        except AttributeError:
            if self.in_every_te:
                raise
            return self.default
        return value


@dataclass(frozen=True)
class Row:
    """What is known of an activation.

    Attributes:
        te_class: Name of Transformer Engine's op class.
        formula: (xp, spec, part, ...) -> value and derivatives, with a part for each that it has.
        is_gated: FC1 makes two values (gate, linear) for each activated one.
        parameters: In the order of the tex function's arguments.
        since: First Transformer Engine that has the op.
        tex: The tex functions of forward and backward; none where the op composes it of others.
        act_func: The frontend's name of what its wrappers compute. Of a gated one it is an argument
            (with a "d" before it in the backward), of a unary one the wrapper's own name. None: the
            frontend does not compute it.
        is_native: `cutedsl/kernels/activations.py` computes it.
        takes_recompute: Transformer Engine's op may make FC2's input anew in the backward.
        has_kinks: The derivative jumps at a clamp, so a rounded value may get the other side's.
        uses_hadamard: Upstream's op computes it under NVFP4 with the frontend's Hadamard kernel.
        probes: Upstream's functions that say whether the frontend computes it.
    """

    te_class: str
    formula: Callable[..., Evaluated] = field(repr=False)
    is_gated: bool
    parameters: tuple[Parameter, ...] = ()
    since: str = "2.19"
    tex: tuple[str, ...] = ()
    act_func: str | None = None
    is_native: bool = False
    takes_recompute: bool = False
    has_kinks: bool = False
    uses_hadamard: bool = False
    probes: tuple[str, ...] = ()


def wrappers(is_gated: bool) -> tuple[str, str]:
    """Return the short names of the frontend's wrappers of FC1 and of FC2's data gradient."""
    return ("glu", "dglu") if is_gated else ("srelu", "dsrelu")


# Formulas: (gate, linear) or x -> value, derivatives ----------------------------------------------


def _swiglu(xp: Any, _: ActivationSpec, gate: Array, linear: Array) -> Evaluated:
    s = xp.sigmoid(gate)
    silu = gate * s
    return Evaluated(linear * silu, lambda _: (linear * (s + silu * (1 - s)), silu))


def _clamped_qgeglu(xp: Any, p: ActivationSpec, gate: Array, linear: Array) -> Evaluated:
    limit = p.limit
    clamped = xp.clamp(gate, max=limit)
    shifted = xp.clamp(linear, -limit, limit) + p.linear_offset
    s = xp.sigmoid(p.alpha * clamped)
    quick = clamped * s

    def derivatives(cut: Cut) -> Parts:
        d_gate = cut(shifted * (s + p.alpha * quick * (1 - s)), gate <= limit)
        return d_gate, cut(quick, (linear >= -limit) & (linear <= limit))

    return Evaluated(quick * shifted, derivatives)


def _situ_glu(xp: Any, p: ActivationSpec, gate: Array, linear: Array) -> Evaluated:
    s = xp.sigmoid(gate)
    t_gate, t_linear = xp.tanh(gate / p.beta1), xp.tanh(linear / p.beta2)
    left, right = p.beta1 * t_gate * s, p.beta2 * t_linear

    def derivatives(_: Cut) -> Parts:
        d_gate = right * ((1 - t_gate**2) * s + left * (1 - s))
        return d_gate, left * (1 - t_linear**2)

    return Evaluated(left * right, derivatives)


def _srelu(xp: Any, _: ActivationSpec, x: Array) -> Evaluated:
    r = _positive(xp, x)
    return Evaluated(r * r, lambda _: (2 * r,))


def _tanh_srelu(xp: Any, p: ActivationSpec, x: Array) -> Evaluated:
    c = p.clamp_scale
    t = xp.tanh(_positive(xp, x) / c)
    return Evaluated((c * t) ** 2, lambda _: (2 * c * (t - t**3),))


def _positive(xp: Any, x: Array) -> Array:
    return xp.where(x > 0, x, xp.zeros_like(x))


# The table ----------------------------------------------------------------------------------------

_SRELU_PROBE = "_cudnn_frontend_supports_grouped_gemm_srelu"


class Activation(Enum):
    """The scaled activations, each with its row; the value is the name of TE's op class."""

    __hash__ = object.__hash__  # as for layout.Output

    _value_: str
    row: Row

    def __new__(cls, row: Row) -> Activation:
        """Take the class's name for the value, by which members are looked up and pickled."""
        self = object.__new__(cls)
        self._value_, self.row = row.te_class, row
        return self

    SWIGLU = Row(
        "ScaledSwiGLU", _swiglu, is_gated=True, tex=("scaled_swiglu", "scaled_dswiglu"),
        act_func="swiglu", is_native=True, uses_hadamard=True,
    )  # fmt: skip
    CLAMPED_QGEGLU = Row(
        "ScaledClampedQGeGLU", _clamped_qgeglu, is_gated=True,
        parameters=(
            Parameter("limit", "_clamped.limit", {"glu_clamp_max": 1, "glu_clamp_min": -1}, 1.5),
            Parameter("alpha", "_clamped.alpha", {"geglu_alpha": 1}, 1.3),
            Parameter(
                "linear_offset", "_clamped.glu_linear_offset", {"linear_offset": 1}, 0.5,
                in_every_te=False,
            ),
        ),
        tex=("scaled_clamped_swiglu", "scaled_clamped_dswiglu"),
        act_func="geglu", is_native=True, has_kinks=True,
    )  # fmt: skip
    SITU_GLU = Row(
        "ScaledSiTUGLU", _situ_glu, is_gated=True,
        parameters=(
            Parameter("beta1", "beta1", {"situ_beta1": 1}, 3.0, is_divisor=True),
            Parameter("beta2", "beta2", {"situ_beta2": 1}, 5.0, is_divisor=True),
        ),
        since="2.20", tex=("scaled_situglu", "scaled_dsituglu"),
        act_func="situglu", is_native=True, uses_hadamard=True,
        probes=("_cudnn_frontend_supports_grouped_gemm_situglu",),
    )  # fmt: skip
    SRELU = Row(
        "ScaledSReLU", _srelu, is_gated=False, tex=("scaled_srelu", "scaled_dsrelu"),
        act_func="srelu", is_native=True, takes_recompute=True, uses_hadamard=True,
        probes=(_SRELU_PROBE,),
    )  # fmt: skip
    TANH_SRELU = Row(
        "ScaledTanhSReLU", _tanh_srelu, is_gated=False,
        parameters=(
            Parameter(
                "clamp_scale", "tanh_clamp_scale", {"tanh_clamp_scale": 1}, 2.0, is_divisor=True
            ),
        ),
        since="2.20", act_func="srelu", is_native=True,
        probes=(_SRELU_PROBE, f"{_SRELU_PROBE}_tanh"),
    )  # fmt: skip

    @property
    def is_gated(self) -> bool:
        """Whether FC1 makes two values (gate, linear) for each activated one."""
        return self.row.is_gated


# In FC1's column order ----------------------------------------------------------------------------


def evaluate(xp: Any, spec: ActivationSpec, x: Array) -> Evaluated:
    """Return value and derivatives at x (rows, features * expansion), FC1's output; dtype kept.

    Raises:
        ValueError: The interleave does not divide the features.
    """
    return spec.kind.row.formula(xp, spec, *split(spec, x))


def split(spec: ActivationSpec, x: Array) -> Parts:
    """Return the parts of FC1's output: x itself, or gate and linear half, each (rows, features).

    Args:
        spec: Its interleave is the width of the alternating blocks of gate and linear columns in x;
            None for the two halves side by side.
        x: (rows, features * expansion).

    Raises:
        ValueError: The interleave does not divide the features.
    """
    if not spec.is_gated:
        return (x,)
    rows, cols = x.shape
    features = cols // 2
    width = features if spec.interleave is None else spec.interleave
    if width <= 0 or features % width:
        allowed = f"divisors of {features}, or None"
        raise ValueError(f"interleave is {spec.interleave}; allowed: {allowed}")
    blocks = x.reshape(rows, features // width, 2, width)
    return blocks[:, :, 0].reshape(rows, features), blocks[:, :, 1].reshape(rows, features)


def join(xp: Any, spec: ActivationSpec, parts: Parts) -> Array:
    """Undo `split`: bring gradients per part into FC1's column order; a new array of two parts."""
    if not spec.is_gated:
        return parts[0]
    rows, features = parts[0].shape
    shape = (rows, features // (spec.interleave or features), spec.interleave or features)
    return xp.stack([part.reshape(shape) for part in parts], 2).reshape(rows, 2 * features)
