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
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch", "hostile_memory")

CHOICES: dict[str, tuple[Any, ...]] = {
    "activation": step.ACTIVATIONS,
    "bias": ("nobias", "bias", "scaledbias"),
    "weight": ("discrete", "grouped", "quantized"),
    "grad": ("grad", "main_grad", "fused", "overwrite"),
    "groups": (1, 2, 5),
    "tiles": (0, 1, 3),
    "fill": fixtures.TAILS,
    "frontend": tuple(fixtures.FRONTENDS),
    "recompute": (False, True),
    "delay": (False, True),
    "prob_dtype": (torch.float32, torch.bfloat16),
}


def pairwise(choices: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Return rows in which each pair of values of two choices occurs; greedy, always the same."""
    names = list(choices)
    missing = {
        (first, a, second, b)
        for first, second in itertools.combinations(range(len(names)), 2)
        for a in range(len(choices[names[first]]))
        for b in range(len(choices[names[second]]))
    }
    rows = []
    while missing:
        row: list[int | None] = [None] * len(names)
        first, a, second, b = min(missing)
        row[first], row[second] = a, b
        for index, name in enumerate(names):
            if row[index] is None:
                gains = [_gain(missing, row, index, value) for value in range(len(choices[name]))]
                row[index] = gains.index(max(gains))
        missing -= {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(names)), 2)}
        rows.append({name: choices[name][row[index]] for index, name in enumerate(names)})
    return rows


def _gain(missing: set[Any], row: list[int | None], index: int, value: int) -> int:
    """Count the missing pairs that a value at `index` makes with the values that are set."""
    pairs = (
        (other, row[other], index, value) if other < index else (index, value, other, row[other])
        for other in range(len(row))
        if row[other] is not None
    )
    return sum(pair in missing for pair in pairs)


ROWS = pairwise(CHOICES)
_BIAS = {"nobias": (False, False), "bias": (True, False), "scaledbias": (True, True)}


def case_of(row: dict[str, Any], splits: tuple[int, ...], shape: tuple[int, int]) -> StepCase:
    bias, scale_bias = _BIAS[row["bias"]]
    return StepCase(
        splits=splits,
        buffer_rows=sum(splits) + 128 * row["tiles"],
        hidden=shape[0],
        ffn=shape[1],
        bias=bias,
        scale_bias=scale_bias,
        **{name: row[name] for name in ("activation", "weight", "grad", "fill", "recompute")},
        **{name: row[name] for name in ("delay", "prob_dtype")},
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
    names = ("activation", "bias", "weight", "grad", "frontend")
    rest = f"{row['groups']}g-pad{row['tiles']}x{row['fill']}"
    return "-".join(str(row[name]).replace(" ", "_") for name in names) + "-" + rest


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


DENSE_ROWS = pairwise(
    {name: CHOICES[name] for name in CHOICES if name not in ("groups", "tiles", "fill", "frontend")}
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
    free = {"y"} if case.bias else set()
    if case.grad in ("main_grad", "fused"):
        free |= {"dW1", "dW2"}
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
    """Run a step whose accumulators hold 1 in the compute dtype; adds what was added to results."""
    model, inputs = step.make_model(case), step.make_inputs(case)
    for parameter in model.parameters():
        if hasattr(parameter, "main_grad"):
            parameter.main_grad = torch.ones(tuple(parameter.shape), dtype=case.dtype)
    y = step.run_model(model, case, inputs)
    assert type(step.fused_op(model)).__name__.startswith("GroupedMLP_CuTeGEMM")
    found = step.collect(case, model, inputs, y)
    if case.bias:
        bias = model[2].bias if model[2].single_grouped_bias else model[2].bias0
        storage = getattr(bias, "rowwise_data", None)
        values = (bias if storage is None else storage).detach().double().view(1, -1)
        found["y added"] = values * (
            inputs.prob.detach().double()[:, None] if case.scale_bias else 1
        )
    for name in ("dW1", "dW2"):
        found[f"{name} added"] = torch.ones(1, dtype=torch.float64)
    return found


def test_rows_hold_every_pair() -> None:
    """The greedy cover is one: what it leaves out would never be tried."""
    for (first, a), (second, b) in itertools.combinations(CHOICES.items(), 2):
        seen = {(str(row[first]), str(row[second])) for row in ROWS}
        assert len(seen) == len(a) * len(b), (first, second)
