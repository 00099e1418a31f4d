# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What a TE file with the patch "use the fork" calls while it is being imported."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from te_grouped_mlp.integration import overlay


def hand_over(name: str) -> bool:
    """Load the forked file in place of the module that is being imported.

    Python gives the importer whatever stands in `sys.modules` once the module has run, so the
    caller's own module is dropped.

    Args:
        name: The caller's `__name__`. Under any other name than TE's own (a private copy), nothing
            happens.

    Returns:
        Whether the forked file is in place. False where NVTE_GROUPED_MLP_FORK=0 asks for
        upstream's module, or where this TE is not one that the fork takes (a warning says why).

    Raises:
        ValueError: NVTE_GROUPED_MLP_FORK has a value that is not allowed.
    """
    if name != overlay.TARGET:
        return False
    file = overlay.fork_file()
    spec = overlay.find_spec(name, None, None)
    if file is None or spec is None or spec.origin is None or Path(spec.origin) != file:
        return False
    patched = sys.modules[name]
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    except BaseException:
        sys.modules[name] = patched
        raise
    return True
