# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""A process in which the real cuDNN frontend believes that CPU tensors lie on a Blackwell GPU.

Two parts. What CuTe DSL and the frontend ask of the driver is answered for the rest of the process
(`install`), since the frontend takes those names when it is imported. What torch says of tensors
and of CUDA is changed only while a wrapper runs (`posing`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from te_grouped_mlp.emulator.runtime import MULTIPROCESSORS, SM
from te_grouped_mlp.emulator.tensors import Claimed

Allocate = Callable[..., torch.Tensor]
"""``(shape, dtype, strides)`` to a fresh tensor on the CPU."""

FRONTEND = "cudnn.gemm.cutedsl.grouped"
"""What takes the replaced names when it is imported."""


class Stream:
    """The one stream of this process."""

    cuda_stream = 0

    def __int__(self) -> int:
        return 0

    def wait_stream(self, other: Any) -> None:
        """Nothing runs behind the host's back."""


STREAM = Stream()


def install(
    compiler: Callable[[Any], Any],
    clusters: Callable[[int], int] = lambda size: MULTIPROCESSORS // size,
    pointed: Callable[[torch.Tensor], None] = lambda _: None,
) -> None:
    """Replace what the frontend takes from CuTe DSL when it is imported.

    Args:
        compiler: Makes what stands for `cute.compile` of the original.
        clusters: Size of a cluster to how many the GPU holds at a time.
        pointed: Called with every tensor whose address a kernel gets without the tensor.

    Raises:
        RuntimeError: The frontend has the originals already.
    """
    if FRONTEND in sys.modules:
        raise RuntimeError(f"{FRONTEND} is imported already; the emulator has to come first")
    import cutlass
    from cutlass import cute

    class Hardware:
        """What the driver would say about the GPU."""

        def __init__(self, *_: Any) -> None:
            pass

        def get_max_active_clusters(self, size: int, stream: Any = None) -> int:
            del stream
            return clusters(size)

    cutlass.utils.HardwareInfo = Hardware
    cute.runtime.from_dlpack = functools.partial(_from_dlpack, cute.runtime.from_dlpack, pointed)
    cute.compile = compiler(cute.compile)
    # Releases before 1.31 keep a workspace per kernel, and need no more than the above.
    with contextlib.suppress(ImportError):
        from cudnn.gemm.cutedsl.grouped.dglu import _blockscaled_api

        if hasattr(_blockscaled_api, "Workspace"):
            _blockscaled_api.Workspace = _host_workspace(_blockscaled_api.Workspace)


def _from_dlpack(
    original: Callable[..., Any],
    pointed: Callable[[torch.Tensor], None],
    tensor: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Let workspaces lie in global memory, which kernels are built for."""
    if isinstance(tensor, torch.Tensor):
        pointed(tensor)
        tensor = Claimed(tensor)
    return original(tensor, *args, **kwargs)


def _host_workspace(original: Any) -> Any:
    class HostWorkspace(original):  # type: ignore[misc]
        """A workspace that does not compare the ordinal of its device, and has one."""

        def __init__(self, *args: Any, device: Any = None, **kwargs: Any) -> None:
            del device
            super().__init__(*args, **kwargs)
            self._device = 0

    return HostWorkspace


@contextlib.contextmanager
def posing(allocate: Allocate) -> Iterator[None]:
    """Let torch speak of CPU tensors as of a Blackwell GPU's while the block runs.

    Args:
        allocate: Makes what the block allocates.
    """
    null = contextlib.nullcontext
    answers = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: SM,
        "current_stream": lambda *_: STREAM,
        "default_stream": lambda *_: STREAM,
        "is_current_stream_capturing": lambda: False,
        "stream": lambda *_: null(),
        "device": lambda *_: null(),
    }
    # What the frontend asks instead, where torch has it: only a build for CUDA does.
    raw = mock.patch.object(torch._C, "_cuda_getCurrentRawStream", _raw_stream, create=True)
    # By its name on the class: torch would refuse the stream before any mode is asked.
    recorded = mock.patch.object(torch.Tensor, "record_stream", _nothing, create=True)
    with mock.patch.multiple(torch.cuda, **answers), raw, recorded, _Posing(allocate):
        yield


def _raw_stream(_index: int) -> int:
    return STREAM.cuda_stream


def _nothing(*_: Any) -> None:
    pass


class _Posing(TorchFunctionMode):
    """CPU tensors that say they are CUDA's, and allocations for them."""

    def __init__(self, allocate: Allocate) -> None:
        super().__init__()
        self._allocate = allocate

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if function == torch.Tensor.is_cuda.__get__:
            return True
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if function in _FRESH:
            return self._fresh(function, args, kwargs)
        return function(*args, **kwargs)

    def _fresh(self, function: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        # Made once without memory, so that torch itself reads the arguments.
        shape = function(*args, **{**kwargs, "device": "meta"})
        out = self._allocate(tuple(shape.shape), shape.dtype, shape.stride())
        return out.zero_() if function is torch.zeros else out


_FRESH = frozenset({torch.empty, torch.empty_strided, torch.zeros})
