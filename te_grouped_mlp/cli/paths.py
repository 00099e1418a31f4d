# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Which path a grouped MLP takes on a machine, and why not another. Imports neither torch nor TE.

Our own paths are asked of `selection`, which plans the real calls; Transformer Engine's fused op is
described by its published conditions, in the `capability` module of `op.backends.upstream`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from te_grouped_mlp.op import selection
from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.backends.upstream import capability as upstream
from te_grouped_mlp.op.environment import Environment
from te_grouped_mlp.op.formats import DType
from te_grouped_mlp.op.layout import Output
from te_grouped_mlp.op.plan import Reject
from te_grouped_mlp.op.problem import (
    Call,
    LinearSpec,
    Problem,
    RecipeKind,
    TensorKind,
)

UNFUSED = "unfused"
RAISES = "raises"

_WIDTH = 1024
_SEVERAL = 8
_ROWS = 2048


class Bias(Enum):
    """Which biases a step has; the value is the word of the tables."""

    NONE = "none"
    FC1 = "FC1"
    FC2 = "FC2"
    SCALED = "scale_bias"
    """FC2's alone, multiplied by the probabilities."""
    BOTH = "both"
    """FC1's, and FC2's multiplied by the probabilities."""

    @property
    def on_fc1(self) -> bool:
        """Whether FC1 has one."""
        return self in (Bias.FC1, Bias.BOTH)

    @property
    def on_fc2(self) -> bool:
        """Whether FC2 has one."""
        return self not in (Bias.NONE, Bias.FC1)

    @property
    def is_scaled(self) -> bool:
        """Whether the probabilities multiply FC2's."""
        return self in (Bias.SCALED, Bias.BOTH)


@dataclass(frozen=True)
class Question:
    """One cell of the table: a step as a user would describe it.

    Attributes:
        activation, recipe: Of the step.
        bias: Which biases there are.
        groups: Number of experts.
        deterministic: Bit-identical results are demanded.
    """

    activation: Activation
    recipe: RecipeKind
    bias: Bias
    groups: int
    deterministic: bool


@dataclass(frozen=True)
class Answer:
    """What happens.

    Attributes:
        path: A backend of ours, "upstream", "unfused", or "raises" (RuntimeError, by us before any
            kernel, by upstream in the backward).
        rows: Row extent of full buffers, and of padded ones where it differs.
        since: Why a backend of ours took the call in the place of one that would vary; "" else.
        outputs: Every wanted output, the launches that compute it, and whether it repeats; empty
            where the path is not ours.
        repeats: Whether every output is bit-identical from run to run; None where not known.
        refusals: Each step that was passed over, with its reason.
    """

    path: str
    rows: str = ""
    since: str = ""
    outputs: tuple[tuple[Output, str, bool], ...] = ()
    repeats: bool | None = None
    refusals: tuple[tuple[str, Reject], ...] = ()

    @property
    def text(self) -> str:
        """The path in words, with what made it necessary."""
        return f"{self.path}, since {self.since}" if self.since else self.path

    @property
    def varying(self) -> list[str]:
        """The outputs that may differ from run to run, where that is known."""
        return [output.value for output, _, repeats in self.outputs if not repeats]

    def by(self, *outputs: Output) -> str:
        """Return the launches that compute any of `outputs`; "" where the path is not ours."""
        found = [launches for output, launches, _ in self.outputs if output in outputs]
        return ", ".join(dict.fromkeys(name for each in found for name in each.split(", ")))


def questions() -> Iterator[Question]:
    """Yield every combination of the table."""
    recipes = (RecipeKind.MXFP8, RecipeKind.NVFP4, RecipeKind.NONE)
    both = (False, True)
    for found in itertools.product(Activation, recipes, Bias, (1, _SEVERAL), both):
        yield Question(*found)


def problem_of(question: Question, env: Environment) -> Problem:
    """Return the problem of a usual step of that kind on that machine."""
    kind = question.activation
    spec = ActivationSpec(kind, interleave=32 if kind.is_gated else None)
    bias = question.bias
    return Problem(
        num_groups=question.groups,
        fc1=LinearSpec(_WIDTH, _WIDTH * spec.expansion, bias.on_fc1, main_grad=True),
        fc2=LinearSpec(_WIDTH, _WIDTH, bias.on_fc2, bias.is_scaled, main_grad=True),
        activation=spec,
        recipe=question.recipe,
        recipe_detail="",
        device="cuda" if env.sm else "cpu",
        dtype=DType.BFLOAT16,
    )


def call_of(question: Question, problem: Problem, *, full: bool) -> Call:
    """Return a training call in which every output is wanted."""
    bias = question.bias
    absent = {Output.DB1: not bias.on_fc1, Output.DB2: not bias.on_fc2}
    return Call(
        rows=_ROWS,
        dtype=DType.BFLOAT16,
        prob_dtype=DType.FLOAT32,
        rows_are_full=full,
        wanted=frozenset(output for output in Output if not absent.get(output)),
        input_kind=TensorKind.PLAIN,
        unit_scale=False,
        deterministic=question.deterministic,
        format=problem.format,
    )


def answer(question: Question, env: Environment) -> Answer:
    """Return which path a step takes, by the order: ours, TE's fused op, unfused."""
    problem = problem_of(question, env)
    if selection.choose(problem, env) is None:
        return _upstream_answer(question, problem, env)
    # The op is fused, and each call asks every backend in the order.
    plan, refusals = selection.first_plan(problem, call_of(question, problem, full=False), env)
    if plan is None:
        return Answer(RAISES, refusals=tuple(refusals))
    full, _ = selection.first_plan(problem, call_of(question, problem, full=True), env)
    extents = [each.layout.extent.value for each in (full, plan) if each is not None]
    varying = plan.not_deterministic()
    outputs = tuple(
        (output, ", ".join(each.kernel.value for each in plan.launches if output in each.outputs))
        for output in Output
        if output in plan.call.wanted
    )
    return Answer(
        path=plan.backend,
        rows="; padded: ".join(dict.fromkeys(extents)),
        since=" and ".join(
            f"{name} would be nondeterministic in "
            + ", ".join(output.value for output in reject.varying)
            for name, reject in refusals
            if reject.varying
        ),
        outputs=tuple((output, launches, output not in varying) for output, launches in outputs),
        repeats=not varying,
        refusals=tuple(refusals),
    )


def _upstream_answer(question: Question, problem: Problem, env: Environment) -> Answer:
    refusals = tuple(selection.refusals(problem, env).items())
    demanded = question.deterministic
    refusal = upstream.refusal(problem, env, deterministic=demanded)
    if refusal is not None:
        return Answer(UNFUSED, refusals=(*refusals, (selection.UPSTREAM, refusal)))
    weak = upstream.determinism_gap(problem, env) if demanded else None
    if weak is not None:
        return Answer(RAISES, refusals=(*refusals, (selection.UPSTREAM, weak)))
    return Answer(
        selection.UPSTREAM,
        "buffer" if upstream.is_dense(problem, env) else "packed",
        # Its check is about dprob; of the bias gradients it says nothing.
        repeats=None if demanded and question.bias is not Bias.NONE else demanded,
        refusals=refusals,
    )
