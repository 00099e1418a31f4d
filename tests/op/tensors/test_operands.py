# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands carry their contract; planning's values; fresh memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from te_grouped_mlp.op.activations import Activation
from te_grouped_mlp.op.formats import MXFP8, UNQUANTIZED, DType
from te_grouped_mlp.op.layout import Kernel, Launch, Output, RowExtent
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.tensors import memory
from te_grouped_mlp.op.tensors.operands import Axis, WeightOperand, torch_dtype
from te_grouped_mlp.op.tensors.stacking import Stacked
from tests.op.backends.reference.cases import ACTIVATIONS, Case


@pytest.mark.parametrize("member", [member for member in DType if hasattr(torch, member.value)])
def test_torch_dtype_is_the_inverse_of_of(member):
    assert DType.of(torch_dtype(member)) is member


def weights(fmt, count=3):
    data = tuple(torch.full((64, 64), index, dtype=torch.uint8) for index in range(count))
    scale = tuple(torch.full((512,), index, dtype=torch.uint8) for index in range(count))
    if fmt is UNQUANTIZED:
        return WeightOperand(fmt, (64, 64), Axis.ROW, data)
    return WeightOperand(fmt, (64, 64), Axis.COLUMN, data, scale, swizzled=True)


@pytest.mark.parametrize("reversed_experts", [False, True])
def test_experts_have_their_number_however_they_lie(reversed_experts):
    scattered = weights(UNQUANTIZED)
    order = scattered.data[::-1] if reversed_experts else scattered.data
    stacked = Stacked(torch.stack(order), reversed_experts)
    operand = dataclasses.replace(scattered, data=stacked)
    assert operand.num_groups == scattered.num_groups == 3
    for expert, values in enumerate(scattered.data):
        assert torch.equal(stacked[expert], values)
    assert [int(each[0, 0]) for each in stacked] == [0, 1, 2]
    with pytest.raises(IndexError):
        stacked[3]


def test_operands_take_no_other_attributes_and_equal_themselves_alone():
    operand = weights(MXFP8)
    with pytest.raises(AttributeError):
        operand.axes = Axis.ROW
    assert operand == operand
    assert operand != dataclasses.replace(operand)


def test_rejects_read_as_sentences():
    assert str(Reject(Reason.DEVICE, "device is xpu")) == f"{Reason.DEVICE.value}: device is xpu"
    assert str(Reject(Reason.SWITCH_OFF, "")) == Reason.SWITCH_OFF.value
    assert len({reason.value for reason in Reason}) == len(Reason)


def test_plan_finds_its_launches():
    plan = Case(ACTIVATIONS["srelu"], (128,), 128).plan()
    assert plan.launch(Kernel.FC1_ACT).kernel is Kernel.FC1_ACT
    with pytest.raises(KeyError, match="the plan has no launch fc2_bias_grad"):
        dataclasses.replace(plan, launches=plan.launches[:2]).launch(Kernel.FC2_BIAS_GRAD)


def test_plan_names_the_wanted_outputs_that_differ_between_runs():
    plan = Case(ACTIVATIONS["srelu"], (128,), 128).plan()
    assert plan.not_deterministic() == {}
    atomic = Launch(
        Kernel.DACT_DGRAD,
        frozenset({RowExtent.PACKED}),
        outputs=frozenset({Output.DPROB, Output.DB1}),
        deterministic=frozenset({Output.DB1}),
        cause="atomics",
    )
    plan = dataclasses.replace(plan, launches=(atomic,))
    assert plan.not_deterministic() == {Output.DPROB: atomic}
    without = dataclasses.replace(plan.call, wanted=frozenset({Output.Y}))
    assert dataclasses.replace(plan, call=without).not_deterministic() == {}
    assert not without.needs_backward
    assert plan.call.needs_backward
    assert plan.call.wants(Output.DX, Output.DPROB)
    assert not without.wants(Output.DX, Output.DPROB)


def test_gated_activations_double_the_features():
    gated = {spec.kind for spec in ACTIVATIONS.values() if spec.expansion == 2}
    assert gated == {kind for kind in Activation if kind.value.endswith("GLU")}


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str
)
def test_poisoned_memory_is_filled(dtype):
    with memory.poisoned(0xFF):
        out = memory.empty((3, 5), dtype, "cpu")
        assert (out.view(torch.uint8) == 0xFF).all()
        with memory.poisoned(0x00):
            assert not memory.empty((4,), dtype, "cpu").view(torch.uint8).any()
        again = memory.empty((4,), dtype, "cpu")
        assert (again.view(torch.uint8) == 0xFF).all()
        assert memory.empty((0, 5), dtype, "cpu").shape == (0, 5)
    assert out.is_contiguous()
    assert out.dtype is dtype


def test_poisoned_memory_ends_with_its_block():
    with pytest.raises(RuntimeError, match="inside"), memory.poisoned(0xFF):
        raise RuntimeError("inside")
    assert memory._fill_byte is None


@pytest.mark.parametrize("byte", [-1, 256])
def test_poisoned_memory_takes_a_byte(byte):
    with pytest.raises(ValueError, match=f"byte is {byte}; allowed: None or 0 to 255"):
        memory.poisoned(byte).__enter__()
