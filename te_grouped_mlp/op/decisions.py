# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What this process decided for grouped MLPs, for `te_grouped_mlp.explain`. Imports no TE."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from te_grouped_mlp.integration import overlay
from te_grouped_mlp.op.backends import CLASSES
from te_grouped_mlp.op.environment import is_first_rank
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.problem import Problem
from te_grouped_mlp.op.step import split_guard

logger = logging.getLogger("te_grouped_mlp")

UNFUSED = "unfused"
_UPSTREAM = "upstream"
_NAN = "results are NaN"
_KEPT = 256
_NOT_OURS_KEPT = 16


@dataclass(frozen=True)
class Decision:
    """What became of one candidate for fusion.

    Attributes:
        problem: The candidate; None for what holds for every candidate of the process.
        path: "reference" or another of our backends, "upstream", "unfused", or what became of the
            results.
        refusals: Every step of the order (our backends, upstream's op) that was passed over, with
            its reason.
    """

    problem: Problem | None
    path: str
    refusals: tuple[tuple[str, Reject], ...]

    def __str__(self) -> str:
        causes = "; ".join(f"not {step}: {reject}" for step, reject in self.refusals)
        what = "" if self.problem is None else f"{self.problem.text}: "
        return f"{what}{self.path} ({causes})" if causes else f"{what}{self.path}"


_decisions: deque[Decision] = deque(maxlen=_KEPT)
_not_ours: list[Decision] = []
"""The first decisions against our backends; unlike the list above it forgets none of these."""
_lock = threading.Lock()


class Decisions(tuple[Decision, ...]):
    """Decisions in their order; the text has a line for each."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no grouped MLP was met in this process"


_steps: Counter[str] = Counter()
"""Forward passes of the fused op by backend; what ran elsewhere is a decision in `_not_ours`."""


def count_step(backend: str) -> None:
    """Note that a forward pass of the fused op is about to run on a backend."""
    _steps[backend] += 1


def assert_fused(*, backend: str | None = None) -> None:
    """Return if every grouped MLP that ran in this process so far ran in our fused op.

    To be asked after a step. It looks at all fusers of the process, also at those that no
    ``torch.nn.Module`` shows (Megatron keeps its own in a tuple), and never synchronises.

    Args:
        backend: Also require that this backend ran every step: "reference", "cutedsl" or "cudnn".

    Raises:
        RuntimeError: None ran; one ran unfused, or in Transformer Engine's own op; or another
            backend ran. The message has the reasons.
        ValueError: There is no such backend.
    """
    if backend is not None and backend not in CLASSES:
        allowed = ", ".join(CLASSES)
        raise ValueError(f"backend is {backend!r}; allowed: None, {allowed}")
    general = _without_our_module()
    with _lock:
        others = [str(each) for each in (*_not_ours, general) if each is not None]
    if others:
        raise RuntimeError(f"not every grouped MLP ran fused: {'; '.join(others)}")
    if not _steps:
        raise RuntimeError(
            "no grouped MLP ran fused in this process: none was met, so ask after a step (and see "
            "that GroupedLinear, scaled activation, GroupedLinear stand in one te.ops.Sequential)"
        )
    if backend is not None and _steps.keys() != {backend}:
        ran = ", ".join(f"{count} on {name}" for name, count in sorted(_steps.items()))
        raise RuntimeError(f"not every forward pass ran on backend {backend}: {ran}")


def explain(module: Any = None, *, recipe: Any = None) -> Decisions:
    """Return which path grouped MLPs take, and why each step before it was passed over.

    Args:
        module: A ``torch.nn.Module``; every `te.ops.Sequential` in it is searched for the three
            ops. None for what this process decided so far.
        recipe: The recipe to ask about; only with `module`.

    Returns:
        With a module: one decision per grouped MLP in it, for the switches as they are now; nothing
        is fused. Without: the decisions of fusers that ran, oldest first, equal ones once, at most
        the latest 256. Where Transformer Engine runs without our module, the first says why; the
        last says of split sizes on a device that did not fit, for which it waits for the device.
        ``str()`` of it is a line for each.
    """
    if module is not None:
        from te_grouped_mlp.op import fusion

        return Decisions(fusion.decide_in(module, recipe))
    general = _without_our_module()
    with _lock:
        kept = tuple(_decisions)
    faults = [
        Decision(None, _NAN, (("split_sizes", Reject(Reason.SPLITS, text)),))
        for text in split_guard.reported()
    ]
    return Decisions((*(() if general is None else (general,)), *kept, *faults))


def _without_our_module() -> Decision | None:
    state = overlay.status()
    if state.active or not state.te_imported:
        return None
    cause = Reason.FORK_OFF if overlay.refusal() is None else Reason.HOST_VERSION
    return Decision(None, _UPSTREAM, (("fork", Reject(cause, state.reason)),))


def record(decision: Decision) -> None:
    """Keep a decision, and say it once on the first rank; a switch that is off is no news."""
    with _lock:
        if decision in _decisions:
            return
        _decisions.append(decision)
        if decision.path not in CLASSES and len(_not_ours) < _NOT_OURS_KEPT:
            _not_ours.append(decision)
    switched_off = any(reject.reason is Reason.SWITCH_OFF for _, reject in decision.refusals)
    if switched_off or not is_first_rank():
        return
    level = logging.WARNING if decision.path == UNFUSED else logging.INFO
    logger.log(level, "grouped MLP: %s", decision)
