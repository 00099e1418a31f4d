# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Clusters, and which of their warps and of their asynchronous work goes next."""

from __future__ import annotations

import random
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from te_grouped_mlp.emulator import barriers, tensor_memory
from te_grouped_mlp.emulator.clocks import Clocks, join
from te_grouped_mlp.emulator.codegen import EXIT
from te_grouped_mlp.emulator.cta import Cta
from te_grouped_mlp.emulator.faults import Deadlock, EmulationFault, Endless, UnfinishedAsync
from te_grouped_mlp.emulator.lanes import ALL
from te_grouped_mlp.emulator.warp import Warp

if TYPE_CHECKING:
    from te_grouped_mlp.emulator.machine import Machine

# Rounds in which waits may time out, without anything else happening, before it is a deadlock.
_PATIENCE = 4
# In the schedule "random": how many blocks a warp runs on at most, how often work completes, and
# how often a wait times out.
_QUANTUM, _COMPLETES, _TIMES_OUT = 24, 0.2, 0.3


class Work(Protocol):
    """Asynchronous work on its way."""

    def finish(self) -> None:
        """Take effect."""


class Cluster:
    """A cluster that runs: its CTAs, their warps, and the asynchronous work that they started."""

    def __init__(
        self, machine: Machine, serial: int, coordinates: list[tuple[int, int, int]]
    ) -> None:
        self.machine, self.serial, self.coordinates = machine, serial, coordinates
        self.shared_size, self.granule = machine.shared_size, machine.granule
        self.clocks = Clocks(machine.options.races)
        self.progress = self.generation = self.arrived = 0
        self.gathered = self.released = Clocks.new()
        self.acquired: set[int] = set()
        self.loads: list[Work] = []
        self.tensor: deque[Work] = deque()
        self.stores: list[Work] = []
        self.schedule = machine.options.schedule
        self.random: random.Random | None = None
        self.ctas = [Cta(self, rank, at) for rank, at in enumerate(coordinates)]
        count = -(-machine.threads // 32)
        self.warps = [Warp(cta, w, machine.threads) for cta in self.ctas for w in range(count)]
        self.all_warps = list(self.warps)
        for cta in self.ctas:
            cta.running = count

    def impatient(self) -> bool:
        """Say whether a wait at an mbarrier times out at once, as it may: at random."""
        return self.random is not None and self.random.random() < _TIMES_OUT

    def read_ended(self, agent: int, time: int) -> bool:
        """Say whether a warp used what it had loaded at one of its times."""
        return any(w.agent == agent and time in w.used for w in self.all_warps)

    def pass_barrier(self) -> None:
        """End the cluster barrier's phase if every warp that still runs has arrived."""
        if self.arrived >= len(self.warps):
            self.arrived, self.released = 0, self.gathered
            self.gathered = Clocks.new()
            self.generation += 1
            self.progress += 1

    def later(self, kind: str, work: Work) -> None:
        """Take asynchronous work, which takes effect as the schedule says.

        Operations of the tensor cores do so in order. A store that nothing completes earlier
        does so when it is waited for.
        """
        if self.schedule == "eager":
            work.finish()
        elif kind == "load":
            self.loads.append(work)
        elif kind == "tensor":
            self.tensor.append(work)
        elif self.schedule == "random":
            self.stores.append(work)

    def complete(self, choice: random.Random | None) -> bool:
        """Let some work take effect; return whether there was any."""
        kinds = [k for k in (self.loads, self.tensor, self.stores) if k]
        if not kinds:
            return False
        queue: Any = choice.choice(kinds) if choice else kinds[0]
        if queue is self.tensor:
            self.tensor.popleft().finish()
        else:
            queue.pop(choice.randrange(len(queue)) if choice else 0).finish()
        return True

    def leave(self, warp: Warp) -> None:
        """Let a warp end, and check that it leaves nothing behind.

        Raises:
            UnfinishedAsync, BarrierMisuse: It did.
        """
        warp.done = True
        self.warps.remove(warp)
        self.progress += 1
        groups = warp.streams.get("stores")
        if groups is not None and self.clocks.active:
            left = groups.committed - int(warp.clock[groups.reads])
            if groups.open or left:
                raise UnfinishedAsync(f"{warp.name} exits while its TMA stores may still read")
        warp.cta.running -= 1
        if warp.cta.running == 0:
            tensor_memory.check_exit(warp.cta)
            barriers.check_exit(warp.cta)
        if self.warps:
            self.pass_barrier()
        elif self.loads or self.tensor:
            work = type((list(self.loads) + list(self.tensor))[0]).__name__.strip("_")
            raise UnfinishedAsync(f"CTA {warp.cta.coordinates} exits with unfinished work ({work})")


class Scheduler:
    """Runs the clusters of a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.resident: list[Cluster] = []
        options = machine.options
        self.random = random.Random(options.seed) if options.schedule == "random" else None
        self.instructions = 0

    def run(self) -> None:
        """Run until every cluster has ended."""
        idle = 0
        while self._fill():
            before = self._mark()
            ran = self._random_step() if self.random else self._round()
            if ran and self._mark() != before:
                idle = 0
                continue
            if any(c.complete(self.random) for c in self.resident):
                idle = 0
                continue
            if not ran:
                idle += 1
                self._time_out(idle)

    def _mark(self) -> tuple[int, ...]:
        return (self.instructions, *(c.progress for c in self.resident))

    def _fill(self) -> bool:
        self.resident = [c for c in self.resident if c.warps]
        while len(self.resident) < self.machine.options.resident_clusters:
            following = self.machine.start_cluster()
            if following is None:
                break
            following.random = self.random
            self.resident.append(following)
        return bool(self.resident)

    def _round(self) -> bool:
        """Run every warp that can until it waits."""
        ran = False
        for cluster in self.resident:
            for warp in list(cluster.warps):
                if self._ready(warp):
                    self._run(warp, None)
                    ran = True
        return ran

    def _random_step(self) -> bool:
        """Let a random warp run for a while, or random work take effect."""
        assert self.random is not None
        if self.random.random() < _COMPLETES:
            self.random.choice(self.resident).complete(self.random)
        ready = [w for c in self.resident for w in c.warps if self._ready(w)]
        if ready:
            self._run(self.random.choice(ready), self.random.randint(1, _QUANTUM))
        return bool(ready)

    def _ready(self, warp: Warp) -> bool:
        if warp.waiting is None:
            return True
        kind, barrier, then = warp.waiting
        if (barrier.phase if kind == "mbarrier" else barrier.generation) == then:
            return False
        if kind != "mbarrier":
            join(warp.clock, barrier.released)
        warp.waiting = None
        return True

    def _time_out(self, idle: int) -> None:
        """Let the waits at mbarriers fail, as they may after a while.

        Raises:
            Deadlock: That has not helped.
        """
        waiting = [w for c in self.resident for w in c.warps]
        polling = [w for w in waiting if w.waiting and w.waiting[0] == "mbarrier"]
        if idle > _PATIENCE or not polling:
            raise Deadlock("; ".join(f"{w.name} waits at {_waits(w)}" for w in waiting))
        for warp in polling:
            warp.waiting = None
            self._run(warp, None)

    def _run(self, warp: Warp, quantum: int | None) -> None:
        """Run a warp until it waits or ends, or for so many blocks."""
        program, traced = self.machine.program, self.machine.options.trace is not None
        registers, limit = warp.R, self.machine.options.max_instructions
        blocks = 0
        try:
            while True:
                pc = warp.pc
                mask = ALL
                if isinstance(pc, np.ndarray):
                    low = int(pc.min())
                    mask = pc == low
                    if mask.all():
                        pc = warp.pc = low
                        mask = ALL
                if pc is warp.pc and mask is ALL:
                    low = pc
                if low == EXIT:
                    warp.cluster.leave(warp)
                    return
                function = program.function(low, mask is not ALL, traced)
                following = function(warp, registers, mask)
                self.instructions += program.lengths[low]
                if mask is ALL:
                    warp.pc = following
                else:
                    warp.pc = np.where(mask, following, warp.pc)
                blocks += 1
                if warp.waiting is not None or blocks == quantum:
                    return
                if self.instructions > limit:
                    raise Endless(f"more than {limit} instructions")
        except (EmulationFault, NotImplementedError) as fault:
            raise self._placed(fault, warp) from None

    def _placed(self, fault: Exception, warp: Warp) -> Exception:
        """Add to a fault where it happened."""
        instruction = None
        trace = sys.exc_info()[2]
        while trace is not None:
            lines = self.machine.program.lines.get(trace.tb_frame.f_code.co_filename)
            if lines is not None:
                instruction = lines[trace.tb_lineno]
            trace = trace.tb_next
        if not isinstance(fault, EmulationFault):
            at = f"PTX line {instruction.line}: {instruction.source}: " if instruction else ""
            return NotImplementedError(f"{at}{fault}")
        place = fault.place
        place.entry, place.cta, place.warp = (
            self.machine.launch.entry,
            warp.cta.coordinates,
            warp.number,
        )
        if instruction is not None:
            place.line, place.source = instruction.line, instruction.source
        return fault


def _waits(warp: Warp) -> str:
    if warp.waiting is None:
        return "nothing"
    kind, barrier, _ = warp.waiting
    if kind == "mbarrier":
        return f"{barrier.name} ({barrier.pending} arrivals, {barrier.transactions} bytes missing)"
    if kind == "cluster":
        return f"the cluster barrier ({barrier.arrived} of {len(barrier.warps)} warps there)"
    return f"a barrier ({barrier.threads} of {barrier.expected} threads there)"
