# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Number formats: exact widening and correctly rounded narrowing, over arrays or scalars of bits.

Wide values are float32, narrow ones unsigned bits. Approximate instructions are computed with
numpy's functions, which differ from the machine's in the last bits; conversions do not.
"""

from __future__ import annotations

import numpy as np

U8, U16, U32, U64 = np.uint8, np.uint16, np.uint32, np.uint64
F16, F32, F64 = np.float16, np.float32, np.float64


def _table(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """Return the value of every code of a format with sign, subnormals and no special codes."""
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
    value = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    return np.where(codes >> (exponent_bits + mantissa_bits), -value, value).astype(F32)


E2M1 = _table(2, 1, 1)
E4M3 = _table(4, 3, 7)
E4M3[[0x7F, 0xFF]] = np.nan
E5M2 = _table(5, 2, 15)
E5M2[[0x7C, 0xFC]] = np.inf, -np.inf
E5M2[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
E8M0 = np.ldexp(F64(1), np.minimum(np.arange(256), 254) - 127)
E8M0[255] = np.nan
E8M0 = E8M0.astype(F32)


def widen(bits: np.ndarray) -> np.ndarray:
    """Return bf16 as float32."""
    return (bits.astype(U32) << U32(16)).view(F32)


widen_bf16 = widen


def widen_f16(bits: np.ndarray) -> np.ndarray:
    """Return f16 as float32."""
    return bits.view(F16).astype(F32)


def _rounded(bits: np.ndarray, dropped: int) -> np.ndarray:
    """Round bits of float32 to nearest even at the lowest `dropped` of them."""
    half = U32((1 << (dropped - 1)) - 1)
    return bits + half + ((bits >> U32(dropped)) & U32(1))


def narrow_bf16(value: np.ndarray) -> np.ndarray:
    """Round float32 to bf16; every NaN becomes 0x7FFF."""
    bits = value.view(U32)
    rounded = (_rounded(bits, 16) >> U32(16)).astype(U16)
    return np.where(np.isnan(value), U16(0x7FFF), rounded)


def truncate_bf16(value: np.ndarray) -> np.ndarray:
    """Cut float32 to bf16; every NaN becomes 0x7FFF."""
    return np.where(np.isnan(value), U16(0x7FFF), (value.view(U32) >> U32(16)).astype(U16))


def relu_bf16(value: np.ndarray) -> np.ndarray:
    """Round to bf16 what is positive; negative values, and -0, become +0."""
    negative = (value.view(U32) >> U32(31)).astype(bool) & ~np.isnan(value)
    return np.where(negative, U16(0), narrow_bf16(value))


def narrow_f16(value: np.ndarray) -> np.ndarray:
    """Round float32 to f16; every NaN becomes 0x7FFF."""
    return np.where(np.isnan(value), U16(0x7FFF), value.astype(F16).view(U16))


def narrow_tf32(value: np.ndarray) -> np.ndarray:
    """Round float32 to tf32, ties away from zero; a NaN is cut."""
    bits = value.view(U32)
    return np.where(np.isnan(value), bits, bits + U32(0x1000)) & U32(0xFFFFE000)


def _narrow_8(
    value: np.ndarray, mantissa_bits: int, smallest: int, limit: int, nan: int
) -> np.ndarray:
    """Round to nearest even with saturation; `smallest` is the exponent of the least normal."""
    bits = value.view(U32)
    sign = ((bits >> U32(24)) & U32(0x80)).astype(U8)
    magnitude = bits & U32(0x7FFFFFFF)
    dropped = 23 - mantissa_bits
    rebias = U32((127 + smallest - 1) << mantissa_bits)
    normal = (_rounded(magnitude, dropped) >> U32(dropped)) - rebias
    # What lies below the least normal is a multiple of the least subnormal.
    least = F32(2.0 ** (smallest - mantissa_bits))
    subnormal = np.rint(np.minimum(magnitude.view(F32) / least, F32(256))).astype(U32)
    code = np.where(magnitude < U32((127 + smallest) << 23), subnormal, normal)
    over = magnitude.view(F32) > F32(2.0 ** (smallest + (limit >> mantissa_bits) + 1))
    code = np.where(over, U32(limit), np.minimum(code, U32(limit))).astype(U8) | sign
    return np.where(np.isnan(value), U8(nan), code)


def narrow_e4m3(value: np.ndarray) -> np.ndarray:
    """Round float32 to E4M3, saturating at 448; NaN becomes 0x7F."""
    return _narrow_8(value, 3, -6, 0x7E, 0x7F)


def narrow_e5m2(value: np.ndarray) -> np.ndarray:
    """Round float32 to E5M2, saturating at 57344; NaN becomes 0x7F."""
    return _narrow_8(value, 2, -14, 0x7B, 0x7F)


def narrow_e2m1(value: np.ndarray) -> np.ndarray:
    """Round float32 to E2M1, saturating at 6; NaN becomes 7, the largest."""
    magnitude = np.abs(value)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], F32)
    # A tie goes to the even code: below at 0, 2, 4 and 6, above at the others.
    code = np.searchsorted(ties, magnitude, "left") + 0
    tie_up = (np.searchsorted(ties, magnitude, "right") != code) & (code & 1 == 1)
    code = (code + tie_up).astype(U8) | ((value.view(U32) >> U32(28)) & U32(8)).astype(U8)
    return np.where(np.isnan(value), U8(7), code)


def narrow_e8m0(value: np.ndarray, up: bool, saturate: bool = False) -> np.ndarray:
    """Return the power of two at or above (`up`) or below a magnitude; NaN becomes 0xFF.

    What is at most 2**-127 becomes that; the sign is ignored.
    """
    bits = value.view(U32)
    exponent, mantissa = (bits >> U32(23)) & U32(0xFF), bits & U32(0x7FFFFF)
    subnormal = exponent == 0
    more = np.where(subnormal, mantissa > U32(0x400000), mantissa != 0) & up
    code = exponent + more.astype(U32)
    top = U32(254 if saturate else 255)
    code = np.where(exponent == 255, top, np.minimum(code, top))
    return np.where(np.isnan(value), U8(0xFF), code.astype(U8))


def widen_e8m0x2(bits: np.ndarray) -> np.ndarray:
    """Return two E8M0 as bf16x2."""
    return pack16(narrow_bf16(E8M0[bits >> U16(8)]), narrow_bf16(E8M0[bits & U16(0xFF)]))


def _widen_8x2(bits: np.ndarray, table: np.ndarray) -> np.ndarray:
    return pack16(narrow_f16(table[bits >> U16(8)]), narrow_f16(table[bits & U16(0xFF)]))


def widen_e4m3x2(bits: np.ndarray) -> np.ndarray:
    """Return two E4M3 as f16x2."""
    return _widen_8x2(bits, E4M3)


def widen_e5m2x2(bits: np.ndarray) -> np.ndarray:
    """Return two E5M2 as f16x2."""
    return _widen_8x2(bits, E5M2)


def narrow_f16x2(bits: np.ndarray, narrow) -> np.ndarray:
    """Round two f16 of one word with `narrow`."""
    high = widen_f16((bits >> U32(16)).astype(U16))
    return pack8(narrow(high), narrow(widen_f16(bits.astype(U16))))


def pack16(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Put two 16-bit values into 32 bits; the first is the upper."""
    return (high.astype(U32) << U32(16)) | low.astype(U32)


