# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Execute a launch."""

from __future__ import annotations

import time
from collections import Counter, deque

import numpy as np

from te_grouped_mlp.emulator import (
    barriers,
    codegen,
    copies,
    cta,
    tensor_core,
    tensor_memory,
    tma,
    warp,
)
from te_grouped_mlp.emulator.launch import Launch, parameter_sizes
from te_grouped_mlp.emulator.memory import Allocation, GlobalMemory
from te_grouped_mlp.emulator.options import Options
from te_grouped_mlp.emulator.report import Report
from te_grouped_mlp.emulator.scheduler import Cluster, Scheduler

# What a CTA may have at most, the system's first KiB included.
SHARED_BYTES = 233472
_SPACES = ("global", "shared", "local", "tensor")

codegen.NAMESPACE.update(tma=tma, tensor=tensor_memory, core=tensor_core)
codegen.NAMESPACE.update(barriers=barriers, copies=copies)
codegen.NAMESPACE.update({k: v for k, v in vars(cta).items() if k.endswith("_window")})
codegen.NAMESPACE.update({k: v for k, v in vars(cta).items() if k.startswith(("to_", "map_"))})


def execute(launch: Launch, memory: GlobalMemory, options: Options = Options()) -> Report:  # noqa: B008
    """Run every CTA of a launch to its end, on the memory as it is.

    Raises:
        NotImplementedError: An instruction, modifier or operand count that is not known; raised
            before anything runs, with the PTX line.
        ValueError: The launch contradicts itself (grid and cluster, parameters and entry).
        EmulationFault: The kernel did something wrong; memory is as the kernel left it.
    """
    machine = Machine(launch, memory, options, codegen.program(launch.ptx, launch.entry))
    return machine.run()


class Machine:
    """What the clusters of a launch share.

    Attributes:
        symbols: Offset of each shared array.
        shared_size: Bytes of a CTA's shared memory, from offset zero.
        granule: Bytes of a cell of shared memory's shadow.
        parameters: The parameter space.
        threads: Of a CTA.
        counts: (way, space) -> bytes, and other counts.
    """

    def __init__(
        self, launch: Launch, memory: GlobalMemory, options: Options, program: codegen.Program
    ) -> None:
        """Lay out shared memory and parameters.

        Raises:
            ValueError: The launch contradicts itself.
        """
        _check(launch, program)
        self.launch, self.memory, self.options, self.program = launch, memory, options, program
        self.threads = int(np.prod(launch.block))
        self.symbols, self.shared_size = _layout(launch, program)
        self.granule = _granule(program)
        self.parameters, self._owner = _parameters(launch, program)
        self.poison = warp.poison(program.entry, {t: s for t, (_, s) in codegen.TYPES.items()})
        self.counts: Counter[tuple[str, str]] = Counter()
        size, grid = launch.cluster, launch.grid
        ranges = [range(0, g, c) for g, c in zip(grid, size, strict=True)]
        self.pending = deque((x, y, z) for z in ranges[2] for y in ranges[1] for x in ranges[0])
        self.started = 0

    def run(self) -> Report:
        """Run the launch and report it."""
        self.memory.begin(self.options.races)
        scheduler = Scheduler(self)
        begin = time.perf_counter()
        with np.errstate(all="ignore"):
            scheduler.run()
        counts = self.counts
        ways = {w: {s: counts[w, s] for s in _SPACES if counts[w, s]} for w in ("read", "written")}
        checked = ["bounds", "alignment", "unwritten bytes", "barriers", "deadlock"]
        if self.options.races:
            checked += ["races", "proxy fences", "unfinished work"]
        return Report(
            self.launch.entry, scheduler.instructions, time.perf_counter() - begin,
            ways["read"], ways["written"], counts["tma", "load"], counts["tma", "store"],
            counts["tma", "bytes"], counts["tensor", "mma"], self.started, self.memory.reports(),
            tuple(checked),
        )  # fmt: skip

    def take_cluster(self) -> tuple[int, int, int] | None:
        """Cancel the next cluster; return the coordinates of its first CTA."""
        return self.pending.popleft() if self.pending else None

    def start_cluster(self) -> Cluster | None:
        """Start the next cluster."""
        base = self.take_cluster()
        if base is None:
            return None
        self.started += 1
        x, y, z = self.launch.cluster
        inside = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        ctas = [(base[0] + i, base[1] + j, base[2] + k) for i, j, k in inside]
        return Cluster(self, self.started, ctas)


def _check(launch: Launch, program: codegen.Program) -> None:
    for g, c in zip(launch.grid, launch.cluster, strict=True):
        if g < 1 or c < 1 or g % c:
            raise ValueError(f"grid={launch.grid} is no multiple of cluster={launch.cluster}")
    threads = program.entry.threads
    if min(launch.block) < 1 or (threads and tuple(threads) + (1, 1) < launch.block):
        raise ValueError(f"block={launch.block}, but the entry wants {threads}")
    if threads and int(np.prod(threads)) != int(np.prod(launch.block)):
        raise ValueError(f"block={launch.block}, but the entry wants {threads}")
    wanted = parameter_sizes(launch.ptx, launch.entry)
    got = tuple(len(p) for p in launch.parameters)
    if got != wanted:
        raise ValueError(f"parameters of {got} bytes, but the entry wants {wanted}")


def _layout(launch: Launch, program: codegen.Program) -> tuple[dict[str, int], int]:
    symbols, offset = {}, cta.SHARED_BASE
    arrays = sorted(program.entry.shared.items(), key=lambda item: item[1][1] == 0)
    for name, (align, size) in arrays:
        offset = -(-offset // align) * align
        symbols[name] = offset
        offset += size or launch.dynamic_shared_bytes
    if offset > SHARED_BYTES:
        raise ValueError(f"dynamic_shared_bytes={launch.dynamic_shared_bytes}: {offset} in all")
    return symbols, offset


def _granule(program: codegen.Program) -> int:
    """Return the least bytes that an access of shared memory has, at most 4."""
    sizes = {4}
    for block in program.entry.blocks:
        for each in block:
            if each.op.startswith(("ld.shared", "st.shared")):
                sizes.add(codegen.TYPES[each.op.rpartition(".")[2]][1])
    return min(sizes)


def _parameters(launch: Launch, program: codegen.Program) -> tuple[Allocation, np.ndarray]:
    owner = np.zeros(program.entry.parameter_bytes + 256, np.uint8)
    start = -owner.ctypes.data % 128
    for (offset, size), raw in zip(
        program.entry.parameters.values(), launch.parameters, strict=True
    ):
        owner[start + offset : start + offset + size] = np.frombuffer(raw, np.uint8)
    size = max(program.entry.parameter_bytes, 1)
    return Allocation(owner.ctypes.data + start, size, "parameters", True), owner
