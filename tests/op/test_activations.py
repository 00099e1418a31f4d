# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The activations' values against plain formulas, their derivatives against torch's autograd."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from te_grouped_mlp.op import activations
from te_grouped_mlp.op.activations import Activation, ActivationSpec
from tests.op.backends.reference import naive
from tests.op.backends.reference.cases import ACTIVATIONS, GATED


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_derivatives(activation):
    spec = ACTIVATIONS[activation]
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 64 * spec.expansion, dtype=torch.float64, generator=generator) * 3
    name, params = spec.kind.value, vars(spec)
    wanted = naive.activation(name, x, params)
    slope = naive.activation_grad(name, x, torch.ones_like(wanted), params)

    x.requires_grad_()
    value, derivatives = activations.evaluate(torch, spec, x)
    torch.testing.assert_close(value.detach(), wanted, rtol=1e-13, atol=1e-13)
    mine = activations.join(torch, spec, derivatives(torch.mul)).detach()
    torch.testing.assert_close(mine, slope, rtol=1e-13, atol=1e-13)
    (by_autograd,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(mine, by_autograd, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("activation", ["srelu", "tanh_srelu"])
def test_nan_enters_the_unary_activations_as_zero(activation):
    x = torch.tensor([[float("nan"), -1.0, 0.0, 2.0]], dtype=torch.float64)
    value, derivatives = activations.evaluate(torch, ACTIVATIONS[activation], x)
    assert not value[0, :3].any()
    assert not derivatives(torch.mul)[0][0, :3].any()
    assert value[0, 3] > 0


@pytest.mark.parametrize("activation", GATED)
def test_nan_passes_through_the_gated_activations(activation):
    x = torch.zeros(1, 64, dtype=torch.float64)
    x[0, 0] = float("nan")
    value = activations.evaluate(torch, ACTIVATIONS[activation], x).value
    assert value[0, 0].isnan()
    assert value[0, 1:].isfinite().all()


def test_a_clamp_passes_the_gradient_at_its_bounds():
    spec = ACTIVATIONS["clamped_qgeglu"]
    limit = spec.limit
    above = limit + 1e-9
    gate = torch.zeros(1, 32, dtype=torch.float64)
    linear = torch.zeros(1, 32, dtype=torch.float64)
    gate[0, :2] = torch.tensor([limit, above], dtype=torch.float64)
    gate[0, 2:6] = 1.0
    linear[0, 2:6] = torch.tensor([limit, above, -limit, -above], dtype=torch.float64)
    x = activations.join(torch, spec, (gate, linear))
    d_gate, d_linear = activations.evaluate(torch, spec, x).derivatives(torch.mul)
    assert d_gate[0, 0] != 0
    assert d_gate[0, 1] == 0
    assert [bool(value) for value in d_linear[0, 2:6]] == [True, False, True, False]


@given(width=st.sampled_from([32, 64, 96, 192, None]), rows=st.integers(0, 3))
def test_gate_order_round_trip(width, rows):
    features = 192
    x = torch.arange(rows * 2 * features, dtype=torch.float64).reshape(rows, 2 * features)
    spec = ActivationSpec(Activation.SWIGLU, width)
    gate, linear = activations.split(spec, x)
    for k in range(0, features, 31):
        block = width or features
        column = 2 * block * (k // block) + k % block
        assert torch.equal(gate[:, k], x[:, column])
        assert torch.equal(linear[:, k], x[:, column + block])
    assert torch.equal(activations.join(torch, spec, (gate, linear)), x)


@pytest.mark.parametrize("width", [0, 36, 256])
def test_a_width_that_does_not_divide_is_named(width):
    spec = dataclasses.replace(ACTIVATIONS["swiglu"], interleave=width)
    with pytest.raises(ValueError, match=f"interleave is {width}; allowed: divisors of 128"):
        activations.evaluate(torch, spec, torch.zeros(1, 256))
