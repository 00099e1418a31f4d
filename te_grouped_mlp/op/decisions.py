# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What this process decided for grouped MLPs, for `te_grouped_mlp.explain`. Imports no TE."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from te_grouped_mlp import overlay
from te_grouped_mlp.op import split_guard
from te_grouped_mlp.op.environment import is_first_rank
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.problem import Problem

logger = logging.getLogger("te_grouped_mlp")

UNFUSED = "unfused"
_UPSTREAM = "upstream"
_NAN = "results are NaN"
_KEPT = 256


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
        causes = "; ".join(f"{step}: {reject}" for step, reject in self.refusals)
        return f"{self.path} ({causes})" if causes else self.path


_decisions: deque[Decision] = deque(maxlen=_KEPT)
_lock = threading.Lock()


def explain(module: Any = None, *, recipe: Any = None) -> tuple[Decision, ...]:
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
    """
    if module is not None:
        from te_grouped_mlp.op import fusion

        return fusion.decide_in(module, recipe)
    general = _without_our_module()
    with _lock:
        kept = tuple(_decisions)
    faults = [
        Decision(None, _NAN, (("split_sizes", Reject(Reason.SPLITS, text)),))
        for text in split_guard.reported()
    ]
    return (*(() if general is None else (general,)), *kept, *faults)


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
    switched_off = any(reject.reason is Reason.SWITCH_OFF for _, reject in decision.refusals)
    if switched_off or not is_first_rank():
        return
    level = logging.WARNING if decision.path == UNFUSED else logging.INFO
    logger.log(level, "grouped MLP runs %s", decision)
