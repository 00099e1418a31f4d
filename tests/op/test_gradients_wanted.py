# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Every choice of what needs a gradient runs, and what is asked for equals the full step."""

from __future__ import annotations

import itertools

import pytest

from tests.support import step
from tests.support.step import StepCase

pytestmark = pytest.mark.usefixtures("fused_switch", "poisoned_memory")

SUBJECTS = ("x", "prob", "fc1", "fc2")
FROZEN = [
    frozenset(chosen)
    for size in range(len(SUBJECTS) + 1)
    for chosen in itertools.combinations(SUBJECTS, size)
]
CASES = {
    "swiglu": StepCase(splits=(128, 128), hidden=128, ffn=64),
    "scaled bias": StepCase(
        splits=(128, 128), hidden=128, ffn=64, bias=(False, True), scale_bias=True
    ),
    "recomputed": StepCase(splits=(128, 0), hidden=128, ffn=64, activation="srelu", recompute=True),
    "unit scale": StepCase(splits=(128,), hidden=128, ffn=64, unit_scale=True, bias=(True, False)),
    "unit recomputed": StepCase(
        splits=(128,), hidden=128, ffn=64, activation="srelu", recompute=True, unit_scale=True
    ),
}
GRADIENT_OF = {"x": ("dx",), "prob": ("dprob",), "fc1": ("dW1", "db1"), "fc2": ("dW2", "db2")}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "frozen", FROZEN, ids=lambda f: "frozen " + ("+".join(sorted(f)) or "none")
)
def test_what_is_wanted_equals_the_full_step(name: str, frozen: frozenset[str]) -> None:
    case = CASES[name].but(frozen=frozen)
    found, full = step.run_step(case), step.run_step(CASES[name])
    assert step.same_bits(found["y"], full["y"])
    recomputed = case.recompute and {"x", "fc1", "prob"} <= frozen | (
        {"prob"} if case.unit_scale else set()
    )
    for subject, names in GRADIENT_OF.items():
        for each in names:
            if subject in frozen:
                assert found[each] is None, each
            elif not (recomputed and each == "dW2"):
                # Without a way through the activation FC2's input is kept, not made anew.
                assert step.same_bits(found[each], full[each]), each
