# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Numbers that fit no kernel are refused by name, value and what is allowed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from te_grouped_mlp.op.activations import Activation
from te_grouped_mlp.op.plan import Reason
from te_grouped_mlp.op.problem import LinearSpec
from te_grouped_mlp.op.shape_constraints import (
    INTERLEAVE,
    activation_refusals,
    feature_refusals,
)
from tests.op.backends.cutedsl.problems import ACTIVATIONS, problem_of

SWIGLU = dataclasses.replace(ACTIVATIONS["swiglu"], interleave=INTERLEAVE)


def _refused(**changes: Any) -> list[tuple[Reason, str]]:
    problem = problem_of(SWIGLU, **changes)
    return [(r.reason, r.detail) for r in feature_refusals(problem, 32, (INTERLEAVE,))]


def test_a_problem_that_fits() -> None:
    assert _refused() == []


@pytest.mark.parametrize("width", [0, 16, 500])
def test_a_width_that_is_no_multiple(width: int) -> None:
    (refusal,) = _refused(fc1=LinearSpec(width, 512))
    assert refusal == (
        Reason.FEATURES,
        f"fc1.in_features is {width}; allowed: positive multiples of 32",
    )


def test_fc1_has_a_gate_and_a_linear_for_each_feature() -> None:
    ((reason, detail),) = _refused(fc1=LinearSpec(512, 256))
    assert reason is Reason.FEATURES
    assert detail.endswith("needs 2 times fc2.in_features, 256")


def test_another_order_of_gate_and_linear() -> None:
    problem = problem_of(dataclasses.replace(SWIGLU, interleave=None))
    (refusal,) = feature_refusals(problem, 32, (INTERLEAVE,))
    assert refusal.reason is Reason.INTERLEAVE
    assert "interleave is None; allowed: 32" in refusal.detail
    assert not list(feature_refusals(problem, 32, (INTERLEAVE, None)))


def test_an_activation_without_a_formula() -> None:
    problem = problem_of(SWIGLU)
    assert not list(activation_refusals(problem, lambda row: True))
    other = next(kind for kind in Activation if kind is not SWIGLU.kind)
    (refusal,) = activation_refusals(problem, lambda row: row is other.row)
    assert refusal.detail == f"activation is {SWIGLU.kind.value}; allowed: {other.value}"
