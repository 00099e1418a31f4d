# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Types of arguments; each refusal names the value and what is allowed."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from te_grouped_mlp.op.activations import Activation
from te_grouped_mlp.op.backends import CLASSES
from te_grouped_mlp.op.formats import MXFP8

ROWS = MXFP8.rows_multiple
FEATURES = MXFP8.rows_multiple
"""Features as whole scale tiles, so that one rule serves every argument of these commands."""


def integer(*, minimum: int, multiple: int = 1, maximum: int | None = None) -> Callable[[str], int]:
    """Return the type of an integer from `minimum` to `maximum`, and a multiple of `multiple`."""
    allowed = f"an integer of at least {minimum}"
    if maximum is not None:
        allowed += f" and at most {maximum}"
    if multiple != 1:
        allowed = f"a multiple of {multiple}, at least {minimum}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum or value % multiple or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: {allowed}")
        return value

    return parse


seed = integer(minimum=0, maximum=2**62)
"""The type of a seed; torch takes numbers of 64 bits, and commands count on from it."""

AUTO = "auto"


def backend(text: str) -> str:
    """Parse the name of a backend that runs steps of ours, or "auto"."""
    allowed = (AUTO, *CLASSES)
    if text not in allowed:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: {', '.join(allowed)}")
    return text


ALL = "all"


def activations(text: str) -> tuple[Activation, ...]:
    """Parse activation names separated by commas, or "all"; "ScaledSwiGLU" and "swiglu" are one."""
    if text.lower() == ALL:
        return tuple(Activation)
    return tuple(dict.fromkeys(activation(name) for name in text.split(",")))


def activation(text: str) -> Activation:
    """Parse one activation name, with or without ``Scaled``, in any case."""
    names = {kind.value.lower(): kind for kind in Activation}
    key = text.strip().lower()
    found = names.get(key) or names.get(f"scaled{key}")
    if found is None:
        allowed = ", ".join(kind.value for kind in Activation)
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: {allowed}")
    return found


def shape(text: str) -> tuple[int, int, int]:
    """Parse `HIDDEN,FFN,ROWS`."""
    parts = text.split(",")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not allowed; allowed: HIDDEN,FFN,ROWS, three multiples of {ROWS}"
        )
    parse = integer(minimum=ROWS, multiple=ROWS)
    hidden, ffn, rows = (parse(part) for part in parts)
    return hidden, ffn, rows


def sizes(*names: str) -> Callable[[str], tuple[int, ...]]:
    """Return the type of positive integers separated by commas, one for each of `names`."""
    form = ",".join(names)
    one = integer(minimum=1)

    def parse(text: str) -> tuple[int, ...]:
        parts = text.split(",")
        if len(parts) != len(names):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not allowed; allowed: {form}, {len(names)} positive integers"
            )
        return tuple(map(one, parts))

    return parse
