# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels with one wait, fence or barrier taken out, and whether an execution notices.

A mutant shares every other block's code with the kernel that it comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from te_grouped_mlp.emulator import EmulationFault, GlobalMemory, Launch, Options, execute
from te_grouped_mlp.emulator.codegen import Program, program
from te_grouped_mlp.emulator.machine import Machine
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
    *(Options(schedule="random", seed=seed) for seed in range(18)),
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


def repeated(mutant: Mutant) -> bool:
    """Say whether the instruction's neighbour in its block is the same one."""
    block = mutant.program.entry.blocks[mutant.block]
    near = block[max(mutant.position - 1, 0) : mutant.position + 1]
    return any(i.op == mutant.instruction.op and not i.operands for i in near)


# What touches data; a wait after the last of them in every warp only holds the exit back.
_DATA = ("ld.shared", "ld.global", "st.", "atom", "red.", "cp.async.bulk.tensor", "cp.reduce",
         "cp.async.c", "tcgen05.ld", "tcgen05.mma", "tcgen05.cp", "clusterlaunchcontrol.try")  # fmt: skip


def drains(launch: Launch, memory: GlobalMemory) -> set[int]:
    """Return the PTX lines that some warp reaches, but none before its last access of data."""
    seen: dict[tuple[object, int], list[int]] = {}
    busy: set[int] = set()

    def trace(cta: tuple[int, int, int], warp: int, line: int, source: str) -> None:
        lines = seen.setdefault((cta, warp), [])
        op = source.split()[1] if source.startswith("@") else source
        if op.startswith(_DATA) and not op.startswith(
            ("cp.async.bulk.commit", "cp.async.bulk.wait")
        ):
            busy.update(lines)
            lines.clear()
        lines.append(line)

    execute(launch, memory, Options(races=False, trace=trace))
    return set().union(*seen.values()) - busy


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
