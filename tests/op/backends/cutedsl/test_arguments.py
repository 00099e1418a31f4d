# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors as the kernels take them, on CPU tensors. No kernel package is needed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from te_grouped_mlp.op.backends.base import Fc1Epilogue
from te_grouped_mlp.op.backends.cutedsl import arguments, capability
from te_grouped_mlp.op.backends.cutedsl.backend import CuteDslBackend
from te_grouped_mlp.op.formats import UNQUANTIZED
from te_grouped_mlp.op.layout import Kernel
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import Axis, GroupedOperand, Splits, WeightOperand
from tests.op.backends.cutedsl.problems import ACTIVATIONS, call_of, environment, problem_of

SHAPE = (16, 8)


def slices(count, distance, order=1, offset=0):
    """Stacked at a distance (in elements) in one storage; order -1 puts the last one first."""
    buffer = torch.arange(offset + count * distance + 64, dtype=torch.float32).bfloat16()
    starts = [offset + index * distance for index in range(count)][::order]
    return [buffer.as_strided(SHAPE, (SHAPE[1], 1), start) for start in starts]


@pytest.mark.parametrize("order", [1, -1], ids=["ascending", "descending"])
@pytest.mark.parametrize("distance", [128, 136, 1024])
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("offset", [0, 8])
def test_even_slices_are_one_view(offset, count, distance, order):
    members = slices(count, distance, order, offset)
    stack = arguments.addressable_view(members)
    assert stack.reversed_experts is (order < 0)
    view = stack.values
    # What a kernel does with the expert's number.
    places = range(count)[::order]
    for place, member in zip(places, members, strict=True):
        assert view[place].data_ptr() == member.data_ptr()
        assert torch.equal(view[place], member)
    assert view.shape == (count, *SHAPE)
    assert view.stride() == (distance, SHAPE[1], 1)


def test_one_member_is_a_view():
    member = torch.randn(SHAPE).bfloat16()
    stack = arguments.addressable_view([member])
    view = stack.values
    assert view.shape == (1, *SHAPE)
    assert view.data_ptr() == member.data_ptr()
    assert stack.reversed_experts is False


@pytest.mark.parametrize("order", [1, -1], ids=["ascending", "descending"])
def test_the_first_and_the_last_member_are_covered_by_one_storage(order):
    """Storages that happen to lie next to each other are not one."""
    buffer = torch.zeros(4 * 128, dtype=torch.bfloat16)
    members = [buffer.as_strided(SHAPE, (8, 1), start) for start in (0, 128, 256)]
    low = torch.empty(0, dtype=torch.bfloat16)
    # A storage of its own over the lowest member's bytes only.
    low.set_(torch.frombuffer(buffer.view(torch.uint8).numpy(), dtype=torch.uint8, count=256)
             .untyped_storage(), 0, SHAPE, (8, 1))  # fmt: skip
    members[0] = low
    assert low.data_ptr() == buffer.data_ptr()
    assert arguments.addressable_view(members[::order]) is None


def picked(count, distance, *indices):
    """Some of the matrices that lie in one storage."""
    members = slices(count, distance)
    return [members[index] for index in indices]


NO_VIEW = {
    "gap": picked(4, 128, 0, 1, 3),
    "gap down": picked(4, 128, 3, 2, 0),
    "up and down": picked(3, 128, 0, 2, 1),
    "down and up": picked(3, 128, 2, 0, 1),
    "same": picked(3, 128, 1, 1, 1),
    "overlap": slices(3, 64),
    "overlap down": slices(3, 64, order=-1),
    "distance": slices(3, 132),
    "distance down": slices(3, 132, order=-1),
    "address": slices(3, 128, offset=4),
    "address down": slices(3, 128, order=-1, offset=4),
    "storages": [torch.zeros(SHAPE, dtype=torch.bfloat16) for _ in range(3)],
    "transposed": [member.t() for member in slices(3, 128)],
}


@pytest.mark.parametrize("name", NO_VIEW)
def test_other_members_have_no_view(name):
    members = NO_VIEW[name]
    assert arguments.addressable_view(members) is None


def test_a_foreign_member_at_the_right_distance_has_no_view():
    buffer = torch.zeros(4 * 128, dtype=torch.bfloat16)
    members = [buffer.as_strided(SHAPE, (8, 1), start) for start in (0, 128, 256)]
    members[1] = buffer.as_strided((8, 16), (16, 1), 128)
    assert arguments.addressable_view(members) is None


def test_equal_addresses_with_another_dtype_are_seen():
    buffer = torch.zeros(4 * 128, dtype=torch.bfloat16)
    members = [buffer.as_strided(SHAPE, (8, 1), start) for start in (0, 128, 256)]
    assert arguments.addressable_view(members) is not None
    other = arguments.addressable_view([each.view(torch.int16) for each in members])
    assert other.values.dtype is torch.int16


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_without_a_view_gets_its_result_afterwards(dtype, accumulate):
    members = tuple(torch.randn(SHAPE).to(dtype) for _ in range(3))
    before = torch.stack(members)
    target = WgradTarget(members, accumulate)
    stack, back = arguments.target_of(target, 3, SHAPE)
    out = stack.values
    assert back is members
    assert stack.reversed_experts is False
    assert out.shape == before.shape
    kernel_adds = arguments.kernel_adds(target, back)
    # bf16 is rounded once, by the kernel.
    assert kernel_adds is (accumulate and dtype is torch.bfloat16)
    product = torch.randn(before.shape)
    # What the kernel does.
    out.copy_(out.float() + product if kernel_adds else product)
    arguments.deliver(out, back, accumulate and not kernel_adds)
    want = (before.float() + product if accumulate else product).to(dtype)
    assert torch.equal(torch.stack(members), want)


