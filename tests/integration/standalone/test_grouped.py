# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Grouped MXFP8 functions of tex: each group equals the dense formula, other rows are spared."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.standalone import naive
from tests.integration.standalone.test_quantize import make_matrix, make_quantizer

SPLITS = st.lists(st.sampled_from([0, 128, 256, 384]), min_size=1, max_size=4)


def expected_buffers(matrix, splits, column, swizzled, fp8=naive.E4M3):
    """Flat data and scale buffers; positions that must stay unwritten hold 0xFF."""
    rows, columns = matrix.shape
    data = torch.full((rows, columns), 0xFF, dtype=torch.uint8)
    width = naive.round_up(columns, 128)
    if column:
        scales = torch.full((naive.round_up(rows // 32, 4) * width,), 0xFF, dtype=torch.uint8)
    else:
        scales = torch.full((rows * naive.round_up(columns // 32, 4),), 0xFF, dtype=torch.uint8)
    start = 0
    for part in naive.split_rows(matrix, splits):
        count = part.shape[0]
        if count:
            codes, scale = naive.quantize(part, column, fp8)
            data[start : start + count] = codes
            placed = naive.place_scales(scale, column, swizzled)
            at = start * width // 32 if column else start * naive.round_up(columns // 32, 4)
            scales[at : at + placed.numel()] = placed
        start += count
    return data.view(-1), scales


def check_grouped(grouped, matrix, splits, swizzled, fp8=naive.E4M3):
    for column in (False, True):
        data = grouped.columnwise_data if column else grouped.rowwise_data
        scales = grouped.columnwise_scale_inv if column else grouped.scale_inv
        expected = expected_buffers(matrix, splits, column, swizzled, fp8)
        assert torch.equal(data, expected[0])
        assert torch.equal(scales, expected[1])


def quantize_groups(tex, matrix, splits, **options):
    quantizer = make_quantizer(tex, **options)
    return tex.group_quantize(matrix, quantizer, len(splits), torch.tensor(splits))


@settings(max_examples=20, deadline=None)
@given(
    splits=SPLITS,
    tail=st.sampled_from([0, 128, 256]),
    columns=st.integers(1, 9).map(lambda n: 32 * n),
    swizzled=st.booleans(),
    fp8=st.sampled_from([naive.E4M3, naive.E5M2]),
)
def test_group_quantize_equals_formula(tex, splits, tail, columns, swizzled, fp8):
    matrix = make_matrix(sum(splits) + tail, columns, torch.bfloat16)
    matrix[sum(splits) :] = float("nan")
    grouped = quantize_groups(tex, matrix, splits, swizzled=swizzled, fp8=fp8)
    check_grouped(grouped, matrix, splits, swizzled, fp8)
    assert grouped._with_gemm_swizzled_scales == swizzled


def test_group_quantize_result(tex):
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor
    from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import (
        GroupedTensorStorage,
    )

    matrix = make_matrix(256, 64, torch.bfloat16)
    quantizer = make_quantizer(tex)
    splits = torch.tensor([128, 128])
    offsets = torch.tensor([0, 128 * 64, 256 * 64])
    grouped = tex.group_quantize(matrix, quantizer, 2, splits, tensor_offsets=offsets)
    assert isinstance(grouped, GroupedTensor)
    assert grouped.quantizer is quantizer
    assert grouped.first_dims is splits
    assert grouped.tensor_offsets is offsets
    assert tex.group_quantize(matrix, quantizer, 2, splits).tensor_offsets.equal(offsets)
    assert tuple(grouped.logical_shape) == tuple(grouped.shape) == (256, 64)
    quantizer.internal = True
    storage = tex.group_quantize(matrix, quantizer, 2, None)
    assert type(storage) is GroupedTensorStorage
    assert storage.first_dims is storage.tensor_offsets is None
    uniform = tex.group_quantize(matrix, make_quantizer(tex, swizzled=True), 2, None)
    check_grouped(uniform, matrix, [128, 128], True)
    by_offsets = tex.group_quantize(matrix, make_quantizer(tex), 2, None, tensor_offsets=offsets)
    check_grouped(by_offsets, matrix, [128, 128], False)


def test_group_quantize_into_an_output(tex):
    first, second = make_matrix(256, 64, torch.bfloat16, 1), make_matrix(256, 64, torch.bfloat16, 2)
    quantizer = make_quantizer(tex)
    output = tex.group_quantize(first, quantizer, 2, None)
    data = output.rowwise_data
    again = tex.group_quantize(second, quantizer, 2, None, output=output)
    assert again is output
    assert output.rowwise_data.data_ptr() == data.data_ptr()
    check_grouped(output, second, [128, 128], False)
    tex.group_quantize(first, quantizer, 2, None, noop_flag=torch.ones(1), output=output)
    check_grouped(output, second, [128, 128], False)


@pytest.mark.parametrize("splits", [[256, 256], [256, 128, 128], [128, 256], [0, 128, 256], None])
@pytest.mark.parametrize("column", [False, True])
def test_tes_own_split_finds_every_group(tex, splits, column):
    """It cuts the data at the offsets that the storage says, not at equal parts."""
    equal = [256, 256] if splits is None else splits
    matrix = make_matrix(sum(equal), 128, torch.bfloat16, special=False)
    quantizer = make_quantizer(tex, rowwise=not column, columnwise=column)
    first_dims = None if splits is None else torch.tensor(splits)
    grouped = tex.group_quantize(matrix, quantizer, len(equal), first_dims)
    for part, member in zip(
        naive.split_rows(matrix, equal), grouped.split_into_quantized_tensors(), strict=True
    ):
        assert tuple(member.shape) == tuple(part.shape)
        if part.numel():
            assert torch.equal(member.dequantize().double(), naive.values_of(part, column))


@pytest.mark.parametrize("column", [False, True])
@pytest.mark.parametrize(("groups", "rows"), [(2, 192), (4, 96), (4, 32)])
def test_equal_groups_of_part_tiles_share_the_scales_of_one_matrix(tex, groups, rows, column):
    """Only their sum is a multiple of 128. What reads them finds each group's scales."""
    from transformer_engine.pytorch.constants import TE_DType

    matrix = make_matrix(groups * rows, 160, torch.bfloat16, special=False)
    quantizer = make_quantizer(tex, rowwise=not column, columnwise=column)
    grouped = tex.group_quantize(matrix, quantizer, groups, None)
    data, scales = expected_buffers(matrix, [groups * rows], column, False)
    found = (grouped.columnwise_data, grouped.columnwise_scale_inv) if column else (
        grouped.rowwise_data, grouped.scale_inv
    )  # fmt: skip
    assert torch.equal(found[0], data)
    assert torch.equal(found[1], scales)
    values = tex.group_dequantize(grouped, TE_DType[torch.float32]).rowwise_data
    assert torch.equal(values.view(matrix.shape).double(), naive.values_of(matrix, column))
    tex.grouped_swizzle_for_gemm(grouped, rowwise=not column, columnwise=column)
    expected = torch.cat(
        [
            naive.place_scales(naive.quantize(part, column)[1], column, True)
            for part in torch.split(matrix, rows)
        ]
    )
    swizzled = grouped.columnwise_scale_inv if column else grouped.scale_inv
    assert torch.equal(swizzled.reshape(-1), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bgrad_group_quantize_sums_in_tiles(tex, dtype):
    splits = [128, 0, 256]
    matrix = make_matrix(512, 96, dtype, special=False)
    matrix[384:] = float("nan")
    grouped, dbias = tex.bgrad_group_quantize(matrix, make_quantizer(tex), 3, torch.tensor(splits))
    check_grouped(grouped, matrix, splits, False)
    parts = naive.split_rows(matrix, splits)
    expected = torch.stack([naive.column_sums(part) for part in parts]).to(dtype)
    assert dbias.dtype == dtype
    assert torch.equal(dbias, expected)
    empty = tex.bgrad_group_quantize(matrix[:0], make_quantizer(tex), 3, torch.zeros(3).long())
    assert torch.equal(empty[1], torch.zeros(3, 96, dtype=dtype))


@pytest.mark.parametrize("column", [False, True])
def test_group_dequantize(tex, column):
    from transformer_engine.pytorch.constants import TE_DType

    splits = [256, 128]
    matrix = make_matrix(512, 96, torch.bfloat16, special=False)
    grouped = quantize_groups(tex, matrix, splits, rowwise=not column, columnwise=column)
    back = tex.group_dequantize(grouped, TE_DType[torch.float32])
    assert back.quantizer is None
    values = back.rowwise_data.view(512, 96)
    expected = torch.cat(
        [naive.values_of(part, column) for part in naive.split_rows(matrix, splits)]
    )
    assert torch.equal(values[:384], expected.float())
    assert bool(torch.isnan(values[384:]).all())


@settings(max_examples=15, deadline=None)
@given(splits=SPLITS, columns=st.integers(1, 6).map(lambda n: 32 * n))
def test_grouped_swizzle_of_varying_groups(tex, splits, columns):
    matrix = make_matrix(sum(splits) + 128, columns, torch.bfloat16)
    grouped = quantize_groups(tex, matrix, splits)
    old = grouped.scale_inv.clone()
    kept = grouped.scale_inv
    tex.grouped_swizzle_for_gemm(grouped, rowwise=True, columnwise=True)
    assert torch.equal(kept, old)
    live = sum(splits)
    width = naive.round_up(columns, 128)
    row = expected_buffers(matrix, splits, False, True)[1]
    column = expected_buffers(matrix, splits, True, True)[1]
    cut = live * naive.round_up(columns // 32, 4)
    assert torch.equal(grouped.scale_inv.view(-1)[:cut], row[:cut])
    cut = live * width // 32
    assert torch.equal(grouped.columnwise_scale_inv.view(-1)[:cut], column[:cut])


@pytest.mark.parametrize("rows", [64, 96, 128, 192])
@pytest.mark.parametrize("columns", [64, 160])
def test_grouped_swizzle_of_equal_groups(tex, te, rows, columns):
    """Weights built member by member: each has scales padded on its own."""
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor

    members = [make_matrix(rows, columns, torch.bfloat16, seed) for seed in range(3)]
    grouped = GroupedTensor.make_grouped_tensor_with_shapes(
        num_tensors=3,
        shapes=[(rows, columns)] * 3,
        quantizer=make_quantizer(tex),
        device="cpu",
        dtype=torch.bfloat16,
    )
    for slot in (grouped.scale_inv, grouped.columnwise_scale_inv):
        slot.fill_(0)
    grouped.quantize(members)
    tex.grouped_swizzle_for_gemm(grouped, rowwise=True, columnwise=True)
    for column in (False, True):
        scales = grouped.columnwise_scale_inv if column else grouped.scale_inv
        expected = torch.cat(
            [naive.place_scales(naive.quantize(m, column)[1], column, True) for m in members]
        )
        assert torch.equal(scales.reshape(-1), expected)
    assert tuple(grouped.scale_inv.shape) == (
        3 * naive.round_up(rows, 128),
        naive.round_up(columns // 32, 4),
    )
    assert tuple(grouped.columnwise_scale_inv.shape) == (
        3 * naive.round_up(columns, 128),
        naive.round_up(rows // 32, 4),
    )


def test_grouped_swizzle_drops_the_direction_it_does_not_swizzle(tex):
    matrix = make_matrix(256, 64, torch.bfloat16)
    grouped = quantize_groups(tex, matrix, [256])
    tex.grouped_swizzle_for_gemm(grouped, rowwise=True, columnwise=False)
    assert grouped.columnwise_scale_inv is None
    assert grouped._with_gemm_swizzled_scales
    kept = grouped.scale_inv
    tex.grouped_swizzle_for_gemm(grouped, rowwise=True, columnwise=True)
    assert grouped.scale_inv is kept


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("returned", [False, True])
def test_group_requantize_inplace(tex, columnwise, returned):
    from transformer_engine.pytorch.constants import TE_DType

    splits = [128, 0, 256]
    matrix = make_matrix(512, 128, torch.bfloat16, special=False)
    grouped = quantize_groups(tex, matrix, splits, columnwise=False)
    row_data, row_scale = grouped.rowwise_data, grouped.scale_inv
    old_scale = row_scale.clone()
    quantizer = make_quantizer(tex, columnwise=columnwise, swizzled=True)
    values = tex.group_requantize_inplace(
        grouped,
        quantizer,
        3,
        torch.tensor(splits),
        TE_DType[torch.bfloat16],
        return_dequantized=returned,
    )
    assert (quantizer.rowwise_usage, quantizer.columnwise_usage) == (True, columnwise)
    assert grouped.rowwise_data is row_data
    assert torch.equal(row_scale, old_scale)
    exact = torch.cat([naive.values_of(part, False) for part in naive.split_rows(matrix, splits)])
    exact = torch.cat([exact, torch.zeros(128, 128)]).bfloat16()
    assert (values is not None) == returned
    if returned:
        assert torch.equal(values[:384], exact[:384])
    expected = expected_buffers(matrix, splits, False, True)[1]
    assert torch.equal(grouped.scale_inv[: 384 * 4], expected[: 384 * 4])
    if columnwise:
        data, scales = expected_buffers(exact, splits, True, True)
        assert torch.equal(grouped.columnwise_data, data)
        assert torch.equal(grouped.columnwise_scale_inv, scales)
    assert (
        tex.group_requantize_inplace(
            grouped, quantizer, 3, torch.tensor(splits), TE_DType[torch.bfloat16]
        )
        is None
    )


@pytest.mark.parametrize(
    ("splits", "words"),
    [
        ([128, 100], "multiples of 128"),
        ([-128, 256], "multiples of 128 >= 0"),
        ([256, 256], "512 rows in all; the buffer has 384"),
    ],
)
def test_bad_splits_are_named(tex, splits, words):
    matrix = make_matrix(384, 64, torch.bfloat16)
    with pytest.raises(ValueError, match=words):
        tex.group_quantize(matrix, make_quantizer(tex), 2, torch.tensor(splits))
