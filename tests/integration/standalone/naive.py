# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The formulas of MXFP8 and of the grouped MLP, written for reading: no kernel of ours is used."""

from __future__ import annotations

from collections.abc import Sequence

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def exponent_bytes(amax: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    """E8M0 bytes: the power of two at or above `amax / largest`, biased by 127."""
    ratio = amax.float() * torch.tensor(1.0 / LARGEST[fp8], dtype=torch.float32)
    mantissa, exponent = torch.frexp(ratio.double())
    ceiling = torch.where(mantissa == 0.5, exponent - 1, exponent)
    biased = (ceiling + 127).clamp(0, 254)
    biased = torch.where(ratio == 0, 0, biased)
    return torch.where(torch.isinf(ratio), 254, biased).to(torch.uint8)


def encode(values: torch.Tensor, scale: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    """FP8 bytes of `values / 2^(scale - 127)`, saturated; a NaN keeps its sign bit clear."""
    scaled = values.double() * torch.exp2(127.0 - scale.double())
    clamped = scaled.clamp(-LARGEST[fp8], LARGEST[fp8]).float()
    codes = clamped.to(fp8).view(torch.uint8)
    return torch.where(torch.isnan(values), 0x7F, codes)


def quantize(
    matrix: torch.Tensor, column: bool, fp8: torch.dtype = E4M3, two_d: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bytes (rows, columns) and one scale byte for each block, without padding."""
    rows, columns = matrix.shape
    tiles = matrix.float().reshape(rows // 32, 32, columns // 32, 32)
    magnitude = torch.nan_to_num(tiles.abs(), nan=0.0, posinf=float("inf"))
    if two_d:
        amax = magnitude.amax(dim=(1, 3), keepdim=True).expand(-1, 32, -1, 32)
    else:
        amax = magnitude.amax(dim=1 if column else 3, keepdim=True).expand(-1, 32, -1, 32)
    scale = exponent_bytes(amax, fp8)
    codes = encode(tiles, scale, fp8).reshape(rows, columns)
    if column:
        return codes, scale[:, 0].reshape(rows // 32, columns)
    return codes, scale[:, :, :, 0].reshape(rows, columns // 32)


def dequantize(
    codes: torch.Tensor, scale: torch.Tensor, column: bool, fp8: torch.dtype = E4M3
) -> torch.Tensor:
    """Return float64 values of bytes and unpadded scales."""
    factors = torch.exp2(scale.double() - 127.0)
    repeated = factors.repeat_interleave(32, dim=0 if column else 1)
    return codes.view(fp8).double() * repeated


def values_of(
    matrix: torch.Tensor, column: bool, fp8: torch.dtype = E4M3, two_d: bool = False
) -> torch.Tensor:
    """Return what a matrix is worth after quantization, float64."""
    return dequantize(*quantize(matrix, column, fp8, two_d), column, fp8)


def swizzled_offset(outer: torch.Tensor, inner: torch.Tensor, inner_tiles: int) -> torch.Tensor:
    """Byte offset of scale (outer, inner) in the order that a GEMM reads."""
    tile = (outer // 128) * inner_tiles + inner // 4
    return tile * 512 + (outer % 32) * 16 + (outer % 128) // 32 * 4 + inner % 4


def place_scales(scale: torch.Tensor, column: bool, swizzled: bool) -> torch.Tensor:
    """Return the padded scale buffer of one matrix, flat, its padding 0."""
    outer_first = scale.t() if column else scale
    outer, inner = outer_first.shape
    padded = torch.zeros(round_up(outer, 128) * round_up(inner, 4), dtype=torch.uint8)
    i, j = torch.arange(outer)[:, None], torch.arange(inner)[None, :]
    if swizzled:
        at = swizzled_offset(i, j, round_up(inner, 4) // 4)
    elif column:
        at = j * round_up(outer, 128) + i
    else:
        at = i * round_up(inner, 4) + j
    padded[at] = outer_first
    return padded


def split_rows(matrix: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
    """Return the rows of each group."""
    return list(torch.split(matrix[: sum(splits)], list(splits)))


def column_sums(matrix: torch.Tensor) -> torch.Tensor:
    """Sum rows in fp32 down each 128-row tile, then over the tiles, in order."""
    total = torch.zeros(matrix.shape[1], dtype=torch.float32)
    for tile in torch.split(matrix.float(), 128):
        partial = torch.zeros_like(total)
        for row in tile:
            partial += row
        total += partial
    return total


def halves(matrix: torch.Tensor, interleave: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gate and the linear half of each row, by the index formula."""
    width = matrix.shape[1] // 2
    block = interleave or width
    index = torch.arange(width)
    gate = 2 * block * (index // block) + index % block
    return matrix[:, gate], matrix[:, gate + block]


def swiglu(x: torch.Tensor, scales: torch.Tensor, interleave: int) -> torch.Tensor:
    gate, linear = halves(x, interleave)
    return gate / (1 + torch.exp(-gate)) * linear * scales[:, None]


def srelu(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) ** 2 * scales[:, None]


def grouped_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    splits: Sequence[int],
    biases: Sequence[torch.Tensor] | None = None,
    bias_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each group's rows by its weight, transposed, and add its bias."""
    outputs = []
    start = 0
    for index, count in enumerate(splits):
        rows = slice(start, start + count)
        out = x[rows] @ weights[index].t()
        if biases is not None:
            factor = 1.0 if bias_scale is None else bias_scale[rows, None]
            out = out + biases[index] * factor
        outputs.append(out)
        start += count
    return torch.cat(outputs)
