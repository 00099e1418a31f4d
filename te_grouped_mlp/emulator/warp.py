# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Warps: what generated code loads from, stores to, and waits with."""

from __future__ import annotations

from typing import Any

import numpy as np

from te_grouped_mlp.emulator.block import LOCAL_BASE
from te_grouped_mlp.emulator.clocks import Clocks, fence
from te_grouped_mlp.emulator.codegen import EXIT
from te_grouped_mlp.emulator.cta import OFFSET_MASK, RANK_SHIFT, SHARED_BASE, Cta
from te_grouped_mlp.emulator.faults import Misaligned, OutOfBounds
from te_grouped_mlp.emulator.formats import U8, U32, U64, bf16x2
from te_grouped_mlp.emulator.lanes import ALL, LANES, POISON, UNSIGNED, Value, first, spread
from te_grouped_mlp.emulator.memory import Allocation, Event


class Warp:
    """32 threads: registers, the next block of each, and what the warp knows of the others."""

    def __init__(self, cta: Cta, number: int, threads: int) -> None:
        cluster = cta.cluster
        self.cta, self.number, self.cluster = cta, number, cluster
        self.machine, self.memory = cluster.machine, cluster.machine.memory
        self.counts = self.machine.counts
        inside = threads - 32 * number > LANES
        self.pc: int | np.ndarray = 0 if inside.all() else np.where(inside, 0, EXIT)
        self.R: list = list(self.machine.poison)
        self.special = _special(cta, number)
        self.symbols = {k: U32(v | cta.rank << RANK_SHIFT) for k, v in self.machine.symbols.items()}
        self.parameter_base = U64(self.machine.parameters.address)
        self.local = np.full((32, max(self.machine.program.entry.local_bytes, 1)), 0xFF, U8)
        self.name = f"warp {number} of CTA {cta.coordinates}"
        self.agent = cluster.clocks.agent(self.name)
        self.clock = Clocks.new()
        self.clock[self.agent] = 1
        self.fenced = self.clock.copy()
        self.waiting: Any = None
        self.done = False
        self.streams: dict[str, Any] = {}
        # Times at which all that was loaded from shared memory was also used.
        self.used: set[int] = set()
        self.loaded_at = 0
        self._event = (0, 0)
        self._last: Allocation | None = None

    # What is ordered

    @property
    def time(self) -> int:
        """The warp's own time."""
        return int(self.clock[self.agent])

    def tick(self) -> None:
        """Begin what is later than everything released so far."""
        self.clock[self.agent] += 1

    def fence(self) -> None:
        """`fence`: what came before is what a relaxed arrival releases."""
        fence(self.clock, proxy=False)
        self.fenced = self.clock.copy()
        self.tick()

    def fence_proxy(self) -> None:
        """`fence.proxy.async`."""
        for barrier in self.streams.get("initialised", ()):
            barrier.visible = True
        fence(self.clock, proxy=True)
        self.tick()

    def use_loads(self) -> None:
        """Note that what was loaded from shared memory at this time has come."""
        if self.loaded_at == self.time:
            self.used.add(self.time)

    def converge(self, mask: np.ndarray) -> None:
        """`bar.warp.sync`: lanes of a warp have one order here."""

    def trace(self, line: int, source: str) -> None:
        """Report an instruction."""
        self.machine.options.trace(self.cta.coordinates, self.number, line, source)

    def event(self, atomic: bool = False) -> int:
        """Return the number of the warp's accesses to global memory at this time."""
        if atomic:
            return self.memory.event(
                Event(self.cluster.serial, self.agent, self.time, self.name, True)
            )
        if self._event[0] != self.time:
            number = self.memory.event(Event(self.cluster.serial, self.agent, self.time, self.name))
            self._event = (self.time, number)
        return self._event[1]

    # Parameters and local memory

    def load_parameter(self, _: None, offset: int, size: int, count: int) -> list[np.generic]:
        """Load values that all lanes share."""
        raw = self.machine.parameters.bytes[offset : offset + size * count]
        return list(raw.view(UNSIGNED[size]))

    def load_local(self, base: Value, offset: int, size: int, count: int, mask: np.ndarray) -> list:
        """Load from each lane's own memory."""
        at = self._local(base, offset, size * count, mask)
        raw = self.local[LANES[:, None], at[:, None] + np.arange(size * count)]
        return list(raw.view(UNSIGNED[size]).T)

    def store_local(
        self, base: Value, offset: int, size: int, values: tuple, mask: np.ndarray
    ) -> None:
        """Store to each lane's own memory."""
        at = self._local(base, offset, size * len(values), mask)[mask]
        raw = _rows(values, size)[mask]
        self.local[LANES[mask][:, None], at[:, None] + np.arange(raw.shape[1])] = raw

    def _local(self, base: Value, offset: int, size: int, mask: np.ndarray) -> np.ndarray:
        at = spread(base).astype(np.int64) + (offset - LOCAL_BASE)
        at = np.where(mask, at, 0)
        if (at < 0).any() or int(at.max()) + size > self.local.shape[1]:
            raise OutOfBounds(f"local memory, which has {self.local.shape[1]} bytes")
        return at

    # Shared memory

    def place(self, address: int, what: str) -> tuple[Cta, int]:
        """Return the CTA of the cluster and the offset that an address names.

        Raises:
            OutOfBounds: The cluster has no such CTA.
        """
        rank = address >> RANK_SHIFT
        if not 0 <= rank < len(self.cluster.ctas):
            raise OutOfBounds(f"{what} at shared address {address:#x}, which names no CTA")
        return self.cluster.ctas[rank], address & OFFSET_MASK

    def _shared(self, base: Value, offset: int, size: int, mask: np.ndarray, what: str) -> Value:
        at = base.astype(np.int64) + offset
        if at.ndim and mask is not ALL:
            at = np.where(mask, at, at[first(mask)])
        low, high = (int(at.min()), int(at.max())) if at.ndim else (int(at), int(at))
        own = self.cta.rank << RANK_SHIFT
        if low < own + SHARED_BASE or high + size > own + self.cta.size:
            raise OutOfBounds(
                f"{what} of shared memory {low:#x} to {high + size:#x}: CTA {self.cta.rank} has"
                f" {own + SHARED_BASE:#x} to {own + self.cta.size:#x}"
            )
        if (at % size).any():
            raise Misaligned(f"{what} of {size} bytes at shared address {low:#x}")
        return at - own

    def load_shared(self, base: Value, offset: int, size: int, count: int, mask: np.ndarray) -> Any:
        """Load `count` elements of `size` bytes in each active lane."""
        at = self._shared(base, offset, size * count, mask, "load")
        index = _index(at, size, count)
        cells = index if size == self.cta.granule else self._cells(at, size * count)
        self.loaded_at = self.time
        self.cta.shared.read(cells, self.clock, self.agent, self.loaded_at)
        self.counts["read", "shared"] += size * count * (32 if at.ndim else 1)
        return self.cta.views[size][index]

    def store_shared(
        self, base: Value, offset: int, size: int, values: tuple, mask: np.ndarray
    ) -> None:
        """Store the values of each active lane."""
        count = len(values)
        at = self._shared(base, offset, size * count, mask, "store")
        if at.ndim and mask is not ALL:
            at = at[mask]
        index = _index(at, size, count)
        cells = index if size == self.cta.granule else self._cells(at, size * count)
        self.cta.shared.write(cells, self.clock, self.agent, self.time)
        view = self.cta.views[size]
        for row, value in zip(index, values, strict=True):
            if not at.ndim:
                view[row] = value[mask][-1] if value.ndim else value
            else:
                view[row] = value[mask] if value.ndim and mask is not ALL else value
        self.counts["written", "shared"] += size * count * at.size

    def _cells(self, at: Value, size: int) -> np.ndarray:
        granule = self.cta.granule
        return _index(at, granule, max(size // granule, 1))

    # Global memory

    def _global(self, base: Value, offset: int, size: int, mask: np.ndarray, what: str):  # noqa: ANN202
        at = base.view(np.int64) + offset
        if at.ndim and mask is not ALL:
            at = np.where(mask, at, at[first(mask)])
        low, high = (int(at.min()), int(at.max())) if at.ndim else (int(at), int(at))
        if (at % size).any():
            raise Misaligned(f"{what} of {size} bytes at {low:#x}")
        found = self._last
        if found is None or low < found.address or high + size > found.address + found.size:
            found = self._last = self.memory.find(low, high + size, what)
        return found, at - (found.address - found.lead)

    def load_global(self, base: Value, offset: int, size: int, count: int, mask: np.ndarray) -> Any:
        """Load `count` elements of `size` bytes in each active lane."""
        found, at = self._global(base, offset, size * count, mask, "load")
        index = _index(at, size, count)
        self.memory.read(found, _elements(index, size), self.event(), self.clock, "load")
        self.counts["read", "global"] += size * count * (32 if at.ndim else 1)
        return found.bytes.view(UNSIGNED[size])[index]

    def store_global(
        self, base: Value, offset: int, size: int, values: tuple, mask: np.ndarray
    ) -> None:
        """Store the values of each active lane."""
        found, at = self._global(base, offset, size * len(values), mask, "store")
        if at.ndim and mask is not ALL:
            at = at[mask]
        index = _index(at, size, len(values))
        self.memory.write(found, _elements(index, size), self.event(), self.clock, "store")
        if found.from_kernel is None:
            found.from_kernel = np.zeros(len(found.bytes), bool)
        _elements(index, size)(found.from_kernel, True)
        view = found.bytes.view(UNSIGNED[size])
        for row, value in zip(index, values, strict=True):
            if not at.ndim:
                view[row] = value[mask][-1] if value.ndim else value
            else:
                view[row] = value[mask] if value.ndim and mask is not ALL else value
        self.counts["written", "global"] += size * len(values) * at.size

    def atomic(self, base: Value, offset: int, value: Value, kind: str, mask: np.ndarray) -> Value:
        """Combine 4-byte elements with the lanes' values, one lane after the other."""
        found, at = self._global(base, offset, 4, mask, "atomic")
        at, value, old = spread(at), spread(value), np.zeros(32, U32)
        combine = {"add": np.add, "max": max, "min": min, "bf16x2": _add_bf16x2}[kind]
        view = found.bytes.view(value.dtype)
        index = _index(at[mask], 4, 1)
        self.memory.write(found, _elements(index, 4), self.event(True), self.clock, "atomic")
        for lane in np.flatnonzero(mask):
            element = int(at[lane]) // 4
            old[lane] = view[element].view(U32)
            view[element] = combine(view[element], value[lane])
        self.counts["written", "global"] += 4 * index.size
        return old


def _add_bf16x2(a: np.uint32, b: np.uint32) -> np.ndarray:
    return bf16x2(np.array([a]), np.array([b]), np.add)[0]


def _index(at: Value, size: int, count: int) -> np.ndarray:
    """Return the elements (count, lanes) that lanes access, or (count,) for all of them."""
    element = at // size
    steps = np.arange(count)
    return steps[:, None] + element if at.ndim else steps + element


def _elements(index: np.ndarray, size: int):  # noqa: ANN202
    """Return what takes an array of bytes' properties to those of elements, or sets them."""

    def select(array: np.ndarray, value: Any = None) -> np.ndarray | None:
        rows = array.reshape(-1, size)
        if value is None:
            return rows[index]
        rows[index] = value
        return None

    return select


def _rows(values: tuple, size: int) -> np.ndarray:
    """Return values as bytes, a row for each lane."""
    columns = [np.ascontiguousarray(spread(v)).view(U8).reshape(32, size) for v in values]
    return np.concatenate(columns, axis=1)


def _special(cta: Cta, number: int) -> dict[str, Value]:
    """Return the values of the special registers."""
    launch = cta.cluster.machine.launch
    thread = LANES + U32(32 * number)
    width, height = launch.block[0], launch.block[1]
    threads = (
        thread % U32(width),
        thread // U32(width) % U32(height),
        thread // U32(width * height),
    )
    found: dict[str, Value] = {
        "%laneid": LANES, "%warpid": U32(number), "%cluster_ctarank": U32(cta.rank),
        "%cluster_nctarank": U32(len(cta.cluster.coordinates)),
    }  # fmt: skip
    for k, axis in enumerate("xyz"):
        size, at, grid = launch.cluster[k], cta.coordinates[k], launch.grid[k]
        scalars = {
            "ntid": launch.block[k], "ctaid": at, "nctaid": grid, "cluster_ctaid": at % size,
            "cluster_nctaid": size, "clusterid": at // size, "nclusterid": grid // size,
        }  # fmt: skip
        found |= {f"%{name}.{axis}": U32(v) for name, v in scalars.items()}
        found[f"%tid.{axis}"] = threads[k]
    return found


def poison(entry: Any, widths: dict[str, int]) -> list:
    """Return what the registers of an entry hold before anything is written to them."""
    wide = (POISON[8], POISON[8])
    return [wide if widths[t] == 16 else POISON[widths[t]] for _, t in entry.registers]
