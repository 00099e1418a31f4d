# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""MXFP8 on a GPU in Triton: the kernels behind `block_scale`, whose bytes are those of csrc.

A program works on a rectangle of ROWS x COLS elements that lies inside one 128-row scale tile of
one member (or group). Elements outside the matrix are read as zeros: the scale of a block of zeros
is 0x00, which is what padding must hold.

`columns / 32` comes instead of `columns`, and row strides come divided by a constant: the compiler
must see that rows begin at multiples of 16 bytes without being compiled anew for each size.
HARDWARE chooses the device's FP8 conversions; without them the same bytes come from integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

RUN_TIME = ["rows", "blocks", "stride", "groups"]
"""Arguments that differ from call to call without a kernel of their own."""


@triton.jit
def _e8m0(amax, E5M2: tl.constexpr):
    """amax / largest rounded up to a power of two, as an exponent byte; int32 bits in and out."""
    reciprocal: tl.constexpr = 1.0 / 57344.0 if E5M2 else 1.0 / 448.0
    bits = (amax.to(tl.float32, bitcast=True) * reciprocal).to(tl.int32, bitcast=True)
    exponent = bits >> 23
    # 2^-127, the smallest scale, is the subnormal 0x400000: up to there nothing is rounded up.
    threshold = tl.where(exponent == 0, 0x400000, 0)
    scale = exponent + ((bits & 0x7FFFFF) > threshold).to(tl.int32)
    scale = tl.minimum(scale, 0xFE)
    return tl.where(bits > 0x7F800000, 0xFF, scale)


@triton.jit
def _power(scale):
    """2^(scale - 127) of exponent bytes (int32) as float32; NaN for 0xFF."""
    bits = tl.where(scale == 0, 0x00400000, scale << 23)
    return tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _inverse_power(scale):
    """2^(127 - scale) likewise."""
    bits = tl.where(scale == 254, 0x00400000, (254 - scale) << 23)
    return tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _encode(x, E5M2: tl.constexpr, HARDWARE: tl.constexpr):
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
def _decode(code, E5M2: tl.constexpr, HARDWARE: tl.constexpr):
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
def _widen(x, HARDWARE: tl.constexpr):
    """float32 of the source's type; Triton's interpreter loses the subnormals of bf16."""
    if HARDWARE or x.dtype != tl.bfloat16:
        wide = x.to(tl.float32)
    else:
        wide = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return wide


