# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiled CuTe DSL functions whose launches are executed by the emulator.

gpu = EmulatedGpu(Options(schedule="random", seed=3))
run = gpu.compiled(cute.compile(function, *fakes, options="--enable-tvm-ffi"))
out = gpu.empty((256, 64), torch.bfloat16)
run(x, out)
print(gpu.reports[-1])
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from te_grouped_mlp.emulator import runtime
from te_grouped_mlp.emulator.launch import Launch
from te_grouped_mlp.emulator.machine import execute
from te_grouped_mlp.emulator.memory import GlobalMemory
from te_grouped_mlp.emulator.options import Options
from te_grouped_mlp.emulator.report import Report
from te_grouped_mlp.emulator.tensors import POISON, Allocations, claimed, tensors_in


class EmulatedFunction:
    """A compiled host function whose launches an `EmulatedGpu` executes.

    Attributes:
        function: What CuTe DSL compiled.
        ptx: The text of its kernels.
    """

    def __init__(self, gpu: EmulatedGpu, function: Callable[..., Any], ptx: str) -> None:
        self._gpu, self.function, self.ptx = gpu, function, ptx

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._gpu.call(self.function, self.ptx, *args, **keywords)


class EmulatedGpu:
    """A Blackwell GPU of whose memory CPU tensors are a part.

    Launches run when the host code makes them, one after the other; there is one stream.

    Attributes:
        options: Of the executions; may be replaced between launches.
        reports: Of every launch, in order.
        launched: Called with every launch and its report.
        poison: What every byte of fresh memory holds.
        also: Gives the tensors that any launch may touch without getting them as arguments.
    """

    sm = runtime.SM

    def __init__(
        self,
        options: Options | None = None,
        launched: Callable[[Launch, Report], None] | None = None,
        clusters: int = 3,
        strict: bool = True,
    ) -> None:
        """Make one; CuTe DSL compiles for it from now on (see `runtime.select`).

        Args:
            options: Of the executions.
            launched: Called with every launch and its report.
            clusters: What persistent kernels are told that the GPU holds at a time. Few, so that
                each computes several tiles of a small problem, and the emulation takes less time.
            strict: Whether bytes that one launch left unwritten are so for the launches after it.
                False where kernels load whole tiles of a buffer whose last rows nobody writes, and
                drop what they computed of those: what they read then is poison, not a fault.
        """
        runtime.select()
        self.options = options or Options()
        self.reports: list[Report] = []
        self.launched = launched
        self.poison = POISON
        self.also: Callable[[], Iterable[Any]] = tuple
        self._clusters, self._strict = clusters, strict
        self._memory = GlobalMemory()
        self._allocations = Allocations(self._memory)

    def empty(
        self,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        strides: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return a fresh tensor; a kernel that reads it before something wrote it is at fault."""
        return self._allocations.empty(shape, dtype, strides, self.poison)

    def active_clusters(self, size: int) -> int:
        """Return how many clusters of `size` CTAs the GPU is said to hold at a time."""
        return min(self._clusters, runtime.MULTIPROCESSORS // size)

    def watch(self, addresses: Iterable[int]) -> AbstractContextManager[None]:
        """Notice in the block what code writes there that torch does not count (see `tensors`)."""
        return self._allocations.watch(addresses)

    def compile(self, function: Any, *args: Any, options: str = "", **keywords: Any) -> Any:
        """Compile a ``cute.jit`` function as `cute.compile` does, and return it `compiled`.

        Raises:
            RuntimeError: Its host code calls what the emulator's CUDA runtime does not have.
        """
        from cutlass import cute

        chosen = f"--enable-tvm-ffi {options}"
        built = runtime.explained(cute.compile, function, *args, options=chosen, **keywords)
        return self.compiled(built)

    def compiled(self, function: Any) -> EmulatedFunction:
        """Return a compiled function as one that takes CPU tensors and runs here.

        Args:
            function: What `cute.compile` gave, with ``--enable-tvm-ffi``, after this object was
                made. Its tensor arguments are registered with their whole storages.

        Raises:
            ValueError: It does not carry its PTX, so it was compiled before.
        """
        if isinstance(function, EmulatedFunction):
            return function
        return EmulatedFunction(self, function, ptx_of(function))

    def call(self, function: Callable[..., Any], ptx: str, *args: Any, **keywords: Any) -> Any:
        """Call a compiled function whose kernels have the text `ptx`.

        Raises:
            EmulationFault, NotImplementedError: From `machine.execute`.
        """
        self.register(*args, *keywords.values(), *self.also())
        given = {name: claimed(value) for name, value in keywords.items()}
        call = functools.partial(function, **given) if given else function
        return runtime.call(call, ptx, self._take, *map(claimed, args))

    def register(self, *values: Any) -> None:
        """Make tensors known that a launch may touch, and those that tables of them point to."""
        self._allocations.register(tensors_in(values))

    def _take(self, launch: Launch) -> None:
        report = execute(launch, self._memory, self.options)
        self.reports.append(report)
        if not self._strict:
            self._allocations.take_for_written()
        if self.launched is not None:
            self.launched(launch, report)


def ptx_of(function: Any) -> str:
    """Return the PTX that a compiled function carries.

    Raises:
        ValueError: It carries none.
    """
    found = getattr(function, "__ptx__", None)
    if not found:
        raise ValueError(
            f"{type(function).__name__} carries no PTX; allowed: functions that cute.compile made "
            "after the EmulatedGpu"
        )
    return found if "\n" in found else Path(found).read_text(encoding="utf-8")
