# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""MXFP8 on a GPU in Triton: the kernels behind `block_scale`, whose bytes are those of csrc.

A program works on a rectangle of ROWS x COLS elements that lies inside one 128-row scale tile of
one member (or group). Elements outside the matrix are read as zeros: the scale of a block of zeros
is 0x00, which is what padding must hold.

`columns / 32` comes instead of `columns`, and row strides come divided by a constant: the compiler
must see that rows begin at multiples of 16 bytes without being compiled anew for each size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from te_grouped_mlp.op.kernels.block_scale_math import (
    as_float,
    as_value,
    decode,
    e8m0,
    encode,
    magnitude,
    narrow,
    power,
    widen,
)

RUN_TIME = ["rows", "blocks", "stride", "groups", "size"]
"""Arguments that differ from call to call without a kernel of their own."""


@triton.jit
def _group_of(group_end_offsets, row, rows, groups, GROUPS: tl.constexpr):
    """First row and number of rows of the group that holds a row.

    Nobody has read `group_end_offsets`: whatever they say, groups are of whole tiles and end where
    the rows do.
    """
    group = tl.arange(0, GROUPS)
    end = tl.load(group_end_offsets + group, mask=group < groups, other=2147483647)
    end = tl.cdiv(tl.minimum(end, rows), 128) * 128
    first = tl.max(tl.where(end <= row, end, 0), 0)
    return first, tl.min(tl.where(end > row, end, 2147483647), 0) - first


