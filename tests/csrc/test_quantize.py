# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""mxfp8_quantize against the naive formulas, byte for byte, at every SIMD level."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from te_grouped_mlp import _C
from te_grouped_mlp.op.tensors.capacity import span
from tests.csrc import calls, naive_mxfp8
from tests.csrc.naive_mxfp8 import COLUMN, ROW

KINDS = ("normal", "wide", "bits", "special")
DTYPES = tuple(calls.SOURCE_TYPES)


def check(x: torch.Tensor, *, axes=(ROW, COLUMN), **options) -> None:
    """Every level and thread count must leave exactly the naive buffers, poison included."""
    naive = {k: v for k, v in options.items() if k in ("splits", "two_d", "nan_in_scale")}
    expected = []
    for axis in axes:
        expected += naive_mxfp8.quantize(
            x, options.get("fp8", 0), axis, options.get("swizzled", False), **naive
        )
    before = x.clone()
    for level, threads in calls.each_level_and_threads():
        got = calls.quantize(
            x, rows_wanted=ROW in axes, cols_wanted=COLUMN in axes, threads=threads, **options
        )
        for i, (ours, wanted) in enumerate(zip(got, expected, strict=True)):
            assert calls.same_bytes(ours, wanted), (level, threads, i, x.shape, options)
    assert calls.same_bytes(x, before)


@pytest.mark.parametrize("rows", [32, 64, 96, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("cols", [32, 64, 96, 128, 160, 192, 224, 256])
def test_all_sizes_modulo_128(rows, cols):
    x = calls.sample(rows, cols, torch.bfloat16, "special", rows * 1000 + cols)
    for swizzled in (False, True):
        check(x, swizzled=swizzled)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fp8", [0, 1], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_source_type_and_format(dtype, fp8, kind):
    x = calls.sample(96, 160, dtype, kind, 7)
    check(x, fp8=fp8)
    check(x, fp8=fp8, nan_in_scale=True, swizzled=True)
    check(x, fp8=fp8, two_d=True)


@settings(max_examples=40, deadline=None)
@given(
    splits=st.lists(st.sampled_from([0, 128, 256, 384]), min_size=1, max_size=4),
    tail=st.integers(0, 3),
    cols=st.integers(1, 9),
    swizzled=st.booleans(),
    two_d=st.booleans(),
    nan_in_scale=st.booleans(),
    fp8=st.sampled_from([0, 1]),
    kind=st.sampled_from(KINDS),
    axes=st.sampled_from([(ROW,), (COLUMN,), (ROW, COLUMN)]),
    seed=st.integers(0, 1000),
)
def test_groups(splits, tail, cols, swizzled, two_d, nan_in_scale, fp8, kind, axes, seed):
    x = calls.sample(sum(splits) + 128 * tail, 32 * cols, torch.bfloat16, kind, seed)
    check(
        x,
        axes=axes,
        splits=splits,
        swizzled=swizzled,
        two_d=two_d,
        nan_in_scale=nan_in_scale,
        fp8=fp8,
    )


@settings(max_examples=30, deadline=None)
@given(
    blocks=st.integers(1, 9),
    free=st.integers(1, 300),
    axis=st.sampled_from([ROW, COLUMN]),
    swizzled=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 1000),
)
def test_one_direction_needs_whole_blocks_along_itself_only(
    blocks, free, axis, swizzled, dtype, kind, seed
):
    shape = (free, 32 * blocks) if axis == ROW else (32 * blocks, free)
    check(calls.sample(*shape, dtype, kind, seed), axes=(axis,), swizzled=swizzled)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 9),
    cols=st.integers(1, 9),
    extra=st.integers(0, 70),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_row_stride(rows, cols, extra, dtype, seed):
    wide = calls.sample(32 * rows, 32 * cols + extra, dtype, "special", seed)
    view = wide[:, extra : extra + 32 * cols]
    got = calls.quantize(view, swizzled=True)
    for ours, wanted in zip(got, calls.quantize(view.contiguous(), swizzled=True), strict=True):
        assert calls.same_bytes(ours, wanted)


