# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What generated code calls on the values of a warp.

A value is an array of 32 lanes or, where all lanes hold the same, a numpy scalar; both have
`dtype`, `view` and `astype`, so that most functions take either.
"""

from __future__ import annotations

import numpy as np

from te_grouped_mlp.emulator.faults import IllegalOperand
from te_grouped_mlp.emulator.formats import F32, F64, U8, U16, U32, U64

LANES = np.arange(32, dtype=U32)
ALL = np.ones(32, bool)
ALL.flags.writeable = False
# What a register holds before anything is written to it.
POISON = {4: U32(0xDEADBEEF), 8: U64(0xDEADBEEFDEADBEEF), 2: U16(0xBEEF), 1: np.False_}
UNSIGNED = {1: U8, 2: U16, 4: U32, 8: U64}
_TWICE = {"i2": np.int32, "u2": U32, "i4": np.int64, "u4": U64}

Value = np.ndarray | np.generic


def spread(value: Value) -> np.ndarray:
    """Return a value as 32 lanes."""
    return value if value.ndim else np.full(32, value)


def blend(mask: np.ndarray, new: Value, old: Value) -> Value:
    """Return `new` in the lanes of the mask, and `old` in the others."""
    if mask is ALL:
        return new
    if isinstance(new, tuple):
        previous = old if isinstance(old, tuple) else (POISON[8],) * len(new)
        return tuple(blend(mask, n, o) for n, o in zip(new, previous, strict=True))
    return np.where(mask, new, old)


def narrowed(mask: np.ndarray, predicate: Value) -> np.ndarray | None:
    """Return the lanes of `mask` where a predicate holds, or None if there are none."""
    if not predicate.ndim:
        return mask if predicate else None
    both = predicate if mask is ALL else mask & predicate
    if both.all():
        return ALL
    return both if both.any() else None


def branch(predicate: Value, taken: int, other: int, mask: np.ndarray) -> int | np.ndarray:
    """Return the next block, or one for each lane where they differ."""
    if not predicate.ndim:
        return taken if predicate else other
    active = predicate if mask is ALL else predicate[mask]
    if active.all():
        return taken
    return np.where(predicate, taken, other) if active.any() else other


def first(mask: np.ndarray) -> int:
    """Return the lowest active lane."""
    return 0 if mask is ALL else int(mask.argmax())


def select(predicate: Value, a: Value, b: Value) -> Value:
    """Return a where a predicate holds, else b."""
    if not predicate.ndim:
        return a if predicate else b
    return np.where(predicate, a, b)


def twice(value: Value) -> Value:
    """Widen an integer to twice its bits."""
    return value.astype(_TWICE[value.dtype.str[1:]])


def bits(value: Value) -> Value:
    """Return the unsigned bits of a value."""
    return value.view(UNSIGNED[value.dtype.itemsize])


def high(product: Value) -> Value:
    """Return the upper half of a 64-bit product."""
    return (product.view(U64) >> U64(32)).astype(U32)


def one(value: Value) -> Value:
    """Return 1 of a value's type."""
    return value.dtype.type(1)


def floats(pair: Value) -> np.ndarray:
    """Return two float32 in 64 bits as (lanes or 1, 2)."""
    return np.atleast_1d(pair).view(F32).reshape(-1, 2)


def bits64(values: np.ndarray) -> Value:
    """Undo `floats`."""
    joined = np.ascontiguousarray(values).view(U64)[:, 0]
    return joined[0] if len(joined) == 1 else joined


def divide(a: Value, b: Value) -> Value:
    """Divide integers towards zero; by zero gives all ones, as the machine does."""
    if a.dtype.itemsize == 4:
        return np.where(b == 0, -1.0, np.trunc(a.astype(F64) / b)).astype(np.int64).astype(U32)[()]
    zero = b == 0
    divisor = np.where(zero, one(b), b)
    quotient = a // divisor
    quotient = quotient + ((quotient < 0) & (quotient * divisor != a))
    return bits(np.where(zero, np.full_like(quotient, -1 if a.dtype.kind == "i" else 0), quotient))[
        ()
    ]


def population(value: Value) -> Value:
    """Count ones."""
    return np.bitwise_count(value).astype(U32)


def leading_zeros(value: Value) -> Value:
    """Count the zeros above the highest one."""
    return (32 - np.frexp(value.astype(F64))[1]).astype(U32)


def logic3(a: Value, b: Value, c: Value, table: int) -> Value:
    """Look up each bit of a result by the bits of a, b and c."""
    result = U32(0)
    for i in (i for i in range(8) if table >> i & 1):
        result = result | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    return result


def funnel_l(low: Value, high: Value, count: Value, mode: str) -> Value:
    """Shift 64 bits left, and return the upper half."""
    return (_funnel(low, high) << _funnel_count(count, mode) >> U64(32)).astype(U32)


def funnel_r(low: Value, high: Value, count: Value, mode: str) -> Value:
    """Shift 64 bits right, and return the lower half."""
    return (_funnel(low, high) >> _funnel_count(count, mode)).astype(U32)


def _funnel(low: Value, high: Value) -> Value:
    return low.astype(U64) | high.astype(U64) << U64(32)


def _funnel_count(count: Value, mode: str) -> Value:
    return (count & U32(31) if mode == "wrap" else np.minimum(count, U32(32))).astype(U64)


def shift_left(value: Value, count: Value) -> Value:
    """Shift; by the width or more gives zero."""
    width = 8 * value.dtype.itemsize
    if not count.ndim:
        return value << value.dtype.type(count) if count < width else value ^ value
    shifted = value << np.minimum(count, width - 1).astype(value.dtype)
    return np.where(count < width, shifted, value.dtype.type(0))


