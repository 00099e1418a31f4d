# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests run in the checkout test the checkout, whatever else is installed.

A wheel in the same environment has started already, by its `.pth` file, when pytest reads this.
This file is not part of `tests/`, so a copy of that folder tests what is installed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGE = "te_grouped_mlp"


def _prefer_checkout() -> None:
    """Forget an installed copy, and make this process and its children import the checkout."""
    loaded = sys.modules.get(PACKAGE)
    if loaded is not None and Path(str(loaded.__file__)).resolve().parent.parent != ROOT:
        sys.meta_path[:] = [
            finder
            for finder in sys.meta_path
            if not getattr(finder, "__module__", "").startswith(PACKAGE)
        ]
        for name in [n for n in sys.modules if n.split(".")[0] == PACKAGE]:
            del sys.modules[name]
    sys.path[:] = [str(ROOT), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
    inherited = os.environ.get("PYTHONPATH", "")
    if str(ROOT) not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), inherited]))


_prefer_checkout()

# Only now, because the import must find the checkout.
import te_grouped_mlp  # noqa: E402

# An installation maps the folder into the package; without one, this does.
te_grouped_mlp.__path__.append(str(ROOT))
te_grouped_mlp.activate()
