# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Which sums FC2's bias asks for, and over what."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformer_engine.pytorch  # noqa: F401  (brings tex, which the op imports)

from te_grouped_mlp.op.layout import Output
from te_grouped_mlp.op.step import bias_gradient
from tests.op.backends.reference.cases import ACTIVATIONS, Case

SIZES = (128, 256)
DB2, DPROB = Output.DB2, Output.DPROB


def plan_of(wanted: set[Output], *, scaled: bool = True, grouped: bool = False) -> Any:

    case = Case(ACTIVATIONS["swiglu"], SIZES, sum(SIZES), fc2_bias=True, scale_bias=scaled)
    plan = case.plan()
    fc2 = dataclasses.replace(plan.problem.fc2, single_grouped_bias=grouped)
    return dataclasses.replace(
        plan,
        problem=dataclasses.replace(plan.problem, fc2=fc2),
        call=dataclasses.replace(plan.call, wanted=frozenset({Output.Y, *wanted})),
    )


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("wanted", [set(), {DB2}, {DPROB}, {DB2, DPROB}])
def test_only_what_is_wanted_is_summed(wanted: set[Output], scaled: bool) -> None:
    plan = plan_of(wanted, scaled=scaled)
    of_bias, of_scale = bias_gradient.wanted(plan.problem.fc2, plan.call)
    assert of_bias is (DB2 in wanted)
    assert of_scale is (scaled and DPROB in wanted)
    dy, bias, prob = torch.randn(384, 8), torch.randn(2, 8), torch.rand(384)
    saved = bias_gradient.to_save(bias, plan)
    assert (saved is not None) is of_scale
    splits = SimpleNamespace(
        sizes=torch.tensor(SIZES),
        group_end_offsets=torch.tensor(SIZES).cumsum(0, dtype=torch.int32),
    )
    state: Any = SimpleNamespace(plan=plan, splits=splits, prob=prob, bias2=saved)
    db2, dscale = bias_gradient.of_fc2(state, dy)
    assert ((db2 is not None), (dscale is not None)) == (of_bias, of_scale)
    parts, factors = dy.double().split(SIZES), (prob if scaled else torch.ones(384)).split(SIZES)
    if db2 is not None:
        want = [
            (part * factor[:, None]).sum(0) for part, factor in zip(parts, factors, strict=True)
        ]
        torch.testing.assert_close(db2.double(), torch.stack(want), rtol=1e-5, atol=1e-5)
    if dscale is not None:
        want = [part @ row.double() for part, row in zip(parts, bias, strict=True)]
        torch.testing.assert_close(dscale.double(), torch.cat(want), rtol=1e-5, atol=1e-5)
    assert bias_gradient.of_fc2(state, None) == (None, None)


@pytest.mark.parametrize("grouped", [False, True])
def test_a_bias_that_shares_memory_with_its_parameter_is_copied(grouped: bool) -> None:
    bias = torch.randn(2, 8)
    saved = bias_gradient.to_save(bias, plan_of({DPROB}, grouped=grouped))
    assert saved is not None
    assert (saved is bias) is not grouped
    assert torch.equal(saved, bias)
