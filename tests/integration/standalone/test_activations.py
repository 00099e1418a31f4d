# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex's scaled activations against torch's derivatives of the naive formulas in float64."""

from __future__ import annotations

import pytest
import torch

from tests.integration.standalone import naive

# name -> (forward, backward, keywords, naive formula of (x, scales, interleave))
GLU = {
    "swiglu": ("scaled_swiglu", "scaled_dswiglu", {}, naive.swiglu),
    "clamped": (
        "scaled_clamped_swiglu",
        "scaled_clamped_dswiglu",
        {"limit": 0.9, "alpha": 1.3, "glu_linear_offset": 0.5},
        lambda x, s, i: naive.clamped_swiglu(x, s, i, 0.9, 1.3, 0.5),
    ),
    "situ": (
        "scaled_situglu",
        "scaled_dsituglu",
        {"beta1": 1.5, "beta2": 2.5},
        lambda x, s, i: naive.situglu(x, s, i, 1.5, 2.5),
    ),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def make_inputs(shape, dtype, out_width):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator).to(dtype)
    scales = torch.rand(shape[:-1], generator=generator).to(dtype)
    dy = torch.randn(*shape[:-1], out_width, generator=generator).to(dtype)
    return x, scales, dy


def reference(formula, x, scales, dy):
    """Return y, dx and dscales in float64, by torch's autograd."""
    matrix = x.double().reshape(-1, x.shape[-1]).requires_grad_()
    column = scales.double().reshape(-1).requires_grad_()
    y = formula(matrix, column)
    y.backward(dy.double().reshape(y.shape))
    return y.detach().view(dy.shape), matrix.grad.view(x.shape), column.grad.view(scales.shape)


def assert_rounded(got, exact, dtype):
    """Within one rounding of the exact value: the reference has its own last bits in float64."""
    assert got.dtype == dtype
    rounded = exact.to(dtype)
    differing = got != rounded
    assert int(differing.sum()) <= exact.numel() // 1000
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance * 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleave", [0, 32, 64])
@pytest.mark.parametrize("name", list(GLU))
def test_glu(tex, name, interleave, dtype):
    forward, backward, options, formula = GLU[name]
    x, scales, dy = make_inputs((3, 37, 256), dtype, 128)
    y, dx, ds = reference(lambda a, b: formula(a, b, interleave), x, scales, dy)
    options = {**options, "glu_interleave_size": interleave}
    assert_rounded(getattr(tex, forward)(x, scales, None, **options), y, dtype)
    got = getattr(tex, backward)(dy, x, scales, None, **options)
    assert_rounded(got[0], dx, dtype)
    assert_rounded(got[1], ds, dtype)
    without = getattr(tex, backward)(dy, x, scales, None, compute_scale_grad=False, **options)
    assert without[1] is None
    assert torch.equal(without[0], got[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_srelu(tex, dtype):
    x, scales, dy = make_inputs((5, 33, 96), dtype, 96)
    y, dx, ds = reference(naive.srelu, x, scales, dy)
    assert_rounded(tex.scaled_srelu(x, scales, None), y, dtype)
    got = tex.scaled_dsrelu(dy, x, scales, None, True)
    assert_rounded(got[0], dx, dtype)
    assert_rounded(got[1], ds, dtype)
    assert tex.scaled_dsrelu(dy, x, scales, None, False)[1] is None


def test_srelu_maps_a_nan_to_zero(tex):
    x = torch.tensor([[float("nan"), 2.0]])
    scales = torch.ones(1)
    assert tex.scaled_srelu(x, scales, None).tolist() == [[0.0, 4.0]]
    dx, ds = tex.scaled_dsrelu(torch.ones(1, 2), x, scales, None)
    assert dx.tolist() == [[0.0, 4.0]]
    assert ds.tolist() == [4.0]


def test_a_row_does_not_depend_on_the_rows_after_it(tex):
    x, scales, dy = make_inputs((301, 192), torch.bfloat16, 96)
    y = tex.scaled_swiglu(x, scales, None, 32)
    dx, ds = tex.scaled_dswiglu(dy, x, scales, None, 32)
    for rows in (1, 7, 128, 300):
        cut = (x[:rows].contiguous(), scales[:rows].contiguous())
        assert torch.equal(tex.scaled_swiglu(*cut, None, 32), y[:rows])
        part = tex.scaled_dswiglu(dy[:rows].contiguous(), *cut, None, 32)
        assert torch.equal(part[0], dx[:rows])
        assert torch.equal(part[1], ds[:rows])


def test_scales_of_another_dtype_and_empty_input(tex):
    x, scales, dy = make_inputs((40, 128), torch.bfloat16, 64)
    precise = scales.float() + 1e-4
    y, _, ds = reference(lambda a, b: naive.swiglu(a, b, 0), x, precise, dy)
    assert_rounded(tex.scaled_swiglu(x, precise, None), y, torch.bfloat16)
    assert_rounded(tex.scaled_dswiglu(dy, x, precise, None)[1], ds, torch.float32)
    assert tex.scaled_swiglu(x[:0], scales[:0], None).shape == (0, 64)
    dx, ds = tex.scaled_dswiglu(dy[:0], x[:0], scales[:0], None)
    assert dx.shape == (0, 128)
    assert ds.shape == (0,)
