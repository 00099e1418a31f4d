# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Which path a grouped MLP takes on a machine, and why not another. Imports neither torch nor TE.

Our own paths are asked through the `capability` modules of the backends, which plan the real calls.
Transformer Engine's fused op is described by its published conditions.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from types import ModuleType

from te_grouped_mlp.op import backends
from te_grouped_mlp.op.activations import Activation, ActivationSpec, wrappers
from te_grouped_mlp.op.backends.upstream import capability as upstream
from te_grouped_mlp.op.environment import Environment
from te_grouped_mlp.op.formats import MXFP8, NVFP4, UNQUANTIZED, DType
from te_grouped_mlp.op.layout import GroupLayout, Launch, Output
from te_grouped_mlp.op.packages import RUNTIME_OFFSETS, Absent
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.problem import (
    Call,
    LinearSpec,
    Problem,
    RecipeKind,
    TensorKind,
)

UPSTREAM = "upstream"
UNFUSED = "unfused"
RAISES = "raises"

_AUTO = "auto"
_FORMATS = {RecipeKind.MXFP8: MXFP8, RecipeKind.NVFP4: NVFP4, RecipeKind.NONE: UNQUANTIZED}
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


def names(device: str = "cuda") -> tuple[str, ...]:
    """Return our backends in the order in which they are asked about tensors on a device."""
    left_out = backends.GPU_ONLY if device == "cpu" else frozenset()
    return tuple(name for name in backends.CLASSES if name not in left_out)


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


def call_of(question: Question, *, full: bool) -> Call:
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
        format=_FORMATS[question.recipe],
    )


def answer(question: Question, env: Environment) -> Answer:
    """Return which path a step takes, by the order: ours, TE's fused op, unfused."""
    problem = problem_of(question, env)
    requested = env.switches.backend
    asked = names(problem.device) if requested == _AUTO else tuple(backends.CLASSES)
    ours = [
        (name, importlib.import_module(f"{backends.__name__}.{name}.capability"))
        for name in asked
        if requested in (_AUTO, name)
    ]
    refused = [(name, module.refusal(problem, env)) for name, module in ours]
    found = [(name, reject) for name, reject in refused if reject is not None]
    if len(found) == len(ours):
        return _upstream_answer(question, env, found)
    # The op is fused, and each call asks every backend in the order.
    refusals: list[tuple[str, Reject]] = []
    since: list[str] = []
    for name, module in ours:
        launches = module.plan_launches(problem, call_of(question, full=False), env)
        weak = [] if isinstance(launches, Reject) else _weak_outputs(question, launches)
        if isinstance(launches, Reject):
            refusals.append((name, launches))
        elif weak:
            text = "; ".join(
                f"{output.value} is computed by {launch.kernel.value}, {launch.cause}"
                for output, launch in weak
            )
            refusals.append((name, Reject(Reason.NOT_DETERMINISTIC, text)))
            varying = ", ".join(dict.fromkeys(output.value for output, _ in weak))
            since.append(f"{name} would be nondeterministic in {varying}")
        else:
            planned = _planned(name, module, question, problem, env)
            return replace(planned, since=" and ".join(since), refusals=tuple(refusals))
    return Answer(RAISES, refusals=tuple(refusals))


def _weak_outputs(question: Question, launches: Iterable[Launch]) -> list[tuple[Output, Launch]]:
    if not question.deterministic:
        return []
    return [
        (output, launch)
        for launch in launches
        for output in sorted(launch.outputs - launch.deterministic, key=lambda each: each.value)
    ]


def _planned(
    name: str, module: ModuleType, question: Question, problem: Problem, env: Environment
) -> Answer:
    extents = []
    launches: tuple[Launch, ...] = ()
    for full in (True, False):
        launches = module.plan_launches(problem, call_of(question, full=full), env)
        layout = GroupLayout.decide(
            num_groups=question.groups,
            buffer_rows=_ROWS,
            rows_are_full=full,
            launches=launches,
        )
        extents.append(layout.extent.value)
    full_rows, padded = extents
    outputs = tuple(
        (output, *_computed_by(launches, output))
        for output in Output
        if output in call_of(question, full=False).wanted
    )
    return Answer(
        path=name,
        rows=full_rows if full_rows == padded else f"{full_rows}; padded: {padded}",
        outputs=outputs,
        repeats=all(repeats for _, _, repeats in outputs),
    )


