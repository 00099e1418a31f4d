# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""mxfp8_dequantize against exact float64 values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_grouped_mlp import _C
from te_grouped_mlp.op.tensors.capacity import span
from tests.csrc import calls, naive_mxfp8
from tests.csrc.naive_mxfp8 import COLUMN, POISON, ROW

DTYPES = tuple(calls.SOURCE_TYPES)


def random_operand(rows, cols, axis, seed):
    """Any data bytes and any logical scale bytes."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, cols // 32) if axis == ROW else (rows // 32, cols)
    data = torch.randint(0, 256, (rows, cols), dtype=torch.uint8, generator=generator)
    return data, torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def expected_values(data, scale, fp8, axis, dtype):
    """The exact product; float32 first for the narrower types, as the contract says."""
    exact = naive_mxfp8.dequantize(data, scale, fp8, axis)
    return exact if dtype == torch.float64 else exact.float().to(dtype)


def assert_same(got, wanted):
    """Bytes equal, except that any NaN stands for any other."""
    assert torch.equal(got.isnan(), wanted.isnan())
    zero = torch.zeros((), dtype=got.dtype)
    assert calls.same_bytes(got.where(~got.isnan(), zero), wanted.where(~wanted.isnan(), zero))


@settings(max_examples=60, deadline=None)
@given(
    splits=st.none() | st.lists(st.sampled_from([0, 128, 256]), min_size=1, max_size=4),
    rows=st.integers(1, 9),
    cols=st.integers(1, 9),
    axis=st.sampled_from([ROW, COLUMN]),
    swizzled=st.booleans(),
    fp8=st.sampled_from([0, 1]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_any_bytes(splits, rows, cols, axis, swizzled, fp8, dtype, seed):
    height = 32 * rows if splits is None else sum(splits) + 128 * (rows % 3)
    width = 32 * cols
    live = height if splits is None else sum(splits)
    data, scale = random_operand(height, width, axis, seed)
    buffer = naive_mxfp8.place_scales(scale, height, width, axis, swizzled, splits)
    wanted = expected_values(data, scale, fp8, axis, dtype)
    for _, threads in calls.each_level_and_threads():
        got = calls.dequantize(data, buffer, fp8, axis, swizzled, dtype, splits, threads)
        assert_same(got[:live], wanted[:live])
        assert (got[live:].contiguous().view(torch.uint8) == POISON).all()


@settings(max_examples=20, deadline=None)
@given(
    blocks=st.integers(1, 9),
    free=st.integers(1, 300),
    axis=st.sampled_from([ROW, COLUMN]),
    swizzled=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_whole_blocks_are_needed_along_the_axis_only(blocks, free, axis, swizzled, seed):
    shape = (free, 32 * blocks) if axis == ROW else (32 * blocks, free)
    data, scale = random_operand(*shape, axis, seed)
    buffer = naive_mxfp8.place_scales(scale, *shape, axis, swizzled, None)
    wanted = expected_values(data, scale, 0, axis, torch.float32)
    for _ in calls.each_level_and_threads():
        assert_same(calls.dequantize(data, buffer, 0, axis, swizzled, torch.float32), wanted)


@pytest.mark.parametrize("fp8", [0, 1], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_with_every_scale(dtype, fp8):
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8).reshape(256, 1).repeat(1, 8)
    wanted = expected_values(codes, scale, fp8, ROW, dtype)
    for _ in calls.each_level_and_threads():
        assert_same(calls.dequantize(codes, scale, fp8, ROW, False, dtype), wanted)


def test_values_worked_out_by_hand():
    data = torch.tensor([[0x38, 0xB8, 0x01, 0x7E, 0x7F, 0x80] + [0] * 26], dtype=torch.uint8)
    scale = torch.full((128, 4), 128, dtype=torch.uint8)
    got = calls.dequantize(data, scale, 0, ROW, False, torch.float32)[0, :6].tolist()
    assert got[:4] == [2.0, -2.0, 2.0**-8, 896.0]
    assert got[4] != got[4]
    assert str(got[5]) == "-0.0"


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 5), cols=st.integers(1, 5), fp8=st.sampled_from([0, 1]), seed=st.integers(0)
)
def test_quantizing_dequantized_values_gives_them_back(rows, cols, fp8, seed):
    x = calls.sample(32 * rows, 32 * cols, torch.bfloat16, "normal", seed % 1000)
    once = calls.quantize(x, fp8=fp8)
    for axis in (ROW, COLUMN):
        values = calls.dequantize(*once[2 * axis : 2 * axis + 2], fp8, axis, False, torch.bfloat16)
        again = calls.quantize(values, fp8=fp8)
        decoded = calls.dequantize(
            *again[2 * axis : 2 * axis + 2], fp8, axis, False, torch.bfloat16
        )
        assert torch.equal(values, decoded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": None}, r"data is None, allowed: \d+ bytes"),
        ({"scale": None}, r"scale is None, allowed: \d+ bytes"),
        ({"out": None}, r"out is None, allowed: \d+ bytes"),
        ({"fp8": 9}, r"fp8 is 9"),
        ({"axis": 2}, r"axis is 2, allowed: ROW=0, COLUMN=1"),
        ({"out_dtype": 7}, r"out_dtype is 7"),
        ({"rows": -1}, r"rows is -1"),
        ({"cols": 33}, r"cols is 33, allowed: multiples of 32"),
        ({"rows": 33, "axis": 1}, r"rows is 33, allowed: multiples of 32"),
        ({"threads": -2}, r"threads is -2"),
        ({"num_groups": 1}, r"splits is None"),
    ],
)
def test_bad_arguments(change, message):
    data, scale, out = calls.poisoned((64, 64)), calls.poisoned((128, 4)), calls.poisoned((64, 256))
    good = {
        "data": span(data),
        "scale": span(scale),
        "fp8": 0,
        "axis": 0,
        "swizzled": False,
        "rows": 64,
        "cols": 64,
        "out": span(out),
        "out_dtype": 0,
        "splits": None,
        "num_groups": 0,
        "threads": 1,
    }
    with pytest.raises(ValueError, match=message):
        _C.mxfp8_dequantize(**(good | change))
    assert (out == POISON).all()
