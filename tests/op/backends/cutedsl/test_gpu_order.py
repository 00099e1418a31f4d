# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Every kernel on a Hopper GPU takes the right expert's matrix, in whatever order they lie.

The matrix of expert e holds one number, e + 1, and rows of tokens have one element that is one. So
every element of a result is the number of the expert that was read or written, exactly.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from te_grouped_mlp.op.activations import ActivationSpec
from te_grouped_mlp.op.backends.base import DactEpilogue, Fc1Epilogue, GemmEpilogue
from te_grouped_mlp.op.backends.cutedsl import arguments, keys
from te_grouped_mlp.op.backends.cutedsl.compile import compile_ahead
from te_grouped_mlp.op.formats import UNQUANTIZED, DType
from te_grouped_mlp.op.layout import Kernel
from te_grouped_mlp.op.tensors import memory
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import Axis, GroupedOperand, WeightOperand
from tests.op.backends.reference.cases import ACTIVATIONS, Case

gpu_step = pytest.importorskip("tests.op.backends.cutedsl.gpu_step")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

SPLITS = {
    1: (129,),
    2: (100, 157),
    3: (128, 0, 131),
    8: (1, 0, 31, 32, 127, 128, 129, 257),
}
SPECS = {
    "swiglu": ACTIVATIONS["swiglu"],
    "halves": ActivationSpec(ACTIVATIONS["swiglu"].kind, None),
    "srelu": ACTIVATIONS["srelu"],
}
ORDERS = {"ascending": False, "descending": True}
HIDDEN, FFN = 256, 192


def case_of(spec, experts, **changes):
    splits = SPLITS[experts]
    changes = {"hidden": HIDDEN, "ffn": FFN, **changes}
    return Case(spec, splits, sum(splits) + 64, fmt=UNQUANTIZED, **changes)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    wanted = []
    for spec in SPECS.values():
        problem = gpu_step.problem_of(case_of(spec, 3))
        for reversed_experts in ORDERS.values():
            for accumulate in (False, True):
                wanted += keys.of_problem(
                    problem, 9, prob=None, accumulate=accumulate, reversed_experts=reversed_experts
                )
                wanted += keys.of_problem(
                    problem,
                    9,
                    grad=DType.BFLOAT16,
                    accumulate=accumulate,
                    reversed_experts=reversed_experts,
                )
            wanted += keys.of_problem(problem, 9, reversed_experts=reversed_experts)
    compile_ahead(wanted)


def numbered(experts, rows, cols, *, reversed_experts, gap=64):
    """Weights as an operand; the matrix of expert e holds e + 1."""
    values = torch.arange(1.0, experts + 1, device="cuda").bfloat16()
    values = values[:, None, None].expand(-1, rows, cols)
    members = gpu_step.laid(values, reversed_experts=reversed_experts, gap=gap)
    view = arguments.addressable_view(members)
    # Otherwise nothing of this file would reach the kernels that it is about.
    assert view is not None
    assert view.reversed_experts is (reversed_experts and experts > 1)
    return WeightOperand(UNQUANTIZED, (rows, cols), Axis.ROW, members)


def one_hot(state, cols):
    """Tokens with a one in another column each, and NaN past the valid rows."""
    rows, live = state.x.shape[0], int(state.x.splits.group_end_offsets[-1])
    values = torch.zeros(rows, cols)
    values[torch.arange(rows), torch.arange(rows) * 7 % cols] = 1.0
    values[live:] = float("nan")
    values = values.bfloat16().cuda()
    return dataclasses.replace(state.x, shape=(rows, cols), plain=values)


def assert_numbers(case, got, factor=1.0):
    """Every valid row holds the number of its expert, times `factor`."""
    numbers = torch.arange(1.0, len(case.splits) + 1)
    want = numbers.repeat_interleave(torch.tensor(case.splits))[:, None] * factor
    live = got[: case.live].double().cpu()
    assert torch.equal(live, want.double().expand_as(live)), live[:, 0].tolist()


