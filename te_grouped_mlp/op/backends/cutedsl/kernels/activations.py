# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The scaled activations in fp32 registers, for one element of a tile.

The formulas are those of `op/activations.py`. `spec` is read while the kernel is traced, so its
numbers become constants of the compiled code, and an activation without a formula here raises.
"""

import math

import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass._mlir_helpers import math as mlir_math

from te_grouped_mlp.op.activations import Activation

_LOG2_E = math.log2(math.e)


def require(spec, *allowed):
    """Raise, while a kernel is traced, unless the formula that follows is that of the activation.

    Raises:
        NotImplementedError: It is not; the message names it.
    """
    if spec.kind not in allowed:
        raise NotImplementedError(f"{spec.kind.value} has no formula in {__name__}")


@cute.jit
def _sigmoid(x: Float32) -> Float32:
    power = cute.math.exp2(x * Float32(-_LOG2_E), fastmath=True)
    return mlir_math.rcp(power + Float32(1.0), approx=True, ftz=True)


@cute.jit
def _tanh(x: Float32) -> Float32:
    # The instruction tanh.approx is good to 11 bits only; near zero the quotient would cancel.
    square = x * x
    near = x * (Float32(1.0) - square * Float32(1.0 / 3.0))
    power = cute.math.exp2(x * Float32(2.0 * _LOG2_E), fastmath=True)
    far = Float32(1.0) - Float32(2.0) * mlir_math.rcp(power + Float32(1.0), approx=True, ftz=True)
    return near if square < Float32(0.0009765625) else far


@cute.jit
def value_gated(spec, gate: Float32, linear: Float32) -> Float32:
    """Return a gated activation, probability not included."""
    if const_expr(spec.kind is Activation.SWIGLU):
        return linear * (gate * _sigmoid(gate))
    if const_expr(spec.kind is Activation.CLAMPED_QGEGLU):
        limit = Float32(spec.limit)
        clamped = limit if gate > limit else gate
        low = -limit if linear < -limit else linear
        shifted = (limit if low > limit else low) + Float32(spec.linear_offset)
        return clamped * _sigmoid(Float32(spec.alpha) * clamped) * shifted
    require(spec, Activation.SITU_GLU)
    left = Float32(spec.beta1) * _tanh(gate * Float32(1.0 / spec.beta1)) * _sigmoid(gate)
    return left * (Float32(spec.beta2) * _tanh(linear * Float32(1.0 / spec.beta2)))


@cute.jit
def gated_derivative(spec, gate: Float32, linear: Float32):
    """Return (value, derivative by the gate, derivative by the linear part)."""
    one = Float32(1.0)
    if const_expr(spec.kind is Activation.SWIGLU):
        s = _sigmoid(gate)
        silu = gate * s
        return linear * silu, linear * (s + silu * (one - s)), silu
    if const_expr(spec.kind is Activation.CLAMPED_QGEGLU):
        limit, alpha, zero = Float32(spec.limit), Float32(spec.alpha), Float32(0.0)
        clamped = limit if gate > limit else gate
        low = -limit if linear < -limit else linear
        shifted = (limit if low > limit else low) + Float32(spec.linear_offset)
        s = _sigmoid(alpha * clamped)
        quick = clamped * s
        d_gate = shifted * (s + alpha * quick * (one - s))
        d_gate = zero if gate > limit else d_gate
        d_linear = zero if linear > limit else quick
        d_linear = zero if linear < -limit else d_linear
        return quick * shifted, d_gate, d_linear
    require(spec, Activation.SITU_GLU)
    s = _sigmoid(gate)
    t_gate = _tanh(gate * Float32(1.0 / spec.beta1))
    t_linear = _tanh(linear * Float32(1.0 / spec.beta2))
    left = Float32(spec.beta1) * t_gate * s
    right = Float32(spec.beta2) * t_linear
    d_gate = right * ((one - t_gate * t_gate) * s + left * (one - s))
    return left * right, d_gate, left * (one - t_linear * t_linear)


@cute.jit
def value_unary(spec, x: Float32) -> Float32:
    """Return a unary activation, probability not included."""
    require(spec, Activation.SRELU, Activation.TANH_SRELU)
    r = x if x > Float32(0.0) else Float32(0.0)
    if const_expr(spec.kind is Activation.TANH_SRELU):
        r = Float32(spec.clamp_scale) * _tanh(r * Float32(1.0 / spec.clamp_scale))
    return r * r


@cute.jit
def unary_derivative(spec, x: Float32):
    """Return (value, derivative)."""
    require(spec, Activation.SRELU, Activation.TANH_SRELU)
    r = x if x > Float32(0.0) else Float32(0.0)
    if const_expr(spec.kind is Activation.TANH_SRELU):
        c = Float32(spec.clamp_scale)
        t = _tanh(r * Float32(1.0 / spec.clamp_scale))
        r = c * t
        return r * r, Float32(2.0) * r * (Float32(1.0) - t * t)
    return r * r, Float32(2.0) * r
