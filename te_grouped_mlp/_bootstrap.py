# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The part of the overlay that every interpreter runs: one finder, put in place by the `.pth` file.

It must stay under a millisecond, so it imports nothing that the interpreter has not imported
already; everything else is in `overlay`, which is imported when the first name of Transformer
Engine is looked up.
"""

import os
import sys

# What mypy reads as true; `typing` itself would cost more than this whole module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

FORK_SWITCH = "NVTE_GROUPED_MLP_FORK"


class OverlayFinder:
    """The one entry of `sys.meta_path`; answers for Transformer Engine's modules only."""

    @staticmethod
    def find_spec(
        fullname: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        """Answer for a module of TE, or return None so that the next finder is asked."""
        if not fullname.startswith("transformer_engine"):
            return None
        from te_grouped_mlp.integration import overlay

        return overlay.find_spec(fullname, path, target)


def install() -> None:
    """Put the finder in front of `sys.meta_path`. A second call changes nothing."""
    if not is_installed():
        sys.meta_path.insert(0, OverlayFinder)


def is_installed() -> bool:
    """Say whether the finder of this copy of the package is on `sys.meta_path`."""
    return OverlayFinder in sys.meta_path


def fork_enabled() -> bool:
    """Read `NVTE_GROUPED_MLP_FORK`: 0 keeps upstream's module, 1 or unset replaces it.

    Raises:
        ValueError: any other value, because a typing error must not choose a code path.
    """
    value = os.environ.get(FORK_SWITCH, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{FORK_SWITCH} is {value!r}; allowed: 0 (upstream's module), 1 or unset")
    return value != "0"