experts_and_order = pytest.mark.parametrize(
    ("experts", "order"),
    [(experts, order) for experts in SPLITS for order in ORDERS],
    ids=lambda value: str(value),
)


@experts_and_order
@pytest.mark.parametrize("activation", SPECS)
def test_fc1_act(activation, experts, order):
    case = case_of(SPECS[activation], experts)
    state = gpu_step.state_of(case)
    w = numbered(experts, case.wide, HIDDEN, reversed_experts=ORDERS[order])
    epilogue = Fc1Epilogue(None, state.prob, True, True)
    with memory.poisoned(0xFF):
        result = gpu_step.BACKEND.fc1_act(state.plan, one_hot(state, HIDDEN), w, epilogue)
    assert_numbers(case, result.pre_activation)


@experts_and_order
@pytest.mark.parametrize("activation", SPECS)
@pytest.mark.parametrize("kernel", [Kernel.FC2_FORWARD, Kernel.FC1_DGRAD], ids=str)
def test_gemm(kernel, activation, experts, order):
    case = case_of(SPECS[activation], experts)
    state = gpu_step.state_of(case)
    reversed_experts = ORDERS[order]
    if kernel is Kernel.FC2_FORWARD:
        w, k = numbered(experts, HIDDEN, FFN, reversed_experts=reversed_experts), FFN
    else:
        w, k = numbered(experts, case.wide, HIDDEN, reversed_experts=reversed_experts), case.wide
    out = torch.full((case.rows, HIDDEN), float("nan"), device="cuda").bfloat16()
    gpu_step.BACKEND.gemm(state.plan, kernel, one_hot(state, k), w, out, GemmEpilogue())
    assert_numbers(case, out)


@experts_and_order
def test_dact_dgrad_gated(experts, order):
    """With gate 0 and linear 1, silu(0) = 0 and silu'(0) = 1/2: the gate's gradient is g / 2."""
    case = case_of(SPECS["swiglu"], experts)
    state = gpu_step.state_of(case)
    w = numbered(experts, HIDDEN, FFN, reversed_experts=ORDERS[order])
    pre = torch.tensor([0.0, 1.0]).repeat(case.rows, FFN).bfloat16().cuda()
    epilogue = DactEpilogue(None, False, False, True)
    with memory.poisoned(0xFF):
        found = gpu_step.BACKEND.dact_dgrad(state.plan, one_hot(state, HIDDEN), w, pre, epilogue)
    assert_numbers(case, found.grad.plain[:, 0::2], 0.5)
    assert not found.grad.plain[: case.live, 1::2].any()


@experts_and_order
def test_dact_dgrad_unary(experts, order):
    """The derivative of the squared ReLU at 1/2 is one; its value there is 1/4."""
    case = case_of(SPECS["srelu"], experts)
    state = gpu_step.state_of(case)
    w = numbered(experts, HIDDEN, FFN, reversed_experts=ORDERS[order])
    pre = torch.full((case.rows, FFN), 0.5).bfloat16().cuda()
    ones = torch.ones(case.rows, device="cuda")
    epilogue = DactEpilogue(ones, True, False, True)
    with memory.poisoned(0xFF):
        found = gpu_step.BACKEND.dact_dgrad(state.plan, one_hot(state, HIDDEN), w, pre, epilogue)
    assert_numbers(case, found.grad.plain)
    assert_numbers(case, found.dprob[:, None], FFN / 4)


