# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Device times with a flushed L2, and the ceilings of the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch

_FLUSH_BYTES = 256 << 20
_HEAD_START = 4_000_000
"""Clock cycles; about two milliseconds."""


@dataclass(frozen=True)
class Time:
    """Milliseconds: the median, and the distance between the quartiles."""

    median: float
    spread: float
    runs: int
    all: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, float]:
        """For JSON, without the single runs."""
        return {name: value for name, value in asdict(self).items() if name != "all"}

    def over(self, other: Time) -> float:
        """The median of this time over another that was taken in turns with it, run by run.

        A GPU whose clocks drift slows both of a pair.
        """
        return statistics.median(a / b for a, b in zip(self.all, other.all, strict=True))


class Clock:
    """Times work on the current stream; L2 is overwritten before every run."""

    def __init__(self) -> None:
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def device(self, work: Callable[[], object], runs: int = 15, warm: int = 3) -> Time:
        """Return the device time of one call of `work`."""
        return self.compare({"": work}, runs, warm)[""]

    def compare(
        self, works: Mapping[str, Callable[[], object]], runs: int = 15, warm: int = 3
    ) -> dict[str, Time]:
        """Return the device time of one call of each of `works`, taken in turns.

        In turns, because the clocks of a loaded GPU drift. The GPU sleeps before every run, so that
        the host is ahead of it, as in training: host time is measured by `host`.
        """
        for work in works.values():
            for _ in range(warm):
                work()
        pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in works}
        order = list(works.items())
        for run in range(runs):
            # Another one begins each time: what ran before decides how warm the GPU is.
            turn = run % len(order)
            for name, work in order[turn:] + order[:turn]:
                self._flush.zero_()
                torch.cuda._sleep(_HEAD_START)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                work()
                end.record()
                pairs[name].append((begin, end))
                # Otherwise the host would run on until the queue is full, and wait inside `work`.
                end.synchronize()
        return {
            name: _summary([begin.elapsed_time(end) for begin, end in found])
            for name, found in pairs.items()
        }

    def host(self, work: Callable[[], object], runs: int = 30) -> Time:
        """Return the time until one call of `work` returns, with an idle GPU before it."""
        times = []
        for _ in range(runs):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            work()
            times.append((time.perf_counter() - begin) * 1e3)
        torch.cuda.synchronize()
        return _summary(times)


def _summary(times: list[float]) -> Time:
    quartiles = statistics.quantiles(times, n=4)
    return Time(statistics.median(times), quartiles[2] - quartiles[0], len(times), tuple(times))


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
