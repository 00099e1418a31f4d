# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Global memory: the process's own, as far as it was registered."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from te_grouped_mlp.emulator.faults import OutOfBounds, Race, Unwritten
from te_grouped_mlp.emulator.report import AllocationReport


@dataclass(frozen=True)
class Event:
    """An access to global memory: by which cluster, by which of its agents, and when.

    Clusters are never ordered with each other within a launch; atomics of two do not conflict.
    """

    cluster: int
    agent: int
    time: int
    name: str
    atomic: bool = False


class Allocation:
    """One registered range, with what is known of each of its bytes.

    Attributes:
        bytes: The memory itself.
        written: Whether a byte has a value, or None if all have.
        from_kernel: Whether a kernel wrote a byte by plain stores, in this launch or before.
        writer, reader: Number of the last event of this launch, by byte; zero if there is none.
        writes: How often this launch wrote a byte.
    """

    def __init__(self, address: int, size: int, name: str, written: bool) -> None:
        self.address, self.size, self.name = address, size, name
        # From a multiple of 16, so that aligned elements are aligned in the view, too.
        self.lead = address % 16
        length = (self.lead + size + 15) // 16 * 16
        raw = (ctypes.c_uint8 * length).from_address(address - self.lead)
        self.bytes = np.frombuffer(raw, np.uint8)
        self.written = None if written else np.zeros(length, np.uint8)
        self.from_kernel: np.ndarray | None = None
        self.begin()

    def begin(self) -> None:
        """Start a launch."""
        self.writer: np.ndarray | None = None
        self.reader: np.ndarray | None = None
        self.writes: np.ndarray | None = None

    def report(self) -> AllocationReport:
        """Return its counts."""
        inside = slice(self.lead, self.lead + self.size)
        unwritten = 0 if self.written is None else self.size - int(self.written[inside].sum())
        if self.writes is None:
            return AllocationReport(self.size, unwritten)
        writes = self.writes[inside]
        return AllocationReport(
            self.size, unwritten, int((writes > 0).sum()), int((writes > 1).sum())
        )


