# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests of the op: the switch is on, and every buffer that the op allocates starts as NaN."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import te_grouped_mlp

te_grouped_mlp.activate()


@pytest.fixture
def fused_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse as a user asks for it."""
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")
    monkeypatch.setenv("NVTE_GROUPED_LINEAR_SINGLE_PARAM", "1")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Start every fresh buffer, data and scales alike, with bytes that are NaN in all formats."""
    from te_grouped_mlp.op.tensors import memory

    with memory.poisoned(0xFF):
        yield
