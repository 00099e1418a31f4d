# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Repairs for Transformer Engine and Megatron-Core trees that are built from source.

Each repair is a module that says which trees it concerns, which places it looks for, and what it
puts there. `engine` runs them; `te-grouped-mlp patch` is the command. Importing this package
imports nothing else, because a TE file with the patch "use the fork" imports it in every process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from te_grouped_mlp.patches.base import Patch

# The order in which repairs are written into a file. A later one may build on an earlier one.
NAMES = (
    "te_one_decision",
    "te_full_rows",
    "te_deterministic_dglu",
    "te_no_dprob",
    "te_use_fork",
    "megatron_deterministic",
    "megatron_skip_when_active",
)

__all__ = ["NAMES", "all_patches"]


def all_patches() -> tuple[Patch, ...]:
    """Return every repair, in the order in which they are written into a file."""
    return tuple(import_module(f"{__name__}.{name}").PATCH for name in NAMES)