@triton.jit
def _rectangle(group_end_offsets, tile, rows, groups, ROWS: tl.constexpr):
    """Whether there is anything to do, and where.

    Returns (is_valid, row in the buffer, padded row at which the member begins, row in the member,
    its rows, its 128-row tiles). With groups the member is the whole buffer: `_group_of` knows
    better.
    """
    if group_end_offsets is None:
        tiles = tl.cdiv(rows, 128)
        programs = tiles * (128 // ROWS)
        start = tile % programs * ROWS
        first = tile // programs * tiles * 128
        row = tile // programs * rows + start
        limit = rows
        is_valid = limit > 0
    else:
        tiles = 0
        first = 0
        row = tile * ROWS
        start = row
        limit = row + ROWS
        is_valid = row < tl.load(group_end_offsets + groups - 1)
    return is_valid, row, first, start, limit, tiles


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


@triton.jit
def _times(
    x,
    factor,
    COLUMN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Each element times the factor of its block: (ROWS / 32, COLS) or (ROWS, COLS / 32), or
    (ROWS, COLS / 64, 2) where even and odd columns belong to different blocks."""
    if INTERLEAVED:
        product = tl.reshape(x, (ROWS, COLS // 64, 32, 2)) * factor[:, :, None, :]
    elif COLUMN:
        product = tl.reshape(x, (ROWS // 32, 32, COLS)) * factor[:, None, :]
    else:
        product = tl.reshape(x, (ROWS, COLS // 32, 32)) * factor[:, :, None]
    return tl.reshape(product, (ROWS, COLS))


@triton.jit
def _codes(
    x, size, COLUMN: tl.constexpr, INTERLEAVED: tl.constexpr, E5M2: tl.constexpr,
    TWO_D: tl.constexpr, NAN: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """FP8 bytes of a rectangle, and the scale of each block as int32."""
    WIDE: tl.constexpr = COLS // 32
    HIGH: tl.constexpr = ROWS // 32
    if INTERLEAVED:
        amax = tl.max(tl.reshape(size, (ROWS, WIDE // 2, 32, 2)), 2)
    elif COLUMN:
        amax = tl.max(tl.reshape(size, (HIGH, 32, COLS)), 1)
        if TWO_D:
            amax = tl.max(tl.reshape(amax, (HIGH, WIDE, 32)), 2)
            amax = tl.broadcast_to(amax[:, :, None], (HIGH, WIDE, 32))
            amax = tl.reshape(amax, (HIGH, COLS))
    else:
        amax = tl.max(tl.reshape(size, (ROWS, WIDE, 32)), 2)
        if TWO_D:
            amax = tl.max(tl.reshape(amax, (HIGH, 32, WIDE)), 1)
            amax = tl.broadcast_to(amax[:, None, :], (HIGH, 32, WIDE))
            amax = tl.reshape(amax, (ROWS, WIDE))
    scale = e8m0(as_float(amax), E5M2, NAN)
    scaled = _times(x, power(254 - scale, NAN), COLUMN, INTERLEAVED, ROWS, COLS)
    return encode(scaled, E5M2, HARDWARE), scale


@triton.jit(do_not_specialize=RUN_TIME)
def quantize_tiles(
    src, group_end_offsets, noop, row_data, row_scale, column_data, column_scale, row_values,
    column_values, rows, blocks, stride, groups, STRIDE: tl.constexpr, GROUPS: tl.constexpr,
    E5M2: tl.constexpr, SWIZZLED: tl.constexpr, TWO_D: tl.constexpr, NAN: tl.constexpr,
    INTERLEAVED: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Quantize one rectangle; outputs that are None are not wanted.

    `rows` are those of one member. With `group_end_offsets`, member and group follow from the row.
    """
    if noop is not None:  # noqa: SIM102
        # Not one condition: without a flag there is nothing to load.
        if tl.load(noop) != 0:
            return
    columns = blocks * 32
    across = tl.cdiv(tl.cdiv(columns, 128) * 128, COLS)
    # Eight elements for each thread, whatever their type: another layout for each would cost a
    # pass through shared memory.
    column = tl.program_id(0) % across * COLS + tl.arange(0, COLS)
    column = tl.max_contiguous(column, 8)
    is_valid, data_row, first, start, limit, tiles = _rectangle(
        group_end_offsets, tl.program_id(0) // across, rows, groups, ROWS
    )
    if not is_valid:
        return
    line = tl.arange(0, ROWS)
    inside = (start + line < limit)[:, None] & (column < columns)[None, :]
    at = (data_row + line).to(tl.int64)[:, None]
    x = tl.load(src + at * (stride * STRIDE) + column[None, :], mask=inside, other=0.0)
    x = widen(x, HARDWARE)
    size = magnitude(x, NAN, HARDWARE)
    place = at * columns + column[None, :]
    if not (row_data is None and row_scale is None and row_values is None):
        code, scale = _codes(x, size, False, INTERLEAVED, E5M2, TWO_D, NAN, HARDWARE, ROWS, COLS)
        if row_data is not None:
            tl.store(row_data + place, code, mask=inside)
        if row_values is not None:
            value = decode(code, E5M2, HARDWARE)
            value = _times(value, power(scale, NAN), False, INTERLEAVED, ROWS, COLS)
            tl.store(row_values + place, as_value(value, HARDWARE), mask=inside)
        if row_scale is not None:
            block = tl.program_id(0) % across * (COLS // 32) + tl.arange(0, COLS // 32)
            to = _row_place((first + start + line)[:, None], block[None, :], blocks, SWIZZLED)
            ours = (block < tl.cdiv(blocks, 4) * 4)[None, :]
            tl.store(row_scale + to, scale.to(tl.uint8), mask=ours)
    if not (column_data is None and column_scale is None and column_values is None):
        code, scale = _codes(x, size, True, False, E5M2, TWO_D, NAN, HARDWARE, ROWS, COLS)
        if column_data is not None:
            tl.store(column_data + place, code, mask=inside)
        if column_values is not None:
            value = decode(code, E5M2, HARDWARE)
            value = _times(value, power(scale, NAN), True, False, ROWS, COLS)
            tl.store(column_values + place, as_value(value, HARDWARE), mask=inside)
        if column_scale is not None:
            if group_end_offsets is not None and SWIZZLED:
                first, count = _group_of(group_end_offsets, data_row, rows, groups, GROUPS)
                start = data_row - first
                tiles = count // 128
            local = start // 32 + tl.arange(0, ROWS // 32)
            to = _column_place(first, local[:, None], column[None, :], tiles, blocks, SWIZZLED)
            ours = (column < tl.cdiv(blocks, 4) * 128)[None, :]
            tl.store(column_scale + to, scale.to(tl.uint8), mask=ours)


@triton.jit(do_not_specialize=RUN_TIME)
def dequantize_tiles(
    data, scale, group_end_offsets, out, rows, blocks, groups, GROUPS: tl.constexpr,
    COLUMN: tl.constexpr, E5M2: tl.constexpr, SWIZZLED: tl.constexpr, HARDWARE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Write the values of one rectangle; the arguments are those of `quantize_tiles`."""
    columns = blocks * 32
    across = tl.cdiv(tl.cdiv(columns, 128) * 128, COLS)
    column = tl.program_id(0) % across * COLS + tl.arange(0, COLS)
    column = tl.max_contiguous(column, 8)
    is_valid, data_row, first, start, limit, tiles = _rectangle(
        group_end_offsets, tl.program_id(0) // across, rows, groups, ROWS
    )
    if not is_valid:
        return
    line = tl.arange(0, ROWS)
    inside = (start + line < limit)[:, None] & (column < columns)[None, :]
    place = (data_row + line).to(tl.int64)[:, None] * columns + column[None, :]
    code = tl.load(data + place, mask=inside, other=0)
    value = decode(code, E5M2, HARDWARE)
    if COLUMN:
        if group_end_offsets is not None and SWIZZLED:
            first, count = _group_of(group_end_offsets, data_row, rows, groups, GROUPS)
            start = data_row - first
            tiles = count // 128
        local = start // 32 + tl.arange(0, ROWS // 32)
        at = _column_place(first, local[:, None], column[None, :], tiles, blocks, SWIZZLED)
        ours = (column < tl.cdiv(blocks, 4) * 128)[None, :]
        factor = power(tl.load(scale + at, mask=ours, other=0).to(tl.int32), True)
    else:
        block = tl.program_id(0) % across * (COLS // 32) + tl.arange(0, COLS // 32)
        at = _row_place((first + start + line)[:, None], block[None, :], blocks, SWIZZLED)
        ours = (block < tl.cdiv(blocks, 4) * 4)[None, :]
        factor = power(tl.load(scale + at, mask=ours, other=0).to(tl.int32), True)
    value = _times(value, factor, COLUMN, False, ROWS, COLS)
    tl.store(out + place, narrow(value, out.dtype.element_ty, HARDWARE), mask=inside)


@triton.jit(do_not_specialize=RUN_TIME)
def swizzle_listed_tiles(table, out, blocks, groups, size, COLUMN: tl.constexpr):
    """Swizzle equal compact matrices that lie apart.

    `table` holds the address of each; `size` are the bytes of one, `groups` its tiles along rows.
    """
    across = tl.cdiv(blocks, 4)
    programs = across * groups
    member = tl.program_id(0) // programs
    scale = tl.load(table + member).to(tl.pointer_type(tl.uint8))
    start = tl.program_id(0) % programs // across
    side = tl.program_id(0) % across
    if COLUMN:
        local = start * 4 + tl.arange(0, 4)[:, None]
        column = side * 128 + tl.arange(0, 128)[None, :]
        at = _column_place(0, local, column, groups, blocks, False)
        to = _column_place(0, local, column, groups, blocks, True)
    else:
        row = start * 128 + tl.arange(0, 128)[:, None]
        block = side * 4 + tl.arange(0, 4)[None, :]
        at = _row_place(row, block, blocks, False)
        to = _row_place(row, block, blocks, True)
    tl.store(out + member.to(tl.int64) * size + to, tl.load(scale + at))


@triton.jit(do_not_specialize=RUN_TIME)
def swizzle_tiles(
    scale, group_end_offsets, out, rows, blocks, groups, GROUPS: tl.constexpr, COLUMN: tl.constexpr,
    INVERSE: tl.constexpr,
):  # fmt: skip
    """Move the 512 scales of one tile from the compact order to the swizzled one, or back."""
    across = tl.cdiv(blocks, 4)
    tile = tl.program_id(0) // across
    side = tl.program_id(0) % across
    if group_end_offsets is None:
        tiles = tl.cdiv(rows, 128)
        first = tile // tiles * tiles * 128
        start = tile % tiles * 128
        limit = rows
    else:
        if tile * 128 >= tl.load(group_end_offsets + groups - 1):
            return
        first, limit = _group_of(group_end_offsets, tile * 128, rows, groups, GROUPS)
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