def pack8(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Put two bytes into 16 bits; the first is the upper."""
    return (high.astype(U16) << U16(8)) | low.astype(U16)


def pack4(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Put two 4-bit values into a byte; the first is the upper."""
    return (high.astype(U8) << U8(4)) | low.astype(U8)


def ftz(value: np.ndarray) -> np.ndarray:
    """Flush subnormals to zero of their sign."""
    bits = value.view(U32)
    return np.where(bits & U32(0x7F800000), bits, bits & U32(0x80000000)).view(F32)


def unit(value: np.ndarray) -> np.ndarray:
    """Clamp to [0, 1]; NaN becomes 0."""
    return np.where(value > 0, np.minimum(value, F32(1)), F32(0))


def _odd_fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c in float64, rounded to odd: a later rounding sees what side of a tie it is.

    The product of two float32 is exact in float64, and so is the error of the sum.
    """
    x, y = a.astype(F64) * b, c.astype(F64)
    total = x + y
    big = total - x
    error = (x - (total - big)) + (y - big)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & ((bits & 1) == 0)
    away = (error > 0) == (total > 0)
    return np.where(inexact, bits + np.where(away, 1, -1), bits).view(F64)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c of float32, rounded once."""
    return _odd_fma(a, b, c).astype(F32)


def bf16x2(a: np.ndarray, b: np.ndarray, function) -> np.ndarray:
    """Apply a function of float32 to the halves of two words, rounding each result to bf16."""
    low = function((a << U32(16)).view(F32), (b << U32(16)).view(F32))
    mask = U32(0xFFFF0000)
    return pack16(
        narrow_bf16(function((a & mask).view(F32), (b & mask).view(F32))), narrow_bf16(low)
    )


def fma_bf16x2(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c of the halves of words, each rounded once to bf16."""

    def half(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
        total = _odd_fma(x.view(F32), y.view(F32), z.view(F32))
        single = total.astype(F32)
        bits = single.view(np.int32)
        inexact = (single != total) & np.isfinite(single) & ((bits & 1) == 0)
        step = np.where(np.abs(total) > np.abs(single), 1, -1).astype(np.int32)
        return narrow_bf16(np.where(inexact, bits + step, bits).view(F32))

    mask = U32(0xFFFF0000)
    high = half(a & mask, b & mask, c & mask)
    return pack16(high, half(*(v << U32(16) for v in (a, b, c))))
