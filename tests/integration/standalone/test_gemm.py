# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex's matrix products against float64 products of the same operands, rounded once."""

from __future__ import annotations

import pytest
import torch

from tests.integration.standalone import naive
from tests.integration.standalone.test_quantize import make_matrix, make_quantizer

LAYOUTS = {"TN": (True, False), "NN": (False, False), "NT": (False, True)}
# (rows, inner, columns) of `rows x inner` times `inner x columns`.
SIZES = (96, 160, 64)


def operand(tex, kind, rows, columns, axis_columns, seed, swizzled=False):
    """Return an operand and its float64 values; `axis_columns`: blocks along the columns."""
    matrix = make_matrix(rows, columns, torch.bfloat16, seed, special=False) / 64
    if kind != "mxfp8":
        plain = matrix.to(kind)
        return plain, plain.double()
    quantized = tex.quantize(matrix, make_quantizer(tex, swizzled=swizzled))
    return quantized, naive.values_of(matrix, not axis_columns)


def operands(tex, kind, layout, sizes=SIZES, swizzled=False):
    """Return A, B and the float64 product in a layout."""
    m, k, n = sizes
    transa, transb = LAYOUTS[layout]
    a_shape, b_shape = ((n, k) if transa else (k, n)), ((k, m) if transb else (m, k))
    A, a = operand(tex, kind, *a_shape, transa, 1, swizzled)
    B, b = operand(tex, kind, *b_shape, not transb, 2, swizzled)
    product = torch.einsum(f"{'km' if transb else 'mk'},{'nk' if transa else 'kn'}->mn", b, a)
    return A, B, product


def gemm(tex, A, B, layout, out=None, bias=None, grad=False, accumulate=False, **options):
    transa, transb = LAYOUTS[layout]
    dtype = options.pop("output_dtype", None)
    workspace = torch.empty(1, dtype=torch.uint8)
    return tex.generic_gemm(
        A, transa, B, transb, out, options.pop("quantizer", None), dtype, bias, 6, False, None,
        grad, workspace, 1, accumulate, False, comm_overlap=None, comm_type=None,
        extra_output=None, bulk_overlap=False, **options,
    )  # fmt: skip


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_mxfp8_product(tex, layout, swizzled, out_dtype):
    A, B, product = operands(tex, "mxfp8", layout, swizzled=swizzled)
    out = torch.full(product.shape, float("nan"), dtype=out_dtype)
    assert gemm(tex, A, B, layout, out)[0] is out
    torch.testing.assert_close(out, product.to(out_dtype), rtol=0, atol=0)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_product(tex, layout, dtype):
    A, B, product = operands(tex, dtype, layout)
    out = gemm(tex, A, B, layout)[0]
    torch.testing.assert_close(out, product.to(dtype), rtol=0, atol=0)


def test_the_direction_read_is_the_inner_one(tex):
    """Row-wise and column-wise values differ, so reading the wrong one would show."""
    matrix = make_matrix(96, 64, torch.bfloat16, special=False)
    assert not torch.equal(naive.values_of(matrix, False), naive.values_of(matrix, True))


def test_leading_dimensions_and_output_dtype(tex):
    A, B, product = operands(tex, torch.bfloat16, "TN")
    out = gemm(tex, A, B.view(3, 32, -1), "TN", output_dtype=4)[0]
    assert out.dtype == torch.float32
    assert tuple(out.shape) == (3, 32, 64)
    torch.testing.assert_close(out.view(96, 64), product.float(), rtol=0, atol=0)


