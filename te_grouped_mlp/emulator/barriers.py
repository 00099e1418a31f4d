# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""mbarriers, named barriers, cluster barriers, and the cancelling of clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from te_grouped_mlp.emulator.clocks import AGENTS, Clocks, join
from te_grouped_mlp.emulator.faults import (
    BarrierMisuse,
    Misaligned,
    MissingFence,
    Race,
)
from te_grouped_mlp.emulator.formats import U32, U64
from te_grouped_mlp.emulator.lanes import ALL, Value, first, spread, uniform

if TYPE_CHECKING:
    from te_grouped_mlp.emulator.cta import Cta
    from te_grouped_mlp.emulator.warp import Warp

_MAX_COUNT = (1 << 20) - 1


class MBarrier:
    """An mbarrier object: the phase that it is in, and the clock of the last one that ended.

    It is an agent, too: what completes in phase p is its access at time p + 1.
    """

    def __init__(self, cta: Cta, offset: int, count: int, warp: Warp) -> None:
        self.cta, self.offset, self.count = cta, offset, count
        self.pending, self.transactions, self.phase = count, 0, 0
        self.name = f"mbarrier {offset:#x} of CTA {cta.rank}"
        self.agent = cta.cluster.clocks.agent(f"what completes on {self.name}")
        self.gathered, self.released = Clocks.new(), Clocks.new()
        self.by, self.since, self.visible = warp, warp.time, False

    def arrive(self, clock: np.ndarray | None, count: int = 1, expected: int = 0) -> None:
        """Count arrivals, and the bytes that they expect.

        Raises:
            BarrierMisuse: More than the phase has left.
        """
        self.transactions += expected
        self.pending -= count
        if clock is not None:
            join(self.gathered, clock)
        if self.pending < 0:
            raise BarrierMisuse(f"{-self.pending} more arrivals at {self.name} than {self.count}")
        self._complete()

    def transfer(self, size: int) -> None:
        """Count bytes that have come."""
        self.transactions -= size
        self._complete()

    def _complete(self) -> None:
        if self.pending == 0 and self.transactions == 0:
            self.phase += 1
            self.pending = self.count
            self.gathered[self.agent :: AGENTS] = self.phase
            self.released = self.gathered.copy()
            self.cta.cluster.progress += 1


def initialise(warp: Warp, base: Value, offset: int, count: Value, mask: np.ndarray) -> None:
    """`mbarrier.init`."""
    for lane in _lanes(mask):
        cta, at = warp.place(int(spread(base)[lane]) + offset, "mbarrier.init")
        if at % 8:
            raise Misaligned(f"mbarrier at {at:#x}")
        number = int(spread(count)[lane])
        if not 1 <= number <= _MAX_COUNT:
            raise BarrierMisuse(f"mbarrier.init with a count of {number}")
        cta.cells(at, 8)
        old = cta.barriers.get(at)
        if old is not None and not warp.clock[old.by.agent] >= old.since:
            raise Race(f"{old.name} is initialised twice without order between")
        cta.barriers[at] = barrier = MBarrier(cta, at, number, warp)
        warp.streams.setdefault("initialised", []).append(barrier)
    warp.tick()


def invalidate(warp: Warp, base: Value, offset: int, mask: np.ndarray) -> None:
    """`mbarrier.inval`."""
    for lane in _lanes(mask):
        barrier = find(warp, int(spread(base)[lane]) + offset)
        del barrier.cta.barriers[barrier.offset]


def fence_init(warp: Warp) -> None:
    """`fence.mbarrier_init`: initialisations become visible to the cluster and to the TMA."""
    for barrier in warp.streams.get("initialised", ()):
        barrier.visible = True
    warp.fence()


def find(warp: Warp, address: int, proxy: bool = False) -> MBarrier:
    """Return the mbarrier at an address.

    Args:
        warp: Who uses it.
        address: In shared memory of the cluster.
        proxy: Whether the asynchronous proxy uses it for the warp.

    Raises:
        BarrierMisuse: There is none.
        Race: Its initialisation is not ordered before.
        MissingFence: It is, but not visible to the cluster.
    """
    cta, at = warp.place(address, "mbarrier")
    cta.cells(at, 8)
    barrier: MBarrier | None = cta.barriers.get(at)
    if barrier is None:
        raise BarrierMisuse(f"no mbarrier was initialised at {at:#x} of CTA {cta.rank}")
    if warp.cluster.clocks.active:
        if barrier.by is not warp and warp.clock[barrier.by.agent] < barrier.since:
            raise Race(f"{barrier.name} is used without order after its initialisation")
        if (proxy or cta is not warp.cta) and not barrier.visible:
            raise MissingFence(f"{barrier.name} is used without fence.mbarrier_init after its init")
    return barrier


def _lanes(mask: np.ndarray) -> list[int]:
    """Return the lanes that act."""
    return np.flatnonzero(mask).tolist()


def arrive(
    warp: Warp,
    base: Value,
    offset: int,
    count: Value | None,
    expected: Value | None,
    mask: np.ndarray,
) -> np.generic:
    """`mbarrier.arrive`, by each active lane; the state that it returns is of no use here."""
    same = not base.ndim and all(v is None or not v.ndim for v in (count, expected))
    lanes = [(first(mask), int(mask.sum()))] if same else [(lane, 1) for lane in _lanes(mask)]
    places = spread(base)
    for lane, times in lanes:
        barrier = find(warp, int(places[lane]) + offset)
        each = 1 if count is None else int(spread(count)[lane])
        more = 0 if expected is None else int(spread(expected)[lane])
        barrier.arrive(warp.clock, each * times, more * times)
    warp.tick()
    return U64(0)


