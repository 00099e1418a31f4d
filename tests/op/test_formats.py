# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Number formats as data."""

from __future__ import annotations

import pytest
import torch

from te_grouped_mlp.op.formats import (
    MXFP8,
    NVFP4,
    SCALE_TILE_INNER,
    SCALE_TILE_OUTER,
    UNQUANTIZED,
    DType,
)
from tests.op.backends.reference.naive import Numbers


@pytest.mark.parametrize("member", list(DType))
def test_dtype_from_its_name(member):
    assert DType.of(member.value) is member
    assert DType.of(f"torch.{member.value}") is member


@pytest.mark.parametrize(
    ("dtype", "member"),
    [
        (torch.float32, DType.FLOAT32),
        (torch.float16, DType.FLOAT16),
        (torch.bfloat16, DType.BFLOAT16),
        (torch.float8_e4m3fn, DType.E4M3),
        (torch.float8_e5m2, DType.E5M2),
        (torch.float8_e8m0fnu, DType.E8M0),
    ],
    ids=str,
)
def test_dtype_from_torch(dtype, member):
    assert DType.of(dtype) is member


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, "bf16", None], ids=str)
def test_other_dtypes_are_named(dtype):
    with pytest.raises(TypeError, match="dtype is .*; allowed: float64, float32, float16"):
        DType.of(dtype)


def test_formats():
    assert MXFP8.is_block_scaled
    assert NVFP4.is_block_scaled
    assert not UNQUANTIZED.is_block_scaled
    assert (MXFP8.block, NVFP4.block, UNQUANTIZED.block) == (32, 16, 0)
    assert (MXFP8.element, MXFP8.scale) == (DType.E4M3, DType.E8M0)
    assert (NVFP4.element, NVFP4.scale) == (DType.E2M1_X2, DType.E4M3)
    assert (UNQUANTIZED.element, UNQUANTIZED.scale) == (None, None)
    assert NVFP4.elements_per_byte == 2
    assert len({fmt.name for fmt in (MXFP8, NVFP4, UNQUANTIZED)}) == 3


@pytest.mark.parametrize("fmt", [MXFP8, NVFP4], ids=lambda fmt: fmt.name)
def test_groups_begin_on_scale_tiles(fmt):
    assert fmt.rows_multiple % SCALE_TILE_OUTER == 0
    assert fmt.rows_multiple % (fmt.block * SCALE_TILE_INNER) == 0


@pytest.mark.parametrize("along_columns", [True, False], ids=["row", "column"])
def test_tolerance_bounds_a_product_of_quantized_operands(along_columns):
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(128, 512, generator=generator) for _ in range(2))
    if not along_columns:
        a, b = a.t().contiguous(), b.t().contiguous()
    numbers = Numbers(quantized=True, dtype=torch.float32)
    pairs = [(numbers.copy(m, along_columns), m.double()) for m in (a, b)]
    if not along_columns:
        pairs = [(quantized.t(), exact.t()) for quantized, exact in pairs]
    (qa, ea), (qb, eb) = pairs
    error = float((qa @ qb.t() - ea @ eb.t()).norm() / (ea @ eb.t()).norm())
    assert MXFP8.tolerance / 3 < error < MXFP8.tolerance
