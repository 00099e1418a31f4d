# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The contracts over combinations that nobody wrote down; every run draws the same ones."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from te_grouped_mlp.op import environment
from tests.op import fixtures
from tests.support import step
from tests.support.pairwise import pairwise
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

PER_LINEAR: dict[str, tuple[Any, ...]] = {
    "bias": (False, True),
    "weight": ("discrete", "grouped", "quantized"),
    "grad": ("grad", "main_grad", "fused", "overwrite"),
    "delay": (False, True),
}
# FC1 and FC2 choose on their own, so that one cannot stand for the other.
CHOICES: dict[str, tuple[Any, ...]] = {
    "activation": step.ACTIVATIONS,
    **{f"{name} {label}": of for name, of in PER_LINEAR.items() for label in ("fc1", "fc2")},
    "scale_bias": (False, True),
    "frozen": ("", "fc1", "fc2", "prob", "x"),
    "groups": (1, 2, 5),
    "tiles": (0, 1, 3),
    "fill": fixtures.TAILS,
    "frontend": tuple(fixtures.FRONTENDS),
    "recompute": (False, True),
    "prob_dtype": (torch.float32, torch.bfloat16),
}
ROWS = pairwise(CHOICES)


def case_of(row: dict[str, Any], splits: tuple[int, ...], shape: tuple[int, int]) -> StepCase:
    pairs = {name: (row[f"{name} fc1"], row[f"{name} fc2"]) for name in PER_LINEAR}
    same = ("activation", "scale_bias", "fill", "recompute", "prob_dtype")
    return StepCase(
        splits=splits,
        buffer_rows=sum(splits) + 128 * row["tiles"],
        hidden=shape[0],
        ffn=shape[1],
        frozen=frozenset({row["frozen"]} - {""}),
        **pairs,
        **{name: row[name] for name in same},
    )


SIZES = st.sampled_from((0, 128, 256, 384))
SHAPES = st.sampled_from(((64, 64), (128, 64), (64, 192), (192, 128)))
SEEDS = st.integers(0, 3)


@st.composite
def steps(draw: st.DrawFn, row: dict[str, Any]) -> StepCase:
    splits = tuple(draw(SIZES) for _ in range(row["groups"]))
    return case_of(row, splits, draw(SHAPES)).but(seed=draw(SEEDS))


def drawn(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def identity(row: dict[str, Any]) -> str:
    """Name a row by what tells it from the others, short."""
    pairs = [f"{row[f'{name} fc1']}+{row[f'{name} fc2']}" for name in PER_LINEAR if name != "delay"]
    rest = f"{row['groups']}g-pad{row['tiles']}x{row['fill']}"
    return "-".join([row["activation"], *pairs, row["frontend"].replace(" ", "_"), rest])


COMBINATIONS = pytest.mark.parametrize("row", ROWS, ids=identity)


def check_padding(data: st.DataObject, row: dict[str, Any]) -> None:
    case = data.draw(steps({**row, "tiles": max(row["tiles"], 1)}))
    with environment.override(wrappers=fixtures.FRONTENDS[row["frontend"]]):
        fixtures.assert_padding_invisible(case)


def check_values(data: st.DataObject, row: dict[str, Any]) -> None:
    case = data.draw(steps(row))
    with environment.override(wrappers=fixtures.FRONTENDS[row["frontend"]]):
        fixtures.assert_right(case, step.run_step(case))


@COMBINATIONS
@given(data=st.data())
@drawn(2)
def test_padded_equals_exact(data: st.DataObject, row: dict[str, Any]) -> None:
    check_padding(data, row)


@COMBINATIONS
@given(data=st.data())
@drawn(2)
def test_values_are_right_per_expert_and_stripe(data: st.DataObject, row: dict[str, Any]) -> None:
    check_values(data, row)


@pytest.mark.slow
@COMBINATIONS
@given(data=st.data())
@drawn(12)
def test_padded_equals_exact_often(data: st.DataObject, row: dict[str, Any]) -> None:
    check_padding(data, row)


@pytest.mark.slow
@COMBINATIONS
@given(data=st.data())
@drawn(8)
def test_values_are_right_often(data: st.DataObject, row: dict[str, Any]) -> None:
    check_values(data, row)


# What is frozen adds nothing here.
DENSE_ROWS = pairwise(
    {
        name: CHOICES[name] if name != "frozen" else ("",)
        for name in CHOICES
        if name not in ("groups", "tiles", "fill", "frontend")
    }
)


@pytest.mark.parametrize("row", DENSE_ROWS, ids=lambda row: "-".join(map(str, row.values())))
@given(data=st.data())
@drawn(2)
def test_dense_and_packed_differ_by_one_rounding(data: st.DataObject, row: dict[str, Any]) -> None:
    """A full single group in both layouts. Only additions that come after a rounding differ: the
    FC2 bias in y, and the old content of a bf16 accumulator. Everything else is equal."""
    case = data.draw(steps({**row, "groups": 1, "tiles": 0, "fill": 0.0}))
    with environment.override(wrappers=fixtures.FRONTENDS["all"]):
        dense = run_accumulating(case)
        with environment.override(treat_rows_as_full=False):
            packed = run_accumulating(case)
    first, second = case.linears
    free = {"y"} if second.bias else set()
    free |= {name for name, linear in (("dW1", first), ("dW2", second)) if linear.accumulates}
    for name in dense:
        if name not in free:
            assert step.same_bits(dense[name], packed[name]), name
            continue
        a, b = dense[name].double(), packed[name].double()
        # What is rounded first is the sum less the addend, so no larger than both together.
        size = torch.maximum(a.abs(), b.abs()) + dense[f"{name} added"].abs()
        eps = torch.finfo(case.dtype).eps
        assert ((a - b).abs() <= eps * size).all(), name


def test_dense_and_packed_do_differ() -> None:
    """The bound above is of use: with an FC2 bias, or an accumulator, the layouts are not equal."""
    case = StepCase(splits=(256,), hidden=128, ffn=64, bias=True, grad="main_grad")
    dense = run_accumulating(case)
    with environment.override(treat_rows_as_full=False):
        packed = run_accumulating(case)
    for name in ("y", "dW1", "dW2"):
        assert not step.same_bits(dense[name], packed[name]), name


def run_accumulating(case: StepCase) -> dict[str, Any]:
    """Run a step whose accumulators have the compute dtype; adds what was added to results."""
    model, inputs = step.make_model(case), step.make_inputs(case)
    for parameter in model.parameters():
        if hasattr(parameter, "main_grad"):
            parameter.main_grad = parameter.main_grad.to(case.dtype)
    y = step.run_model(model, case, inputs)
    assert type(step.fused_op(model)).__name__.startswith("GroupedMLP_CuTeGEMM")
    found = step.collect(case, model, inputs, y)
    if case.linears[1].bias:
        bias = model[2].bias if model[2].single_grouped_bias else model[2].bias0
        storage = getattr(bias, "rowwise_data", None)
        values = (bias if storage is None else storage).detach().double().view(1, -1)
        found["y added"] = values * (
            inputs.prob.detach().double()[:, None] if case.scale_bias else 1
        )
    for index in (0, 1):
        start = step.main_grad_start(case, index).double()
        found[f"dW{index + 1} added"] = start.view_as(found[f"dW{index + 1}"])
    return found


def test_rows_hold_every_pair() -> None:
    """The greedy cover is one: what it leaves out would never be tried."""
    for (first, a), (second, b) in itertools.combinations(CHOICES.items(), 2):
        seen = {(str(row[first]), str(row[second])) for row in ROWS}
        assert len(seen) == len(a) * len(b), (first, second)
