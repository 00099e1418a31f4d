# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the three ops to fuse and settles, once, which implementation they get and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from te_grouped_mlp.op import decisions, environment, selection
from te_grouped_mlp.op.activations import Activation, ActivationSpec
from te_grouped_mlp.op.backends.upstream import backend as upstream
from te_grouped_mlp.op.decisions import UNFUSED, Decision
from te_grouped_mlp.op.environment import BACKEND_SWITCH, FUSED_SWITCH
from te_grouped_mlp.op.formats import MXFP8, DType
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.problem import LinearSpec, Problem, RecipeKind
from te_grouped_mlp.op.shape_constraints import INTERLEAVE, feature_refusals
from te_grouped_mlp.op.te import probes, quantizers
from te_grouped_mlp.op.te.adapter import (
    GroupedLinear,
    activation_kind,
    activation_spec,
    problem_of,
)


def decide_in(module: Any, recipe: Any) -> tuple[Decision, ...]:
    """Decide for every grouped MLP in a ``torch.nn.Module``, as a fuser would; fuse nothing."""
    decisions_of_module = []
    for part in module.modules():
        ops = list(part.children())
        for index in range(len(ops) - 2):
            triple = tuple(ops[index : index + 3])
            if _is_candidate(triple, None, None):
                decisions_of_module.append(_decide(triple, recipe)[0])
    return tuple(decisions_of_module)


def fuse(
    ops: Sequence[Any],
    recipe: Any,
    gated: bool,
    build: Callable[[Any, Any, Any], Any],
    only: tuple[type, ...] | None = None,
) -> list[Any]:
    """Replace every fusible triple of `ops` whose activation is of the asked kind.

    Args:
        ops: A fuser's ops.
        recipe: The recipe in force, or None.
        gated: Handle gated activations (and those that only upstream may know), or unary ones.
        build: Makes our fused op from FC1, activation and FC2.
        only: Activation types to handle; None for all of that kind.

    Returns:
        A new list; upstream's fused op stands where ours was refused and upstream's was not.
    """
    out: list[Any] = []
    index = 0
    while index < len(ops):
        triple = tuple(ops[index : index + 3])
        fused = None
        if _is_candidate(triple, gated, only):
            fused = _fuse_triple(triple, recipe, build)
        out.append(ops[index] if fused is None else fused)
        index += 1 if fused is None else 3
    return out


def _is_candidate(
    triple: tuple[Any, ...], gated: bool | None, only: tuple[type, ...] | None
) -> bool:
    if len(triple) != 3 or (only is not None and not isinstance(triple[1], only)):
        return False
    if not (isinstance(triple[0], GroupedLinear) and isinstance(triple[2], GroupedLinear)):
        return False
    kind = activation_kind(triple[1])
    # One of the two passes asks upstream about an activation that we do not know.
    is_gated = True if kind is None else kind.is_gated
    return gated is None or is_gated is gated


def _fuse_triple(
    triple: tuple[Any, ...], recipe: Any, build: Callable[[Any, Any, Any], Any]
) -> Any | None:
    decision, upstream_op = _decide(triple, recipe)
    decisions.add(decision)
    _require_requested(decision)
    if decision.path in (UNFUSED, selection.UPSTREAM) and not quantizers.te_decodes_carriers():
        # These would read the bytes as bf16: they do not know the announcement.
        quantizers.refuse_carriers(triple[0], triple[2])
    if decision.path == UNFUSED:
        return None
    return build(*triple) if upstream_op is None else upstream_op


def _decide(triple: tuple[Any, ...], recipe: Any) -> tuple[Decision, Any]:
    """Return the decision, and upstream's fused op where that is the path."""
    known = activation_kind(triple[1]) is not None
    problem = problem_of(triple[0], triple[1], triple[2], recipe) if known else None
    switches = environment.current_switches()
    if not switches.fused:
        off = Reject(Reason.SWITCH_OFF, f"set {FUSED_SWITCH}=1 before the first call")
        return Decision(problem, UNFUSED, (("fused", off),)), None
    forbidden = probes.refusal(activation_kind(triple[1]))
    if forbidden is not None:
        return Decision(problem, UNFUSED, (("fused", forbidden),)), None
    refused: list[tuple[str, Reject]] = []
    if problem is None:
        detail = f"the op between the linears is {type(triple[1]).__name__}"
        refused.append(("ours", Reject(Reason.PATTERN, detail)))
    else:
        mismatch = dimension_mismatch(*triple)
        if mismatch is not None:
            return Decision(problem, UNFUSED, (("fused", mismatch),)), None
        env = environment.current()
        name = selection.choose(problem, env)
        refused += selection.passed_over(problem, env)
        if name is not None:
            return Decision(problem, name, tuple(refused)), None
    outcome = upstream.fuse(triple, recipe, switches)
    if isinstance(outcome, Reject):
        refused.append((selection.UPSTREAM, outcome))
        return Decision(problem, UNFUSED, tuple(refused)), None
    return Decision(problem, selection.UPSTREAM, tuple(refused)), outcome


