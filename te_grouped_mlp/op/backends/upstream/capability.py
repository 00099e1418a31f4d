# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""When Transformer Engine's own fused op may stand in. Imports neither torch nor TE.

Upstream's conditions are upstream's to check. Here is what they let through although the result is
wrong, or the step fails where the unfused ops compute it. Whoever names upstream gets it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from te_grouped_mlp.op.activations import Activation, wrappers
from te_grouped_mlp.op.environment import FULL_ROWS_SWITCH, Environment
from te_grouped_mlp.op.layout import is_single_group
from te_grouped_mlp.op.packages import RUNTIME_OFFSETS, Absent
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.problem import LinearSpec, Problem, RecipeKind

NAME = "upstream"

OWN_CHECK = "_deterministic_algorithms_required"
"""The function of upstream's module by which it refuses what it cannot do deterministically.

2.20.2 has it and 2.19.0 has not. The two came with other repairs, so it tells them apart.
"""


@dataclass(frozen=True)
class Step:
    """What upstream's op is asked to take.

    Attributes:
        recipe, recipe_detail: As of `Problem`.
        num_groups: Number of experts.
        fc1, fc2: The two linears.
        activation: Which one; None for one that is not known here.
        unit_scale: The activation announces that its probabilities are one.
    """

    recipe: RecipeKind
    recipe_detail: str
    num_groups: int
    fc1: LinearSpec
    fc2: LinearSpec
    activation: Activation | None
    unit_scale: bool = False

    @property
    def is_unit_group(self) -> bool:
        """Whether the probabilities are one and unused, as for one shared expert."""
        return self.unit_scale and is_single_group(self.num_groups)


def is_laid_out_densely(num_groups: int, *, takes_offsets: bool, has_own_check: bool) -> bool:
    """Whether upstream handles the rows of a step as one dense matrix, whatever the splits say.

    Args:
        num_groups: Number of experts.
        takes_offsets: The kernels of the activation can be told to compute every row.
        has_own_check: As of `determinism_refusal`; the module then asks the kernels.
    """
    return is_single_group(num_groups) and (takes_offsets or not has_own_check)


def faults(step: Step, *, dense: bool, full_rows: bool) -> Iterator[Reject]:
    """Yield the known faults of upstream's op that the step would meet.

    Args:
        step: What it is asked to take.
        dense: The answer of `is_laid_out_densely`.
        full_rows: The promise that a routed single group fills its buffer.
    """
    if step.recipe is RecipeKind.OTHER:
        yield Reject(
            Reason.RECIPE,
            f"recipe is {step.recipe_detail or step.recipe.value}; upstream's op asks for the kind "
            "of a recipe alone; allowed: mxfp8, nvfp4",
        )
    if step.recipe is RecipeKind.MXFP8 and step.recipe_detail:
        yield Reject(Reason.GRADIENT_FORMAT, f"{step.recipe_detail}; allowed: E4M3 throughout")
    if step.recipe is RecipeKind.NVFP4:
        yield from _nvfp4_faults(step)
    if step.fc1.scale_bias:
        yield Reject(Reason.UPSTREAM_FAULT, "scale_bias of FC1 is ignored; allowed: on FC2 only")
    row = None if step.activation is None else step.activation.row
    # This kernel packs its rows and takes no absent probability.
    hadamard = step.recipe is RecipeKind.NVFP4 and row is not None and row.uses_hadamard
    unary = row is not None and not row.is_gated
    if step.is_unit_group and (unary or hadamard):
        detail = "a unit activation scale hands no probabilities to a kernel that needs them"
        yield Reject(Reason.UPSTREAM_FAULT, detail)
    if dense and not full_rows and not step.is_unit_group:
        how = "whose first product packs its rows" if hadamard else "padding included"
        yield Reject(
            Reason.UPSTREAM_FAULT,
            f"one expert is read as a dense matrix of all rows, {how}; allowed: several experts, "
            f"or {FULL_ROWS_SWITCH}=1 where no row is padding",
        )


