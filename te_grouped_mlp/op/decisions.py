# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What this process decided for grouped MLPs and what ran, for `explain`. Imports no TE."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass

from te_grouped_mlp.op import extension
from te_grouped_mlp.op.backends import CLASSES
from te_grouped_mlp.op.environment import is_first_rank
from te_grouped_mlp.op.packages import Absent
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.problem import Problem

logger = logging.getLogger("te_grouped_mlp")

UNFUSED = "unfused"
_SLOWER = "slower on the host"
_LATEST = 256
_FIRST_NOT_OURS = 16


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


_decisions: deque[Decision] = deque(maxlen=_LATEST)
_not_ours: list[Decision] = []
"""The first decisions against our backends; unlike the list above it forgets none of these."""
_lock = threading.Lock()


_steps: Counter[str] = Counter()
"""Forward passes of the fused op by backend; what ran elsewhere is a decision in `_not_ours`."""


def count_step(backend: str) -> None:
    """Note that a forward pass of the fused op is about to run on a backend."""
    if not _steps:
        _say_what_is_slower()
    _steps[backend] += 1


def forward_passes() -> dict[str, int]:
    """Return how many forward passes of the fused op ran, by backend."""
    return dict(_steps)


def latest() -> tuple[Decision, ...]:
    """Return the decisions of this process, oldest first, at most the latest 256."""
    with _lock:
        return tuple(_decisions)


def not_ours() -> tuple[Decision, ...]:
    """Return the first decisions against our backends."""
    with _lock:
        return tuple(_not_ours)


def without_extension() -> Decision | None:
    """Say what is slower in a process without the C++ extension; None with it."""
    state = extension.status()
    if not isinstance(state, Absent):
        return None
    detail = f"{state.cause}; {extension.SLOWER}"
    return Decision(None, _SLOWER, (("extension", Reject(Reason.EXTENSION, detail)),))


def _say_what_is_slower() -> None:
    decision = without_extension()
    if decision is not None and is_first_rank():
        logger.warning("grouped MLP: %s", decision)


def add(decision: Decision) -> None:
    """Keep a decision, and say it once on the first rank; a switch that is off is no news."""
    with _lock:
        if decision in _decisions:
            return
        _decisions.append(decision)
        if decision.path not in CLASSES and len(_not_ours) < _FIRST_NOT_OURS:
            _not_ours.append(decision)
    switched_off = any(reject.reason is Reason.SWITCH_OFF for _, reject in decision.refusals)
    if switched_off or not is_first_rank():
        return
    level = logging.WARNING if decision.path == UNFUSED else logging.INFO
    logger.log(level, "grouped MLP: %s", decision)
