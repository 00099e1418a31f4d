# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What a user asks about the path of grouped MLPs: `explain` and `assert_fused`."""

from __future__ import annotations

from typing import Any

from te_grouped_mlp.integration import overlay
from te_grouped_mlp.op import decisions, selection
from te_grouped_mlp.op.backends import CLASSES
from te_grouped_mlp.op.decisions import Decision
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.step import split_guard

_NAN = "results are NaN"


class Decisions(tuple[Decision, ...]):
    """Decisions in their order; the text has a line for each."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no grouped MLP was met in this process"


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
    others = [
        str(decision) for decision in (*decisions.not_ours(), general) if decision is not None
    ]
    if others:
        raise RuntimeError(f"not every grouped MLP ran fused: {'; '.join(others)}")
    steps = decisions.forward_passes()
    if not steps:
        raise RuntimeError(
            "no grouped MLP ran fused in this process: none was met, so ask after a step (and see "
            "that GroupedLinear, scaled activation, GroupedLinear stand in one te.ops.Sequential)"
        )
    if backend is not None and steps.keys() != {backend}:
        ran = ", ".join(f"{count} on {name}" for name, count in sorted(steps.items()))
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
        the latest 256. Where Transformer Engine runs without our module, the first says why, and
        where this package has no C++ extension, one says what is slower; the last says of split
        sizes on a device that did not fit, for which it waits for the device.
        ``str()`` of it is a line for each.
    """
    if module is not None:
        # Only this question needs TE; what a process decided is told without it.
        from te_grouped_mlp.op import fusion

        return Decisions(fusion.decide_in(module, recipe))
    general = (_without_our_module(), decisions.without_extension())
    known = (decision for decision in general if decision is not None)
    faults = [
        Decision(None, _NAN, (("split_sizes", Reject(Reason.SPLITS, text)),))
        for text in split_guard.reported()
    ]
    return Decisions((*known, *decisions.latest(), *faults))


def _without_our_module() -> Decision | None:
    state = overlay.status()
    if state.active or not state.te_imported:
        return None
    cause = Reason.FORK_OFF if overlay.refusal() is None else Reason.HOST_VERSION
    return Decision(None, selection.UPSTREAM, (("fork", Reject(cause, state.reason)),))
