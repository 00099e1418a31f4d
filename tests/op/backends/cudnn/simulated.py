# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The backend on a CPU, over stand-ins of the wrappers; whole steps through it and the reference.

What makes it possible is another `Host`: no switch of a user lets the backend take CPU tensors.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from te_grouped_mlp.op import environment, packages
from te_grouped_mlp.op.backends.cudnn import capability, signatures
from te_grouped_mlp.op.backends.cudnn.backend import CudnnBackend
from tests.support import backends, frontend_stand_in, step
from tests.support.frontend_signatures import WRAPPERS as ALL_WRAPPERS
from tests.support.frontend_stand_in import StandIn
from tests.support.step import StepCase

SM = (10, 0)


class _Simulated:
    """What the backend says of itself where it is allowed on CPU tensors."""

    refusal = staticmethod(functools.partial(capability.refusal, placement=capability.EMULATED))
    plan = staticmethod(functools.partial(capability.plan, placement=capability.EMULATED))


def wrappers_of(stand_in: StandIn) -> dict[str, frozenset[str]]:
    """Return the arguments of the wrappers as `environment` would find them."""
    found = {}
    for short, name in packages.WRAPPERS.items():
        shown = getattr(stand_in.module, name).__signature__
        found[short] = frozenset(shown.parameters)
    assert found.keys() <= set(ALL_WRAPPERS)
    return found


def environment_of(stand_in: StandIn) -> environment.Environment:
    """Return the record of a machine with that frontend."""
    with environment.override(sm=SM, wrappers=wrappers_of(stand_in)):
        return environment.current()


@contextlib.contextmanager
def simulation(
    monkeypatch: pytest.MonkeyPatch, version: str = "1.32.0", **options: Any
) -> Iterator[StandIn]:
    """Show a frontend, a Blackwell GPU and the simulated backend while the block runs."""
    stand_in = frontend_stand_in.build(version, **options)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cudnn", stand_in.module)
        backends.install(patch, capability.NAME, CudnnBackend(), _Simulated)
        _forget()
        try:
            with environment.override(sm=SM, wrappers=wrappers_of(stand_in)):
                yield stand_in
        finally:
            _forget()


def _forget() -> None:
    for cached in (signatures.wrapper, signatures.takes):
        cached.cache_clear()


def run_on(backend: str, case: StepCase) -> dict[str, Any]:
    """Run a step on a backend by name."""
    with step.switches(NVTE_GROUPED_MLP_BACKEND=backend):
        return step.run_step(case)
