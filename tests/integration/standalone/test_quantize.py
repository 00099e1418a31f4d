# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Dense MXFP8 functions of tex against the formulas of `naive`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.integration.standalone import naive

FORMATS = {naive.E4M3: "kFloat8E4M3", naive.E5M2: "kFloat8E5M2"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def make_quantizer(tex, fp8=naive.E4M3, rowwise=True, columnwise=True, swizzled=False, two_d=False):
    from transformer_engine.pytorch import MXFP8Quantizer

    quantizer = MXFP8Quantizer(
        getattr(tex.DType, FORMATS[fp8]),
        rowwise=rowwise,
        columnwise=columnwise,
        with_2d_quantization=two_d,
    )
    quantizer.optimize_for_gemm = swizzled
    return quantizer


def make_matrix(rows, columns, dtype, seed=0, special=True):
    """Values over many magnitudes, with zeros, a NaN, infinities and subnormals among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator)
    values *= torch.exp2(torch.randint(-12, 12, (rows, columns), generator=generator).float())
    if special and rows and columns:
        values[0, : columns // 2] = 0.0
        values[rows // 2, columns // 3] = float("nan")
        values[rows - 1, 0] = float("inf")
        values[rows // 3, columns - 1] = 2.0**-126
        values[:32, :32] = 0.0
    return values.to(dtype)


def check_direction(quantized, matrix, column, fp8, swizzled, two_d=False):
    codes, scale = naive.quantize(matrix, column, fp8, two_d)
    prefix = "_columnwise" if column else "_rowwise"
    data = getattr(quantized, f"{prefix}_data")
    scales = getattr(quantized, f"{prefix}_scale_inv")
    assert data.dtype == scales.dtype == torch.uint8
    assert torch.equal(data.view(codes.shape), codes)
    assert torch.equal(scales.view(-1), naive.place_scales(scale, column, swizzled))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9).map(lambda n: 32 * n),
    columns=st.integers(1, 9).map(lambda n: 32 * n),
    dtype=st.sampled_from(DTYPES),
    fp8=st.sampled_from(list(FORMATS)),
    swizzled=st.booleans(),
    two_d=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_quantize_equals_formula(tex, rows, columns, dtype, fp8, swizzled, two_d, seed):
    matrix = make_matrix(rows, columns, dtype, seed)
    quantizer = make_quantizer(tex, fp8, swizzled=swizzled, two_d=two_d)
    quantized = tex.quantize(matrix, quantizer)
    for column in (False, True):
        check_direction(quantized, matrix, column, fp8, swizzled, two_d)


@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (False, True)])
def test_quantize_makes_only_the_wanted_direction(tex, rowwise, columnwise):
    matrix = make_matrix(64, 96, torch.bfloat16)
    quantizer = make_quantizer(tex, rowwise=rowwise, columnwise=columnwise)
    quantized = tex.quantize(matrix, quantizer)
    assert (quantized._rowwise_data is not None) == rowwise
    assert (quantized._columnwise_data is not None) == columnwise
    check_direction(quantized, matrix, columnwise, naive.E4M3, False)


def test_quantize_takes_leading_dimensions_strides_and_empties(tex):
    base = make_matrix(96, 192, torch.bfloat16)
    strided = base[:, :64]
    quantized = tex.quantize(strided, make_quantizer(tex))
    check_direction(quantized, strided.contiguous(), True, naive.E4M3, False)
    cube = base.view(3, 32, 192)
    quantized = tex.quantize(cube, make_quantizer(tex))
    assert tuple(quantized.shape) == (3, 32, 192)
    assert tuple(quantized._rowwise_data.shape) == (3, 32, 192)
    check_direction(quantized, base, False, naive.E4M3, False)
    empty = tex.quantize(torch.empty(0, 64), make_quantizer(tex))
    assert tuple(empty._columnwise_data.shape) == (0, 64)


def test_internal_quantizer_gives_a_storage(tex):
    from transformer_engine.pytorch import MXFP8Tensor, MXFP8TensorStorage

    quantizer = make_quantizer(tex)
    matrix = make_matrix(32, 32, torch.float32)
    assert isinstance(tex.quantize(matrix, quantizer), MXFP8Tensor)
    quantizer.internal = True
    storage = tex.quantize(matrix, quantizer)
    assert type(storage) is MXFP8TensorStorage
    assert storage._dtype == torch.float32


def test_output_is_reused_coerced_and_spared_by_noop(tex):
    first, second = make_matrix(64, 64, torch.float32, 1), make_matrix(64, 64, torch.float32, 2)
    output = tex.quantize(first, make_quantizer(tex, columnwise=False))
    row_data = output._rowwise_data
    quantizer = make_quantizer(tex, swizzled=True)
    before = row_data.clone()
    tex.quantize(second, make_quantizer(tex, columnwise=False), output, torch.ones(1))
    assert torch.equal(row_data, before)
    assert tex.quantize(second, quantizer, output, torch.zeros(1)) is output
    assert output._rowwise_data is row_data
    assert output._with_gemm_swizzled_scales
    for column in (False, True):
        check_direction(output, second, column, naive.E4M3, True)
    tex.quantize(first, make_quantizer(tex, rowwise=False), output)
    assert output._rowwise_data is None
    assert output._rowwise_scale_inv is None


def test_bgrad_quantize_sums_every_row(tex):
    matrix = make_matrix(288, 96, torch.bfloat16, special=False)
    dbias, quantized = tex.bgrad_quantize(matrix.view(3, 96, 96), make_quantizer(tex))
    assert torch.equal(dbias, naive.column_sums(matrix).bfloat16())
    check_direction(quantized, matrix, True, naive.E4M3, False)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 6).map(lambda n: 32 * n),
    columns=st.integers(1, 6).map(lambda n: 32 * n),
    fp8=st.sampled_from(list(FORMATS)),
    column=st.booleans(),
    swizzled=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_dequantize_equals_formula(tex, rows, columns, fp8, column, swizzled, dtype):
    from transformer_engine.pytorch.constants import TE_DType

    matrix = make_matrix(rows, columns, torch.bfloat16, special=False)
    quantizer = make_quantizer(tex, fp8, not column, column, swizzled)
    got = tex.dequantize(tex.quantize(matrix, quantizer), TE_DType[dtype])
    assert torch.equal(got, naive.values_of(matrix, column, fp8).to(dtype))
    assert tex.quantize(matrix, quantizer).dequantize(dtype=dtype).equal(got)


def test_split_quantize_is_one_quantize_for_each_part(tex):
    splits = [64, 0, 128, 32]
    matrix = make_matrix(sum(splits), 96, torch.bfloat16)
    quantizers = [make_quantizer(tex) for _ in splits]
    parts = tex.split_quantize(matrix, splits, quantizers)
    for part, rows in zip(parts, torch.split(matrix, splits), strict=True):
        assert tuple(part._rowwise_data.shape) == tuple(rows.shape)
        if rows.numel():
            check_direction(part, rows, False, naive.E4M3, False)
            check_direction(part, rows, True, naive.E4M3, False)


@pytest.mark.parametrize("rows", [32, 96, 128, 160])
@pytest.mark.parametrize("columns", [32, 96, 128, 288])
def test_swizzle_in_place_makes_new_buffers(tex, rows, columns):
    matrix = make_matrix(rows, columns, torch.bfloat16)
    quantized = tex.quantize(matrix, make_quantizer(tex))
    old = quantized._rowwise_scale_inv
    before = old.clone()
    tex.swizzle_scales_for_gemm_(quantized)
    assert torch.equal(old, before)
    assert quantized._rowwise_scale_inv is not old
    for column in (False, True):
        check_direction(quantized, matrix, column, naive.E4M3, True)
    again = quantized._rowwise_scale_inv
    tex.swizzle_scales_for_gemm_(quantized)
    assert quantized._rowwise_scale_inv is again


def test_swizzle_leaves_a_direction_without_data_alone(tex):
    matrix = make_matrix(128, 128, torch.bfloat16)
    quantized = tex.quantize(matrix, make_quantizer(tex))
    column_data, column_scale = quantized._columnwise_data, quantized._columnwise_scale_inv
    quantized._columnwise_data = None
    tex.swizzle_scales_for_gemm_(quantized)
    assert quantized._columnwise_scale_inv is column_scale
    quantized._columnwise_data = column_data
    check_direction(quantized, matrix, False, naive.E4M3, True)


@pytest.mark.parametrize("column", [False, True])
def test_pack_pointers_of_discrete_weights(tex, column):
    weights = [make_matrix(96, 160, torch.bfloat16, seed) for seed in range(3)]
    quantized = [tex.quantize(weight, make_quantizer(tex)) for weight in weights]
    prefix = "_columnwise" if column else "_rowwise"
    data = [getattr(one, f"{prefix}_data") for one in quantized]
    scales = [getattr(one, f"{prefix}_scale_inv") for one in quantized]
    pack = tex.grouped_mlp_experimental.swizzle_scales_and_pack_ptrs_for_discrete_weights
    kind = "mxfp8_columnwise" if column else "mxfp8_rowwise"
    data_ptrs, scale_ptrs, kept = pack(data, scales, kind, torch.device("cpu"))
    assert data_ptrs.tolist() == [one.data_ptr() for one in data]
    assert data_ptrs.dtype == scale_ptrs.dtype == torch.int64
    for index, weight in enumerate(weights):
        start = int(scale_ptrs[index]) - kept.data_ptr()
        expected = naive.place_scales(naive.quantize(weight, column)[1], column, True)
        assert torch.equal(kept[start : start + expected.numel()], expected)
    assert [t.numel() for t in pack([], [], kind, torch.device("cpu"))] == [0, 0, 0]


def test_empty_quantized_tensor(tex):
    from transformer_engine.pytorch import MXFP8Tensor

    made = make_quantizer(tex).make_empty((64, 96), dtype=torch.bfloat16)
    assert isinstance(made, MXFP8Tensor)
    assert tuple(made.shape) == (64, 96)
    assert made.device.type == "cpu"
    assert tuple(made._rowwise_scale_inv.shape) == (128, 4)
    assert tuple(made._columnwise_scale_inv.shape) == (4, 128)