@experts_and_order
@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", SPECS)
@pytest.mark.parametrize("kernel", [Kernel.FC1_WGRAD, Kernel.FC2_WGRAD], ids=str)
def test_wgrad(kernel, activation, dtype, accumulate, experts, order):
    """One row of an expert counts: ones on the left, the expert's number on the right."""
    case = case_of(SPECS[activation], experts)
    state = gpu_step.state_of(case)
    rows, cols = (case.wide, HIDDEN) if kernel is Kernel.FC1_WGRAD else (HIDDEN, FFN)
    left, right = torch.zeros(case.rows, rows), torch.zeros(case.rows, cols)
    begin = 0
    for expert, size in enumerate(case.splits):
        left[begin : begin + min(size, 1)] = 1.0
        right[begin : begin + size] = expert + 1.0
        begin += size
    left[begin:] = right[begin:] = float("nan")

    def tokens(values: torch.Tensor) -> GroupedOperand:
        shape = (values.shape[0], values.shape[1])
        return dataclasses.replace(state.x, shape=shape, plain=values.bfloat16().cuda())

    held = torch.arange(1.0, experts + 1)[:, None, None].expand(-1, rows, cols) * 16
    held = held.to("cuda", dtype) if accumulate else torch.full_like(held, torch.nan).cuda()
    held = held.to(dtype)
    out = gpu_step.laid(held, reversed_experts=ORDERS[order], gap=64)
    target = WgradTarget(out, accumulate)
    stack, back = arguments.target_of(target, experts, (rows, cols))
    assert stack.reversed_experts is (ORDERS[order] and experts > 1)
    assert not back
    gpu_step.BACKEND.wgrad(state.plan, kernel, tokens(right), tokens(left), target)
    for expert, taken in enumerate(case.splits):
        want = (expert + 1.0) * (bool(taken) + 16 * accumulate)
        found = out[expert].float().unique().tolist()
        assert found == [want], (expert, found)
    # Nothing was written between the matrices.
    lowest, size = min(out, key=torch.Tensor.data_ptr), rows * cols
    spaces = lowest.as_strided((experts, 64), (size + 64, 1), lowest.storage_offset() + size)
    assert spaces.isnan().all()


@pytest.mark.parametrize("grads", ORDERS)
@pytest.mark.parametrize("second", ORDERS)
@pytest.mark.parametrize("first", ORDERS)
@pytest.mark.parametrize("accumulate", [False, True], ids=["overwrite", "accumulate"])
@pytest.mark.parametrize("activation", SPECS)
def test_a_step_has_the_same_bits_in_every_order(activation, accumulate, first, second, grads):
    case = case_of(SPECS[activation], 8, accumulate=accumulate)
    state = gpu_step.state_of(case)
    want = gpu_step.run(case, state)

    def moved(w: WeightOperand, order: str) -> WeightOperand:
        members = gpu_step.laid(torch.stack(w.data), reversed_experts=ORDERS[order])
        return dataclasses.replace(w, data=members)

    other = dataclasses.replace(state, w1=moved(state.w1, first), w2=moved(state.w2, second))
    with memory.poisoned(0xFF):
        got = gpu_step.run(case, other, reversed_experts=ORDERS[grads])
    for name in ("y", "dx", "dprob"):
        assert torch.equal(got[name][: case.live], want[name][: case.live]), name
    for name in ("dw1", "dw2", "db1"):
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_is_copied(order):
    """A step allocates no tensor as large as the weights."""
    case = case_of(SPECS["swiglu"], 8, hidden=1024, ffn=2048, accumulate=True)
    state = gpu_step.state_of(case)
    reversed_experts = ORDERS[order]
    for name in ("w1", "w2"):
        w = getattr(state, name)
        members = gpu_step.laid(torch.stack(w.data), reversed_experts=reversed_experts)
        setattr(state, name, dataclasses.replace(w, data=members))
    out = gpu_step.laid(state.main1, reversed_experts=reversed_experts)
    x, dy = one_hot(state, case.hidden), one_hot(state, case.wide)
    epilogue = Fc1Epilogue(None, state.prob, True, True)

    def step() -> None:
        gpu_step.BACKEND.fc1_act(state.plan, x, state.w1, epilogue)
        gpu_step.BACKEND.wgrad(state.plan, Kernel.FC1_WGRAD, x, dy, WgradTarget(out, True))

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    size = 8 * case.wide * case.hidden * 2
    assert torch.cuda.max_memory_allocated() - before < size / 2
