# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex functions and tensors that are not what they seem: refused or computed, never read past."""

from __future__ import annotations

import random

import pytest
import torch

from tests.integration.standalone import random_calls
from tests.integration.standalone.test_quantize import make_quantizer

SEED = 20261130


@pytest.mark.parametrize("name", random_calls.CALLS)
def test_the_calls_are_good_unspoiled(name: str, tex) -> None:
    for seed in range(3):
        good = random_calls.Good(tex, random.Random(seed))
        random_calls.function_of(tex, name)(*random_calls.CALLS[name](good))


def test_random_calls(tex) -> None:
    """A tensor without memory is refused everywhere; the others are as they are."""
    draw = random.Random(SEED)
    refused = 0
    for number in range(300):
        name, how, error = random_calls.run_spoiled(tex, draw)
        refused += error is not None
        if how.split()[0] in random_calls.LOST:
            message = f"{SEED} {number}: {name}, {how}: {error!r}"
            assert isinstance(error, ValueError), message
            assert "bytes of memory" in str(error), message
    assert refused > 150


@pytest.mark.parametrize("axis", ["row", "column"])
@pytest.mark.parametrize("swizzled", [False, True])
def test_a_scale_less_is_refused(axis: str, swizzled: bool, tex) -> None:
    quantizer = make_quantizer(
        tex, rowwise=axis == "row", columnwise=axis == "column", swizzled=swizzled
    )
    tensor = tex.quantize(torch.ones(160, 160).bfloat16(), quantizer)
    name = f"_{axis}wise_scale_inv"
    assert (tex.dequantize(tensor, tex.DType.kBFloat16) == 1).all()
    setattr(tensor, name, getattr(tensor, name).flatten()[:-1].clone())
    with pytest.raises(RuntimeError, match=rf"{axis}-wise scales of shape \(\d+,\); allowed: "):
        tex.dequantize(tensor, tex.DType.kBFloat16)


def test_grouped_scales_that_are_too_few_are_refused_before_anything_changes(tex) -> None:
    quantizer = make_quantizer(tex, columnwise=False)
    counts = torch.tensor([128, 128])
    for function in ("group_dequantize", "group_requantize_inplace", "grouped_swizzle_for_gemm"):
        grouped = tex.group_quantize(torch.ones(256, 128).bfloat16(), quantizer, 2, counts)
        grouped.scale_inv = grouped.scale_inv[:-1].clone()
        before = dict(vars(grouped))
        more = {
            "group_dequantize": (tex.DType.kBFloat16,),
            "group_requantize_inplace": (make_quantizer(tex), 2, counts, tex.DType.kBFloat16),
            "grouped_swizzle_for_gemm": (True, False),
        }[function]
        with pytest.raises(RuntimeError, match="1023 row-wise scales; allowed: 1024"):
            getattr(tex, function)(grouped, *more)
        assert all(vars(grouped)[name] is value for name, value in before.items())
