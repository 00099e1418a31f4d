# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine over our tex, for the tests of this folder."""

from __future__ import annotations

import warnings
from types import ModuleType

import pytest

import te_grouped_mlp

te_grouped_mlp.activate()


@pytest.fixture(scope="session")
def te() -> ModuleType:
    """Transformer Engine's torch package, running standalone."""
    with warnings.catch_warnings():
        # TE 2.19 uses torch.jit.script, which newer torch versions deprecate.
        warnings.simplefilter("ignore", DeprecationWarning)
        from transformer_engine import pytorch

    from te_grouped_mlp.integration import standalone

    assert standalone.is_active()
    return pytorch


@pytest.fixture(scope="session")
def tex(te: ModuleType) -> ModuleType:
    """The module that Transformer Engine imports as its compiled extension."""
    import transformer_engine_torch

    return transformer_engine_torch


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Fill every fresh buffer with NaN patterns, so that an unwritten byte shows."""
    from te_grouped_mlp.op.tensors import memory

    with memory.poisoned(0xFF):
        yield
