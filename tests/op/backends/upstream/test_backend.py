# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What each call of upstream's own op is checked for, which fusion could not know."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor

from te_grouped_mlp.op.backends.upstream import backend, capability

NEW = types.SimpleNamespace(**{capability.OWN_CHECK: lambda: False})
"""A module that refuses by itself what would vary in dprob."""
OLD = types.SimpleNamespace()


class Op:
    """Stands for upstream's fused op."""

    def __init__(self, bias: bool = False, scale_bias: bool = False, unit: bool = False) -> None:
        fc1 = types.SimpleNamespace(has_bias=bias, num_groups=1)
        activation = te.ops.ScaledSReLU()
        activation._grouped_mlp_unit_activation_scale = unit
        fc2 = types.SimpleNamespace(has_bias=bias, _scale_bias=scale_bias)
        self.basic_ops = (fc1, activation, fc2)

    def fuser_forward(self, *_args: Any, **_kwargs: Any) -> str:
        return "forward"

    def fuser_backward(self, *_args: Any, **_kwargs: Any) -> str:
        return "backward"


def guarded(op: Op, module: Any = NEW, named: bool = False) -> Any:
    return backend._guarded(op, module, named=named)


@contextlib.contextmanager
def demand() -> Iterator[None]:
    """Ask for bit-identical results, by torch's flag alone."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def forward(op: Any, *probs: torch.Tensor) -> Any:
    splits = torch.tensor([2])
    extra = [(splits,), (probs[0],), (splits, *probs[1:])]
    return op.fuser_forward([], None, basic_op_extra_inputs=extra, basic_op_kwargs=[{}, {}, {}])


@pytest.mark.parametrize("named", [False, True], ids=["second", "named"])
def test_a_module_without_own_check_is_checked_at_each_call(named: bool) -> None:
    op = guarded(Op(), OLD, named)
    assert (forward(op, torch.ones(2)), op.fuser_backward([], None)) == ("forward", "backward")
    with demand():
        with pytest.raises(RuntimeError, match="float atomics"):
            forward(op, torch.ones(2))
        with pytest.raises(RuntimeError, match="float atomics"):
            op.fuser_backward([], None)


@pytest.mark.parametrize(("bias", "unit"), [(True, True), (True, False), (False, True)])
def test_a_bias_beside_a_unit_scale_escapes_the_modules_own_check(bias: bool, unit: bool) -> None:
    op = guarded(Op(bias=bias, unit=unit))
    assert op.fuser_backward([], torch.ones(2, 2)) == "backward"
    with demand():
        if bias and unit:
            with pytest.raises(RuntimeError, match="FC1's bias gradient"):
                op.fuser_backward([], torch.ones(2, 2))
        else:
            assert op.fuser_backward([], torch.ones(2, 2)) == "backward"


@pytest.mark.parametrize("named", [False, True], ids=["second", "named"])
@pytest.mark.parametrize("scale_bias", [False, True])
def test_a_second_tensor_of_probabilities_is_refused(scale_bias: bool, named: bool) -> None:
    """Upstream's backward reads the first alone; by name it may."""
    op, prob = guarded(Op(bias=True, scale_bias=scale_bias), named=named), torch.ones(2)
    assert forward(op, prob, prob) == "forward"
    if scale_bias and not named:
        with pytest.raises(ValueError, match="the scale of FC2's bias is another tensor"):
            forward(op, prob, prob.clone())
    else:
        assert forward(op, prob, prob.clone()) == "forward"


@pytest.mark.parametrize("bias", [False, True])
def test_the_bias_gradient_of_a_quantized_gradient_is_a_sum_of_atomics(bias: bool) -> None:
    """Its kernel asks the environment variable, and not torch's flag."""
    op = guarded(Op(bias=bias))
    dy = GroupedTensor(
        shape=(2, 4), dtype=torch.bfloat16, num_tensors=1, data=torch.zeros(8), first_dims=None
    )
    assert op.fuser_backward([], dy) == "backward"
    with demand():
        assert op.fuser_backward([], torch.zeros(2, 4)) == "backward"
        if bias:
            with pytest.raises(RuntimeError, match="take the bias off FC2"):
                op.fuser_backward([], dy)
        else:
            assert op.fuser_backward([], dy) == "backward"
