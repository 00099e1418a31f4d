# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Whether the numbers of a grouped MLP fit the kernels, for all backends. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from te_grouped_mlp.op.activations import Activation, Row
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.problem import Problem

INTERLEAVE = 32
"""Width of the gate and linear blocks that every kernel with a gated activation takes."""


def feature_refusals(
    problem: Problem, multiple: int, interleaves: Sequence[int | None]
) -> Iterator[Reject]:
    """Yield each number of `problem` that does not fit.

    Args:
        problem: The facts of the ops.
        multiple: What every feature width must be a positive multiple of.
        interleaves: The widths that a gated activation may have; None for two halves.
    """
    for name, spec in (("fc1", problem.fc1), ("fc2", problem.fc2)):
        for side in ("in_features", "out_features"):
            width = getattr(spec, side)
            if width <= 0 or width % multiple:
                detail = f"{name}.{side} is {width}; allowed: positive multiples of {multiple}"
                yield Reject(Reason.FEATURES, detail)
    act = problem.activation
    if problem.fc1.out_features != act.expansion * problem.fc2.in_features:
        yield Reject(
            Reason.FEATURES,
            f"fc1.out_features is {problem.fc1.out_features}; {act.kind.value} needs "
            f"{act.expansion} times fc2.in_features, {problem.fc2.in_features}",
        )
    if act.is_gated and act.interleave not in interleaves:
        listed = " or ".join(str(width) for width in interleaves)
        yield Reject(
            Reason.INTERLEAVE,
            f"interleave is {act.interleave}; allowed: {listed}; `te-grouped-mlp convert` reorders "
            "FC1 of a checkpoint",
        )


def activation_refusals(problem: Problem, is_computed: Callable[[Row], bool]) -> Iterator[Reject]:
    """Yield a refusal of an activation whose row says that the kernels do not compute it."""
    kind = problem.activation.kind
    if not is_computed(kind.row):
        allowed = ", ".join(other.value for other in Activation if is_computed(other.row))
        yield Reject(Reason.OPTION, f"activation is {kind.value}; allowed: {allowed}")
