# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The check that every tex function makes first: its tensors lie where it is implemented."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

# What lies on no device.
_PLAIN = (int, float, str, bytes, torch.dtype)


def _devices(value: Any) -> Iterator[torch.device]:
    """Yield the device of each tensor in an argument: tensor, quantized tensor, list, device."""
    if value is None or isinstance(value, _PLAIN):
        return
    if isinstance(value, (list, tuple)):
        for item in value:
            if not isinstance(item, _PLAIN):
                yield from _devices(item)
    elif isinstance(value, torch.device):
        yield value
    elif hasattr(value, "get_data_tensors"):
        yield from _devices(tuple(value.get_data_tensors()))
    elif isinstance(value, torch.Tensor):
        yield value.device


def tex_function(function: _Function) -> _Function:
    """Make a function raise NotImplementedError when given a tensor that is not on the CPU.

    The error names the function and the device, and is raised before any work.
    """
    return _restricted(function, ("cpu",))


def tex_function_on_gpu_too(function: _Function) -> _Function:
    """Do the same for a function that takes CPU and CUDA tensors."""
    return _restricted(function, ("cpu", "cuda"))


def _restricted(function: _Function, allowed: tuple[str, ...]) -> _Function:
    where = " and ".join(map(str.upper, allowed))

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for device in _devices((*args, *kwargs.values())):
            if device.type not in allowed:
                raise NotImplementedError(
                    f"{function.__name__} was given a tensor on {device}; standalone implements "
                    f"it for {where} tensors only"
                )
        return function(*args, **kwargs)

    return checked  # type: ignore[return-value]
