# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels with one wait, fence or barrier taken out, and whether an execution notices.

A mutant shares every other block's code with the kernel that it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np

from te_grouped_mlp.emulator import EmulationFault, GlobalMemory, Launch, Options, barriers, execute
from te_grouped_mlp.emulator.clocks import Shadow
from te_grouped_mlp.emulator.codegen import Program, program
from te_grouped_mlp.emulator.machine import Machine
from te_grouped_mlp.emulator.operands import used, written
from te_grouped_mlp.emulator.ptx import Immediate, Instruction

# Opcodes by their first letters -> the kind under which the score counts them.
KINDS = {
    "mbarrier.try_wait": "mbarrier wait",
    "mbarrier.test_wait": "mbarrier wait",
    "cp.async.bulk.wait_group": "bulk wait",
    "cp.async.wait_": "copy wait",
    "tcgen05.wait::ld": "tensor load wait",
    "fence.proxy.async": "proxy fence",
    "fence.proxy.tensormap": "tensor map fence",
    "fence.mbarrier_init": "init fence",
    "fence.acq_rel": "fence",
    "bar.sync": "barrier",
    "barrier.sync": "barrier",
    "barrier.cluster.wait": "cluster barrier",
}
SCHEDULES = (
    Options(schedule="late"),
    Options(schedule="eager"),
    *(Options(schedule="random", seed=seed) for seed in range(6)),
)


@dataclass(frozen=True)
class Mutant:
    """A kernel without one instruction."""

    kind: str
    instruction: Instruction
    block: int
    position: int
    program: Program


def mutants(launch: Launch) -> Iterator[Mutant]:
    """Yield every mutant of a kernel."""
    whole = program(launch.ptx, launch.entry)
    for number, block in enumerate(whole.entry.blocks):
        for position, each in enumerate(block):
            kind = next((v for k, v in KINDS.items() if each.op.startswith(k)), None)
            if kind is not None:
                yield Mutant(kind, each, number, position, _without(whole, number, position))


def _without(whole: Program, number: int, position: int) -> Program:
    block = list(whole.entry.blocks[number])
    gone = block.pop(position)
    if gone.op.startswith("mbarrier"):
        passed = replace(gone, op="mov.pred", operands=(gone.operands[0], Immediate(1)))
        block.insert(position, passed)
    blocks = list(whole.entry.blocks)
    blocks[number] = block
    changed = object.__new__(Program)
    changed.__dict__.update(whole.__dict__)
    changed.entry = replace(whole.entry, blocks=blocks)
    changed.lengths = [len(b) for b in blocks]
    changed.functions = {k: v for k, v in whole.functions.items() if k[0] != number}
    changed.lines = dict(whole.lines)
    return changed


# What touches data; a wait after the last of them in every warp only holds the exit back.
_DATA = ("ld.shared", "ld.global", "st.", "atom", "red.", "cp.async.bulk.tensor", "cp.reduce",
         "cp.async.c", "tcgen05.ld", "tcgen05.mma", "tcgen05.cp",
         "clusterlaunchcontrol.try")  # fmt: skip


