# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of MXFP8 for Triton kernels: the formulas of csrc/simd/elements.inl, bit for bit.

HARDWARE chooses the device's FP8 conversions; without them the same bytes come from integers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e8m0(amax, E5M2: tl.constexpr, NAN: tl.constexpr):
    """amax / largest rounded up to a power of two, as an exponent byte (int32), of float32 >= 0."""
    reciprocal: tl.constexpr = 1.0 / 57344.0 if E5M2 else 1.0 / 448.0
    bits = (amax * reciprocal).to(tl.int32, bitcast=True)
    # 2^-127, the smallest scale, is the subnormal 0x400000: up to there nothing is rounded up.
    scale = (bits + tl.where(bits < 0x00800000, 0x003FFFFF, 0x007FFFFF)) >> 23
    scale = tl.minimum(scale, 0xFE)
    if NAN:
        scale = tl.where(bits > 0x7F800000, 0xFF, scale)
    return scale


@triton.jit
def power(scale, NAN: tl.constexpr):
    """2^(scale - 127) of exponent bytes (int32) as float32; NaN for 0xFF if that occurs."""
    bits = tl.maximum(scale << 23, 0x00400000)
    if NAN:
        bits = tl.where((scale & 0xFF) == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x, NAN: tl.constexpr, HARDWARE: tl.constexpr):
    """|x| in a type whose maximum is right for NaN: float32, or its bits as int32."""
    if HARDWARE and not NAN:
        size = tl.abs(x)
    else:
        # A NaN lies above infinity; it counts as 0 where it must not reach the scale.
        size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if not NAN:
            size = tl.where(size > 0x7F800000, 0, size)
    return size


@triton.jit
def as_float(amax):
    """A maximum of `magnitude` as float32. The device's own leaves a NaN where all were NaN."""
    if amax.dtype == tl.float32:
        value = tl.where(amax == amax, amax, 0.0)
    else:
        value = amax.to(tl.float32, bitcast=True)
    return value


@triton.jit
def encode(x, E5M2: tl.constexpr, HARDWARE: tl.constexpr):
    """FP8 bytes of float32: nearest even, saturating, 0x7F for a NaN."""
    if HARDWARE:
        if E5M2:
            code = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            code = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        mantissa: tl.constexpr = 2 if E5M2 else 3
        rebias: tl.constexpr = 112 if E5M2 else 120
        largest: tl.constexpr = 0x7B if E5M2 else 0x7E
        # Its unit in the last place is the quantum of the format's subnormals.
        magic: tl.constexpr = 128.0 if E5M2 else 16384.0
        magic_bits: tl.constexpr = (127 + 7) << 23 if E5M2 else (127 + 14) << 23
        shift: tl.constexpr = 23 - mantissa
        below_half: tl.constexpr = (1 << (shift - 1)) - 1 - (rebias << 23)
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = (magnitude + below_half + ((magnitude >> shift) & 1)) >> shift
        added = magnitude.to(tl.float32, bitcast=True) + magic
        subnormal = added.to(tl.int32, bitcast=True) - magic_bits
        number = tl.where(magnitude < ((rebias + 1) << 23), subnormal, normal)
        number = tl.minimum(number, largest) | ((bits >> 24) & 0x80)
        code = tl.where(magnitude > 0x7F800000, 0x7F, number).to(tl.uint8)
    return code


@triton.jit
def decode(code, E5M2: tl.constexpr, HARDWARE: tl.constexpr):
    """float32 values of FP8 bytes."""
    if HARDWARE:
        if E5M2:
            value = code.to(tl.float8e5, bitcast=True).to(tl.float32)
        else:
            value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        mantissa: tl.constexpr = 2 if E5M2 else 3
        rebias: tl.constexpr = 112 if E5M2 else 120
        quantum: tl.constexpr = 1.0 / 65536.0 if E5M2 else 1.0 / 512.0
        wide = code.to(tl.int32)
        magnitude = wide & 0x7F
        bits = (magnitude << (23 - mantissa)) + (rebias << 23)
        subnormal = (magnitude.to(tl.float32) * quantum).to(tl.int32, bitcast=True)
        bits = tl.where(magnitude < (1 << mantissa), subnormal, bits)
        if E5M2:
            bits = tl.where(magnitude == 0x7C, 0x7F800000, bits)
            bits = tl.where(magnitude > 0x7C, 0x7FC00000, bits)
        else:
            bits = tl.where(magnitude == 0x7F, 0x7FC00000, bits)
        value = (bits | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)
    return value


@triton.jit
def widen(x, HARDWARE: tl.constexpr):
    """float32 of the source's type; Triton's interpreter loses the subnormals of bf16."""
    if HARDWARE or x.dtype != tl.bfloat16:
        wide = x.to(tl.float32)
    else:
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return wide


@triton.jit
def narrow(x, kind: tl.constexpr, HARDWARE: tl.constexpr):
    """float32 rounded to the result's type; every NaN becomes the positive quiet one."""
    if kind == tl.float32:
        bits = tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
        out = bits.to(tl.float32, bitcast=True)
    elif kind == tl.float16:
        bits = x.to(tl.float16).to(tl.int16, bitcast=True)
        out = tl.where(x != x, 0x7E00, bits).to(tl.int16).to(tl.float16, bitcast=True)
    elif HARDWARE:
        bits = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
        out = tl.where(x != x, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        wide = x.to(tl.int32, bitcast=True)
        wide = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16) & 0xFFFF
        out = tl.where(x != x, 0x7FC0, wide).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return out


@triton.jit
def as_value(x, HARDWARE: tl.constexpr):
    """bf16 of float32, a NaN being any NaN: the device's own conversion takes two at a time."""
    return x.to(tl.bfloat16) if HARDWARE else narrow(x, tl.bfloat16, HARDWARE)
