# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of choices in which every pair of values meets: what a full product would find, mostly."""

from __future__ import annotations

import itertools
from typing import Any

import pytest


def pairwise(choices: dict[str, tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Return rows in which each pair of values of two choices occurs; greedy, always the same."""
    names = list(choices)
    missing = {
        (first, a, second, b)
        for first, second in itertools.combinations(range(len(names)), 2)
        for a in range(len(choices[names[first]]))
        for b in range(len(choices[names[second]]))
    }
    rows = []
    while missing:
        row: list[int | None] = [None] * len(names)
        first, a, second, b = min(missing)
        row[first], row[second] = a, b
        for index, name in enumerate(names):
            if row[index] is None:
                gains = [_gain(missing, row, index, value) for value in range(len(choices[name]))]
                row[index] = gains.index(max(gains))
        missing -= {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(names)), 2)}
        rows.append({name: choices[name][row[index]] for index, name in enumerate(names)})
    return rows


def pairwise_rows(choices: dict[str, tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Parametrize a test's `row` by `pairwise`, each named by its values."""
    found = pairwise(choices)
    names = ["-".join(str(value) for value in row.values()) for row in found]
    return pytest.mark.parametrize("row", found, ids=names)


def _gain(missing: set[Any], row: list[int | None], index: int, value: int) -> int:
    """Count the missing pairs that a value at `index` makes with the values that are set."""
    pairs = (
        (other, row[other], index, value) if other < index else (index, value, other, row[other])
        for other in range(len(row))
        if row[other] is not None
    )
    return sum(pair in missing for pair in pairs)
