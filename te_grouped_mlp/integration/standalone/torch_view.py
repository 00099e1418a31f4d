# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The torch that Transformer Engine's modules see in standalone.

A view delegates every name to torch and answers a few questions about the CUDA device itself.
torch is never changed: a Transformer Engine module gets the view as its global name `torch`.
"""

from __future__ import annotations

import os
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

# The capability whose code paths standalone serves, whatever the device is.
CAPABILITY = (10, 0)


def default_device() -> torch.device:
    """Return where a tensor goes when Transformer Engine names no device."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class _View(ModuleType):
    """A module that answers the names it was given and delegates the rest."""

    def __init__(self, base: ModuleType, answers: dict[str, Any]) -> None:
        super().__init__(base.__name__, f"View of {base.__name__} for standalone.")
        self.__dict__.update(answers)
        self.__dict__["_base"] = base

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_base"], name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self.__dict__["_base"]), *self.__dict__})


def _current_device() -> int | torch.device:
    return torch.cuda.current_device() if torch.cuda.is_available() else torch.device("cpu")


def _get_device_properties(device: Any = None) -> SimpleNamespace:
    major, minor = CAPABILITY
    answers = {"name": "cpu", "total_memory": 0, "multi_processor_count": os.cpu_count() or 1}
    if torch.cuda.is_available():
        real = torch.cuda.get_device_properties(device)
        answers = {name: getattr(real, name) for name in answers}
    return SimpleNamespace(major=major, minor=minor, **answers)


def _get_device_capability(device: Any = None) -> tuple[int, int]:
    del device
    return CAPABILITY


def _is_current_stream_capturing() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _current_stream(device: Any = None) -> Any:
    if torch.cuda.is_available():
        return torch.cuda.current_stream(device)
    return SimpleNamespace(cuda_stream=0, synchronize=_nothing, wait_stream=_nothing)


def _synchronize(device: Any = None) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize(device)


def _nothing(*args: Any) -> None:
    del args


def _autocast_device_type(device_type: str) -> str:
    """Map "cuda" to the device type whose autocast governs the op here."""
    return device_type if torch.cuda.is_available() else "cpu"


def _is_autocast_enabled(device_type: str = "cuda") -> bool:
    return bool(torch.is_autocast_enabled(_autocast_device_type(device_type)))


def _get_autocast_dtype(device_type: str = "cuda") -> torch.dtype:
    return torch.get_autocast_dtype(_autocast_device_type(device_type))


_CUDA_ANSWERS = {
    "current_device": _current_device,
    "get_device_properties": _get_device_properties,
    "get_device_capability": _get_device_capability,
    "is_current_stream_capturing": _is_current_stream_capturing,
    "current_stream": _current_stream,
    "synchronize": _synchronize,
}


def make_view() -> ModuleType:
    """Return a new view of torch.

    Returns:
        A module object. `view.cuda` answers for the CPU (and capability 10.0 on every device);
        autocast questions about "cuda" are answered for the CPU where there is no CUDA;
        `view.version.cuda` is "0" where torch has none, since Transformer Engine compares it as a
        number.
    """
    answers: dict[str, Any] = {
        "cuda": _View(torch.cuda, _CUDA_ANSWERS),
        "is_autocast_enabled": _is_autocast_enabled,
        "get_autocast_dtype": _get_autocast_dtype,
        # TE asks every tensor that a step saves whether it is one; to delegate takes far longer.
        "Tensor": torch.Tensor,
    }
    if torch.version.cuda is None:
        answers["version"] = _View(torch.version, {"cuda": "0"})
    return _View(torch, answers)


VIEW = make_view()
