# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A wrapper of any release gets the keywords that it has, or the call is refused."""

from __future__ import annotations

import pytest

from te_grouped_mlp.op.backends.cudnn.signatures import fitting


def test_what_a_wrapper_lacks_is_left_out_at_its_default_alone() -> None:
    takes = frozenset({"a", "new"})
    needed = {"a": 1}
    assert fitting("glu", takes, needed, {"new": (2, None)}) == {"a": 1, "new": 2}
    assert fitting("glu", takes, needed, {"old": (None, None)}) == {"a": 1}
    with pytest.raises(ValueError, match="wrapper glu has no argument old"):
        fitting("glu", takes, needed, {"old": (3, None)})


def test_what_changes_the_cost_alone_may_be_dropped() -> None:
    optional = {"workspace": (b"", None)}
    assert fitting("wgrad", frozenset(), {}, optional, ("workspace",)) == {}


def test_every_argument_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="has no argument alpha, b"):
        fitting("glu", frozenset(), {"b": 1}, {"alpha": (1.0, None)})
