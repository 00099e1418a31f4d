# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""From a plan to an object whose four device operations run it."""

from __future__ import annotations

import functools
import importlib

from te_grouped_mlp.op import backends
from te_grouped_mlp.op.backends.base import Backend
from te_grouped_mlp.op.backends.checked import CheckedBackend
from te_grouped_mlp.op.plan import Plan


@functools.cache
def backend(name: str) -> Backend:
    """Return one of our backends by name; the object holds no state of a call."""
    module = importlib.import_module(f"{backends.__name__}.{name}.backend")
    instance: Backend = getattr(module, backends.CLASSES[name])()
    return instance


def operations(plan: Plan) -> CheckedBackend:
    """Return the four device operations of a plan, each checked against it."""
    return CheckedBackend(backend(plan.backend), plan)
