# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens of plans that read values: the bits of their bytes, and memory that goes in time."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from te_grouped_mlp.op.tensors.operands import DequantizedCopy
from tests.support import step
from tests.support.prequantized import run_prequantized
from tests.support.step import StepCase
from tests.support.values_backend import in_use

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

SEVERAL = StepCase(splits=(128, 0, 256), hidden=128, ffn=128)


@pytest.mark.parametrize("ready", [False, True], ids=["compact", "ready"])
def test_equal_with_prequantized_tokens(ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_prequantized(SEVERAL, x=ready, dy=ready)
    with in_use(monkeypatch) as calls:
        step.assert_same(run_prequantized(SEVERAL, x=ready, dy=ready), expected)
    # The tokens came as bytes: only the weights were quantized here.
    assert calls.count("quantize") == 2


@pytest.mark.parametrize(
    "delay", [(False, False), (True, False), (False, True)], ids=["now", "dW1 later", "dW2 later"]
)
def test_the_output_gradients_copies_go_before_the_inputs_gradient_is_made(
    delay: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as large as dx and the values of x, which come next; a delayed dW2 needs one, which
    is then kept quantized."""
    case = SEVERAL.but(delay=delay)
    model, inputs = step.make_model(case), step.make_inputs(case)
    from te_grouped_mlp.op.step import data_gradient
    from te_grouped_mlp.op.tensors import quantize

    made: list[Any] = []
    as_bytes: list[bool] = []
    alive: list[tuple[bool, bool]] = []
    tokens, of_input = quantize.tokens, data_gradient.of_input

    def remember(*args: Any, **kwargs: Any) -> Any:
        operand = tokens(*args, **kwargs)
        column = operand.column
        as_bytes.append(not isinstance(column, DequantizedCopy))
        held = column.values if isinstance(column, DequantizedCopy) else column.data
        made.append((weakref.ref(operand.row.values), weakref.ref(held)))
        return operand

    def look(*args: Any) -> Any:
        row, column = made[-1]
        alive.append((row() is not None, column() is not None))
        return of_input(*args)

    monkeypatch.setattr(quantize, "tokens", remember)
    monkeypatch.setattr(data_gradient, "of_input", look)
    with in_use(monkeypatch):
        step.run_model(model, case, inputs)
    # Of x, which the backward reads, and of dy.
    assert as_bytes == [True, delay[1]]
    assert alive == [(False, delay[1])]
