# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""One step of the native backend on a GPU, on the inputs of the reference backend's cases."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from te_grouped_mlp.op.backends.base import DactEpilogue, Fc1Epilogue, GemmEpilogue
from te_grouped_mlp.op.backends.cutedsl import capability
from te_grouped_mlp.op.backends.cutedsl.backend import CuteDslBackend
from te_grouped_mlp.op.environment import Environment, Switches
from te_grouped_mlp.op.formats import UNQUANTIZED
from te_grouped_mlp.op.layout import Kernel, Output
from te_grouped_mlp.op.packages import Absent
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.problem import Call, LinearSpec, Problem, RecipeKind, TensorKind
from te_grouped_mlp.op.tensors import memory
from te_grouped_mlp.op.tensors.gradients import WgradTarget
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    GroupedOperand,
    Splits,
    WeightOperand,
    torch_dtype,
)
from tests.op.backends.reference import cases
from tests.op.backends.reference.cases import Case

BACKEND = CuteDslBackend()
VERSIONS = {"quack": "0.6.5", "cutlass_dsl": "4.8.1", "triton": "3.6.0"}
HOPPER = Environment((9, 0), VERSIONS, Absent("none"), Switches(), False)


def problem_of(case: Case) -> Problem:
    """The problem of a case, on a GPU."""
    return Problem(
        len(case.splits),
        LinearSpec(case.hidden, case.wide, has_bias=case.fc1_bias),
        LinearSpec(case.ffn, case.hidden, has_bias=case.fc2_bias, scale_bias=case.scale_bias),
        case.activation,
        RecipeKind.NONE,
        "",
        "cuda",
        case.dtype,
    )


def plan_of(case: Case) -> Plan:
    """The plan of a case."""
    wanted = frozenset(Output) - ({Output.DPROB} if case.unit_scale else set())
    call = Call(
        rows=case.rows,
        dtype=case.dtype,
        prob_dtype=case.prob_dtype,
        rows_are_full=case.full,
        wanted=wanted,
        input_kind=TensorKind.PLAIN,
        unit_scale=case.unit_scale,
        deterministic=True,
        format=UNQUANTIZED,
    )
    plan = capability.plan(problem_of(case), call, HOPPER)
    assert isinstance(plan, Plan), plan
    return plan


@dataclass
class State:
    """Everything that a step reads, on the GPU."""

    plan: Plan
    x: GroupedOperand
    dy: GroupedOperand
    w1: WeightOperand
    w2: WeightOperand
    prob: torch.Tensor | None
    bias_scale: torch.Tensor | None
    b1: torch.Tensor | None
    b2: torch.Tensor | None
    main1: torch.Tensor
    main2: torch.Tensor


def copy_splits(source: Splits, target: Splits) -> None:
    """Give the tensors of a division of rows the content of another, whatever tensors it has."""
    for field in dataclasses.fields(Splits):
        given, kept = getattr(source, field.name), getattr(target, field.name)
        if isinstance(kept, torch.Tensor):
            kept.copy_(given)
        else:
            assert not kept, f"{field.name} is {kept!r}, which a captured step does not read anew"


def state_of(case: Case, *, discrete: bool = False, tail: float = float("nan")) -> State:
    """Copy a case's inputs to the GPU; rows past the valid ones hold `tail`."""
    given, plan = cases.inputs(case), plan_of(case)
    host = cases.splits_of(case.splits)
    offsets = host.group_offsets.cuda()
    splits = Splits(
        host.sizes.cuda(), host.group_end_offsets.cuda(), offsets, {}, None, offsets.int()
    )

    def rows(parts: list[torch.Tensor]) -> torch.Tensor:
        live = torch.cat(parts)
        out = torch.full((case.rows, *live.shape[1:]), tail).to(live.dtype)
        out[: len(live)] = live
        return out.cuda()

    def tokens(parts: list[torch.Tensor]) -> GroupedOperand:
        values = rows(parts)
        return GroupedOperand(UNQUANTIZED, tuple(values.shape), plan.layout, splits, plain=values)

    def weight(members: list[torch.Tensor]) -> WeightOperand:
        if discrete:
            # The spacers keep the allocator from placing the members at one distance.
            placed = []
            for index, member in enumerate(members):
                spacer = torch.empty(512 * (index % 3 + 1), device="cuda")
                placed.append(member.cuda())
                del spacer
            data = tuple(placed)
        else:
            data = torch.stack(members).cuda().unbind(0)
        return WeightOperand(UNQUANTIZED, tuple(members[0].shape), Axis.ROW, data)

    groups = given.groups
    return State(
        plan,
        tokens([g.x for g in groups]),
        tokens([g.dy for g in groups]),
        weight([g.w1 for g in groups]),
        weight([g.w2 for g in groups]),
        None if case.unit_scale else rows([g.prob for g in groups]),
        rows([g.bias_scale for g in groups]) if case.scale_bias else None,
        torch.stack([g.b1 for g in groups]).cuda() if case.fc1_bias else None,
        torch.stack([g.b2 for g in groups]).cuda() if case.fc2_bias else None,
        given.main1.cuda(),
        given.main2.cuda(),
    )


