# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Fuses with Transformer Engine's own fused op, from the file that our fork replaces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from te_grouped_mlp.op import environment
from te_grouped_mlp.op.backends.upstream import capability
from te_grouped_mlp.op.environment import Switches, determinism_requested
from te_grouped_mlp.op.plan import Reason, Reject

_CLASSES = {True: "GroupedMLP_CuTeGEMMGLU", False: "GroupedMLP_CuTeGEMMUnary"}
_FUSIONS = ("fuse_glu_ops", "fuse_ops", "fuse_unary_activation_ops", "fuse_srelu_ops")
"""The functions that fuse, by the names of the versions that have them."""


def is_supported(*, gated: bool) -> bool:
    """Whether upstream's own class would run here."""
    module = _load()
    return not isinstance(module, Reject) and bool(getattr(module, _CLASSES[gated]).is_supported())


def fuse(triple: tuple[Any, ...], recipe: Any, switches: Switches) -> Any | Reject:
    """Return upstream's fused op for the three ops, or why there is none.

    Args:
        triple: FC1, activation, FC2; the activation may be one that only upstream knows.
        recipe: The recipe in force.
        switches: Of this moment.
    """
    module = _load()
    if isinstance(module, Reject):
        return module
    checks_itself = hasattr(module, capability.OWN_CHECK)
    refusal = capability.determinism_refusal(
        type(triple[1]).__name__,
        requested=determinism_requested(switches),
        has_own_check=checks_itself,
    )
    if refusal is not None:
        return refusal
    if not any(getattr(module, name).is_supported() for name in _CLASSES.values()):
        return Reject(Reason.PACKAGE, "upstream's is_supported() is False on this machine")
    for name in _FUSIONS:
        function = getattr(module, name, None)
        fused = list(triple) if function is None else function(list(triple), recipe=recipe)
        if len(fused) < len(triple):
            return fused[0] if checks_itself else _guarded(fused[0])
    return Reject(Reason.OPTION, "upstream's own conditions do not hold")


def _load() -> ModuleType | Reject:
    from te_grouped_mlp.overlay import PATCH_MARKER, load_upstream

    try:
        return load_upstream()
    except Exception as error:  # whatever a broken installation raises, the step goes on unfused
        patched = PATCH_MARKER in str(error)
        text = str(error) if patched else f"{type(error).__name__}: {error}"
        return Reject(Reason.PATCHED if patched else Reason.PACKAGE, text)


def _guarded(op: Any) -> Any:
    """Make an op of a module without own check refuse each call that demands determinism."""

    def checked(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            refusal = capability.determinism_refusal(
                type(op.basic_ops[1]).__name__,
                requested=determinism_requested(environment.current_switches()),
                has_own_check=False,
            )
            if refusal is not None:
                raise RuntimeError(str(refusal))
            return method(*args, **kwargs)

        return call

    op.fuser_forward = checked(op.fuser_forward)
    op.fuser_backward = checked(op.fuser_backward)
    return op