def _computed_by(launches: Iterable[Launch], output: Output) -> tuple[str, bool]:
    found = [each for each in launches if output in each.outputs]
    text = ", ".join(each.kernel.value for each in found)
    return text, all(output in each.deterministic for each in found)


def _upstream_answer(
    question: Question, env: Environment, refusals: list[tuple[str, Reject]]
) -> Answer:
    refusal = upstream_refusal(question, env)
    if refusal is not None:
        return Answer(UNFUSED, refusals=(*refusals, (UPSTREAM, refusal)))
    gated = question.activation.is_gated
    bias = question.bias
    weak = gated or bias.is_scaled or not env.wrapper_takes("dsrelu", "deterministic")
    if question.deterministic and weak:
        detail = "its backward raises for every gated activation and for a scaled FC2 bias"
        weakness = Reject(Reason.NOT_DETERMINISTIC, detail)
        return Answer(RAISES, refusals=(*refusals, (UPSTREAM, weakness)))
    rows = "buffer" if _upstream_is_dense(question, env) else "packed"
    # Its check is about dprob; of the bias gradients it says nothing.
    repeats = None if question.deterministic and bias is not Bias.NONE else question.deterministic
    return Answer(UPSTREAM, rows, repeats=repeats, refusals=tuple(refusals))


def _upstream_is_dense(question: Question, env: Environment) -> bool:
    gated = question.activation.is_gated
    return upstream.is_laid_out_densely(
        question.groups,
        takes_offsets=gated and env.wrapper_takes("glu", RUNTIME_OFFSETS),
        has_own_check=not _te_2_19(env),
    )


def upstream_refusal(question: Question, env: Environment) -> Reject | None:
    """Return why Transformer Engine's own fused op does not take the step, or None."""
    return next(_upstream_refusals(question, env), None)


def _upstream_refusals(question: Question, env: Environment) -> Iterator[Reject]:
    te = env.versions["transformer_engine"]
    if isinstance(te, Absent):
        yield Reject(Reason.PACKAGE, te.cause)
    if env.standalone:
        yield Reject(Reason.PACKAGE, "Transformer Engine's extension is not installed")
    if isinstance(env.sm, Absent):
        yield Reject(Reason.ARCHITECTURE, f"{env.sm.cause}; allowed: 10.x")
    elif env.sm[0] != 10:
        yield Reject(Reason.ARCHITECTURE, f"it is {env.sm[0]}.{env.sm[1]}; allowed: 10.x")
    if isinstance(env.wrappers, Absent):
        yield Reject(Reason.PACKAGE, env.wrappers.cause)
    if question.recipe is RecipeKind.NONE:
        yield Reject(Reason.RECIPE, "there is no recipe; allowed: mxfp8, nvfp4")
    row = question.activation.row
    if _te_2_19(env) and row.since != "2.19":
        yield Reject(Reason.OPTION, f"Transformer Engine {te} has no {row.te_class}")
    wrapper = wrappers(row.is_gated)[0]
    # It asks about the arguments of some activations; of the others it leaves them out.
    for argument in (name for each in row.parameters if row.probes for name in each.frontend):
        if not env.wrapper_takes(wrapper, argument):
            yield Reject(Reason.WRAPPER, f"{wrapper} has no argument {argument}")
    weak = upstream.determinism_refusal(
        question.activation.value,
        requested=question.deterministic,
        has_own_check=not _te_2_19(env),
    )
    if weak is not None:
        yield weak
    if env.switches.backend != UPSTREAM:
        problem = problem_of(question, env)
        step = upstream.Step(
            question.recipe, "", question.groups, problem.fc1, problem.fc2, question.activation
        )
        dense = _upstream_is_dense(question, env)
        yield from upstream.faults(step, dense=dense, full_rows=env.switches.full_rows)


def _te_2_19(env: Environment) -> bool:
    return str(env.versions["transformer_engine"]).startswith("2.19.")