def try_wait(warp: Warp, base: Value, offset: int, parity: Value, mask: np.ndarray) -> Value:
    """`mbarrier.try_wait`: whether a parity's phase has ended; the warp waits if not."""
    if not base.ndim and not parity.ndim:
        return np.bool_(_passed(warp, int(base) + offset, int(parity)))
    places, parities = spread(base), spread(parity)
    result = np.zeros(32, bool)
    for lane in _lanes(mask):
        result[lane] = _passed(warp, int(places[lane]) + offset, int(parities[lane]))
    return result


def _passed(warp: Warp, address: int, parity: int) -> bool:
    barrier = find(warp, address)
    if barrier.phase & 1 == parity & 1:
        if not warp.cluster.impatient():
            warp.waiting = ("mbarrier", barrier, barrier.phase)
        return False
    join(warp.clock, barrier.released)
    return True


class NamedBarrier:
    """A barrier of `bar`: threads that have come, and their clock."""

    def __init__(self) -> None:
        self.threads = self.expected = self.generation = 0
        self.gathered = self.released = Clocks.new()


def named(warp: Warp, number: Value, threads: Value | None, arrives: bool) -> None:
    """`bar.sync` and `bar.arrive`.

    Raises:
        BarrierMisuse: A count that is not of whole warps, or not that of the others.
    """
    identity = uniform(number, ALL, "the number of a barrier")
    block = warp.machine.threads
    count = -(-block // 32) * 32 if threads is None else uniform(threads, ALL, "a count of threads")
    if identity > 15 or count % 32 or not 0 < count <= -(-block // 32) * 32:
        raise BarrierMisuse(f"barrier {identity} of {count} threads, in a CTA of {block}")
    barrier = warp.cta.named.setdefault(identity, NamedBarrier())
    if barrier.threads and barrier.expected != count:
        raise BarrierMisuse(
            f"barrier {identity} of {count} threads; others said {barrier.expected}"
        )
    if barrier.threads == 0:
        barrier.expected, barrier.gathered = count, Clocks.new()
    barrier.threads += 32
    join(barrier.gathered, warp.clock)
    warp.tick()
    if not arrives:
        warp.waiting = ("barrier", barrier, barrier.generation)
    if barrier.threads == count:
        barrier.threads, barrier.released = 0, barrier.gathered
        barrier.generation += 1
        warp.cluster.progress += 1


def check_exit(cta: Cta) -> None:
    """Fault if a CTA ends with arrivals at a barrier that nobody waits for."""
    for number, barrier in cta.named.items():
        if barrier.threads:
            text = f"{barrier.threads} of {barrier.expected} threads at barrier {number}"
            raise BarrierMisuse(f"CTA {cta.coordinates} exits with {text}")


def cluster_arrive(warp: Warp, relaxed: bool) -> None:
    """`barrier.cluster.arrive`; a relaxed one releases what was fenced.

    Raises:
        BarrierMisuse: Twice without a wait.
    """
    cluster = warp.cluster
    if warp.streams.get("arrived", -1) == cluster.generation:
        raise BarrierMisuse("barrier.cluster.arrive twice without a wait")
    warp.streams["arrived"] = cluster.generation
    join(cluster.gathered, warp.fenced if relaxed else warp.clock)
    warp.tick()
    cluster.arrived += 1
    cluster.pass_barrier()


def cluster_wait(warp: Warp) -> None:
    """`barrier.cluster.wait`.

    Raises:
        BarrierMisuse: Without an arrival before.
    """
    generation = warp.streams.pop("arrived", None)
    if generation is None:
        raise BarrierMisuse("barrier.cluster.wait without an arrival")
    warp.waiting = ("cluster", warp.cluster, generation)


def try_cancel(
    warp: Warp,
    base: Value,
    offset: int,
    at: Value,
    at_offset: int,
    everywhere: bool,
    mask: np.ndarray,
) -> None:
    """`clusterlaunchcontrol.try_cancel`: take over the next cluster that has not begun."""
    for lane in _lanes(mask):
        response, barrier_at = int(spread(base)[lane]) + offset, int(spread(at)[lane]) + at_offset
        following = warp.machine.take_cluster()
        words = ((1 << 64) - 1, 0)
        if following is not None:
            x, y, z = following
            words = (x | y << 20 | z << 40, 1)
        _, to = warp.place(response, "the response of try_cancel")
        if to % 16:
            raise Misaligned(f"the response of try_cancel at {to:#x}")
        _, barrier_offset = warp.place(barrier_at, "the mbarrier of try_cancel")
        for cta in warp.cluster.ctas if everywhere else [warp.cta]:
            mine = cta.rank << 24
            barrier = find(warp, mine | barrier_offset, proxy=True)
            cta.shared.write(
                cta.cells(to, 16), warp.clock, barrier.agent, barrier.phase + 1, proxy=True
            )
            warp.cluster.later("load", _Response(cta, to, words, barrier))
    warp.tick()


class _Response:
    """A response on its way."""

    def __init__(self, cta: Cta, offset: int, words: tuple[int, int], barrier: MBarrier) -> None:
        self.cta, self.offset, self.words, self.barrier = cta, offset, words, barrier

    def finish(self) -> None:
        """Let it come."""
        self.cta.cells(self.offset, 16)
        self.cta.chunks[self.offset // 16] = self.words
        self.barrier.transfer(16)


def first_cta(response: tuple[Value, Value], axis: str) -> Value:
    """`clusterlaunchcontrol.query_cancel`: a coordinate of the cancelled cluster's first CTA.

    Of a response that cancelled nothing it is undefined: large here.
    """
    return ((response[0] >> U64(20 * "xyz".index(axis))) & U64(0xFFFFF)).astype(U32)
