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
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCH = "sm_100a"
RECORD, COMPILE, CHECK = "record", "compile", "check"
_CUDA = 2
"""DLPack's code of a CUDA device."""


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


class Stream:
    """The one stream of this process."""

    cuda_stream = 0

    def __int__(self) -> int:
        return 0


STREAM = Stream()
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
    _replace_in_torch()
    import cutlass
    from cutlass import cute

    assert "cudnn.gemm.cutedsl.grouped" not in sys.modules, "the frontend has taken the originals"
    cutlass.utils.HardwareInfo = _Hardware
    cute.runtime.from_dlpack = functools.partial(_from_dlpack, cute.runtime.from_dlpack)
    cute.compile = _Compiler(cute.compile, level, folder)
    # Releases before 1.31 keep a workspace per kernel, and need no more than the above.
    with contextlib.suppress(ImportError):
        from cudnn.gemm.cutedsl.grouped.dglu import _blockscaled_api

        if hasattr(_blockscaled_api, "Workspace"):
            _blockscaled_api.Workspace = _host_workspace(_blockscaled_api.Workspace)


def _replace_in_torch() -> None:
    import torch

    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda *_: (10, 0)
    cuda.current_stream = cuda.default_stream = lambda *_: STREAM
    # What the frontend asks instead, where torch has it: only a build for CUDA does.
    torch._C._cuda_getCurrentRawStream = lambda _index: STREAM.cuda_stream
    cuda.is_current_stream_capturing = lambda: False
    cuda.stream = cuda.device = lambda *_: contextlib.nullcontext()
    torch.Tensor.is_cuda = property(lambda _: True)
    torch.Tensor.record_stream = lambda *_: None
    torch.empty = functools.partial(_empty, torch.empty)


def _empty(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Allocate on the CPU; workspaces as aligned as CUDA's allocator makes them."""
    import torch

    if str(kwargs.get("device", "")).startswith("cuda"):
        kwargs["device"] = "cpu"
    size = args[0][0] if isinstance(args[0], tuple) and len(args[0]) == 1 else args[0]
    if kwargs.get("dtype") is torch.uint8 and isinstance(size, int):
        raw = original(size + 256, dtype=torch.uint8)
        skipped = -raw.data_ptr() % 256
        return raw[skipped : skipped + size]
    return original(*args, **kwargs)


def _from_dlpack(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Let workspaces lie in global memory, which kernels are built for."""
    import torch

    claimed = _Claimed(tensor) if isinstance(tensor, torch.Tensor) else tensor
    return original(claimed, *args, **kwargs)


class _Hardware:
    """What the driver would say about the GPU."""

    def __init__(self, *_: Any) -> None:
        pass

    def get_max_active_clusters(self, size: int, stream: Any = None) -> int:
        del stream
        return 148 // size


def _host_workspace(original: Any) -> Any:
    class HostWorkspace(original):  # type: ignore[misc]
        """A workspace that does not compare the ordinal of its device, and has one."""

        def __init__(self, *args: Any, device: Any = None, **kwargs: Any) -> None:
            del device
            super().__init__(*args, **kwargs)
            self._device = 0

    return HostWorkspace


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
        built(*_claimed(args), **dict(zip(kwargs, _claimed(tuple(kwargs.values())), strict=True)))
    except Exception as error:
        # What the kernel says about its arguments is the result of this level.
        launch.error = f"{type(error).__name__}: {error}"


def _claimed(values: Sequence[Any]) -> list[Any]:
    import torch

    return [_Claimed(value) if isinstance(value, torch.Tensor) else value for value in values]


class _Claimed:
    """A CPU tensor that exports itself as CUDA's."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor.detach()

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._tensor.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # The struct begins with the address of the data; the device's type follows.
        ctypes.c_int32.from_address(get(capsule, b"dltensor") + 8).value = _CUDA
        return capsule
