# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The installed wrappers, and which arguments they have."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from te_grouped_mlp.op.packages import WRAPPERS, remembered


@remembered
def wrapper(name: str) -> Callable[..., Any]:
    """Return a wrapper by its short name.

    Raises:
        ImportError, AttributeError: The frontend is not there, or lacks it.
    """
    function: Callable[..., Any] = getattr(importlib.import_module("cudnn"), WRAPPERS[name])
    return function


@remembered
def takes(name: str) -> frozenset[str]:
    """Return the argument names of a wrapper."""
    return frozenset(inspect.signature(wrapper(name)).parameters)


def fitting(
    wrapper: str,
    takes: frozenset[str],
    needed: Mapping[str, Any],
    optional: Mapping[str, tuple[Any, Any]],
    droppable: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the keywords that the wrapper has.

    Args:
        wrapper: Short name, for messages.
        takes: Its arguments.
        needed: Passed whatever happens.
        optional: Name to (value, value that leaving it out stands for).
        droppable: Names in `optional` that change the cost of a call only.

    Raises:
        ValueError: The wrapper lacks an argument and leaving it out would change the result.
    """
    keywords = dict(needed)
    lacking = needed.keys() - takes
    for name, (value, default) in optional.items():
        if name in takes:
            keywords[name] = value
        elif value is not default and name not in droppable:
            lacking |= {name}
    if lacking:
        raise ValueError(f"wrapper {wrapper} has no argument {', '.join(sorted(lacking))}")
    return keywords
