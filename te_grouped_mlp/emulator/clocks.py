# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What happens before what: vector clocks, and what each cell of a memory remembers.

An *agent* is whatever accesses memory in an order of its own: a warp, the TMA stores of a warp, the
tensor core as fed by a warp, and an mbarrier, which stands for the loads that complete on it. A
clock has three entries an agent: what is ordered before; which of its writes the asynchronous proxy
sees; and which of its reads that proxy's writes come after. A proxy fence raises the second and the
third to the first, another fence the third only. (For the third the PTX ISA demands a proxy fence,
too, but kernels that are known to be right use the other.) Asynchronous agents need no fence: their
three entries are raised together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from te_grouped_mlp.emulator.faults import EmulationFault, MissingFence, Race, Unwritten

AGENTS = 400
_CLOCK = (1 << 32) - 1
Cells = np.ndarray | slice


class Clocks:
    """The agents of one cluster."""

    def __init__(self, active: bool) -> None:
        self.active = active
        self.names: list[str] = []

    def agent(self, name: str) -> int:
        """Add an agent.

        Raises:
            NotImplementedError: There are too many.
        """
        if len(self.names) == AGENTS:
            raise NotImplementedError(f"more than {AGENTS} agents in a cluster")
        self.names.append(name)
        return len(self.names) - 1

    @staticmethod
    def new() -> np.ndarray:
        """Return a clock that knows nothing."""
        return np.zeros(3 * AGENTS, np.int64)


def join(clock: np.ndarray, other: np.ndarray) -> None:
    """Add to a clock what another one knows."""
    np.maximum(clock, other, out=clock)


def observe(clock: np.ndarray, agent: int, time: int) -> None:
    """Add to a clock that an asynchronous agent has completed what it did up to a time."""
    if clock[agent] < time:
        clock[agent::AGENTS] = time


def fence(clock: np.ndarray, proxy: bool) -> None:
    """Order reads before, and with `proxy` make writes visible to, the asynchronous proxy."""
    kinds = clock.reshape(3, AGENTS)
    np.maximum(kinds[1 if proxy else 2 :], kinds[0], out=kinds[1 if proxy else 2 :])


class Shadow:
    """Who wrote each cell of a memory last, and when each agent last read it.

    Without clocks only whether a cell was written is known.
    """

    def __init__(self, clocks: Clocks, cells: int, describe: Callable[[int], str]) -> None:
        """Start with nothing written; `describe` names a cell."""
        self.clocks, self.describe = clocks, describe
        self.writer = np.zeros(cells, np.int64)
        self.readers: list[int] = []
        self.reads = np.zeros((0, cells), np.int64)
        self.rows: dict[int, int] = {}

    def read(
        self, cells: Cells, clock: np.ndarray, agent: int, time: int, proxy: bool = False
    ) -> None:
        """Check a read and remember it.

        Args:
            cells: An index of the shadow's cells.
            clock: What is ordered before the read.
            agent, time: The reader.
            proxy: Whether it reads through the asynchronous proxy.

        Raises:
            Unwritten: Nothing has written a cell.
            Race: A cell's write is not ordered before.
            MissingFence: It is, but not visible to the proxy.
        """
        writer = self.writer[cells]
        head = writer.flat[0]
        if head == 0 or (writer != head).any():
            if not writer.all():
                cell = self._where(cells, writer == 0)
                raise Unwritten(f"read of {self.describe(cell)}, which nothing has written")
            if self.clocks.active:
                self._ordered(cells, writer, clock, proxy, "read", "written")
        elif self.clocks.active:
            by, at = int(head) >> 32, int(head) & _CLOCK
            if clock[AGENTS + by if proxy else by] < at:
                self._fail(self._where(cells, writer == head), by, at, clock, "read", "written")
        if self.clocks.active:
            row = self.rows.get(agent)
            if row is None:
                row = self._row(agent)
            self.reads[row][cells] = time

    def write(
        self, cells: Cells, clock: np.ndarray, agent: int, time: int, proxy: bool = False,
        read_ended: Callable[[int, int], bool] = lambda _agent, _time: False,
    ) -> None:  # fmt: skip
        """Check a write and remember it; the counterpart of `read`.

        `read_ended` says of a reader's time whether its reads need no fence.

        Raises:
            Race, MissingFence: As there; for earlier reads, too.
        """
        if self.clocks.active:
            writer = self.writer[cells]
            head = writer.flat[0]
            if (writer != head).any():
                self._ordered(cells, writer, clock, False, "written", "written")
            else:
                by, at = int(head) >> 32, int(head) & _CLOCK
                if clock[by] < at:
                    self._fail(
                        self._where(cells, writer == head), by, at, clock, "written", "written"
                    )
            half = 2 * AGENTS if proxy else 0
            for row, by in enumerate(self.readers):
                read = self.reads[row][cells]
                latest = int(read.max())
                if clock[half + by] >= latest or by == agent:
                    continue
                if clock[by] < latest or not read_ended(by, latest):
                    cell = self._where(cells, read == latest)
                    self._fail(cell, by, latest, clock, "written", "read")
        self.writer[cells] = (agent << 32) | time

    def _row(self, agent: int) -> int:
        row = self.rows[agent] = len(self.readers)
        self.readers.append(agent)
        if row == len(self.reads):
            more = np.zeros((max(4, 2 * row), len(self.writer)), np.int64)
            more[:row] = self.reads
            self.reads = more
        return row

    def _ordered(
        self, cells: Cells, writer: np.ndarray, clock: np.ndarray, proxy: bool, now: str, then: str
    ) -> None:
        by, at = writer >> 32, writer & _CLOCK
        late = clock[AGENTS + by if proxy else by] < at
        if late.any():
            position = int(late.argmax())
            cell = self._where(cells, late)
            self._fail(cell, int(by.flat[position]), int(at.flat[position]), clock, now, then)

    def _fail(self, cell: int, by: int, at: int, clock: np.ndarray, now: str, then: str) -> None:
        text = f"{self.describe(cell)} is {now}, but was {then} by {self.clocks.names[by]}"
        kind: type[EmulationFault] = Race
        if clock[by] >= at:
            kind, text = (
                MissingFence,
                f"{text} through another proxy, without a proxy fence between",
            )
        else:
            text = f"{text} without order between"
        raise kind(text)

    def _where(self, cells: Cells, wrong: np.ndarray) -> int:
        if isinstance(cells, slice):
            return cells.start + int(wrong.argmax())
        return int(np.broadcast_to(cells, wrong.shape).flat[int(wrong.argmax())])