def _copied(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else array.copy()


class GlobalMemory:
    """The allocations that a kernel may touch.

    They are real memory of this process, owned by the caller, who keeps it alive until `forget`.
    What is known of each byte (whether something wrote it) is kept from launch to launch.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._allocations: list[Allocation] = []
        self._events: list[Event] = []
        self._races = True

    def register(self, address: int, nbytes: int, *, name: str = "", written: bool = True) -> None:
        """Make `nbytes` from `address` known; the address of a whole allocation, not of a view.

        Args:
            address: Of the first byte.
            nbytes: Size; zero registers nothing.
            name: For faults and reports.
            written: Whether the bytes have values. If not, reading one before it is written is a
                fault.

        Raises:
            ValueError: It overlaps a registered allocation; both are named.
        """
        if nbytes == 0:
            return
        if address <= 0 or nbytes < 0:
            raise ValueError(f"address={address:#x}, nbytes={nbytes}: no allocation")
        name = name or f"{address:#x}"
        at = bisect.bisect_right(self._starts, address)
        for other in self._allocations[max(at - 1, 0) : at + 1]:
            if other.address < address + nbytes and address < other.address + other.size:
                raise ValueError(
                    f"{name} ({address:#x}, {nbytes} bytes) overlaps {other.name}"
                    f" ({other.address:#x}, {other.size} bytes)"
                )
        self._starts.insert(at, address)
        self._allocations.insert(at, Allocation(address, nbytes, name, written))

    def forget(self, address: int) -> None:
        """Forget the allocation that starts at `address`.

        Raises:
            KeyError: None does.
        """
        at = self._place(address)
        del self._starts[at], self._allocations[at]

    def take_for_written(self, address: int) -> None:
        """Take every byte of the allocation that starts at `address` for written.

        What kernels wrote to it stays known: a tensor map that one wrote has to be acquired.

        Raises:
            KeyError: None does.
        """
        self._allocations[self._place(address)].written = None

    def _place(self, address: int) -> int:
        at = bisect.bisect_left(self._starts, address)
        if at == len(self._starts) or self._starts[at] != address:
            raise KeyError(f"no allocation starts at {address:#x}")
        return at

    def allocations(self) -> list[Allocation]:
        """Return what is registered, by address."""
        return list(self._allocations)

    def snapshot(self) -> Callable[[], None]:
        """Return what puts the bytes of every allocation, and what is known of them, back."""
        names = ("bytes", "written", "from_kernel")
        states = [[_copied(getattr(a, n)) for n in names] for a in self._allocations]
        saved = list(zip(self._allocations, states, strict=True))

        def restore() -> None:
            for each, (values, written, from_kernel) in saved:
                inside = slice(each.lead, each.lead + each.size)
                each.bytes[inside] = values[inside]
                each.written, each.from_kernel = _copied(written), _copied(from_kernel)

        return restore

    def begin(self, races: bool) -> None:
        """Start a launch: everything earlier is ordered before everything in it."""
        self._events = [Event(-1, 0, 0, "")]
        self._races = races
        for each in self._allocations:
            each.begin()

    def reports(self) -> dict[str, AllocationReport]:
        """Return the counts of every allocation."""
        return {each.name: each.report() for each in self._allocations}

    def event(self, event: Event) -> int:
        """Return the number of an event."""
        self._events.append(event)
        return len(self._events) - 1

    def find(self, low: int, high: int, what: str) -> Allocation:
        """Return the allocation that holds bytes `low` to `high`.

        Raises:
            OutOfBounds: None holds them all.
        """
        at = bisect.bisect_right(self._starts, low) - 1
        if at >= 0:
            found = self._allocations[at]
            if high <= found.address + found.size:
                return found
            if low < found.address + found.size:
                over = high - found.address - found.size
                raise OutOfBounds(
                    f"{what} of {low:#x} to {high:#x}: {over} bytes past {found.name}"
                )
        raise OutOfBounds(f"{what} of {low:#x} to {high:#x}, which no allocation holds")

    def read(
        self,
        at: Allocation,
        select,
        event: int,
        clock: np.ndarray,
        what: str,  # noqa: ANN001
    ) -> None:
        """Check a read and remember it.

        Args:
            at: Where.
            select: Takes an array with an element for each byte to the part that is read.
            event: The reader's number.
            clock: What is ordered before it, in its cluster.
            what: The access, for a fault.

        Raises:
            Unwritten, Race: See there.
        """
        if at.written is not None and not select(at.written).all():
            if at.written[at.lead : at.lead + at.size].all():
                at.written = None
            else:
                raise Unwritten(f"{what} of bytes of {at.name} that nothing has written")
        if self._races:
            if at.writer is not None:
                self._ordered(select(at.writer), event, clock, f"{what} of {at.name}", "written")
            if at.reader is None:
                at.reader = np.zeros(len(at.bytes), np.int32)
            select(at.reader, event)

    def write(
        self,
        at: Allocation,
        select,
        event: int,
        clock: np.ndarray,
        what: str,  # noqa: ANN001
    ) -> None:
        """Check a write and remember it; arguments as for `read`.

        Raises:
            Race: See there.
        """
        if at.written is not None:
            select(at.written, 1)
        if at.writes is None:
            at.writes = np.zeros(len(at.bytes), np.uint8)
        if not self._events[event].atomic:
            select(at.writes, np.minimum(select(at.writes), 254) + 1)
        if self._races:
            for earlier, verb in ((at.writer, "written"), (at.reader, "read")):
                if earlier is not None:
                    self._ordered(select(earlier), event, clock, f"{what} of {at.name}", verb)
            if at.writer is None:
                at.writer = np.zeros(len(at.bytes), np.int32)
            select(at.writer, event)

    def _ordered(
        self, earlier: np.ndarray, event: int, clock: np.ndarray, what: str, verb: str
    ) -> None:
        low, high = int(earlier.min()), int(earlier.max())
        if high == 0:
            return
        new = self._events[event]
        for number in [high] if low == high else np.unique(earlier).tolist():
            old = self._events[number]
            if number == 0 or (old.atomic and new.atomic):
                continue
            if old.cluster != new.cluster or (
                old.agent != new.agent and clock[old.agent] < old.time
            ):
                raise Race(f"{what} that was {verb} by {old.name} without order between")