def _nvfp4_faults(step: Step) -> Iterator[Reject]:
    if step.recipe_detail:
        detail = f"{step.recipe_detail}, for which the scales of the products are not computed"
        yield Reject(Reason.RECIPE, f"{detail}; allowed: the defaults")
    if step.fc1.single_grouped_weight or step.fc2.single_grouped_weight:
        detail = "single_grouped_weight under NVFP4 leaves its scales in an order not read"
        yield Reject(Reason.UPSTREAM_FAULT, f"{detail}; allowed: one weight for each expert")
    if step.fc2.has_bias and not step.fc2.scale_bias:
        detail = "the backward of a plain FC2 bias raises under NVFP4"
        yield Reject(Reason.UPSTREAM_FAULT, f"{detail}; allowed: scale_bias, or none")


def determinism_refusal(
    activation: str, *, requested: bool, has_own_check: bool, unchecked: bool = False
) -> Reject | None:
    """Refuse an upstream module that would silently break a request for determinism.

    Args:
        activation: Name of the activation op.
        requested: Whether bit-identical results are demanded now.
        has_own_check: Whether the module refuses by itself (2.20.2 does, 2.19.0 does not).
        unchecked: Whether the step has a bias gradient that the module's check passes over: FC1's
            beside a unit activation scale, since the check is about dprob.
    """
    if requested and not has_own_check:
        return Reject(
            Reason.NOT_DETERMINISTIC,
            f"upstream's {activation} sums dprob with float atomics and this "
            "version does not check; install Transformer Engine 2.20",
        )
    if requested and unchecked:
        return Reject(
            Reason.NOT_DETERMINISTIC,
            "upstream sums FC1's bias gradient with float atomics and checks dprob alone, of which "
            "a unit activation scale has none; take the bias off FC1",
        )
    return None


# What a machine's record says of upstream's op, for a step that nobody has built ------------------


def refusal(problem: Problem, env: Environment, *, deterministic: bool) -> Reject | None:
    """Return why upstream's op would not take a step, by its published conditions, or None."""
    return next(_refusals(problem, env, deterministic), None)


def is_dense(problem: Problem, env: Environment) -> bool:
    """Whether it would handle the rows as one dense matrix."""
    return is_laid_out_densely(
        problem.num_groups,
        takes_offsets=problem.activation.is_gated and env.wrapper_takes("glu", RUNTIME_OFFSETS),
        has_own_check=not _is_2_19(env),
    )


def determinism_gap(problem: Problem, env: Environment) -> Reject | None:
    """Say why the backward of a step that it took raises under a demand for determinism."""
    gated, scaled = problem.activation.is_gated, problem.fc2.scale_bias
    if not gated and not scaled and env.wrapper_takes("dsrelu", "deterministic"):
        return None
    detail = "its backward raises for every gated activation and for a scaled FC2 bias"
    return Reject(Reason.NOT_DETERMINISTIC, detail)


def _refusals(problem: Problem, env: Environment, deterministic: bool) -> Iterator[Reject]:
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
    if problem.recipe is RecipeKind.NONE:
        yield Reject(Reason.RECIPE, "there is no recipe; allowed: mxfp8, nvfp4")
    kind = problem.activation.kind
    row = kind.row
    if _is_2_19(env) and row.since != "2.19":
        yield Reject(Reason.OPTION, f"Transformer Engine {te} has no {row.te_class}")
    wrapper = wrappers(row.is_gated)[0]
    # It asks about the arguments of some activations; of the others it leaves them out.
    probed = row.parameters if row.probes else ()
    for argument in (name for parameter in probed for name in parameter.frontend):
        if not env.wrapper_takes(wrapper, argument):
            yield Reject(Reason.WRAPPER, f"{wrapper} has no argument {argument}")
    own_check = not _is_2_19(env)
    weak = determinism_refusal(kind.value, requested=deterministic, has_own_check=own_check)
    if weak is not None:
        yield weak
    if env.switches.backend != NAME:
        step = Step(problem.recipe, "", problem.num_groups, problem.fc1, problem.fc2, kind)
        dense, full_rows = is_dense(problem, env), env.switches.full_rows
        yield from faults(step, dense=dense, full_rows=full_rows)


def _is_2_19(env: Environment) -> bool:
    return str(env.versions["transformer_engine"]).startswith("2.19.")
