# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The installed cuDNN frontend with an emulated GPU behind it."""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import torch

from te_grouped_mlp.emulator import fake_cuda, runtime
from te_grouped_mlp.emulator.host import EmulatedGpu
from te_grouped_mlp.emulator.tensors import ALIGNMENT

_WORKSPACE = "descriptor_workspace"


class EmulatedFrontend:
    """Wrappers of the frontend that take CPU tensors; their launches run on an `EmulatedGpu`."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        """Take over the frontend of this process, for the rest of it.

        Raises:
            ImportError: The frontend is not installed.
            RuntimeError: It was imported before (see `fake_cuda.install`).
        """
        self._gpu = gpu
        self._pointed: dict[int, weakref.ref[torch.Tensor]] = {}
        self._arguments: list[Any] = []
        gpu.also = self._tensors
        compiler = functools.partial(_Compiler, gpu)
        fake_cuda.install(compiler, gpu.active_clusters, self._remember)

    def replace(self, names: dict[str, str]) -> None:
        """Put emulated wrappers where the frontend has its own.

        Args:
            names: Short name to the name in the package `cudnn`.
        """
        package = importlib.import_module("cudnn")
        with fake_cuda.posing(self._gpu.empty):
            found = {name: getattr(package, name, None) for name in names.values()}
        for name, wrapper in found.items():
            if wrapper is not None:
                setattr(package, name, self.wrapper(wrapper))

    def wrapper(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return one wrapper as one that takes CPU tensors."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("current_stream", 0) is None:
                kwargs["current_stream"] = fake_cuda.STREAM.cuda_stream
            workspace = kwargs.get(_WORKSPACE)
            if workspace is not None and workspace.data_ptr() % ALIGNMENT:
                # As CUDA's allocator would have aligned it; nothing is kept in it between launches.
                kwargs[_WORKSPACE] = self._gpu.empty(workspace.shape, workspace.dtype)
            # Some arguments reach a kernel by their address alone.
            self._arguments = [*args, *kwargs.values()]
            try:
                with fake_cuda.posing(self._gpu.empty):
                    return function(*args, **kwargs)
            finally:
                self._arguments = []

        return run

    def _remember(self, tensor: torch.Tensor) -> None:
        self._pointed[id(tensor)] = weakref.ref(tensor)

    def _tensors(self) -> list[Any]:
        """Return what kernels get by address: workspaces, and the running wrapper's arguments."""
        living = {key: found for key, ref in self._pointed.items() if (found := ref()) is not None}
        self._pointed = {key: self._pointed[key] for key in living}
        return [*living.values(), *self._arguments]


class _Compiler:
    """`cute.compile` of functions that are called with CPU tensors."""

    def __init__(self, gpu: EmulatedGpu, original: Any) -> None:
        self._gpu, self._original = gpu, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._gpu.compiled(runtime.explained(self._original, *args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
