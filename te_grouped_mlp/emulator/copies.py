# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""`cp.async` and `st.async`: asynchronous copies of single threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from te_grouped_mlp.emulator import barriers
from te_grouped_mlp.emulator.clocks import observe
from te_grouped_mlp.emulator.faults import IllegalOperand, Misaligned
from te_grouped_mlp.emulator.lanes import Value, spread
from te_grouped_mlp.emulator.memory import Allocation, Event

if TYPE_CHECKING:
    from te_grouped_mlp.emulator.cta import Cta
    from te_grouped_mlp.emulator.warp import Warp


class Copies:
    """The copies of a warp, in groups that complete in order."""

    def __init__(self, warp: Warp) -> None:
        self.agent = warp.cluster.clocks.agent(f"cp.async of {warp.name}")
        self.open: list[_Copy] = []
        self.groups: list[list[_Copy]] = []
        self.committed = 0


class _Copy:
    """A copy on its way."""

    def __init__(
        self, cta: Cta, to: int, source: Allocation | None, at: int, taken: int, size: int
    ) -> None:
        self.cta, self.to, self.source, self.at, self.taken, self.size = (
            cta,
            to,
            source,
            at,
            taken,
            size,
        )

    def finish(self) -> None:
        """Let it come; zeros behind what is taken."""
        target = self.cta.bytes[self.to : self.to + self.size]
        target[self.taken :] = 0
        if self.source is not None:
            target[: self.taken] = self.source.bytes[self.at : self.at + self.taken]


def start(
    warp: Warp, base: Value, offset: int, at: Value, at_offset: int, size: int, taken: Value | None,
    mask: np.ndarray,
) -> None:  # fmt: skip
    """`cp.async` by each active lane; `taken` bytes are read, the rest becomes zero."""
    copies = _copies(warp)
    for lane in np.flatnonzero(mask):
        count = size if taken is None else int(spread(taken)[lane])
        if size not in (4, 8, 16) or not 0 <= count <= size:
            raise IllegalOperand(f"cp.async of {count} of {size} bytes")
        cta, to = warp.place(int(spread(base)[lane]) + offset, "cp.async")
        address = int(spread(at)[lane]) + at_offset
        if to % size or address % size:
            raise Misaligned(f"cp.async of {size} bytes from {address:#x} to shared memory {to:#x}")
        found, place = None, 0
        if count:
            found = warp.memory.find(address, address + count, "cp.async")
            place = address - found.address + found.lead
            part = slice(place, place + count)

            def select(array: np.ndarray, value: object = None, part: slice = part) -> np.ndarray:
                if value is not None:
                    array[part] = value
                return array[part]

            event = Event(
                warp.cluster.serial, copies.agent, copies.committed + 1, f"cp.async of {warp.name}"
            )
            warp.memory.read(found, select, warp.memory.event(event), warp.clock, "cp.async")
        cta.shared.write(cta.cells(to, size), warp.clock, copies.agent, copies.committed + 1)
        copy = _Copy(cta, to, found, place, count, size)
        copies.open.append(copy)
        warp.cluster.later("store", copy)
    warp.counts["written", "shared"] += size * int(mask.sum())


def _copies(warp: Warp) -> Copies:
    if "copies" not in warp.streams:
        warp.streams["copies"] = Copies(warp)
    return warp.streams["copies"]


def commit(warp: Warp) -> None:
    """`cp.async.commit_group`."""
    copies = _copies(warp)
    copies.groups.append(copies.open)
    copies.open = []
    copies.committed += 1


def wait(warp: Warp, left: int) -> None:
    """`cp.async.wait_group`."""
    copies = _copies(warp)
    while len(copies.groups) > left:
        for each in copies.groups.pop(0):
            each.finish()
    observe(warp.clock, copies.agent, copies.committed - left)


def arrive(warp: Warp, base: Value, offset: int, mask: np.ndarray) -> None:
    """`cp.async.mbarrier.arrive.noinc`: each lane arrives when its copies so far have come."""
    commit(warp)
    copies = _copies(warp)
    while copies.groups:
        for each in copies.groups.pop(0):
            each.finish()
    clock = warp.clock.copy()
    observe(clock, copies.agent, copies.committed)
    for lane in np.flatnonzero(mask):
        barriers.find(warp, int(spread(base)[lane]) + offset).arrive(clock)
    warp.tick()


class _Store:
    """A value on its way to another CTA."""

    def __init__(self, cta: Cta, to: int, data: bytes, barrier: barriers.MBarrier) -> None:
        self.cta, self.to, self.data, self.barrier = cta, to, data, barrier

    def finish(self) -> None:
        """Let it come."""
        self.cta.cells(self.to, len(self.data))
        self.cta.bytes[self.to : self.to + len(self.data)] = np.frombuffer(self.data, np.uint8)
        self.barrier.transfer(len(self.data))


def store_async(
    warp: Warp, base: Value, offset: int, size: int, values: tuple, at: Value, at_offset: int,
    mask: np.ndarray,
) -> None:  # fmt: skip
    """`st.async` by each active lane, which takes the asynchronous proxy."""
    for lane in np.flatnonzero(mask):
        cta, to = warp.place(int(spread(base)[lane]) + offset, "st.async")
        if to % (size * len(values)):
            raise Misaligned(f"st.async of {size * len(values)} bytes to shared memory {to:#x}")
        barrier = barriers.find(warp, int(spread(at)[lane]) + at_offset, proxy=True)
        if barrier.cta is not cta:
            raise IllegalOperand("st.async to one CTA with the mbarrier of another")
        data = b"".join(spread(v)[lane].tobytes() for v in values)
        cells = cta.cells(to, len(data))
        ended = warp.cluster.read_ended
        cta.shared.write(cells, warp.clock, barrier.agent, barrier.phase + 1, True, ended)
        warp.cluster.later("load", _Store(cta, to, data, barrier))
        warp.counts["written", "shared"] += len(data)
    warp.tick()
