# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex's scaled activations against naive formulas and derivatives in float64."""

from __future__ import annotations

import pytest
import torch

from te_grouped_mlp.op.activations import Activation
from tests.op.backends.reference import naive

TEX = [kind for kind in Activation if kind.row.tex]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def make_inputs(shape, dtype, out_width):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator).to(dtype)
    scales = torch.rand(shape[:-1], generator=generator).to(dtype)
    dy = torch.randn(*shape[:-1], out_width, generator=generator).to(dtype)
    return x, scales, dy


def reference(kind, interleave, x, scales, dy):
    """Return y, dx and dscales in float64, by the naive formula and its derivative."""
    params = {each.name: each.trial for each in kind.row.parameters}
    params["interleave"] = interleave or None
    matrix, column = x.double().reshape(-1, x.shape[-1]), scales.double().reshape(-1, 1)
    value = naive.activation(kind.value, matrix, params)
    dy = dy.double().reshape(value.shape)
    dx = naive.activation_grad(kind.value, matrix, dy * column, params)
    y, ds = value * column, (dy * value).sum(1)
    return y.view(*x.shape[:-1], -1), dx.view(x.shape), ds.view(scales.shape)


def assert_rounded(got, exact, dtype):
    """Within one rounding of the exact value: the reference has its own last bits in float64."""
    assert got.dtype == dtype
    rounded = exact.to(dtype)
    differing = got != rounded
    assert int(differing.sum()) <= exact.numel() // 1000
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance * 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "interleave"),
    [(kind, each) for kind in TEX for each in ((0, 32, 64) if kind.is_gated else (0,))],
)
def test_every_activation(tex, kind, interleave, dtype):
    forward, backward = (getattr(tex, name) for name in kind.row.tex)
    x, scales, dy = make_inputs((3, 37, 256), dtype, 128 if kind.is_gated else 256)
    y, dx, ds = reference(kind, interleave, x, scales, dy)
    options = {each.keyword: each.trial for each in kind.row.parameters}
    if kind.is_gated:
        options["glu_interleave_size"] = interleave
    assert_rounded(forward(x, scales, None, **options), y, dtype)
    got = backward(dy, x, scales, None, **options)
    assert_rounded(got[0], dx, dtype)
    assert_rounded(got[1], ds, dtype)
    without = backward(dy, x, scales, None, compute_scale_grad=False, **options)
    assert without[1] is None
    assert torch.equal(without[0], got[0])


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
    y, _, ds = reference(Activation.SWIGLU, 0, x, precise, dy)
    assert_rounded(tex.scaled_swiglu(x, precise, None), y, torch.bfloat16)
    assert_rounded(tex.scaled_dswiglu(dy, x, precise, None)[1], ds, torch.float32)
    assert tex.scaled_swiglu(x[:0], scales[:0], None).shape == (0, 64)
    dx, ds = tex.scaled_dswiglu(dy[:0], x[:0], scales[:0], None)
    assert dx.shape == (0, 128)
    assert ds.shape == (0,)
