# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What an execution may find wrong, one class a kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Place:
    """Where it happened; what is not known is None."""

    entry: str | None = None
    cta: tuple[int, int, int] | None = None
    warp: int | None = None
    lane: int | None = None
    line: int | None = None
    source: str | None = None

    def __str__(self) -> str:
        """Describe it on one line."""
        names = ("cta", "warp", "lane")
        parts = [f"{n} {getattr(self, n)}" for n in names if getattr(self, n) is not None]
        if self.line is not None:
            parts.append(f"PTX line {self.line}: {self.source}")
        if self.entry is not None:
            parts.append(f"of {self.entry}")
        return ", ".join(parts)


class EmulationFault(Exception):
    """The kernel did what it must not do.

    Attributes:
        reason: What is wrong, without the place.
        place: Where it happened.
    """

    def __init__(self, reason: str, lane: int | None = None) -> None:
        """Keep the reason; the machine fills in the rest of the place."""
        super().__init__(reason)
        self.reason = reason
        self.place = Place(lane=lane)

    def __str__(self) -> str:
        """Reason and place on one line."""
        return f"{self.reason} [{self.place}]"


class OutOfBounds(EmulationFault):
    """An access to an address of no registered allocation, or past shared or tensor memory."""


class Misaligned(EmulationFault):
    """An address that is not a multiple of what the access needs."""


class Unwritten(EmulationFault):
    """A read of bytes that nothing has written."""


class Race(EmulationFault):
    """Two accesses of one byte, one of them a write, without order between them."""


class MissingFence(EmulationFault):
    """Ordered accesses of two proxies without a proxy fence on the way."""


class BarrierMisuse(EmulationFault):
    """More arrivals than expected, a barrier that was not initialised, or a wrong count."""


class Deadlock(EmulationFault):
    """Every warp waits, and no asynchronous work is left that could end a wait."""


class UnfinishedAsync(EmulationFault):
    """Asynchronous work, or tensor memory, that nobody waited for or freed at exit."""


class Endless(EmulationFault):
    """More instructions than `Options.max_instructions`."""


class IllegalOperand(EmulationFault):
    """A value that the instruction does not take: a descriptor, a shape, a mask, a count."""
