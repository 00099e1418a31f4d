# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A process in which the real frontend believes that CPU tensors lie on a Blackwell GPU.

For child processes: it replaces functions of torch, of CuTe DSL and of the frontend for good. Three
levels of truth: the wrapper runs to its end and its kernel is never built; the kernel is built, to
PTX and cubin, and never called; it is called with tensors that claim to be CUDA's, so that all its
own checks of arguments pass before the missing driver is noticed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from te_grouped_mlp.emulator import fake_cuda as emulated
from te_grouped_mlp.emulator.tensors import claimed

ARCH = "sm_100a"
RECORD, COMPILE, CHECK = "record", "compile", "check"


@dataclass
class Launch:
    """A kernel that a wrapper launched.

    Attributes:
        kernel: Class name.
        tensors: Shape and dtype of every tensor argument, in order.
        error: What the built kernel raised, at the level that calls it.
        ptx: The kernel's text, at the levels that build it.
    """

    kernel: str
    tensors: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    error: str = ""
    ptx: str = ""


@dataclass
class Result:
    """What one launch gave.

    Attributes:
        error: Type and text of what was raised instead, or "".
        launches: The kernels that the wrapper launched.
        seconds: Of the whole call, compilation included.
    """

    error: str = ""
    launches: list[Launch] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Report:
    """Results by job, the memory that the process took at most, and the wrappers' arguments."""

    results: list[Result]
    megabytes: float
    wrappers: dict[str, frozenset[str]]


STREAM = emulated.STREAM
launches: list[Launch] = []


def install(level: str, folder: Path) -> None:
    """Replace what stands between the frontend and a CPU.

    Args:
        level: RECORD, COMPILE or CHECK.
        folder: Where built kernels are written.

    Raises:
        RuntimeError: This is the process of the tests.
    """
    if "pytest" in sys.modules:
        raise RuntimeError("fake_cuda is for child processes")
    os.environ["CUTE_DSL_ARCH"] = ARCH
    _posing.enter_context(emulated.posing(_empty))
    emulated.install(lambda original: _Compiler(original, level, folder))


_posing = contextlib.ExitStack()
"""Never left: the whole process believes it."""


def _empty(shape: Sequence[int], dtype: Any, strides: Sequence[int]) -> Any:
    """Allocate on the CPU; workspaces as aligned as CUDA's allocator makes them."""
    import torch

    last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    nbytes = (last + 1) * dtype.itemsize if all(shape) else 0
    raw = torch.arange(0, dtype=torch.uint8).new_zeros(nbytes + 256)
    skipped = -raw.data_ptr() % 256
    return raw[skipped : skipped + nbytes].view(dtype).as_strided(shape, strides)


class _Compiler:
    """`cute.compile`, which builds nothing, or keeps what it builds."""

    def __init__(self, original: Any, level: str, folder: Path) -> None:
        self._original, self._level, self._folder = original, level, folder

    def __call__(self, kernel: Any, *args: Any, options: str = "", **kwargs: Any) -> Any:
        name, built, ptx = type(kernel).__name__, None, ""
        if self._level != RECORD:
            before = set(self._folder.iterdir())
            keep = f" --keep-ptx --keep-cubin --dump-dir={self._folder}"
            built = self._original(kernel, *args, options=options + keep, **kwargs)
            new = set(self._folder.iterdir()) - before
            ptx = next(file.read_text() for file in new if file.suffix == ".ptx")
            assert any(file.suffix == ".cubin" for file in new), sorted(new)
            for file in new:
                file.unlink()
        call = built if self._level == CHECK else None
        return functools.partial(_launch, name, ptx, call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _launch(kernel: str, ptx: str, built: Any, *args: Any, **kwargs: Any) -> None:
    import torch

    given = (*args, *kwargs.values())
    shapes = [(tuple(a.shape), str(a.dtype)) for a in given if isinstance(a, torch.Tensor)]
    launch = Launch(kernel, shapes, ptx=ptx)
    launches.append(launch)
    if built is None:
        return
    try:
        built(*map(claimed, args), **{name: claimed(value) for name, value in kwargs.items()})
    except Exception as error:
        # What the kernel says about its arguments is the result of this level.
        launch.error = f"{type(error).__name__}: {error}"
