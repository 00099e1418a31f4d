# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Device times with a flushed L2, and the ceilings of the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch

Result = TypeVar("Result")

_FLUSH_BYTES = 256 << 20
_CYCLES_PER_MS = 2_000_000
"""At about two gigahertz."""
_LEAST_AHEAD_MS = 2.0
_MOST_AHEAD_MS = 60.0
_AHEAD = 1.5
"""How much longer the GPU sleeps than the host needs."""


@dataclass(frozen=True)
class Time:
    """Milliseconds: the median, and the distance between the quartiles.

    `late` counts the runs in which the GPU did not wait for the host to be done, so that host time
    may be in them.
    """

    median: float
    spread: float
    runs: int
    late: int = 0
    all: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, float]:
        """For JSON, without the single runs."""
        return {name: value for name, value in asdict(self).items() if name != "all"}

    def over(self, other: Time) -> dict[str, float]:
        """Return this time over another that was taken in turns with it.

        A GPU whose clocks drift slows both of a pair, so the ratio is formed run by run.

        Returns:
            "ratio", the median of the ratios, and "ratio_spread", the distance of their quartiles.
        """
        ratios = [a / b for a, b in zip(self.all, other.all, strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        return {"ratio": median, "ratio_spread": high - low}


def summary(times: list[float], late: int = 0) -> Time:
    """Summarize single runs; at least two."""
    quartiles = statistics.quantiles(times, n=4)
    median = statistics.median(times)
    return Time(median, quartiles[2] - quartiles[0], len(times), late, tuple(times))


def orders(count: int) -> list[list[int]]:
    """Return turns of `count` candidates in which each follows each other one equally often.

    What ran just before decides the clocks and the temperature that a candidate meets, so no
    candidate may have a steady predecessor. This is Williams' balanced Latin square: `count` turns,
    and for an odd count these and their reverses.
    """
    zigzag = [0]
    for step in range(1, count):
        zigzag.append((zigzag[-1] + (step if step % 2 else -step)) % count)
    found = []
    for shift in range(count):
        turn = [(place + shift) % count for place in zigzag]
        found += [turn, turn[::-1]] if count % 2 and count > 1 else [turn]
    return found


class Clock:
    """Times work on the current stream; L2 is overwritten before every run."""

    place = "cuda"
    """The device of what it times."""

    def __init__(self) -> None:
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def device(self, work: Callable[[], object], runs: int = 15, warm: int = 3) -> Time:
        """Return the device time of one call of `work`."""
        return self.compare({"": work}, runs, warm)[""]

    def compare(
        self, works: Mapping[str, Callable[[], object]], runs: int = 15, warm: int = 3
    ) -> dict[str, Time]:
        """Return the device time of one call of each of `works`, taken in turns.

        In turns, because the clocks of a loaded GPU drift; see `orders` for their order. The GPU
        sleeps before every run, equally long for all, so that the host is ahead of it, as in
        training: host time is measured by `host`.
        """
        host_ms = max((self._warm(work, warm) for work in works.values()), default=0.0)
        asleep = min(_LEAST_AHEAD_MS + _AHEAD * host_ms, _MOST_AHEAD_MS)
        times: dict[str, list[float]] = {name: [] for name in works}
        late = dict.fromkeys(works, 0)
        names, turns = list(works), orders(len(works))
        for run in range(runs):
            for name in (names[place] for place in turns[run % len(turns)]):
                self._flush.zero_()
                torch.cuda._sleep(int(asleep * _CYCLES_PER_MS))
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                works[name]()
                late[name] += begin.query()
                end.record()
                # Otherwise the host would run on until the queue is full, and wait inside `work`.
                end.synchronize()
                times[name].append(begin.elapsed_time(end))
        return {name: summary(found, late[name]) for name, found in times.items()}

    def host(self, work: Callable[[], object], runs: int = 30) -> Time:
        """Return the time until one call of `work` returns, with an idle GPU before it."""
        times = [self._warm(work, 1) for _ in range(runs)]
        torch.cuda.synchronize()
        return summary(times)

    def memory(self) -> int:
        """Return the bytes that tensors hold now; synchronises."""
        torch.cuda.synchronize()
        return int(torch.cuda.memory_allocated())

    def peak(self, work: Callable[[], Result]) -> tuple[Result, int]:
        """Run `work` once, and return its result and the most bytes that it held at a time."""
        before = self.memory()
        torch.cuda.reset_peak_memory_stats()
        result = work()
        torch.cuda.synchronize()
        return result, torch.cuda.max_memory_allocated() - before

    def _warm(self, work: Callable[[], object], runs: int) -> float:
        """Run `work`, and return the host's milliseconds of the last run; the GPU was idle."""
        taken = 0.0
        for _ in range(runs):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            taken = (time.perf_counter() - begin) * 1e3
        return taken


def ceilings(clock: Clock) -> dict[str, float]:
    """Return the measured bf16 rate (TFLOP/s) and copy bandwidth (TB/s, read plus written)."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = clock.device(lambda: torch.matmul(a, b), runs=20)
    source = torch.empty(2 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy = clock.device(lambda: target.copy_(source), runs=10)
    return {
        "bf16_tflops": 2 * size**3 / product.median / 1e9,
        "copy_tbs": 2 * source.numel() / copy.median / 1e9,
    }
