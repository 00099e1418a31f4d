# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Fuses with Transformer Engine's own fused op, from the file that our fork replaces."""

from __future__ import annotations

from typing import Any

from te_grouped_mlp.op.backends.upstream import capability
from te_grouped_mlp.op.environment import Environment, determinism_requested
from te_grouped_mlp.op.plan import Reason, Reject
from te_grouped_mlp.op.problem import Problem


def fuse(triple: tuple[Any, ...], recipe: Any, problem: Problem, env: Environment) -> Any | Reject:
    """Return upstream's fused op for the three ops, or why there is none.

    Args:
        triple: FC1, activation, FC2.
        recipe: The recipe in force.
        problem: The facts of the triple.
        env: The machine.
    """
    from te_grouped_mlp.overlay import load_upstream

    try:
        module = load_upstream()
    except ImportError as error:
        return Reject(Reason.PACKAGE, str(error))
    except RuntimeError as error:
        return Reject(Reason.PATCHED, str(error))
    requested = determinism_requested(env.switches)
    refusal = capability.determinism_refusal(
        problem, requested=requested, has_own_check=hasattr(module, capability.OWN_CHECK)
    )
    if refusal is not None:
        return refusal
    gated = problem.activation.is_gated
    cls = module.GroupedMLP_CuTeGEMMGLU if gated else module.GroupedMLP_CuTeGEMMUnary
    if not cls.is_supported():
        return Reject(Reason.PACKAGE, f"{cls.__name__}.is_supported() is False on this machine")
    names = (
        ("fuse_glu_ops", "fuse_ops") if gated else ("fuse_unary_activation_ops", "fuse_srelu_ops")
    )
    function = next(getattr(module, name) for name in names if hasattr(module, name))
    fused = function(list(triple), recipe=recipe)
    if len(fused) == len(triple):
        return Reject(Reason.OPTION, "upstream's own conditions do not hold")
    return fused[0]
