# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of names against the TE that is installed here."""

from __future__ import annotations

from te_grouped_mlp import host


def test_installed_te_has_every_name_and_keyword() -> None:
    assert list(host.missing_host_names()) == []


def test_a_wrong_keyword_is_found() -> None:
    assert host._missing_keywords(lambda prepend: None, ("prepend", "first")) == ["first"]
    assert host._missing_keywords(lambda **rest: None, ("first",)) == []
    assert host._missing_keywords(object(), ("first",)) == []
