# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Every listed mutation still fits the source, so that `make mutation` tries all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import te_grouped_mlp
from tests.mutation.mutations import CannotApplyError, Mutation, every, unfit

_ROOT = Path(__file__).resolve().parents[2]
_SOURCE = "class A:\n    def f(self):\n        return 1 + 1\n\n    def g(self):\n        return 2\n"


def _mutation(function: str, old: str, new: str) -> Mutation:
    return Mutation("m", "a.py", function, old, new, "tests/test_gate.py")


@pytest.mark.skipif(
    Path(te_grouped_mlp.__file__).resolve().parents[1] != _ROOT, reason="no source tree"
)
def test_every_mutation_applies() -> None:
    mutations = every()
    assert len(mutations) >= 80
    assert not unfit(mutations, _ROOT)


def test_one_text_of_one_function_is_changed() -> None:
    changed = _mutation("A.g", "return 2", "return 3").apply(_SOURCE)
    assert changed == _SOURCE.replace("return 2", "return 3")


@pytest.mark.parametrize(
    ("function", "old", "new", "said"),
    [
        ("A.h", "2", "3", "0 definitions"),
        ("A.g", "1", "3", "stands 0 times"),
        ("A.f", "1", "3", "stands 2 times"),
        ("A.g", "return 2", "return (", "not Python"),
        ("A.g", "return 2", "return (2)", "same program"),
    ],
)
def test_what_does_not_apply_is_named(function: str, old: str, new: str, said: str) -> None:
    with pytest.raises(CannotApplyError, match=said):
        _mutation(function, old, new).apply(_SOURCE)
