# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters become the operands that a plan reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine.pytorch  # noqa: F401  (brings tex, which the op imports)

from te_grouped_mlp.op.formats import MXFP8, UNQUANTIZED, DType, Format
from te_grouped_mlp.op.te.adapter import linear_spec, parameters
from te_grouped_mlp.op.tensors import experts, weights
from te_grouped_mlp.op.tensors.operands import Axis, WeightCopies
from te_grouped_mlp.op.tensors.stacking import Stacked
from tests.op.backends.reference import cases
from tests.support import step
from tests.support.step import StepCase

CASE = StepCase(splits=(128, 0, 128), hidden=128, ffn=64)
QUANTIZED = CASE.but(weight="quantized")

pytestmark = pytest.mark.usefixtures("fused_switch")


def operands(
    op: Any, fmt: Format, *, column: bool = True, dtype: DType = DType.BFLOAT16
) -> WeightCopies:
    case = cases.Case(cases.ACTIVATIONS["swiglu"], CASE.splits, 256, fmt=fmt, dtype=dtype)
    owned, spec = parameters(op), linear_spec(op)
    held = experts.read("fc1", op.num_groups, spec, owned, torch.device("cpu"))
    plan = case.plan()
    return weights.for_forward(owned, held, op, spec, plan, column=column)


def in_one_buffer(op: Any, *, reversed_experts: bool) -> Any:
    """Move a linear's weights to one buffer, filled from its end or not."""
    weights = parameters(op)
    order = -1 if reversed_experts else 1
    buffer = torch.stack([weight.detach() for weight in weights[::order]])
    for weight, part in zip(weights[::order], buffer.unbind(0), strict=True):
        weight.data = part
    return op


@pytest.mark.parametrize("reversed_experts", [False, True])
def test_plain_weights_in_one_buffer_are_one_tensor(reversed_experts: bool) -> None:
    op = in_one_buffer(step.make_model(CASE)[0], reversed_experts=reversed_experts)
    copies = operands(op, UNQUANTIZED)
    assert copies.row is not None
    assert copies.column is not None
    assert isinstance(copies.row.data, Stacked)
    assert copies.row.data.reversed_experts is reversed_experts
    for expert, weight in zip(copies.row.data, parameters(op), strict=True):
        assert expert.data_ptr() == weight.data_ptr()
    # Autograd watches the parameters themselves.
    assert all(a is b for a, b in zip(copies.column.data, parameters(op), strict=True))


@pytest.mark.parametrize("expert", [0, 2])
@pytest.mark.parametrize("axis", Axis)
def test_a_quantized_weight_without_a_copy_is_named(axis: Axis, expert: int) -> None:
    op = step.make_model(QUANTIZED)[0]
    setattr(getattr(op, f"weight{expert}"), f"_{axis.value}wise_data", None)
    with pytest.raises(RuntimeError, match=f"a quantized weight has no {axis.value}-wise copy"):
        operands(op, MXFP8)
    if axis is Axis.COLUMN:
        # Nothing reads it then.
        assert operands(op, MXFP8, column=False).column is None


def test_the_plain_ones_among_quantized_weights_are_quantized() -> None:
    op = step.make_model(QUANTIZED)[0]
    first = op.weight0
    quantizer = first._get_quantizer()
    plain = first.dequantize()
    op.weight1 = torch.nn.Parameter(plain.clone())
    op.get_quantizer = lambda *_: quantizer
    copies = operands(op, MXFP8)
    assert copies.row is not None
    assert copies.row.data[0] is first._rowwise_data
    assert torch.equal(copies.row.data[1], quantizer(plain)._rowwise_data)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_plain_weights_are_used_as_they_are_or_cast_once(dtype: DType) -> None:
    op = step.make_model(CASE)[0]
    copies = operands(op, UNQUANTIZED, dtype=dtype)
    assert copies.row is not None
    assert copies.column is not None
    for index, weight in enumerate(parameters(op)):
        for w in (copies.row, copies.column):
            cast = weight.detach().to(torch.float16 if dtype is DType.FLOAT16 else torch.bfloat16)
            assert torch.equal(w.data[index], cast)
        assert (copies.column.data[index] is weight) is (dtype is DType.BFLOAT16)
    if dtype is DType.FLOAT16:
        assert copies.row.data is copies.column.data


def test_quantized_weights_of_an_unquantized_step_are_dequantized() -> None:
    op = step.make_model(QUANTIZED)[0]
    copies = operands(op, UNQUANTIZED)
    assert copies.row is not None
    for index, weight in enumerate(parameters(op)):
        assert torch.equal(copies.row.data[index], weight.dequantize(dtype=torch.bfloat16))
