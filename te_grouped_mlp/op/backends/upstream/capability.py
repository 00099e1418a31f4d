# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""When Transformer Engine's own fused op may stand in. Imports neither torch nor TE."""

from __future__ import annotations

from te_grouped_mlp.op.plan import Reason, Reject

OWN_CHECK = "_deterministic_algorithms_required"
"""The function of upstream's module by which it refuses what it cannot do deterministically."""


def determinism_refusal(activation: str, *, requested: bool, has_own_check: bool) -> Reject | None:
    """Refuse an upstream module that would silently break a request for determinism.

    Args:
        activation: Name of the activation op.
        requested: Whether bit-identical results are demanded now.
        has_own_check: Whether the module refuses by itself (2.20.2 does, 2.19.0 does not).
    """
    if requested and not has_own_check:
        return Reject(
            Reason.NOT_DETERMINISTIC,
            f"upstream's {activation} sums dprob with float atomics and this "
            "version does not check; install Transformer Engine 2.20",
        )
    return None
