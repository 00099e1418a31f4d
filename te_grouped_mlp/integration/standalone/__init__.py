# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine's pure-Python wheel on a machine without its compiled extension.

Importing this package imports neither torch nor Transformer Engine.
"""

from __future__ import annotations

__all__ = ["allow_upstream_fused", "is_active"]


def is_active() -> bool:
    """Return whether Transformer Engine runs over our tex in this process."""
    from te_grouped_mlp.integration.standalone import loader

    return loader.is_active()


def allow_upstream_fused(allowed: bool) -> None:
    """Let Transformer Engine's own fused grouped MLP run in standalone, or forbid it again.

    It needs the cuDNN frontend's kernels, which a machine without Transformer Engine's extension
    does not have; so it is off until a caller has put stand-in wrappers in place.

    Args:
        allowed: True makes upstream's `is_supported()` answer for itself, in every upstream
            module loaded now or later, and registers its fusions where it says yes. False takes
            them out again. Fusers that have fused already keep their choice.
    """
    from te_grouped_mlp.integration.standalone import upstream_fused

    upstream_fused.allow(allowed)
