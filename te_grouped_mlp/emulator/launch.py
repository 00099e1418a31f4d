# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""One launch of a kernel, as the host code asks for it."""

from __future__ import annotations

from dataclasses import dataclass

from te_grouped_mlp.emulator import ptx as ptx_text


@dataclass(frozen=True)
class Launch:
    """A kernel's text with the arguments of one launch.

    Attributes:
        ptx: The module's text. Two kernels may have one entry's name, so the text is the identity.
        entry: Name of the entry in it.
        grid: CTAs in x, y, z.
        block: Threads of a CTA in x, y, z.
        cluster: CTAs of a cluster in x, y, z; the grid is a multiple of it.
        dynamic_shared_bytes: Bytes of the entry's `.extern .shared` array.
        parameters: The bytes of each `.param` of the entry, in order.
    """

    ptx: str
    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared_bytes: int
    parameters: tuple[bytes, ...]


def parameter_sizes(ptx: str, entry: str) -> tuple[int, ...]:
    """Return the bytes of each `.param` of an entry, in order.

    Raises:
        ValueError: The text has no such entry; the message names those it has.
    """
    found = ptx_text.entries(ptx)
    if entry not in found:
        raise ValueError(f"entry={entry!r} is none of {sorted(found)}")
    return tuple(size for _, size in found[entry].parameters.values())
