# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensor memory: its allocation, and the loads from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from te_grouped_mlp.emulator.clocks import Shadow, observe
from te_grouped_mlp.emulator.faults import IllegalOperand, OutOfBounds, UnfinishedAsync
from te_grouped_mlp.emulator.formats import U32
from te_grouped_mlp.emulator.lanes import ALL, Value, uniform

if TYPE_CHECKING:
    from te_grouped_mlp.emulator.cta import Cta
    from te_grouped_mlp.emulator.warp import Warp

LANES, COLUMNS = 128, 512


class TensorMemory:
    """128 lanes by 512 columns of 32 bits, and who may use which columns.

    Warp w of a CTA sees lanes 32 (w % 4) on; a shadow's cell is a column of such a quarter.
    """

    def __init__(self, cta: Cta) -> None:
        self.words = np.full((LANES, COLUMNS), 0xFFFFFFFF, U32)
        self.shadow = Shadow(
            cta.cluster.clocks, 4 * COLUMNS,
            lambda cell: (
                f"tensor memory of CTA {cta.rank}, lanes from {cell // COLUMNS * 32},"
                f" column {cell % COLUMNS}"
            ),
        )  # fmt: skip
        self.allocated: dict[int, int] = {}
        self.relinquished = False

    def cells(
        self, column: int, count: int, quarters: tuple[int, ...] = (0, 1, 2, 3)
    ) -> np.ndarray:
        """Return the shadow's cells of columns.

        Raises:
            OutOfBounds: They are not allocated.
        """
        if not any(a <= column and column + count <= a + n for a, n in self.allocated.items()):
            raise OutOfBounds(
                f"tensor memory columns {column} to {column + count}; allocated are"
                f" {', '.join(f'{a} to {a + n}' for a, n in self.allocated.items()) or 'none'}"
            )
        return _cells(column, count, quarters)


@lru_cache(maxsize=4096)
def _cells(column: int, count: int, quarters: tuple[int, ...]) -> np.ndarray:
    return (np.array(quarters)[:, None] * COLUMNS + column + np.arange(count)).reshape(-1)


def memory_of(cta: Cta) -> TensorMemory:
    """Return a CTA's tensor memory."""
    if cta.tensor is None:
        cta.tensor = TensorMemory(cta)
    return cta.tensor


def allocate(warp: Warp, base: Value, offset: int, columns: Value) -> None:
    """`tcgen05.alloc`: write the first column's address to shared memory."""
    count = uniform(columns, ALL, "a count of columns")
    tensor = memory_of(warp.cta)
    start = max((a + n for a, n in tensor.allocated.items()), default=0)
    if count not in (32, 64, 128, 256, 512) or tensor.relinquished or start + count > COLUMNS:
        raise IllegalOperand(f"tcgen05.alloc of {count} columns, {start} of {COLUMNS} in use")
    tensor.allocated[start] = count
    warp.store_shared(base, offset, 4, (U32(start),), ALL)


def free(warp: Warp, address: Value, columns: Value) -> None:
    """`tcgen05.dealloc`."""
    start = uniform(address, ALL, "an address") & 0xFFFF
    count = uniform(columns, ALL, "a count of columns")
    tensor = memory_of(warp.cta)
    if tensor.allocated.get(start) != count:
        raise IllegalOperand(
            f"tcgen05.dealloc of {count} columns from {start}: not what was allocated"
        )
    tensor.shadow.write(tensor.cells(start, count), warp.clock, warp.agent, warp.time)
    del tensor.allocated[start]


def relinquish(warp: Warp) -> None:
    """`tcgen05.relinquish_alloc_permit`."""
    memory_of(warp.cta).relinquished = True


def check_exit(cta: Cta) -> None:
    """Fault if a CTA ends with columns allocated."""
    if cta.tensor is not None and cta.tensor.allocated:
        raise UnfinishedAsync(
            f"CTA {cta.coordinates} exits with tensor memory {cta.tensor.allocated}"
        )


@dataclass
class Count:
    """An agent with a time that its operations advance."""

    agent: int
    time: int = 0


def stream_of(warp: Warp, name: str) -> Count:
    if name not in warp.streams:
        warp.streams[name] = Count(warp.cluster.clocks.agent(f"{name} of {warp.name}"))
    return warp.streams[name]


def load(warp: Warp, base: Value, offset: int, count: int) -> np.ndarray:
    """`tcgen05.ld` of the shape 32x32b: a row of 32 lanes for each column."""
    address = uniform(base, ALL, "an address of tensor memory") + offset
    lane, column = address >> 16, address & 0xFFFF
    quarter = warp.number % 4
    if lane != 32 * quarter:
        raise IllegalOperand(f"warp {warp.number} loads lanes from {lane}, not from {32 * quarter}")
    tensor, stream = memory_of(warp.cta), stream_of(warp, "tcgen05.ld")
    stream.time += 1
    cells = tensor.cells(column, count, (quarter,))
    tensor.shadow.read(cells, warp.clock, stream.agent, stream.time)
    warp.counts["read", "tensor"] += 128 * count
    return np.ascontiguousarray(tensor.words[lane : lane + 32, column : column + count].T)


def wait_load(warp: Warp) -> None:
    """`tcgen05.wait::ld`."""
    stream = stream_of(warp, "tcgen05.ld")
    observe(warp.clock, stream.agent, stream.time)
