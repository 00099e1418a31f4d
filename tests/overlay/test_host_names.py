# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""How names and keywords are looked up; test_installed_te has the real table."""

from __future__ import annotations

from te_grouped_mlp import host


def test_a_wrong_keyword_is_found() -> None:
    assert host._missing_keywords(lambda prepend: None, ("prepend", "first")) == ["first"]
    assert host._missing_keywords(lambda **rest: None, ("first",)) == []
    assert host._missing_keywords(object(), ("first",)) == []