def test_accumulate_rounds_the_sum_once(tex):
    A, B, product = operands(tex, "mxfp8", "NT")
    start = torch.randn(product.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    out = start.clone()
    gemm(tex, A, B, "NT", out, accumulate=True, alpha=1.0, beta=1.0)
    once = (product + start.double()).bfloat16()
    twice = product.bfloat16() + start
    assert torch.equal(out, once)
    assert not torch.equal(once, twice)
    out = start.clone()
    gemm(tex, A, B, "NT", out, accumulate=True, alpha=0.5, beta=0.25)
    assert torch.equal(out, (0.5 * product + 0.25 * start.double()).bfloat16())


def test_bias_is_added_before_rounding_and_its_gradient_summed(tex):
    A, B, product = operands(tex, torch.bfloat16, "TN")
    bias = torch.randn(64, generator=torch.Generator().manual_seed(4)).bfloat16()
    out, none, *_ = gemm(tex, A, B, "TN", bias=bias)
    assert none is None
    assert torch.equal(out, (product + bias.double()).bfloat16())
    dy = make_matrix(96, 64, torch.bfloat16, 5, special=False)
    x = make_matrix(96, 32, torch.bfloat16, 6, special=False)
    grad = gemm(tex, x, dy, "NT", bias=torch.empty(64).bfloat16(), grad=True)[1]
    assert torch.equal(grad, dy.double().sum(0).bfloat16())


def test_empty_operands_and_quantized_output(tex):
    x, dy = torch.empty(0, 64).bfloat16(), torch.empty(0, 32).bfloat16()
    out = torch.full((32, 64), float("nan"))
    gemm(tex, x, dy, "NT", out)
    assert torch.equal(out, torch.zeros(32, 64))
    A, B, product = operands(tex, torch.bfloat16, "TN")
    out = gemm(tex, A, B, "TN", quantizer=make_quantizer(tex))[0]
    assert torch.equal(out._rowwise_data, naive.quantize(product.bfloat16(), False)[0])


def test_general_gemm_of_te_runs(te, tex):
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    A, B, product = operands(tex, "mxfp8", "NN", swizzled=True)
    out, *_ = general_gemm(A, B, torch.bfloat16, layout="NN")
    assert torch.equal(out, product.bfloat16())


# --- grouped ---------------------------------------------------------------------------------

SPLITS = [128, 0, 256]
TAIL = 128
INNER, COLUMNS = 96, 160


def rows_operand(tex, kind, columns, seed, axis_columns):
    """Grouped storage of tokens x columns, garbage past the groups, and its groups' values."""
    from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import (
        GroupedTensorStorage,
    )

    tokens = sum(SPLITS) + TAIL
    matrix = make_matrix(tokens, columns, torch.bfloat16, seed, special=False) / 64
    matrix[sum(SPLITS) :] = float("nan")
    splits = torch.tensor(SPLITS)
    parts = naive.split_rows(matrix, SPLITS)
    if kind == "mxfp8":
        grouped = tex.group_quantize(matrix, make_quantizer(tex, swizzled=True), 3, splits)
        return grouped, [naive.values_of(part, not axis_columns) for part in parts]
    grouped = GroupedTensorStorage(
        shape=(tokens, columns), dtype=torch.bfloat16, num_tensors=3, quantizer=None,
        data=matrix.reshape(-1), first_dims=splits,
    )  # fmt: skip
    return grouped, [part.double() for part in parts]


def weight_operand(tex, kind, form, axis_columns):
    """Weights as a list, or as one grouped storage; and their values."""
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor

    weights = [
        make_matrix(COLUMNS, INNER, torch.bfloat16, 10 + index, special=False) / 64
        for index in range(3)
    ]
    quantizer = make_quantizer(tex) if kind == "mxfp8" else None
    values = [w.double() for w in weights]
    if kind == "mxfp8":
        values = [naive.values_of(w, not axis_columns) for w in weights]
    if form == "list":
        return (
            weights if quantizer is None else [tex.quantize(w, quantizer) for w in weights]
        ), values
    grouped = GroupedTensor.make_grouped_tensor_with_shapes(
        num_tensors=3, shapes=[(COLUMNS, INNER)] * 3, quantizer=quantizer, device="cpu",
        dtype=torch.bfloat16,
    )  # fmt: skip
    if quantizer is None:
        grouped.rowwise_data.copy_(torch.stack(weights).view(-1))
        return grouped, values
    grouped.quantize(weights)
    if form == "swizzled":
        tex.grouped_swizzle_for_gemm(grouped, rowwise=axis_columns, columnwise=not axis_columns)
    return grouped, values


def output_storage(columns):
    from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import (
        GroupedTensorStorage,
    )

    tokens = sum(SPLITS) + TAIL
    out = torch.full((tokens, columns), 7.0, dtype=torch.bfloat16)
    return out, GroupedTensorStorage(
        shape=(tokens, columns), dtype=torch.bfloat16, num_tensors=3, quantizer=None,
        data=out.view(-1), first_dims=torch.tensor(SPLITS),
    )  # fmt: skip


def call(te_function, *args, **kwargs):
    from transformer_engine.pytorch.cpp_extensions import gemm as te_gemm

    return getattr(te_gemm, te_function)(*args, **kwargs)


@pytest.mark.parametrize("form", ["list", "grouped", "swizzled"])
@pytest.mark.parametrize("kind", ["mxfp8", "plain"])
@pytest.mark.parametrize("layout", ["TN", "NN"])
def test_grouped_forward_and_input_gradient(tex, layout, kind, form):
    forward = layout == "TN"
    rows, row_values = rows_operand(tex, kind, INNER if forward else COLUMNS, 1, True)
    weights, weight_values = weight_operand(tex, kind, form, forward)
    out, storage = output_storage(COLUMNS if forward else INNER)
    call("general_grouped_gemm_for_grouped_tensor", weights, rows, storage, layout=layout)
    expected = [
        (x @ (w.t() if forward else w)).bfloat16()
        for x, w in zip(row_values, weight_values, strict=True)
    ]
    assert torch.equal(out[: sum(SPLITS)], torch.cat(expected))
    assert bool((out[sum(SPLITS) :] == 7).all())


@pytest.mark.parametrize("scaled", [False, True])
def test_grouped_bias_is_a_second_rounding(tex, scaled):
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor

    rows, row_values = rows_operand(tex, "mxfp8", INNER, 1, True)
    weights, weight_values = weight_operand(tex, "mxfp8", "list", True)
    out, storage = output_storage(COLUMNS)
    bias = make_matrix(3, COLUMNS, torch.bfloat16, 4, special=False)
    scale = torch.rand(sum(SPLITS) + TAIL, generator=torch.Generator().manual_seed(5))
    grouped_bias = GroupedTensor.make_grouped_tensor_from_rowwise_data(
        num_tensors=3, tensor_shape=(1, COLUMNS), rowwise_data=bias.view(-1), internal=True
    )
    call(
        "general_grouped_gemm_for_grouped_tensor", weights, rows, storage, layout="TN",
        bias=grouped_bias, bias_scale=scale if scaled else None,
    )  # fmt: skip
    start = 0
    for index, (x, w) in enumerate(zip(row_values, weight_values, strict=True)):
        part = slice(start, start + x.shape[0])
        factor = scale[part, None].double() if scaled else 1.0
        first = (x @ w.t()).bfloat16().double()
        expected = (first + bias[index].double() * factor).float().bfloat16()
        assert torch.equal(out[part], expected)
        start += x.shape[0]
    assert bool((out[start:] == 7).all())


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", ["mxfp8", "plain"])
@pytest.mark.parametrize("form", ["list", "grouped"])
def test_grouped_weight_gradient(tex, kind, form, accumulate):
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor

    x, x_values = rows_operand(tex, kind, INNER, 1, False)
    dy, dy_values = rows_operand(tex, kind, COLUMNS, 2, False)
    buffer = torch.full((3, COLUMNS, INNER), 0.5)
    out = list(buffer)
    if form == "grouped":
        out = GroupedTensor.make_grouped_tensor_from_rowwise_data(
            num_tensors=3, tensor_shape=(COLUMNS, INNER), rowwise_data=buffer.view(-1)
        )
    call("general_grouped_gemm_for_grouped_tensor", x, dy, out, layout="NT", accumulate=accumulate)
    start = 0.5 if accumulate else 0.0
    expected = [(b.t() @ a + start).float() for a, b in zip(x_values, dy_values, strict=True)]
    assert torch.equal(buffer, torch.stack(expected))


@pytest.mark.parametrize("kind", ["mxfp8", "plain"])
def test_legacy_grouped_gemm(tex, kind):
    """Lists of dense operands into one output, with bias, and a weight gradient."""
    splits = [64, 0, 96]
    matrix = make_matrix(sum(splits), INNER, torch.bfloat16, 1, special=False) / 64
    parts = torch.split(matrix, splits)
    weights, weight_values = weight_operand(tex, kind, "list", True)
    if kind == "mxfp8":
        xs = tex.split_quantize(matrix, splits, [make_quantizer(tex)] * 3)
        x_values = [
            naive.values_of(part, False) if part.numel() else part.double() for part in parts
        ]
    else:
        xs, x_values = list(parts), [part.double() for part in parts]
    bias = list(make_matrix(3, COLUMNS, torch.bfloat16, 4, special=False))
    out = torch.full((sum(splits), COLUMNS), float("nan"), dtype=torch.bfloat16)
    call(
        "general_grouped_gemm", weights, xs, [out], [None] * 3, torch.bfloat16, m_splits=splits,
        bias=bias, use_bias=True, single_output=True,
    )  # fmt: skip
    expected = [
        (x @ w.t() + b.double()).bfloat16()
        for x, w, b in zip(x_values, weight_values, bias, strict=True)
    ]
    assert torch.equal(out, torch.cat(expected))
    grads = [torch.full((COLUMNS, INNER), 0.25) for _ in splits]
    dys = list(torch.split(out, splits))
    call(
        "general_grouped_gemm", list(parts), dys, grads, [None] * 3, torch.float32, layout="NT",
        m_splits=splits, accumulate=True,
    )  # fmt: skip
    for grad, dy, part in zip(grads, dys, parts, strict=True):
        assert torch.equal(grad, (dy.double().t() @ part.double() + 0.25).float())


def test_bad_grouped_calls_are_named(tex):
    rows, _ = rows_operand(tex, "plain", INNER, 1, True)
    weights, _ = weight_operand(tex, "plain", "list", True)
    _, storage = output_storage(COLUMNS)
    with pytest.raises(ValueError, match="layout is 'TT'"):
        call("general_grouped_gemm_for_grouped_tensor", weights, rows, storage, layout="TT")
    with pytest.raises(ValueError, match="both lists"):
        call("general_grouped_gemm_for_grouped_tensor", weights, rows, weights)