def laid(values: torch.Tensor, *, reversed_experts: bool, gap: int = 0) -> tuple[torch.Tensor, ...]:
    """Copy the matrices of a (G, rows, cols) tensor into one buffer; return one view per expert.

    Args:
        values: The matrices.
        reversed_experts: The last expert's comes first in memory.
        gap: Elements between two matrices, which hold NaN.
    """
    groups, (rows, cols) = len(values), values.shape[1:]
    buffer = torch.full((groups, rows * cols + gap), float("nan")).to(values)
    places = range(groups)[::-1] if reversed_experts else range(groups)
    members = tuple(buffer[place, : rows * cols].view(rows, cols) for place in places)
    for member, value in zip(members, values, strict=True):
        member.copy_(value)
    return members


def run(
    case: Case, state: State, *, discrete_grads: bool = False, reversed_experts: bool | None = None
) -> dict[str, Any]:
    """Run one step; every output by name, on the GPU.

    Args:
        case: The step.
        state: Its inputs.
        discrete_grads: The weight gradients go to tensors of their own.
        reversed_experts: They go to one buffer, in this order; None for one tensor.
    """
    plan, recompute = state.plan, case.activation.recomputes_input
    want_column = not recompute
    forward = BACKEND.fc1_act(
        plan, state.x, state.w1, Fc1Epilogue(state.b1, state.prob, want_column, True)
    )
    y = memory.empty((case.rows, case.hidden), torch.bfloat16, "cuda")
    epilogue = GemmEpilogue(state.b2, state.bias_scale, True)
    BACKEND.gemm(plan, Kernel.FC2_FORWARD, forward.activated, state.w2, y, epilogue)
    assert forward.pre_activation is not None
    backward = BACKEND.dact_dgrad(
        plan,
        state.dy,
        dataclasses.replace(state.w2, axis=Axis.COLUMN),
        forward.pre_activation,
        DactEpilogue(state.prob, state.prob is not None, True, want_column, recompute),
    )
    dx = memory.empty((case.rows, case.hidden), torch.bfloat16, "cuda")
    column = dataclasses.replace(state.w1, axis=Axis.COLUMN)
    BACKEND.gemm(plan, Kernel.FC1_DGRAD, backward.grad, column, dx, GemmEpilogue())
    grads = []
    activated = backward.activated if recompute else forward.activated
    for kernel, x, dy, main in (
        (Kernel.FC2_WGRAD, activated, state.dy, state.main2),
        (Kernel.FC1_WGRAD, state.x, backward.grad, state.main1),
    ):
        out: Any = main.clone()
        if discrete_grads:
            out = tuple(member.clone() for member in reversed(out.unbind(0)))[::-1]
        elif reversed_experts is not None:
            out = laid(main, reversed_experts=reversed_experts)
        BACKEND.wgrad(plan, kernel, x, dy, WgradTarget(out, case.accumulate))
        grads.append(out if isinstance(out, torch.Tensor) else torch.stack(out))
    return {
        "y": y,
        "dx": dx,
        "dprob": backward.dprob,
        "db1": backward.bias_grad,
        "dw1": grads[1],
        "dw2": grads[0],
        "pre": forward.pre_activation,
        "activated": forward.activated.plain,
        "grad": backward.grad.plain,
    }


def dtype_of(case: Case) -> torch.dtype:
    """The compute dtype of a case."""
    return torch_dtype(case.dtype)
