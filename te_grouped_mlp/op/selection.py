# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Which backend runs: at fusion by the problem alone, at each call by the call's facts as well.

Asks the `capability` modules of the backends and runs nothing. Imports neither torch nor TE.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, cast

from te_grouped_mlp.op import backends
from te_grouped_mlp.op.environment import BACKEND_SWITCH, Environment, is_first_rank
from te_grouped_mlp.op.packages import Absent
from te_grouped_mlp.op.plan import Plan, Reason, Reject
from te_grouped_mlp.op.problem import Call, Problem

logger = logging.getLogger("te_grouped_mlp")

AUTO = "auto"
UPSTREAM = "upstream"
NAMES = (*backends.CLASSES, UPSTREAM)
"""What NVTE_GROUPED_MLP_BACKEND may name, besides "auto", in the order in which that asks them."""

_PLANS_KEPT = 64


class Capability(Protocol):
    """What a backend says of itself, in its module ``capability``. Pure: equal answers to equal
    arguments."""

    def refusal(self, problem: Problem, env: Environment) -> Reject | None:
        """Say why no call of `problem` could run here; None when some can."""

    def plan(self, problem: Problem, call: Call, env: Environment) -> Plan | Reject:
        """Say what would run, or why nothing can."""


@functools.cache
def capability(name: str) -> Capability:
    """Return what one of our backends says of itself."""
    return cast(Capability, importlib.import_module(f"{backends.__name__}.{name}.capability"))


def candidates(env: Environment, device: str = "cuda") -> tuple[str, ...]:
    """Return the names of our backends to ask, in order; empty when upstream's op is named.

    Args:
        env: The machine; a backend that is named is the only one.
        device: Type of the tensors' device.

    Raises:
        ValueError: NVTE_GROUPED_MLP_BACKEND names no backend.
    """
    requested = env.switches.backend
    if requested == AUTO:
        on_host = device == "cpu" and not env.emulated
        left_out = {UPSTREAM, *backends.GPU_ONLY} if on_host else {UPSTREAM}
        return tuple(name for name in NAMES if name not in left_out)
    if requested not in NAMES:
        allowed = ", ".join((AUTO, *NAMES))
        raise ValueError(f"{BACKEND_SWITCH} is {requested!r}; allowed: {allowed}")
    return () if requested == UPSTREAM else (requested,)


def refusals(problem: Problem, env: Environment) -> dict[str, Reject]:
    """Return why each of our backends cannot run `problem`; those that can are not in it."""
    answers = {
        name: capability(name).refusal(problem, env) for name in candidates(env, problem.device)
    }
    return {name: reject for name, reject in answers.items() if reject is not None}


def choose(problem: Problem, env: Environment) -> str | None:
    """Return the first of our backends that can run `problem`, or None."""
    refused = refusals(problem, env)
    return next((name for name in candidates(env, problem.device) if name not in refused), None)


def passed_over(problem: Problem, env: Environment) -> list[tuple[str, Reject]]:
    """Return the refusals of the backends before the one that `choose` takes."""
    refused = refusals(problem, env)
    before = itertools.takewhile(refused.__contains__, candidates(env, problem.device))
    return [(name, refused[name]) for name in before]


def first_plan(
    problem: Problem, call: Call, env: Environment
) -> tuple[Plan | None, list[tuple[str, Reject]]]:
    """Return the plan of the first backend that takes a call, and who refused it before.

    A plan that cannot keep a demand for determinism is a refusal. Raises as `candidates`.
    """
    rejects: list[tuple[str, Reject]] = []
    for name in candidates(env, problem.device):
        outcome = capability(name).plan(problem, call, env)
        if isinstance(outcome, Plan):
            weak = _determinism_refusal(outcome)
            if weak is None:
                return outcome, rejects
            outcome = weak
        rejects.append((name, outcome))
    return None, rejects


_plans: OrderedDict[tuple[object, ...], Plan] = OrderedDict()
_plans_lock = threading.Lock()
_latest: tuple[tuple[object, ...], Plan] | None = None
"""The facts of the latest call, and its plan."""


def make_plan(problem: Problem, call: Call, env: Environment) -> Plan:
    """Return the plan of one call; equal calls share one plan.

    Raises:
        RuntimeError: A deterministic result is asked for and no backend gives it; the message
            names the output, the cause and what to change.
        ValueError: No backend takes the call; the message holds each reason.
    """
    global _latest
    facts = (problem, call, env.switches, env.single_group_is_always_dense, env.wrappers, env.sm)
    # Comparing with the latest call takes less time than a hash of all those facts.
    latest = _latest
    if latest is not None and latest[0] == facts:
        return latest[1]
    plan = _plan_of(problem, call, env)
    _latest = (facts, plan)
    return plan


def _plan_of(problem: Problem, call: Call, env: Environment) -> Plan:
    known = {} if isinstance(env.wrappers, Absent) else env.wrappers
    wrappers = tuple(sorted(known.items()))
    key = (problem, call, env.switches, env.single_group_is_always_dense, wrappers, env.sm)
    with _plans_lock:
        # Taken out and put back: the latest one is the last. Each look hashes all the facts.
        plan = _plans.pop(key, None)
        if plan is None:
            plan, rejects = first_plan(problem, call, env)
            if plan is None:
                raise _refusal_error(rejects)
            _report(plan)
        _plans[key] = plan
        if len(_plans) > _PLANS_KEPT:
            _plans.popitem(last=False)
    return plan


def _determinism_refusal(plan: Plan) -> Reject | None:
    weak = plan.not_deterministic() if plan.call.deterministic else {}
    if not weak:
        return None
    parts = [
        f"{output.value} is computed by {launch.kernel.value}, {launch.cause}"
        for output, launch in weak.items()
    ]
    return Reject(Reason.NOT_DETERMINISTIC, "; ".join(parts), tuple(weak))


def _refusal_error(rejects: Sequence[tuple[str, Reject]]) -> Exception:
    text = "; ".join(f"backend {name!r}: {reject}" for name, reject in rejects)
    if not rejects:
        text = f"{BACKEND_SWITCH} names {UPSTREAM!r} now, but the op was fused for another backend"
    if any(reject.reason is Reason.NOT_DETERMINISTIC for _, reject in rejects):
        return RuntimeError(f"the fused grouped MLP cannot be deterministic here: {text}")
    return ValueError(f"no backend takes this call of the fused grouped MLP: {text}")


def require_no_stronger_demand(plan: Plan, *, deterministic: bool) -> None:
    """Compare the demand for determinism now with the one that the plan was made for.

    Raises:
        RuntimeError: Determinism is demanded now, was not then, and an output would vary.
    """
    if plan.call.deterministic or not deterministic:
        return
    weak = plan.not_deterministic()
    if weak:
        text = "; ".join(f"{output.value}: {launch.cause}" for output, launch in weak.items())
        raise RuntimeError(
            "a deterministic backward is demanded, but the forward was planned without it and "
            f"these outputs would vary ({text}); demand it before the forward"
        )


_reported: set[tuple[object, ...]] = set()


def _report(plan: Plan) -> None:
    """Say once per kind of plan what runs, on the first rank."""
    call = plan.call
    key = (plan.backend, plan.problem, call.deterministic, plan.layout.extent)
    if key in _reported or not is_first_rank():
        return
    _reported.add(key)
    logger.info(
        "grouped MLP with %d experts, %s, %s: backend %s, %s rows%s",
        plan.problem.num_groups,
        plan.problem.activation.kind.value,
        call.format.name,
        plan.backend,
        plan.layout.extent.value,
        ", deterministic" if call.deterministic else "",
    )
