# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What stands in for the replaced names of Transformer Engine (TE); `overrides` says why.

A function with the arguments (module, original) makes the replacement; the others are it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from te_grouped_mlp.integration.standalone.torch_view import VIEW, default_device
from te_grouped_mlp.op.tensors import memory


def view(module: ModuleType, original: Any) -> Any:
    del module, original
    return VIEW


def constant(value: Any) -> Callable[[ModuleType, Any], Any]:
    def make(module: ModuleType, original: Any) -> Any:
        del module, original
        return value

    return make


def canonicalize_device(module: ModuleType, original: Any) -> Any:
    del module

    def canonicalize_device(device: torch.device | str | None) -> torch.device:
        if device is not None:
            return original(device)
        chosen = torch.get_default_device()
        return default_device() if chosen.type == "cpu" else original(chosen)

    return canonicalize_device


def release(tensor: torch.Tensor) -> None:
    """Drop a tensor's memory; what is left is float32 of shape (0,), as on the GPU."""
    tensor.data = torch.empty(0, device=tensor.device)


def clear_tensor_data(*tensors: Any) -> None:
    for tensor in tensors:
        if tensor is None or hasattr(tensor, "_do_not_clear"):
            continue
        inner = tensor.get_data_tensors() if hasattr(tensor, "get_data_tensors") else ()
        if any(hasattr(part, "_do_not_clear") for part in inner):
            continue
        if hasattr(tensor, "clear"):
            tensor.clear()
        else:
            release(tensor)


def clear_mxfp8(self: Any) -> None:
    for name in (
        "_rowwise_data",
        "_columnwise_data",
        "_rowwise_scale_inv",
        "_columnwise_scale_inv",
    ):
        part = getattr(self, name)
        if part is not None:
            release(part)


@functools.cache
def no_elements() -> torch.Tensor:
    return torch.empty(0)


def make_empty(module: ModuleType, original: Any) -> Any:
    del module

    @functools.wraps(original)
    def make_empty(self: Any, shape: Any, *, device: Any = None, **options: Any) -> Any:
        device = default_device() if device is None else device
        return original(self, shape, device=device, **options)

    return make_empty


def alloc_tensors(module: ModuleType, original: Any) -> Any:
    del module

    @functools.wraps(original)
    def alloc_tensors(self: Any, shape: Any, *, device: Any = None) -> Any:
        return original(self, shape, device=default_device() if device is None else device)

    return alloc_tensors


@functools.cache
def cublas_workspace(device: int | None, ub: bool, grouped_gemm: bool) -> Any:
    del device, ub
    byte = torch.empty(1, dtype=torch.uint8)
    return [byte] if grouped_gemm else byte


def from_mxfp8(module: ModuleType, original: Any) -> Any:
    del original

    def forward(ctx: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
        del ctx
        data = tensor._rowwise_data if tensor._rowwise_data is not None else tensor._columnwise_data
        if data is None:
            raise ValueError("MXFP8 tensor has neither row-wise nor column-wise data")
        if data.numel() == 0:
            return memory.empty(tensor.size(), dtype, data.device)
        return module.tex.dequantize(tensor, module.torch_to_transformer_engine_dtype[dtype])

    return staticmethod(forward)


@functools.cache
def dummy_wgrad(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return memory.empty(shape, dtype, device)


def get_dummy_wgrad(shape: Sequence[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """Return a placeholder gradient where tensors go by default, over memory that shapes share."""
    dummy = dummy_wgrad(tuple(shape), dtype, default_device())
    if zero:
        dummy.zero_()
    return dummy.detach()


_ADDED = "grad_added_to_main_grad"


def dummy_wgrads_for_params(weight_params: list[Any]) -> list[torch.Tensor | None]:
    """Return what autograd gets for parameters whose gradient went to `main_grad`.

    Each is a tensor of its own, over memory that parameters of one shape share: autograd takes a
    tensor that nobody else holds as it is, and copies any other.
    """
    dummies: list[torch.Tensor | None] = []
    shape = dtype = device = None
    dummy, clean = no_elements(), False
    for param in weight_params:
        # Not hasattr alone: a tensor is slow to say that it lacks something.
        if _ADDED not in param.__dict__ and not hasattr(param, _ADDED):
            dummies.append(None)
            continue
        param.grad_added_to_main_grad = True
        # Most parameters are like the one before.
        if param.shape != shape or param.dtype is not dtype or param.device != device:
            shape, dtype, device = param.shape, param.dtype, param.device
            dummy, clean = dummy_wgrad(shape, dtype, device), False
        if not clean and getattr(param, "zero_out_wgrad", False):
            dummy.zero_()
            clean = True
        # A new tensor over the same memory, like `detach`, in a third of the time.
        dummies.append(dummy.data)
    return dummies
