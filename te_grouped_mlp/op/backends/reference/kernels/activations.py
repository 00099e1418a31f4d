# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The scaled activations and their derivatives in float64.

With g the gate and u the linear half of a gated activation, x the input of a unary one, and
s(z) = 1 / (1 + exp(-z)):

    ScaledSwiGLU          g s(g) u
    ScaledClampedQGeGLU   gc s(alpha gc) (uc + offset),  gc = min(g, limit), uc = clamp(u, +-limit)
    ScaledSiTUGLU         b1 tanh(g / b1) s(g) b2 tanh(u / b2)
    ScaledSReLU           r^2,                           r = max(x, 0)
    ScaledTanhSReLU       (c tanh(r / c))^2

The probability is not part of these. A clamp passes the gradient at its bounds. NaN enters
the unary ones as 0, because the kernels compare with zero instead of taking a maximum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from te_grouped_mlp.op.problem import Activation, ActivationSpec


class Derivative(NamedTuple):
    """An activation at a point.

    Attributes:
        value: (rows, features).
        parts: Its partial derivatives: one for a unary activation, (gate, linear) for a gated one.
    """

    value: torch.Tensor
    parts: tuple[torch.Tensor, ...]


Parts = tuple[torch.Tensor, ...]
# The derivatives wait behind a function, because the forward does not want them.
Evaluated = tuple[torch.Tensor, Callable[[], Parts]]


def forward(spec: ActivationSpec, x: torch.Tensor) -> torch.Tensor:
    """Return the activation of x (rows, features * expansion), FC1's column order; dtype kept."""
    return _evaluate(spec, x)[0]


def differentiate(spec: ActivationSpec, x: torch.Tensor) -> Derivative:
    """Return value and partial derivatives at x (rows, features * expansion)."""
    value, parts = _evaluate(spec, x)
    return Derivative(value, parts())


def _evaluate(spec: ActivationSpec, x: torch.Tensor) -> Evaluated:
    if spec.kind is Activation.SRELU:
        return _srelu(x)
    if spec.kind is Activation.TANH_SRELU:
        return _tanh_srelu(x, spec)
    gate, linear = split_gate(x, spec.interleave)
    if spec.kind is Activation.SWIGLU:
        return _swiglu(gate, linear)
    if spec.kind is Activation.CLAMPED_QGEGLU:
        return _clamped_qgeglu(gate, linear, spec)
    return _situ_glu(gate, linear, spec)


def split_gate(x: torch.Tensor, interleave: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Split FC1's output into gate and linear halves, each (rows, features).

    Args:
        x: (rows, 2 * features): alternating blocks of `interleave` gate and linear columns, or the
            two halves side by side for None.
        interleave: Block width, a divisor of features.

    Raises:
        ValueError: The width does not divide the features.
    """
    rows, cols = x.shape
    features = cols // 2
    width = features if interleave is None else interleave
    if width <= 0 or features % width:
        raise ValueError(f"interleave is {interleave}; allowed: divisors of {features}, or None")
    blocks = x.reshape(rows, features // width, 2, width)
    return blocks[:, :, 0].reshape(rows, features), blocks[:, :, 1].reshape(rows, features)


def join_gate(gate: torch.Tensor, linear: torch.Tensor, interleave: int | None) -> torch.Tensor:
    """Undo `split_gate`; a new contiguous tensor (rows, 2 * features)."""
    rows, features = gate.shape
    width = features if interleave is None else interleave
    shape = (rows, features // width, width)
    return torch.stack((gate.reshape(shape), linear.reshape(shape)), 2).reshape(rows, 2 * features)


def join(spec: ActivationSpec, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Bring gradients per part into FC1's column order."""
    return join_gate(parts[0], parts[1], spec.interleave) if spec.is_gated else parts[0]


def _positive(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, torch.zeros_like(x))


def _srelu(x: torch.Tensor) -> Evaluated:
    r = _positive(x)
    return r * r, lambda: (2 * r,)


def _tanh_srelu(x: torch.Tensor, spec: ActivationSpec) -> Evaluated:
    c = spec.clamp_scale
    t = torch.tanh(_positive(x) / c)
    return (c * t) ** 2, lambda: (2 * c * (t - t**3),)


def _swiglu(gate: torch.Tensor, linear: torch.Tensor) -> Evaluated:
    s = torch.sigmoid(gate)
    silu = gate * s
    return linear * silu, lambda: (linear * s * (1 + gate * (1 - s)), silu)


def _clamped_qgeglu(gate: torch.Tensor, linear: torch.Tensor, spec: ActivationSpec) -> Evaluated:
    limit, alpha = spec.limit, spec.alpha
    clamped = torch.clamp(gate, max=limit)
    shifted = torch.clamp(linear, -limit, limit) + spec.linear_offset
    s = torch.sigmoid(alpha * clamped)
    quick = clamped * s

    def parts() -> Parts:
        d_gate = shifted * s * (1 + alpha * clamped * (1 - s)) * (gate <= limit)
        return d_gate, quick * ((linear >= -limit) & (linear <= limit))

    return quick * shifted, parts


def _situ_glu(gate: torch.Tensor, linear: torch.Tensor, spec: ActivationSpec) -> Evaluated:
    s = torch.sigmoid(gate)
    t_gate, t_linear = torch.tanh(gate / spec.beta1), torch.tanh(linear / spec.beta2)
    left, right = spec.beta1 * t_gate * s, spec.beta2 * t_linear

    def parts() -> Parts:
        d_gate = right * ((1 - t_gate**2) * s + left * (1 - s))
        return d_gate, left * (1 - t_linear**2)

    return left * right, parts
