# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A state's tensors leave it for autograd, and come back to the same places."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.formats import MXFP8, UNQUANTIZED, DType
from te_grouped_mlp.op.layout import GroupLayout, Output, RowExtent
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.problem import Call, LinearSpec, Problem, RecipeKind, TensorKind
from te_grouped_mlp.op.step import saved
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    GroupedOperand,
    QuantizedCopy,
    Splits,
    WeightOperand,
)
from te_grouped_mlp.op.tensors.stacking import Stacked

LAYOUT = GroupLayout(3, 8, RowExtent.PACKED)


def plan() -> Plan:
    problem = Problem(
        3, LinearSpec(4, 8), LinearSpec(4, 4), ActivationSpec(Activation.SWIGLU),
        RecipeKind.NONE, "", "cpu", DType.BFLOAT16,
    )  # fmt: skip
    call = Call(
        8, DType.BFLOAT16, DType.FLOAT32, False, frozenset(Output), TensorKind.PLAIN, False, False,
        UNQUANTIZED,
    )  # fmt: skip
    return Plan("reference", problem, call, LAYOUT, ())


class Numbered:
    """Makes tensors that can be told apart."""

    def __init__(self) -> None:
        self._next = itertools.count()

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.full(shape or (1,), float(next(self._next)))


def tokens(kind: str | None, splits: Splits, make: Numbered) -> GroupedOperand | None:
    if kind is None:
        return None
    if kind == "plain":
        return GroupedOperand(UNQUANTIZED, (8, 4), LAYOUT, splits, plain=make(8, 4))
    column = QuantizedCopy(make(8, 4), make(), Axis.COLUMN, kind == "swizzled")
    return GroupedOperand(MXFP8, (8, 4), LAYOUT, splits, column=column)


def weight(kind: str | None, make: Numbered) -> WeightOperand | None:
    if kind is None:
        return None
    if kind == "whole":
        return WeightOperand(UNQUANTIZED, (8, 4), Axis.ROW, Stacked(make(3, 8, 4), True))
    if kind == "whole scaled":
        return WeightOperand(
            MXFP8, (8, 4), Axis.COLUMN, Stacked(make(3, 8, 4)), Stacked(make(3, 1))
        )
    data = tuple(make(8, 4) for _ in range(3))
    if kind == "plain":
        return WeightOperand(UNQUANTIZED, (8, 4), Axis.ROW, data)
    return WeightOperand(MXFP8, (8, 4), Axis.COLUMN, data, tuple(make() for _ in range(3)), True)


def state_of(x: str | None, w: str | None, *, prob: bool, quantized: bool) -> saved.SavedState:
    make = Numbered()
    elements = {4: make(4), 8: make(4)} if quantized else {}
    starts, host = (None, (1, 2, 3)) if quantized else (make(4), None)
    splits = Splits(make(3), make(3), make(4), elements, host, starts)
    return saved.SavedState(
        plan=plan(),
        splits=splits,
        prob=make(8) if prob else None,
        x=tokens(x, splits, make),
        pre_activation=make(8, 8) if x else None,
        activated=tokens(None if x == "swizzled" else x, splits, make),
        w1=weight(w, make),
        w2=weight("plain" if w == "whole" else w, make),
        owns_x=quantized,
        bias2=make(3, 4) if quantized else None,
        ops=saved.OpsState("of the gradient", ("of FC1", None), ((1, 2), None)),
    )


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Everything in a record with its path."""
    if dataclasses.is_dataclass(value) and not isinstance(value, (Plan, GroupLayout)):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}[{key}]")
    elif isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}[{index}]")
    else:
        yield path, value


STATES = [
    pytest.param(x, w, prob, quantized, id=f"{x}-{w}-{prob}-{quantized}")
    for x in ("plain", "column", "swizzled", None)
    for w in ("plain", "whole", "scaled", "whole scaled", None)
    for prob in (True, False)
    for quantized in (True, False)
]


@pytest.mark.parametrize(("x", "w", "prob", "quantized"), STATES)
def test_every_tensor_comes_back_to_its_place(
    x: str | None, w: str | None, prob: bool, quantized: bool
) -> None:
    state = state_of(x, w, prob=prob, quantized=quantized)
    skeleton, tensors = saved.flatten(state)
    # As autograd's hooks may do, other tensors with the same content.
    restored = saved.restore(skeleton, [each if each is None else each.clone() for each in tensors])
    before, after = dict(leaves(state)), dict(leaves(restored))
    assert before.keys() == after.keys()
    for path, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(after[path], value), path
            assert after[path] is not value, path
        else:
            assert after[path] == value, path
    for operand in (restored.x, restored.activated):
        assert operand is None or operand.splits is restored.splits


@pytest.mark.parametrize(("x", "w", "prob", "quantized"), STATES)
def test_the_skeleton_keeps_no_tensor(
    x: str | None, w: str | None, prob: bool, quantized: bool
) -> None:
    skeleton, _ = saved.flatten(state_of(x, w, prob=prob, quantized=quantized))
    kept = [path for path, value in leaves(skeleton) if isinstance(value, torch.Tensor)]
    assert kept == []
    assert "tensor(" not in repr(skeleton)