def shift_right(value: Value, count: Value) -> Value:
    """Shift, with copies of the sign where the type has one."""
    width = 8 * value.dtype.itemsize
    limited = np.minimum(count, width - 1).astype(value.dtype)
    shifted = value >> limited
    if value.dtype.kind == "i":
        return shifted
    return (
        shifted
        if not count.ndim and count < width
        else np.where(count < width, shifted, one(value) ^ one(value))
    )


def permute_bytes(a: Value, b: Value, control: Value) -> Value:
    """Pick four of eight bytes, or their signs."""
    source = a.astype(U64) | (b.astype(U64) << U64(32))
    result = U32(0)
    for i in range(4):
        nibble = (control >> U32(4 * i)) & U32(15)
        byte = (source >> ((nibble & U32(7)).astype(U64) * U64(8))).astype(U32) & U32(0xFF)
        sign = (byte >> U32(7)) * U32(0xFF)
        result = result | (np.where(nibble & U32(8), sign, byte) << U32(8 * i))
    return result


def minimum(a: Value, b: Value, c: Value | None = None) -> Value:
    """Return the least; a number rather than a NaN, and -0 before +0."""
    least = np.where(a == b, (a.view(U32) | b.view(U32)).view(F32), np.fmin(a, b))
    return _canonical(least) if c is None else minimum(_canonical(least), c)


def maximum(a: Value, b: Value, c: Value | None = None) -> Value:
    """Return the greatest; a number rather than a NaN, and +0 before -0."""
    greatest = np.where(a == b, (a.view(U32) & b.view(U32)).view(F32), np.fmax(a, b))
    return _canonical(greatest) if c is None else maximum(_canonical(greatest), c)


def minimum_nan(a: Value, b: Value, c: Value | None = None) -> Value:
    """Return the least, NaN if one of them is."""
    least = np.where(np.isnan(a) | np.isnan(b), F32("nan"), minimum(a, b))
    return _canonical(least) if c is None else minimum_nan(_canonical(least), c)


def maximum_nan(a: Value, b: Value, c: Value | None = None) -> Value:
    """Return the greatest, NaN if one of them is."""
    greatest = np.where(np.isnan(a) | np.isnan(b), F32("nan"), maximum(a, b))
    return _canonical(greatest) if c is None else maximum_nan(_canonical(greatest), c)


def _canonical(value: np.ndarray) -> np.ndarray:
    """Make every NaN the one that the machine returns."""
    return np.where(np.isnan(value), U32(0x7FFFFFFF).view(F32), value)


def saturate_s32(value: Value) -> Value:
    """Convert an integral float32 to 32 bits; NaN becomes zero."""
    wide = np.clip(
        np.nan_to_num(value.astype(F64), posinf=2.0**31, neginf=-(2.0**31)), -(2.0**31), 2.0**31 - 1
    )
    return wide.astype(np.int32)


def shuffle_up(value: Value, delta: Value, clamp: Value) -> Value:
    """Take the value of the lane `delta` below."""
    return _shuffle(value, lambda lane, b, _: lane - b, delta, clamp, up=True)


def shuffle_down(value: Value, delta: Value, clamp: Value) -> Value:
    """Take the value of the lane `delta` above."""
    return _shuffle(value, lambda lane, b, _: lane + b, delta, clamp)


def shuffle_bfly(value: Value, mask: Value, clamp: Value) -> Value:
    """Take the value of the lane whose number differs by a mask."""
    return _shuffle(value, lambda lane, b, _: lane ^ b, mask, clamp)


def shuffle_idx(value: Value, index: Value, clamp: Value) -> Value:
    """Take the value of a lane by its number."""
    if not value.ndim:
        return value
    if not index.ndim and not clamp.ndim and clamp == 31:
        return value[int(index) & 31]
    return _shuffle(value, lambda lane, b, seg: (lane & seg) | (b & ~seg), index, clamp)


def _shuffle(value: Value, source, b: Value, c: Value, up: bool = False) -> Value:
    if not value.ndim:
        return value
    lane = LANES.astype(np.int32)
    b, c = (b & U32(31)).astype(np.int32), c.astype(np.int32)
    clamp, segment = c & 31, (c >> 8) & 31
    limit = (lane & segment) | (clamp & ~segment)
    wanted = source(lane, b, segment)
    inside = wanted >= limit if up else wanted <= limit
    return value[np.where(inside, wanted, lane)]


def ballot(predicate: Value, mask: np.ndarray) -> np.generic:
    """Return the active lanes where a predicate holds, a bit each."""
    return np.packbits(mask & predicate, bitorder="little").view(U32)[0]


def vote_any(predicate: Value, mask: np.ndarray) -> np.bool_:
    """Say whether it holds in some active lane."""
    return (mask & predicate).any()


def vote_all(predicate: Value, mask: np.ndarray) -> np.bool_:
    """Say whether it holds in every active lane."""
    return (~mask | predicate).all()


def reduce_add(value: Value, mask: np.ndarray) -> np.generic:
    """Sum the active lanes."""
    return spread(value)[mask].sum(dtype=value.dtype)


def reduce_min(value: Value, mask: np.ndarray) -> np.generic:
    """Return the least of the active lanes, NaN if one is."""
    return spread(value)[mask].min()


def reduce_max(value: Value, mask: np.ndarray) -> np.generic:
    """Return the greatest of the active lanes, NaN if one is."""
    return spread(value)[mask].max()


def uniform(value: Value, mask: np.ndarray, what: str) -> int:
    """Return the one value of the active lanes.

    Raises:
        IllegalOperand: They differ.
    """
    if not value.ndim:
        return int(value)
    active = value if mask is ALL else value[mask]
    if (active != active[0]).any():
        raise IllegalOperand(f"{what} differs between the lanes of a warp: {active.tolist()}")
    return int(active[0])