@pytest.mark.parametrize("fp8", [0, 1], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_pattern_as_an_element(dtype, fp8):
    """Each block holds the format's largest value, so that its scale is 1 and elements stay."""
    largest = naive_mxfp8.FORMATS[fp8][1]
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    patterns = torch.where(
        patterns.float().abs() <= largest, patterns, torch.zeros((), dtype=dtype)
    )
    body = torch.cat([patterns, patterns.new_zeros(31 * 2115 - 65536)]).reshape(2115, 31)
    x = torch.cat([torch.full((2115, 1), largest, dtype=dtype), body], dim=1)
    for _ in calls.each_level_and_threads():
        data, scale = calls.quantize(x, fp8=fp8, cols_wanted=False)
        assert (scale[:2115, 0] == 127).all()
        assert torch.equal(data, naive_mxfp8.to_fp8(x.double(), fp8))


@pytest.mark.parametrize("fp8", [0, 1], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("nan_in_scale", [False, True])
def test_every_bfloat16_pattern_as_the_maximum(fp8, nan_in_scale):
    x = torch.zeros(65536, 32, dtype=torch.bfloat16)
    x[:, 5] = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    expected = naive_mxfp8.quantize_axis(x, fp8, ROW, nan_in_scale=nan_in_scale)
    for _ in calls.each_level_and_threads():
        data, scale = calls.quantize(x, fp8=fp8, cols_wanted=False, nan_in_scale=nan_in_scale)
        assert torch.equal(scale[:, :1], expected[1])
        assert torch.equal(data, expected[0])


@pytest.mark.parametrize("fp8", [0, 1], ids=["e4m3", "e5m2"])
def test_every_scale_with_magnitudes_of_all_exponents(fp8):
    """A panel of 32 rows per scale, because the kernel chooses its arithmetic by panel."""
    largest = naive_mxfp8.FORMATS[fp8][1]
    last = 247 if fp8 == 0 else 240  # the scale of bfloat16's largest value
    exponents = torch.arange(last + 1, dtype=torch.float64) - 127
    maximum = (largest * torch.exp2(exponents)).bfloat16()
    maximum[-1] = torch.finfo(torch.bfloat16).max
    most = maximum.view(torch.int16).long().repeat_interleave(32).unsqueeze(1)
    generator = torch.Generator().manual_seed(fp8)
    bits = (torch.rand(len(most), 31, generator=generator) * (most + 1)).long()
    bits += torch.randint(0, 2, bits.shape, generator=generator) * -32768
    x = torch.cat([most, bits], dim=1).to(torch.int16).view(torch.bfloat16)
    expected = naive_mxfp8.quantize_axis(x, fp8, ROW)
    assert sorted(set(expected[1].flatten().tolist())) == list(range(last + 1))
    for _ in calls.each_level_and_threads():
        data, scale = calls.quantize(x, fp8=fp8, cols_wanted=False)
        assert torch.equal(scale[: len(x), :1], expected[1])
        assert torch.equal(data, expected[0])


def test_values_worked_out_by_hand():
    """Ends of every rule: (block value, scale byte, element byte) for E4M3."""
    nan, inf = float("nan"), float("inf")
    cases = [
        (0.0, 0x00, 0x00),
        (-0.0, 0x00, 0x80),
        (448.0, 127, 0x7E),
        (449.0, 128, 0x76),  # 224.5 rounds to 224
        (-1.0, 119, 0xF8),  # 1 / 448 rounds up to 2^-8; 256 is 0x78
        (inf, 0xFE, 0x7E),
        (nan, 0x00, 0x7F),
        (2.0**-149, 0x00, 0x00),  # 2^-22 after scaling, below half of 2^-9
        (2.0**-126, 0x00, 0x40),  # 2 after scaling by 2^127
        (3.4028234663852886e38, 247, 0x78),  # 2^128 / 448 rounds up to 2^120; 256
    ]
    x = torch.zeros(len(cases), 32)
    x[:, 3] = torch.tensor([c[0] for c in cases])
    data, scale = calls.quantize(x, cols_wanted=False)
    assert scale[: len(cases), 0].tolist() == [c[1] for c in cases]
    assert data[:, 3].tolist() == [c[2] for c in cases]


def test_a_nan_spoils_its_block_only_where_asked():
    x = torch.ones(32, 64)
    x[4, 40] = float("nan")
    data, scale, col_data, col_scale = calls.quantize(x)
    assert scale[4, :2].tolist() == [119, 119]
    assert data[4, 40] == 0x7F
    assert data[4, 41] == 0x78
    assert col_scale[0, 40] == 119
    data, scale, col_data, col_scale = calls.quantize(x, nan_in_scale=True)
    assert scale[4, :2].tolist() == [119, 255]
    assert (data[4, 32:] == 0x7F).all()
    assert (data[4, :32] == 0x78).all()
    assert col_scale[0, 40] == 255
    assert (col_data[:, 40] == 0x7F).all()
    assert (col_data[:, 41] == 0x78).all()


def test_flush_to_zero_of_the_calling_thread_changes_nothing():
    x = calls.sample(64, 64, torch.float32, "bits", 3)
    # Subnormals that the smallest scale, 2^-127, brings up to 1.
    x[:, :32] = torch.arange(32) * 2.0**-132
    expected = calls.quantize(x)
    assert (expected[0][:, 1:32] != 0).all()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        results = [calls.quantize(x, threads=threads) for threads in (1, 3)]
        still_on = bool(torch.tensor(2.0**-126) * 0.5 == 0.0)
    finally:
        torch.set_flush_denormal(False)
    assert still_on
    for got in results:
        for ours, wanted in zip(got, expected, strict=True):
            assert calls.same_bytes(ours, wanted)


def test_threads_over_a_large_input():
    """Large enough that threads=0 splits the work too."""
    x = calls.sample(1024, 1056, torch.bfloat16, "wide", 0)
    expected = calls.quantize(x, swizzled=True, threads=1)
    for threads in (0, 2, 5, 64):
        got = calls.quantize(x, swizzled=True, threads=threads)
        for ours, wanted in zip(got, expected, strict=True):
            assert calls.same_bytes(ours, wanted)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_nothing_to_do(shape):
    calls.quantize(torch.zeros(shape, dtype=torch.bfloat16))
    if shape[1]:
        calls.quantize(torch.zeros(shape, dtype=torch.bfloat16), splits=[0, 0])


GOOD = {
    "src_dtype": 0,
    "rows": 128,
    "cols": 64,
    "row_stride": 64,
    "fp8": 0,
    "swizzled": False,
    "num_groups": 0,
    "two_d": False,
    "nan_in_scale": False,
    "threads": 1,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"src": None}, r"src is None, allowed: \d+ bytes"),
        ({"src_dtype": 4}, r"src_dtype is 4, allowed: F32=0, F16=1, BF16=2, F64=3"),
        ({"src_dtype": -1}, r"src_dtype is -1"),
        ({"rows": -32}, r"rows is -32, allowed: 0 or more"),
        ({"rows": 100}, r"rows is 100, allowed: multiples of 32"),
        ({"cols": -1}, r"cols is -1, allowed: 0 or more"),
        ({"cols": 48}, r"cols is 48, allowed: multiples of 32"),
        ({"rows": 2**62}, r"rows x cols is 4611686018427387904 x 64, allowed"),
        ({"row_stride": 63}, r"row_stride is 63, allowed: at least cols = 64"),
        ({"row_stride": 2**61}, r"row_stride is 2305843009213693952, allowed"),
        ({"fp8": 2}, r"fp8 is 2, allowed: E4M3=0, E5M2=1"),
        ({"threads": -1}, r"threads is -1, allowed: 0 \(decide\) to 1024"),
        ({"threads": 1025}, r"threads is 1025"),
        ({"row_scale": None}, r"row_scale is None, allowed: memory, because row_data"),
        ({"row_data": None}, r"row_data is None, allowed: memory, because row_scale"),
        ({"col_scale": None}, r"col_scale is None"),
        (
            dict.fromkeys(("row_data", "row_scale", "col_data", "col_scale")),
            r"row_data and col_data is None",
        ),
        ({"num_groups": -1}, r"num_groups is -1"),
        ({"num_groups": 2}, r"splits is None, allowed: 2 int64 row counts"),
        ({"splits": []}, r"num_groups is 0, allowed: 1 or more, because splits is given"),
        ({"splits": [128, -128]}, r"splits\[1\] is -128, allowed: 0 or more"),
        ({"splits": [64]}, r"splits\[0\] is 64, allowed: multiples of 128"),
        (
            {"splits": [128, 0, 128]},
            r"splits\[2\] is 128, allowed: a sum of splits of at most rows",
        ),
    ],
)
def test_bad_arguments(change, message):
    source = torch.ones(128, 64)
    buffers = {
        "row_data": calls.poisoned((128, 64)),
        "row_scale": calls.poisoned((128, 4)),
        "col_data": calls.poisoned((128, 64)),
        "col_scale": calls.poisoned((4, 128)),
    }
    arguments = GOOD | {name: span(b) for name, b in buffers.items()}
    arguments |= {"src": span(source), "splits": None}
    # One number more than asked for: the address of an empty tensor is 0.
    held = torch.tensor([*change.get("splits", []), 0], dtype=torch.int64)
    if "splits" in change:
        change = {"splits": span(held), "num_groups": len(held) - 1}
    with pytest.raises(ValueError, match=message):
        _C.mxfp8_quantize(**(arguments | change))
    for buffer in buffers.values():
        assert (buffer == naive_mxfp8.POISON).all()
