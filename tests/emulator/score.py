# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""How many removed waits, fences and barriers the emulator notices (`make emulator-score`).

Of every own kernel and of one of the cuDNN frontend's of each kind, one instruction at a time is
taken out, and the launch is repeated under up to 8 schedules until something is noticed. What no
check could miss, as an execution of the unchanged kernel shows, is counted apart, by its reason.

Exit status 0 if at least 90 % are noticed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import te_grouped_mlp
from te_grouped_mlp.emulator import GlobalMemory, Launch, Options, execute, launches, process
from te_grouped_mlp.emulator.launch_cases import LaunchCase
from te_grouped_mlp.op.activations import Activation
from te_grouped_mlp.op.layout import Kernel
from tests.emulator.mutants import SCHEDULES, Idle, alarm, mutants

AIM = 0.9
# Several tiles of several experts, one of them empty, and no more.
_SMALL = {"ROWS": 768, "SPLITS": (256, 0, 256), "H": 512, "FFN": 320}
_OWN = (
    LaunchCase(Kernel.FC1_ACT),
    LaunchCase(Kernel.FC2_FORWARD),
    LaunchCase(Kernel.FC1_DGRAD),
    LaunchCase(Kernel.DACT_DGRAD, deterministic=True),
    LaunchCase(Kernel.FC1_WGRAD, accumulate=True),
    LaunchCase(Kernel.FC2_WGRAD, accumulate=True),
    LaunchCase(Kernel.FC2_WGRAD, dtype=torch.bfloat16),
)
_FRONTEND = (
    LaunchCase(Kernel.FC2_FORWARD),
    LaunchCase(Kernel.FC1_ACT),
    LaunchCase(Kernel.FC1_ACT, Activation.SRELU),
    LaunchCase(Kernel.DACT_DGRAD, deterministic=True),
    LaunchCase(Kernel.DACT_DGRAD, Activation.SRELU, deterministic=True),
    LaunchCase(Kernel.FC2_WGRAD),
)
CASES = (*(replace(case, backend="cutedsl") for case in _OWN), *_FRONTEND)


class Score:
    """Takes launches, and tries every mutant of each kernel at its first one.

    Attributes:
        total, noticed: By kind.
        apart: What is not counted, by reason.
    """

    def __init__(self, schedules: int) -> None:
        self.schedules = SCHEDULES[:schedules]
        self.total: Counter[str] = Counter()
        self.noticed: Counter[str] = Counter()
        self.apart: Counter[str] = Counter()

    def take(self, launch: Launch, memory: GlobalMemory) -> None:
        """Score a launch, and leave memory as the unchanged kernel does."""
        restore = memory.snapshot()
        before = execute(launch, memory, Options())
        right = [each.bytes.copy() for each in memory.allocations()]
        restore()
        idle = Idle(launch, memory).reasons
        limit = 3 * before.instructions + 100_000

        def fresh() -> GlobalMemory:
            restore()
            return memory

        def wrong() -> bool:
            now = (each.bytes for each in memory.allocations())
            return any((a != b).any() for a, b in zip(now, right, strict=True))

        found, total, begin = 0, 0, time.perf_counter()
        for mutant in mutants(launch):
            reason = idle.get(mutant.instruction.line)
            name = f"{mutant.instruction.source} (PTX line {mutant.instruction.line})"
            if reason is not None:
                print(f"  apart: {name}: {reason}")
                self.apart[reason] += 1
                continue
            schedules = (replace(each, max_instructions=limit) for each in self.schedules)
            alarms = (alarm(launch, mutant.program, fresh, wrong, each) for each in schedules)
            first = next(filter(None, alarms), None)
            total += 1
            found += first is not None
            self.total[mutant.kind] += 1
            self.noticed[mutant.kind] += first is not None
            if first is None:
                print(f"  missed: {name}")
        restore()
        execute(launch, memory, Options())
        seconds = time.perf_counter() - begin
        print(f"  {launch.entry[:90]}: {found} of {total} in {seconds:.0f} s", flush=True)

    def report(self) -> bool:
        """Print the sums; return whether the aim is met."""
        for kind, count in self.total.items():
            print(f"{kind:16} {self.noticed[kind]:4} of {count}")
        for reason, count in self.apart.items():
            print(f"{'apart':16} {count:4} {reason}")
        found, total = self.noticed.total(), self.total.total()
        print(f"noticed {found} of {total}: {found / max(total, 1):.1%}")
        return found >= AIM * total


def emulated(take: Callable[[Launch, GlobalMemory], None]) -> Any:
    """Make this process's GPU an emulated one that hands every kernel's first launch to `take`."""
    os.environ |= {"NVTE_GROUPED_MLP_EMULATE": "sm100", "TRITON_INTERPRET": "1"}
    te_grouped_mlp.activate()
    importlib.import_module("transformer_engine.pytorch")
    gpu = process.enter()
    for name, value in _SMALL.items():
        setattr(launches, name, value)
    seen: set[tuple[str, str]] = set()

    def taken(launch: Launch) -> None:
        # Kernels that only build tensor maps wait for nothing.
        kernel = (launch.ptx, launch.entry)
        if kernel in seen or next(mutants(launch), None) is None:
            execute(launch, gpu._memory)
        else:
            seen.add(kernel)
            take(launch, gpu._memory)
        gpu._allocations.take_for_written()

    # One cluster, which computes every tile, so that each buffer is used again and again.
    gpu._clusters, gpu._take = 1, taken
    return gpu


def main() -> int:
    """Score the cases whose names contain an argument, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of cases; all without")
    parser.add_argument("--schedules", type=int, default=len(SCHEDULES))
    arguments = parser.parse_args()
    score = Score(arguments.schedules)
    emulated(score.take)
    for case in CASES:
        if not arguments.names or any(name in case.name for name in arguments.names):
            print(case.name, flush=True)
            launches.Maker.of(case).run(case)
    return 0 if score.report() else 1


if __name__ == "__main__":
    sys.exit(main())
