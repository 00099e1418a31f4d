# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A plan's launches: found by kernel, laid out, and asked for what is not deterministic."""

from __future__ import annotations

import pytest

from te_grouped_mlp.op.layout import Kernel, Launch, Output, RowExtent
from te_grouped_mlp.op.plan import Plan, Reason, Reject, planned
from tests.op.backends.cutedsl.problems import ACTIVATIONS, call_of, problem_of

PACKED = frozenset({RowExtent.PACKED})
LAUNCHES = (
    Launch(Kernel.FC1_ACT, PACKED, frozenset({Output.Y}), frozenset({Output.Y})),
    Launch(Kernel.DACT_DGRAD, PACKED, frozenset({Output.DPROB, Output.DB1}), cause="atomics"),
)
PROBLEM = problem_of(ACTIVATIONS["swiglu"])


def _plan(**changes: object) -> Plan:
    plan = planned("cutedsl", PROBLEM, call_of(**changes), LAUNCHES)
    assert isinstance(plan, Plan)
    return plan


def test_a_refusal_stays_one() -> None:
    reject = Reject(Reason.OPTION, "x is 1; allowed: 0")
    assert planned("cutedsl", PROBLEM, call_of(), reject) is reject
    assert str(reject).endswith(": x is 1; allowed: 0")


def test_launches_are_found_by_kernel() -> None:
    assert _plan().launch(Kernel.DACT_DGRAD) is LAUNCHES[1]
    with pytest.raises(KeyError, match="the plan has no launch fc2_wgrad"):
        _plan().launch(Kernel.FC2_WGRAD)


def test_only_wanted_outputs_can_break_determinism() -> None:
    assert _plan().not_deterministic() == {
        Output.DB1: LAUNCHES[1],
        Output.DPROB: LAUNCHES[1],
    }
    wanted = frozenset({Output.Y, Output.DPROB})
    assert set(_plan(wanted=wanted).not_deterministic()) == {Output.DPROB}
    assert not _plan(wanted=frozenset({Output.Y})).not_deterministic()


def test_splits_keep_to_the_formats_multiple_unless_the_backend_says_more() -> None:
    call = call_of()
    assert _plan().split_multiple == call.format.rows_multiple
    plan = planned("cutedsl", PROBLEM, call, LAUNCHES, split_multiple=256)
    assert isinstance(plan, Plan)
    assert plan.split_multiple == 256