def _require_requested(decision: Decision) -> None:
    """Raise where a backend was named and does not run: only "auto" may choose another.

    Raises:
        ValueError: Naming the backend and each reason.
    """
    switches = environment.current_switches()
    requested = switches.backend
    known = decision.problem is not None
    if switches.fused and known and requested not in (selection.AUTO, decision.path):
        raise ValueError(
            f"{BACKEND_SWITCH} is {requested!r}, which cannot run this grouped MLP: {decision}; "
            f"allowed: unset it, or {selection.AUTO}, and the next step of the order is taken"
        )


def dimension_mismatch(fc1: Any, activation: Any, fc2: Any) -> Reject | None:
    """Say why the two linears do not fit together, or None."""
    if fc1.num_groups != fc2.num_groups:
        return Reject(Reason.GROUPS, f"FC1 has {fc1.num_groups}, FC2 has {fc2.num_groups}")
    wanted = activation_spec(activation).expansion * fc2.in_features
    if fc1.out_features != wanted:
        return Reject(
            Reason.FEATURES,
            f"FC1 has {fc1.out_features} out features; allowed: {wanted}, for FC2's "
            f"{fc2.in_features} in features",
        )
    return None


def is_glu_activation(activation: Any) -> bool:
    """Whether an op is a gated scaled activation."""
    kind = activation_kind(activation)
    return kind is not None and kind.is_gated


def require_fitting(fc1: Any, activation: Any, fc2: Any) -> None:
    """Check that the three ops fit together.

    Raises:
        TypeError: `activation` is no scaled activation.
        ValueError: The numbers do not fit; the message names them.
    """
    mismatch = dimension_mismatch(fc1, activation, fc2)
    if mismatch is not None:
        raise ValueError(str(mismatch))


def validate_grouped_mlp_dims(fc1: Any, activation: Any, fc2: Any) -> None:
    """Check that the three ops fit together and the block-scaled kernels, as upstream does.

    Raises:
        TypeError: `activation` is no scaled activation.
        ValueError: The numbers do not fit; the message names them.
    """
    require_fitting(fc1, activation, fc2)
    problem = problem_of(fc1, activation, fc2, None)
    refusals = feature_refusals(problem, MXFP8.features_multiple, (INTERLEAVE,))
    mismatch = next(refusals, None)
    if mismatch is not None:
        raise ValueError(str(mismatch))


def require_supported(problem: Problem) -> None:
    """Raise unless a fused op may be built; for direct construction.

    Outside autocast there may be no recipe yet; then a later MXFP8 recipe is enough.

    Raises:
        ValueError: Features, interleave or recipe do not fit.
        RuntimeError: The switch is off, or no backend runs here.
    """
    env = environment.current()
    if not env.switches.fused:
        raise RuntimeError(f"{Reason.SWITCH_OFF.value}; set {FUSED_SWITCH}=1")
    if selection.choose(problem, env) is not None:
        return
    if problem.recipe is RecipeKind.NONE:
        problem = dataclasses.replace(problem, recipe=RecipeKind.MXFP8)
        if selection.choose(problem, env) is not None:
            return
    refused = selection.refusals(problem, env)
    text = "; ".join(f"{step}: {reject}" for step, reject in refused.items())
    shapes = (Reason.FEATURES, Reason.INTERLEAVE, Reason.RECIPE, Reason.GRADIENT_FORMAT)
    error = ValueError if any(r.reason in shapes for r in refused.values()) else RuntimeError
    raise error(f"no backend runs this grouped MLP: {text or 'upstream is named'}")


def is_supported(*, gated: bool) -> bool:
    """Whether a usual grouped MLP is fused here: by one of our backends, or by upstream's op."""
    if not environment.current_switches().fused:
        return False
    env = environment.current()
    activation = (
        ActivationSpec(Activation.SWIGLU, INTERLEAVE) if gated else ActivationSpec(Activation.SRELU)
    )
    problem = Problem(
        num_groups=2,
        fc1=LinearSpec(128, 128 * activation.expansion),
        fc2=LinearSpec(128, 128),
        activation=activation,
        recipe=RecipeKind.MXFP8,
        recipe_detail="",
        device="cuda" if env.sm and not env.emulated else "cpu",
        dtype=DType.BFLOAT16,
    )
    return selection.choose(problem, env) is not None or upstream.is_supported(gated=gated)
