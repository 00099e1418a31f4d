# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Parameters are read as they lie and as they are held, and checked as they are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformer_engine.pytorch  # noqa: F401  (brings tex, which the op imports)

from te_grouped_mlp.op.te.adapter import linear_spec, parameters
from te_grouped_mlp.op.tensors import experts
from te_grouped_mlp.op.tensors.operands import Axis, WeightCopies
from tests.support import step
from tests.support.step import StepCase

CASE = StepCase(splits=(128, 0, 128), hidden=128, ffn=64)
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("fused_switch")


def read(op: Any) -> WeightCopies | None:
    return experts.read("fc1", op.num_groups, linear_spec(op), parameters(op), CPU)


def test_weights_of_several_kinds_must_be_asked_one_by_one() -> None:
    op = step.make_model(CASE)[0]
    op.weight1.data = op.weight1.data.t().contiguous().t()
    assert read(op) is None


@pytest.mark.parametrize("weight", ["grouped", "quantized"])
def test_nothing_is_copied(weight: str) -> None:
    op = step.make_model(CASE.but(weight=weight))[0]
    copies = read(op)
    assert copies is not None
    for axis, w in ((Axis.ROW, copies.row), (Axis.COLUMN, copies.column)):
        assert w is not None
        assert (w.axis, w.num_groups, w.shape) == (axis, 3, (128, 128))
        if weight == "grouped":
            assert w.data[0].data_ptr() == op.weight.rowwise_data.data_ptr()
            continue
        name = "_rowwise_data" if axis is Axis.ROW else "_columnwise_data"
        assert all(getattr(op, f"weight{i}").__dict__[name] is w.data[i] for i in range(3))


@pytest.mark.parametrize("expert", [0, 2])
@pytest.mark.parametrize("part", ["_columnwise_data", "_columnwise_scale_inv"])
def test_a_copy_that_an_expert_lacks_is_not_there(part: str, expert: int) -> None:
    op = step.make_model(CASE.but(weight="quantized"))[0]
    setattr(getattr(op, f"weight{expert}"), part, None)
    copies = read(op)
    assert copies is not None
    assert copies.row is not None
    assert copies.column is None


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("_rowwise_data", r"fc1.weight1._rowwise_data has shape \(64, 128\)"),
        ("_rowwise_scale_inv", "fc1.weight1._rowwise_scale_inv has 256 bytes"),
    ],
)
def test_the_one_that_does_not_fit_is_named(part: str, words: str) -> None:
    op = step.make_model(CASE.but(weight="quantized"))[0]
    tensor = getattr(op.weight1, part)
    setattr(op.weight1, part, tensor[: tensor.shape[0] // 2].clone())
    with pytest.raises(ValueError, match=words):
        read(op)
