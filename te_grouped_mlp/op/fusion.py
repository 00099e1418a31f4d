# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the three ops to fuse and settles, once, which implementation they get and why."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from te_grouped_mlp.op import environment, selection
from te_grouped_mlp.op.backends.upstream import backend as upstream
from te_grouped_mlp.op.decisions import UNFUSED, Decision, record
from te_grouped_mlp.op.decisions import explain as explain
from te_grouped_mlp.op.environment import (
    FUSED_SWITCH,
    WRAPPERS,
    Absent,
)
from te_grouped_mlp.op.formats import DType
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.problem import Activation, ActivationSpec, LinearSpec, Problem, RecipeKind
from te_grouped_mlp.op.te_adapter import (
    ACTIVATION_TYPES,
    GroupedLinear,
    activation_spec,
    problem_of,
)


def decide_in(module: Any, recipe: Any) -> tuple[Decision, ...]:
    """Decide for every grouped MLP in a ``torch.nn.Module``, as a fuser would; fuse nothing."""
    found = []
    for part in module.modules():
        ops = list(part.children())
        for index in range(len(ops) - 2):
            triple = tuple(ops[index : index + 3])
            if _is_candidate(triple, None, None):
                found.append(_decide(triple, recipe)[0])
    return tuple(found)


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
        gated: Handle gated activations, or unary ones.
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
    kind = ACTIVATION_TYPES.get(type(triple[1]))
    linears = isinstance(triple[0], GroupedLinear) and isinstance(triple[2], GroupedLinear)
    return linears and kind is not None and (gated is None or kind.is_gated is gated)


def _fuse_triple(
    triple: tuple[Any, ...], recipe: Any, build: Callable[[Any, Any, Any], Any]
) -> Any | None:
    decision, upstream_op = _decide(triple, recipe)
    record(decision)
    if decision.path == UNFUSED:
        return None
    return build(*triple) if upstream_op is None else upstream_op


def _decide(triple: tuple[Any, ...], recipe: Any) -> tuple[Decision, Any]:
    """Return the decision, and upstream's fused op where that is the path."""
    env = environment.current()
    problem = problem_of(*triple, recipe)
    refused: list[tuple[str, Reject]] = []
    blocked = dimension_mismatch(*triple)
    if not env.switches.fused:
        blocked = Reject(Reason.SWITCH_OFF, f"set {FUSED_SWITCH}=1 before the first call")
    if blocked is not None:
        return Decision(problem, UNFUSED, (("fused", blocked),)), None
    name = selection.choose(problem, env)
    for step, reject in selection.refusals(problem, env).items():
        if step == name:
            break
        refused.append((step, reject))
    if name is not None:
        return Decision(problem, name, tuple(refused)), None
    outcome = upstream.fuse(triple, recipe, problem, env)
    if isinstance(outcome, Reject):
        refused.append((selection.UPSTREAM, outcome))
        return Decision(problem, UNFUSED, tuple(refused)), None
    return Decision(problem, selection.UPSTREAM, tuple(refused)), outcome


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


def require_supported(problem: Problem) -> None:
    """Raise unless a fused op may be built; for direct construction.

    Outside autocast there is no recipe yet; MXFP8 is assumed then.

    Raises:
        ValueError: Features, interleave or recipe do not fit.
        RuntimeError: The switch is off, or no backend runs here.
    """
    env = environment.current()
    if problem.recipe is RecipeKind.NONE:
        problem = dataclasses.replace(problem, recipe=RecipeKind.MXFP8)
    if not env.switches.fused:
        raise RuntimeError(f"{Reason.SWITCH_OFF.value}; set {FUSED_SWITCH}=1")
    if selection.choose(problem, env) is not None:
        return
    refused = selection.refusals(problem, env)
    text = "; ".join(f"{step}: {reject}" for step, reject in refused.items())
    shapes = (Reason.FEATURES, Reason.INTERLEAVE, Reason.RECIPE, Reason.GRADIENT_FORMAT)
    error = ValueError if any(r.reason in shapes for r in refused.values()) else RuntimeError
    raise error(f"no backend runs this grouped MLP: {text or 'upstream is named'}")


def is_supported(*, gated: bool) -> bool:
    """Whether the switch is on and one of our backends runs a usual grouped MLP here."""
    env = environment.current()
    activation = (
        ActivationSpec(Activation.SWIGLU, 32) if gated else ActivationSpec(Activation.SRELU)
    )
    problem = Problem(
        num_groups=2,
        fc1=LinearSpec(128, 128 * activation.expansion),
        fc2=LinearSpec(128, 128),
        activation=activation,
        recipe=RecipeKind.MXFP8,
        recipe_detail="",
        device="cuda" if env.sm else "cpu",
        dtype=DType.BFLOAT16,
    )
    return env.switches.fused and selection.choose(problem, env) is not None


def frontend_kernel(wrapper: str) -> Any:
    """Return a wrapper of the installed cuDNN frontend by its short name.

    Raises:
        ImportError: There is none.
    """
    env = environment.current()
    if isinstance(env.wrappers, Absent):
        raise ImportError(env.wrappers.cause)
    return getattr(importlib.import_module("cudnn"), WRAPPERS[wrapper])


class capability:  # noqa: N801  (used as a decorator, like classmethod)
    """A class method with the ``cache_clear`` that users of upstream's cached ones call.

    The answer is not cached: the switch may be set after import.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, _instance: object, owner: type) -> Any:
        bound = functools.partial(self._function, owner)
        bound.cache_clear = lambda: None  # type: ignore[attr-defined]
        return bound


class UpstreamSeams:
    """The class methods of upstream's fused ops that its users ask before they call one.

    Attributes:
        is_gated: Whether the class fuses gated activations.
    """

    is_gated: bool

    @capability
    def is_supported(cls) -> bool:
        """Whether the switch is on and one of our backends runs on this machine."""
        return is_supported(gated=cls.is_gated)

    @capability
    def grouped_gemm_activation_kernel(cls) -> Any:
        """Return the frontend's kernel of the forward activation, as upstream's class does."""
        return frontend_kernel("glu" if cls.is_gated else "srelu")

    @capability
    def grouped_gemm_dactivation_kernel(cls) -> Any:
        """Return the frontend's kernel of the backward activation, as upstream's class does."""
        return frontend_kernel("dglu" if cls.is_gated else "dsrelu")

    @capability
    def grouped_gemm_quant_kernel(cls) -> Any:
        """Return the frontend's kernel of FC2 and FC1's dgrad, as upstream's class does."""
        return frontend_kernel("quant")

    @capability
    def grouped_gemm_wgrad_kernel(cls) -> Any:
        """Return the frontend's kernel of the weight gradients, as upstream's class does."""
        return frontend_kernel("wgrad")
