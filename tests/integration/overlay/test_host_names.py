# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""How names and keywords are looked up; test_installed_te has the real table."""

from __future__ import annotations

import importlib.metadata

import pytest

from te_grouped_mlp.integration import installed_te


def test_a_wrong_keyword_is_found() -> None:
    assert installed_te._missing_keywords(lambda prepend: None, ("prepend", "first")) == ["first"]
    assert installed_te._missing_keywords(lambda **rest: None, ("first",)) == []
    assert installed_te._missing_keywords(object(), ("first",)) == []


@pytest.mark.parametrize(
    ("torch", "refused"), [("2.5.1", True), ("2.6.0+cpu", False), ("2.14.1", False)]
)
def test_a_torch_that_te_cannot_be_imported_with_is_refused(
    monkeypatch: pytest.MonkeyPatch, torch: str, refused: bool
) -> None:
    versions = {"torch": torch, "transformer-engine": "2.20.2"}
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    text = f"torch {torch}, installed with TE 2.20.2, is older than 2.6, which is needed"
    assert installed_te.version_refusal() == (text if refused else None)
