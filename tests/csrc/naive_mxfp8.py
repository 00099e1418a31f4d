# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""MXFP8 by the book: every formula written out, nothing shared with the C++ kernels.

Slow on purpose. Scale places come from the index formula entry by entry, scales from exact
arithmetic on Python floats, elements from torch's own float8 casts.
"""

import math

import torch

FORMATS = {0: (torch.float8_e4m3fn, 448.0), 1: (torch.float8_e5m2, 57344.0)}
ROW, COLUMN = 0, 1
POISON = 0xAA


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below value."""
    return -(-value // multiple) * multiple


def scale_shape(rows: int, cols: int, axis: int) -> tuple[int, int]:
    """Shape of the scale buffer of a (rows, cols) matrix."""
    if axis == ROW:
        return round_up(rows, 128), round_up(cols // 32, 4)
    return round_up(rows // 32, 4), round_up(cols, 128)


def e8m0(amax: float, fp8: int) -> int:
    """Scale byte of a block: amax / max rounded up to a power of two; amax is a float32 value."""
    if math.isnan(amax):
        return 255
    if math.isinf(amax):
        return 254
    reciprocal = torch.tensor(1.0 / FORMATS[fp8][1], dtype=torch.float32)
    ratio = float(torch.tensor(amax, dtype=torch.float32) * reciprocal)
    if ratio == 0.0:
        return 0
    mantissa, exponent = math.frexp(ratio)  # mantissa in [0.5, 1)
    return max(0, (exponent - 1 if mantissa == 0.5 else exponent) + 127)


def power(scale: torch.Tensor, sign: int = 1) -> torch.Tensor:
    """2 ** (sign * (scale - 127)) in float64, NaN for scale byte 255."""
    value = torch.exp2(sign * (scale.double() - 127.0))
    return torch.where(scale == 255, torch.nan, value)


def to_fp8(scaled: torch.Tensor, fp8: int) -> torch.Tensor:
    """Bytes of scaled (float64), saturated to the largest finite value; every NaN is 0x7F."""
    dtype, largest = FORMATS[fp8]
    codes = scaled.clamp(-largest, largest).float().to(dtype).view(torch.uint8)
    return torch.where(scaled.isnan(), torch.tensor(0x7F, dtype=torch.uint8), codes)


def block_scales(x: torch.Tensor, fp8: int, nan_in_scale: bool) -> torch.Tensor:
    """Scale bytes of x (blocks, elements), one per block."""
    amaxes = []
    for block in x.float().abs():
        values = block if nan_in_scale else block[~block.isnan()]
        # torch's max gives NaN as soon as one value is NaN.
        amaxes.append(float(values.max()) if values.numel() else 0.0)
    return torch.tensor([e8m0(a, fp8) for a in amaxes], dtype=torch.uint8)


def quantize_axis(
    x: torch.Tensor, fp8: int, axis: int, two_d: bool = False, nan_in_scale: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data (rows, cols) and logical scales, (rows, cols/32) or (rows/32, cols), without padding."""
    rows, cols = x.shape
    if two_d:
        blocks = x.reshape(rows // 32, 32, cols // 32, 32).permute(0, 2, 1, 3).reshape(-1, 1024)
        scale = block_scales(blocks, fp8, nan_in_scale).reshape(rows // 32, cols // 32)
        scale = scale.repeat_interleave(32, 0 if axis == ROW else 1)
    elif axis == ROW:
        scale = block_scales(x.reshape(-1, 32), fp8, nan_in_scale).reshape(rows, cols // 32)
    else:
        turned = x.t().reshape(-1, 32)  # (cols * rows/32, 32)
        scale = block_scales(turned, fp8, nan_in_scale).reshape(cols, rows // 32).t().contiguous()
    per_element = scale.repeat_interleave(32, 1 if axis == ROW else 0)
    data = to_fp8(x.float().double() * power(per_element, -1), fp8)
    return data, scale


def group_ranges(rows: int, splits: list[int] | None) -> list[tuple[int, int]]:
    """(first row, rows) of each group; dense data is one group."""
    if splits is None:
        return [(0, rows)]
    return [(sum(splits[:g]), split) for g, split in enumerate(splits)]


def scale_places(
    rows: int, cols: int, axis: int, swizzled: bool, splits: list[int] | None
) -> list[tuple[int, tuple[int, int] | None]]:
    """(byte, logical entry or None for padding) for every byte that a writer must write."""
    height, width = scale_shape(rows, cols, axis)
    places: list[tuple[int, tuple[int, int] | None]] = []
    for first, count in group_ranges(rows, splits):
        if axis == ROW:
            outer = range(first, round_up(first + count, 128) if count else first)
            inner, tiles = width, math.ceil(cols / 128)
        else:
            outer = range(width)
            inner, tiles = round_up(count // 32, 4), math.ceil(count / 128)
        for i in outer:
            for j in range(inner):
                if axis == ROW:
                    entry = (i, j) if i < rows and j < cols // 32 else None
                    compact, base = i * width + j, 0
                else:
                    block = first // 32 + j
                    entry = (block, i) if j < count // 32 and i < cols else None
                    compact, base = block * width + i, first * round_up(cols, 128) // 32
                if not swizzled:
                    places.append((compact, entry))
                    continue
                tile = (i // 128) * tiles + j // 4
                byte = base + tile * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
                places.append((byte, entry))
    assert all(0 <= byte < height * width for byte, _ in places)
    return places


def place_scales(
    scale: torch.Tensor, rows: int, cols: int, axis: int, swizzled: bool, splits: list[int] | None
) -> torch.Tensor:
    """The whole scale buffer: logical scales in place, padding 0, unwritten bytes POISON."""
    height, width = scale_shape(rows, cols, axis)
    buffer = [POISON] * (height * width)
    values = scale.tolist()
    for byte, entry in scale_places(rows, cols, axis, swizzled, splits):
        buffer[byte] = 0 if entry is None else values[entry[0]][entry[1]]
    return torch.tensor(buffer, dtype=torch.uint8).reshape(height, width)


def quantize(
    x: torch.Tensor,
    fp8: int,
    axis: int,
    swizzled: bool,
    splits: list[int] | None = None,
    two_d: bool = False,
    nan_in_scale: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data and scale buffers as the kernel must leave them in memory filled with POISON."""
    rows, cols = x.shape
    live = rows if splits is None else sum(splits)
    data = torch.full((rows, cols), POISON, dtype=torch.uint8)
    data[:live], scale = quantize_axis(x[:live], fp8, axis, two_d, nan_in_scale)
    return data, place_scales(scale, rows, cols, axis, swizzled, splits)


def dequantize(data: torch.Tensor, scale: torch.Tensor, fp8: int, axis: int) -> torch.Tensor:
    """Exact float64 values; scale is logical, without padding."""
    per_element = scale.repeat_interleave(32, 1 if axis == ROW else 0)
    return data.view(FORMATS[fp8][0]).double() * power(per_element)


def column_sums(
    x: torch.Tensor, splits: list[int] | None, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """(groups, cols) float32: row after row in tiles of 128, then tile after tile."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    sums = []
    for first, count in group_ranges(x.shape[0], splits):
        total = torch.zeros(x.shape[1], dtype=dtype)
        for tile in range(first, first + count, 128):
            partial = torch.zeros(x.shape[1], dtype=dtype)
            for i in range(tile, min(tile + 128, first + count)):
                row = x[i].to(dtype)
                partial = partial + (row if weights is None else row * weights[i].to(dtype))
            total = total + partial
        sums.append(total.float())
    return torch.stack(sums)


def row_dots(x: torch.Tensor, table: torch.Tensor, splits: list[int] | None) -> torch.Tensor:
    """One float32 per valid row: lane j % 32 sums its products in order, then lanes are halved."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    dots = []
    for g, (first, count) in enumerate(group_ranges(x.shape[0], splits)):
        products = x[first : first + count].to(dtype) * table[g].to(dtype)
        lanes = torch.zeros(count, 32, dtype=dtype)
        for j in range(x.shape[1]):
            lanes[:, j % 32] += products[:, j]
        width = 16
        while width:
            lanes = lanes[:, :width] + lanes[:, width : 2 * width]
            width //= 2
        dots.append(lanes[:, 0].float())
    return torch.cat(dots)