class Idle:
    """What of a kernel cannot be missed, as one execution of the unchanged kernel shows.

    Attributes:
        reasons: PTX line -> why its instruction is of no use.
    """

    def __init__(self, launch: Launch, memory: GlobalMemory) -> None:
        """Execute the kernel and look at what follows, and what is touched around, each line."""
        self.at: tuple[object, int] = (None, 0)
        self.line = 0
        self.pending: dict[object, list[int]] = {}
        self.busy: set[int] = set()
        self.fences: dict[object, int] = {}
        self.initialising: set[object] = set()
        self.useful: set[int] = set()
        self.touched: dict[object, dict[Shadow, np.ndarray]] = {}
        self.fenced: dict[int, list[tuple[Shadow, np.ndarray]]] = {}
        self.asynchronous: dict[Shadow, np.ndarray] = {}
        self.phases: dict[int, int] = {}
        self._run(launch, memory)
        self.reasons = self._judge(program(launch.ptx, launch.entry))

    def _run(self, launch: Launch, memory: GlobalMemory) -> None:
        passed = barriers._passed
        accesses = {name: getattr(Shadow, name) for name in ("read", "write")}

        def waited(warp: object, address: int, parity: int) -> bool:
            phase = barriers.find(warp, address).phase
            fresh = phase == 0 and parity & 1
            self.phases[self.line] = self.phases.get(self.line, 0) + (not fresh)
            return passed(warp, address, parity)

        def accessed(name: str) -> Callable[..., None]:
            def access(shadow: Shadow, cells: object, clock: object, agent: int, time: int,
                       proxy: bool = False, *rest: object) -> None:  # fmt: skip
                table = self.asynchronous if proxy else self.touched.setdefault(self.at, {})
                if shadow not in table:
                    table[shadow] = np.zeros(len(shadow.writer), bool)
                table[shadow][cells] = True
                accesses[name](shadow, cells, clock, agent, time, proxy, *rest)

            return access

        with ExitStack() as stack:
            stack.enter_context(patch.object(barriers, "_passed", waited))
            for name in accesses:
                stack.enter_context(patch.object(Shadow, name, accessed(name)))
            execute(launch, memory, Options(trace=self._trace))

    def _trace(self, cta: tuple[int, int, int], warp: int, line: int, source: str) -> None:
        self.at, self.line = (cta, warp), line
        op = source.split()[1] if source.startswith("@") else source
        if op.startswith(_DATA):
            self.busy.update(self.pending.pop(self.at, ()))
        self.pending.setdefault(self.at, []).append(line)
        if op.startswith("mbarrier.init"):
            self.initialising.add(self.at)
        elif op.startswith("fence.mbarrier_init"):
            self.fences[self.at] = line if self.at in self.initialising else 0
            self.initialising.discard(self.at)
        elif op.startswith(("mbarrier.", *_DATA)) and not op.startswith("mbarrier.init"):
            self.useful.add(self.fences.pop(self.at, 0))
        if op.startswith("fence."):
            self.fenced.setdefault(line, []).extend(self.touched.pop(self.at, {}).items())

    def _judge(self, whole: Program) -> dict[int, str]:
        reasons = {}
        for each in (i for block in whole.entry.blocks for i in block):
            line, op = each.line, each.op
            left = any(line in lines for lines in self.pending.values())
            if left and line not in self.busy:
                reasons[line] = "drain at the end"
            elif op.startswith("fence.mbarrier_init") and line not in self.useful:
                reasons[line] = "another one does the same"
            elif op.startswith(("fence.proxy.async", "fence.acq_rel")) and not self._matters(line):
                reasons[line] = "only one proxy touches what it fences"
            elif self.phases.get(line, 1) == 0:
                reasons[line] = "meets new barriers only"
            elif op.startswith("mbarrier.t") and not _read(whole, each):
                reasons[line] = "nothing reads its result"
        return reasons

    def _matters(self, line: int) -> bool:
        return any(
            (cells & self.asynchronous[shadow]).any()
            for shadow, cells in self.fenced.get(line, ())
            if shadow in self.asynchronous
        )


def _read(whole: Program, wait: Instruction) -> bool:
    """Say whether an instruction reads the predicate of a wait."""
    result = written(wait)
    return any(result & used(i) for block in whole.entry.blocks for i in block)


def alarm(
    launch: Launch,
    program_: Program,
    memory: Callable[[], GlobalMemory],
    wrong: Callable[[], bool],
    options: Options,
) -> str | None:
    """Run a program once; return what was noticed.

    Args:
        launch: Of the kernel.
        program_: What runs in its place.
        memory: Makes the memory as it is before the launch.
        wrong: Says whether memory is not as the unchanged kernel leaves it.
        options: Of the execution.
    """
    try:
        Machine(launch, memory(), options, program_).run()
    except EmulationFault as fault:
        return f"{type(fault).__name__}: {fault.reason}"
    return "wrong result" if wrong() else None
