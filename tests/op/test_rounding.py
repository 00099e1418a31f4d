# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Rounding to odd in bf16 and then to MXFP8 gives what MXFP8 gives of the fp32 values."""

from __future__ import annotations

import pytest
import torch

from tests.csrc import calls

BLOCK = 32
EXACT_FROM = 5
"""The smallest scale byte for which it holds: below, bf16's subnormals have too few bits."""

# Sixteen low bits that stand for all: a number of bf16, and the least and greatest above it. The
# numbers at which either format rounds to another one are numbers of bf16.
LOW = (0x0000, 0x0001, 0xFFFF)


def odd(x: torch.Tensor) -> torch.Tensor:
    """bf16 of fp32 as epilogues store it: the odd neighbour of what bf16 has not."""
    bits = x.view(torch.int32)
    inexact = (bits & 0xFFFF) != 0
    return ((bits >> 16) | inexact.int()).to(torch.int16).view(torch.bfloat16)


def nearest(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16)


def of_bits(high: torch.Tensor, low: tuple[int, ...] = LOW) -> torch.Tensor:
    """fp32 of every upper half with each of the lower halves."""
    return ((high[:, None] << 16) | torch.tensor(low)).to(torch.int32).view(torch.float32).flatten()


def bits_of(value: float) -> int:
    return int(torch.tensor(value).view(torch.int32)) >> 16


def blocks(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """(n, 32): 31 of the values each, behind the largest magnitude of their block."""
    padded = torch.nn.functional.pad(values, (0, -values.numel() % (BLOCK - 1)))
    rows = padded.view(-1, BLOCK - 1)
    return torch.cat([largest.expand(rows.shape[0], 1), rows], 1).contiguous()


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scale bytes of rows that are one block each."""
    rows = x.shape[0]
    padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % BLOCK))
    data, scale = calls.quantize(padded.contiguous(), cols_wanted=False, nan_in_scale=True)
    return data[:rows], scale[:rows, 0]


def assert_same(x: torch.Tensor) -> None:
    (data, scale), (stored, stored_scale) = quantized(x), quantized(odd(x))
    assert torch.equal(scale, stored_scale)
    assert torch.equal(data, stored)


def scaled_values() -> torch.Tensor:
    """All magnitudes that E4M3 tells apart under one scale, and some that it does not."""
    high = torch.arange(bits_of(2.0**-13), bits_of(448.0))
    return of_bits(torch.cat([high, high | 0x8000]))


@pytest.mark.parametrize("scale", [EXACT_FROM, 6, 100, 127, 200, 240])
def test_every_code(scale: int) -> None:
    """Ties, the subnormals of E4M3 and both signs, under small and large scales."""
    factor = 2.0 ** (scale - 127)
    for largest in (225.0, 447.9999, 448.0):
        values = scaled_values()
        x = blocks(values[values.abs() <= largest] * factor, torch.tensor(largest * factor))
        assert (quantized(x)[1] == scale).all()
        assert_same(x)


def test_every_scale() -> None:
    """Each magnitude that fp32 has as the largest of its block, infinities and NaN too."""
    high = torch.arange(bits_of(448.0 * 2.0 ** (EXACT_FROM - 128)), 0x8000)
    largest = of_bits(high)
    x = largest[:, None] * torch.linspace(1.0, -1.0, BLOCK)
    x[:, 0] = largest
    assert (quantized(x)[1] >= EXACT_FROM - 1).all()
    assert_same(x[quantized(x)[1] >= EXACT_FROM])


def test_saturation_and_what_is_no_number() -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.randn(4, BLOCK)
    x[0, 3], x[1, 5], x[2, 7] = inf, -inf, nan
    x[3, 0] = torch.finfo(torch.float32).max
    assert odd(x)[:3].isnan().sum() == 1
    assert odd(x)[3].isfinite().all()
    assert_same(x)


def test_random_blocks_and_that_nearest_would_be_seen() -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(20000, BLOCK, generator=generator)
    x *= 2.0 ** torch.randint(-90, 90, (20000, 1), generator=generator)
    assert_same(x)
    codes, twice = quantized(x)[0], quantized(nearest(x))[0]
    assert 0.005 < (codes != twice).float().mean() < 0.05


def test_below_the_smallest_scales_a_code_may_differ() -> None:
    """The bound that the kernels' module gives is the true one."""
    values = scaled_values()
    factor = 2.0 ** (EXACT_FROM - 1 - 127)
    x = blocks(values * factor, torch.tensor(448.0 * factor))
    assert (quantized(x)[1] == EXACT_FROM - 1).all()
    with pytest.raises(AssertionError):
        assert_same(x)