@triton.jit
def _narrow(x, TYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """float32 rounded to the result's type; every NaN becomes the positive quiet one."""
    if tl.float32 == TYPE:
        bits = tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
        out = bits.to(tl.float32, bitcast=True)
    elif tl.float16 == TYPE:
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
def _group_of(ends, row, groups, GROUPS: tl.constexpr):
    """First row and number of rows of the group that holds a row."""
    each = tl.arange(0, GROUPS)
    end = tl.load(ends + each, mask=each < groups, other=2147483647)
    first = tl.max(tl.where(end <= row, end, 0), 0)
    return first, tl.min(tl.where(end > row, end, 2147483647), 0) - first


@triton.jit
def _row_place(row, block, blocks, SWIZZLED: tl.constexpr):
    """Byte of a row scale; `row` counts padded rows from the first member on."""
    inner = (blocks + 3) // 4
    if SWIZZLED:
        tile = (row // 128).to(tl.int64) * inner + block // 4
        place = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    else:
        place = row.to(tl.int64) * (inner * 4) + block
    return place


@triton.jit
def _column_place(first, local, column, tiles, blocks, SWIZZLED: tl.constexpr):
    """Byte of a column scale.

    `first` is the padded row at which the member begins, `local` the row block counted from there,
    `tiles` the member's number of 128-row tiles.
    """
    wide = (blocks + 3) // 4 * 128
    begin = tl.cast(first // 32, tl.int64) * wide
    if SWIZZLED:
        tile = (column // 128).to(tl.int64) * tiles + local // 4
        place = begin + tile * 512 + column % 32 * 16 + column % 128 // 32 * 4 + local % 4
    else:
        place = begin + local.to(tl.int64) * wide + column
    return place


@triton.jit(do_not_specialize=RUN_TIME)
def quantize_tiles(
    src, ends, row_data, row_scale, column_data, column_scale, row_values, column_values,
    rows, blocks, stride, groups, STRIDE: tl.constexpr, GROUPS: tl.constexpr, E5M2: tl.constexpr,
    SWIZZLED: tl.constexpr, TWO_D: tl.constexpr, NAN: tl.constexpr, PAIRED: tl.constexpr,
    HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Quantize one rectangle; outputs that are None are not wanted.

    `rows` are those of one member. With `ends`, member and group are found from the row.
    """
    WIDE: tl.constexpr = COLS // 32
    HIGH: tl.constexpr = ROWS // 32
    columns = blocks * 32
    across = tl.cdiv(tl.cdiv(columns, 128) * 128, COLS)
    tile = tl.program_id(0) // across
    column = tl.program_id(0) % across * COLS + tl.arange(0, COLS)
    if ends is None:
        tiles = tl.cdiv(rows, 128)
        per_member = tiles * (128 // ROWS)
        start = tile % per_member * ROWS
        member = tile // per_member
        data_row = member * rows + start
        first = member * tiles * 128
        limit = rows
    else:
        data_row = tile * ROWS
        if data_row >= tl.load(ends + groups - 1):
            return
        start = data_row
        first = 0
        limit = data_row + ROWS
        tiles = 0
    line = tl.arange(0, ROWS)
    inside = (start + line < limit)[:, None] & (column < columns)[None, :]
    at = (data_row + line).to(tl.int64)[:, None]
    x = tl.load(src + at * (stride * STRIDE) + column[None, :], mask=inside, other=0.0)
    x = _widen(x, HARDWARE)
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if not NAN:
        bits = tl.where(bits > 0x7F800000, 0, bits)
    place = at * columns + column[None, :]
    by_row: tl.constexpr = not (row_data is None and row_scale is None and row_values is None)
    by_column: tl.constexpr = not (
        column_data is None and column_scale is None and column_values is None
    )
    if PAIRED:
        if row_values is not None:
            # [row, period, block's element, which block of the two]
            amax = tl.max(tl.reshape(bits, (ROWS, WIDE // 2, 32, 2)), 2)
            scale = _e8m0(amax, E5M2)[:, :, None, :]
            scaled = tl.reshape(x, (ROWS, WIDE // 2, 32, 2)) * _inverse_power(scale)
            value = _decode(_encode(scaled, E5M2, HARDWARE), E5M2, HARDWARE) * _power(scale)
            value = _narrow(tl.reshape(value, (ROWS, COLS)), tl.bfloat16, HARDWARE)
            tl.store(row_values + place, value, mask=inside)
    elif by_row:
        amax = tl.max(tl.reshape(bits, (ROWS, WIDE, 32)), 2)
        if TWO_D:
            amax = tl.max(tl.reshape(amax, (HIGH, 32, WIDE)), 1)
            amax = tl.broadcast_to(amax[:, None, :], (HIGH, 32, WIDE))
            amax = tl.reshape(amax, (ROWS, WIDE))
        scale = _e8m0(amax, E5M2)
        scaled = tl.reshape(x, (ROWS, WIDE, 32)) * _inverse_power(scale)[:, :, None]
        code = _encode(tl.reshape(scaled, (ROWS, COLS)), E5M2, HARDWARE)
        if row_data is not None:
            tl.store(row_data + place, code, mask=inside)
        if row_values is not None:
            value = tl.reshape(_decode(code, E5M2, HARDWARE), (ROWS, WIDE, 32))
            value = tl.reshape(value * _power(scale)[:, :, None], (ROWS, COLS))
            tl.store(row_values + place, _narrow(value, tl.bfloat16, HARDWARE), mask=inside)
        if row_scale is not None:
            block = tl.program_id(0) % across * WIDE + tl.arange(0, WIDE)
            to = _row_place((first + start + line)[:, None], block[None, :], blocks, SWIZZLED)
            ours = (block < tl.cdiv(blocks, 4) * 4)[None, :]
            tl.store(row_scale + to, scale.to(tl.uint8), mask=ours)
    if by_column:
        amax = tl.max(tl.reshape(bits, (HIGH, 32, COLS)), 1)
        if TWO_D:
            amax = tl.max(tl.reshape(amax, (HIGH, WIDE, 32)), 2)
            amax = tl.broadcast_to(amax[:, :, None], (HIGH, WIDE, 32))
            amax = tl.reshape(amax, (HIGH, COLS))
        scale = _e8m0(amax, E5M2)
        scaled = tl.reshape(x, (HIGH, 32, COLS)) * _inverse_power(scale)[:, None, :]
        code = _encode(tl.reshape(scaled, (ROWS, COLS)), E5M2, HARDWARE)
        if column_data is not None:
            tl.store(column_data + place, code, mask=inside)
        if column_values is not None:
            value = tl.reshape(_decode(code, E5M2, HARDWARE), (HIGH, 32, COLS))
            value = tl.reshape(value * _power(scale)[:, None, :], (ROWS, COLS))
            tl.store(column_values + place, _narrow(value, tl.bfloat16, HARDWARE), mask=inside)
        if column_scale is not None:
            if ends is not None and SWIZZLED:
                first, count = _group_of(ends, data_row, groups, GROUPS)
                start = data_row - first
                tiles = count // 128
            local = start // 32 + tl.arange(0, HIGH)
            to = _column_place(first, local[:, None], column[None, :], tiles, blocks, SWIZZLED)
            ours = (column < tl.cdiv(blocks, 4) * 128)[None, :]
            tl.store(column_scale + to, scale.to(tl.uint8), mask=ours)


@triton.jit(do_not_specialize=RUN_TIME)
def dequantize_tiles(
    data, scale, ends, out, rows, blocks, groups, GROUPS: tl.constexpr, COLUMN: tl.constexpr,
    E5M2: tl.constexpr, SWIZZLED: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Write the values of one rectangle; the arguments are those of `quantize_tiles`."""
    WIDE: tl.constexpr = COLS // 32
    HIGH: tl.constexpr = ROWS // 32
    columns = blocks * 32
    across = tl.cdiv(tl.cdiv(columns, 128) * 128, COLS)
    tile = tl.program_id(0) // across
    column = tl.program_id(0) % across * COLS + tl.arange(0, COLS)
    if ends is None:
        tiles = tl.cdiv(rows, 128)
        per_member = tiles * (128 // ROWS)
        start = tile % per_member * ROWS
        member = tile // per_member
        data_row = member * rows + start
        first = member * tiles * 128
        limit = rows
    else:
        data_row = tile * ROWS
        if data_row >= tl.load(ends + groups - 1):
            return
        start = data_row
        first = 0
        limit = data_row + ROWS
        tiles = 0
    line = tl.arange(0, ROWS)
    inside = (start + line < limit)[:, None] & (column < columns)[None, :]
    place = (data_row + line).to(tl.int64)[:, None] * columns + column[None, :]
    code = tl.load(data + place, mask=inside, other=0)
    value = _decode(code, E5M2, HARDWARE)
    if COLUMN:
        if ends is not None and SWIZZLED:
            first, count = _group_of(ends, data_row, groups, GROUPS)
            start = data_row - first
            tiles = count // 128
        local = start // 32 + tl.arange(0, HIGH)
        at = _column_place(first, local[:, None], column[None, :], tiles, blocks, SWIZZLED)
        ours = (column < tl.cdiv(blocks, 4) * 128)[None, :]
        factor = _power(tl.load(scale + at, mask=ours, other=0).to(tl.int32))
        value = tl.reshape(value, (HIGH, 32, COLS)) * factor[:, None, :]
    else:
        block = tl.program_id(0) % across * WIDE + tl.arange(0, WIDE)
        at = _row_place((first + start + line)[:, None], block[None, :], blocks, SWIZZLED)
        ours = (block < tl.cdiv(blocks, 4) * 4)[None, :]
        factor = _power(tl.load(scale + at, mask=ours, other=0).to(tl.int32))
        value = tl.reshape(value, (ROWS, WIDE, 32)) * factor[:, :, None]
    value = tl.reshape(value, (ROWS, COLS))
    tl.store(out + place, _narrow(value, out.dtype.element_ty, HARDWARE), mask=inside)


@triton.jit(do_not_specialize=RUN_TIME)
def swizzle_tiles(
    scale, ends, out, rows, blocks, groups, GROUPS: tl.constexpr, COLUMN: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """Move the 512 scales of one tile from the compact order to the swizzled one, or back."""
    across = tl.cdiv(blocks, 4)
    tile = tl.program_id(0) // across
    side = tl.program_id(0) % across
    if ends is None:
        tiles = tl.cdiv(rows, 128)
        first = tile // tiles * tiles * 128
        start = tile % tiles * 128
        limit = rows
    else:
        if tile * 128 >= tl.load(ends + groups - 1):
            return
        first, limit = _group_of(ends, tile * 128, groups, GROUPS)
        start = tile * 128 - first
        tiles = limit // 128
    if COLUMN:
        local = start // 32 + tl.arange(0, 4)[:, None]
        column = side * 128 + tl.arange(0, 128)[None, :]
        inside = (local * 32 < limit) & (column < blocks * 32)
        at = _column_place(first, local, column, tiles, blocks, INVERSE)
        to = _column_place(first, local, column, tiles, blocks, not INVERSE)
    else:
        row = start + tl.arange(0, 128)[:, None]
        block = side * 4 + tl.arange(0, 4)[None, :]
        inside = (row < limit) & (block < blocks)
        at = _row_place(first + row, block, blocks, INVERSE)
        to = _row_place(first + row, block, blocks, not INVERSE)
    tl.store(out + to, tl.load(scale + at, mask=inside, other=0))
