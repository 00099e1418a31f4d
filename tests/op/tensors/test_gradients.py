# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Where weight gradients go, and in which order autograd gets them."""

from __future__ import annotations

import itertools

import pytest
import torch

from te_grouped_mlp.op.problem import LinearSpec
from te_grouped_mlp.op.tensors import gradients

SHAPE = (64, 32)


def _parameters(count: int) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.empty(SHAPE)) for _ in range(count)]
    for parameter in parameters:
        parameter.main_grad = torch.zeros(SHAPE)  # type: ignore[attr-defined]
    return parameters


@pytest.mark.parametrize(
    ("one_weight", "one_bias", "bias", "order"),
    [
        (False, False, False, "w0 w1"),
        (False, False, True, "w0 w1 b0 b1"),
        (True, False, True, "b0 b1 w0"),
        (False, True, True, "w0 w1 b"),
        (True, True, True, "w0 b"),
    ],
)
def test_registration_order(one_weight: bool, one_bias: bool, bias: bool, order: str) -> None:
    spec = LinearSpec(
        32, 64, has_bias=bias, single_grouped_weight=one_weight, single_grouped_bias=one_bias
    )
    weights = [torch.full((1,), 10.0 + i) for i in range(1 if one_weight else 2)]
    bias_grad = torch.tensor([[20.0], [21.0]]) if bias else None
    result = gradients.in_registration_order(spec, weights, bias_grad, 2)
    values = {"w0": [10.0], "w1": [11.0], "b0": [20.0], "b1": [21.0], "b": [20.0, 21.0]}
    got = [grad.flatten().tolist() for grad in result if grad is not None]
    assert got == [values[name] for name in order.split()]


@pytest.mark.parametrize("overwrite", [False, True])
def test_main_grads_are_the_target_themselves(overwrite: bool) -> None:
    parameters = _parameters(2)
    parameters[0].overwrite_main_grad = overwrite  # type: ignore[attr-defined]
    target = gradients.main_grad_target(LinearSpec(32, 64), parameters, 2, "FC1")
    assert target.accumulate is not overwrite
    for member, parameter in zip(target.members(), parameters, strict=True):
        assert member is parameter.main_grad


def test_a_missing_main_grad_is_named() -> None:
    parameters = _parameters(3)
    parameters[1].main_grad = None  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match=r"FC2 weight1\.main_grad is missing"):
        gradients.main_grad_target(LinearSpec(32, 64), parameters, 3, "FC2")


def test_experts_without_gaps_are_one_piece() -> None:
    stack = torch.zeros(2, *SHAPE)
    scattered = (torch.zeros(SHAPE), torch.zeros(SHAPE))
    assert len(gradients.WgradTarget(tuple(stack.unbind(0)), True).pieces()) == 1
    assert len(gradients.WgradTarget(stack, True).pieces()) == 1
    pieces = gradients.WgradTarget(scattered, True).pieces()
    written = itertools.chain.from_iterable(piece.view(-1, *SHAPE).unbind(0) for piece in pieces)
    assert {tensor.data_ptr() for tensor in written} == {tensor.data_ptr() for tensor in scattered}