def test_a_target_in_one_tensor_is_written_itself():
    whole = torch.randn(3, *SHAPE)
    stack, back = arguments.target_of(WgradTarget(whole, True), 3, SHAPE)
    same = stack.values
    assert same is whole
    assert stack.reversed_experts is False
    assert back == ()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("order", [1, -1], ids=["ascending", "descending"])
def test_a_target_in_one_buffer_is_written_itself(order, accumulate):
    members = tuple(slices(3, 136, order))
    stack, back = arguments.target_of(WgradTarget(members, accumulate), 3, SHAPE)
    out = stack.values
    assert back == ()
    assert stack.reversed_experts is (order < 0)
    assert arguments.kernel_adds(WgradTarget(members, accumulate), back) is accumulate
    wanted = torch.randn(3, *SHAPE).bfloat16()
    # What a kernel does with the expert's number.
    for place, value in zip(range(3)[::order], wanted, strict=True):
        out[place] = value
    assert torch.equal(torch.stack(members), wanted)


@pytest.mark.parametrize("width", [32, None])
def test_pairs(width):
    bias = torch.randn(3, 256).bfloat16()
    got = arguments.in_pairs(bias, width)
    half = 128 if width is None else width
    for group in range(3):
        for j in range(128):
            row = 2 * half * (j // half) + j % half
            assert got[group, 2 * j] == bias[group, row].float()
            assert got[group, 2 * j + 1] == bias[group, row + half].float()
    assert torch.equal(arguments.out_of_pairs(got, width), bias.float())


def test_addressable():
    base = torch.zeros(64, 72, dtype=torch.bfloat16)
    assert arguments.addressable(base) is base
    narrow = base[:, :64]
    assert arguments.addressable(narrow) is narrow
    for bad in (base[:, 1:65], base.t(), torch.zeros(64, 65, dtype=torch.bfloat16)[:, :64]):
        copy = arguments.addressable(bad)
        assert copy is not bad
        assert copy.is_contiguous()
        assert torch.equal(copy, bad)


def test_int32_offsets_are_those_of_the_splits():
    offsets = torch.tensor([0, 3, 7])
    splits = Splits(offsets.diff(), offsets[1:].int(), offsets, {}, None)
    assert torch.equal(arguments.int32_offsets(splits), offsets.int())
    given = dataclasses.replace(splits, group_offsets_int32=offsets.int())
    assert arguments.int32_offsets(given) is given.group_offsets_int32


def operands():
    backend = CuteDslBackend()
    problem = problem_of(ACTIVATIONS["swiglu"])
    plan = capability.plan(problem, call_of(), environment())
    counts = torch.full((8,), 125)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    splits = Splits(counts, offsets[1:].int(), offsets, {}, None)

    def tokens(cols, dtype=torch.bfloat16):
        values = torch.zeros(1000, cols, dtype=dtype)
        return GroupedOperand(UNQUANTIZED, (1000, cols), plan.layout, splits, plain=values)

    w1 = WeightOperand(UNQUANTIZED, (512, 512), Axis.ROW, tuple(torch.zeros(8, 512, 512)))
    w2 = WeightOperand(UNQUANTIZED, (512, 256), Axis.ROW, tuple(torch.zeros(8, 512, 256)))
    return backend, plan, tokens, w1, w2


def calls():
    """Wrong calls by name, each with what its message must say."""
    backend, plan, tokens, w1, _ = operands()
    first = Fc1Epilogue(None, None, True, True)
    empty = dataclasses.replace(tokens(512), plain=None)
    whole, wide = torch.zeros(8, 512, 512), torch.zeros(8, 512, 256)

    def wgrad(kernel, target):
        backend.wgrad(plan, kernel, tokens(512), tokens(512), WgradTarget(target, False))

    return {
        "x device": (
            lambda: backend.fc1_act(plan, tokens(512), w1, first),
            "x is torch.bfloat16 on cpu; allowed: torch.bfloat16 on cuda",
        ),
        "x empty": (lambda: backend.fc1_act(plan, empty, w1, first), "x has no plain values"),
        "target shape": (
            lambda: wgrad(Kernel.FC1_WGRAD, wide),
            r"target has shape \(8, 512, 256\); allowed: \(8, 512, 512\)",
        ),
        "target members": (
            lambda: wgrad(Kernel.FC1_WGRAD, tuple(whole[:7])),
            "target has 7 members; the plan has 8 groups",
        ),
    }


@pytest.mark.parametrize("name", calls())
def test_wrong_arguments_are_named_before_any_work(name):
    call, text = calls()[name]
    with pytest.raises(ValueError, match=text):
        call()


def test_weights_are_named():
    with pytest.raises(ValueError, match=r"w\[1\] has shape \(8, 16\); allowed: \(16, 8\)"):
        arguments.require_shapes("w", [torch.zeros(SHAPE), torch.zeros(8, 16)], SHAPE)
    members = [torch.zeros(SHAPE), torch.zeros(SHAPE).double()]
    with pytest.raises(ValueError, match=r"w\[1\] is torch.float64 on cpu; allowed: torch.float32"):
        arguments.require_shapes("w", members, SHAPE)
