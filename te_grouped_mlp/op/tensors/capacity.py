# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""How many bytes a tensor really has. Nothing that takes an address trusts a shape alone.

A tensor keeps its shape when its storage shrinks: FSDP frees the storages of weights, and anyone
may resize one. Whoever reads by address (C++, Triton, CuTe DSL, the cuDNN frontend) would read on.
No function here synchronises or reads an element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Span = tuple[int, int]
"""An address, and how many bytes may be used from there on."""

BYTES = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)
"""Types of MXFP8 data."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SOURCE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}


def extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    size: int = tensor.nbytes
    if size and not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((length - 1) * stride for length, stride in steps)
        size = (last + 1) * tensor.element_size()
    return size


def held(tensor: torch.Tensor) -> int:
    """Return the bytes that a tensor's storage has from the tensor's first element on.

    For a subclass that has its memory elsewhere: what its shape takes.
    """
    kind = type(tensor)
    if kind not in _PLAIN and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return extent(tensor)
    rest: int = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return max(rest, 0)


def span(tensor: torch.Tensor | None, skip: int = 0) -> Span | None:
    """Return a tensor's memory as the functions of `_C` take it.

    Args:
        tensor: On the host, any strides; None for what is not wanted.
        skip: Bytes at its beginning to leave out; they may be more than it has.

    Returns:
        None for None. The bytes end where the tensor ends, or earlier where its storage does.
    """
    if tensor is None:
        return None
    return tensor.data_ptr() + skip, min(extent(tensor), held(tensor)) - skip


def source_code(dtype: torch.dtype) -> int:
    """Return the number by which the functions of `_C` know a dtype; TypeError for any other."""
    code = _SOURCE_CODES.get(dtype)
    if code is None:
        raise TypeError(f"dtype is {dtype}; allowed: {', '.join(map(str, _SOURCE_CODES))}")
    return code


def require_memory(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor's storage covers it; for a quantized tensor, those of its parts.

    Raises:
        ValueError: Its storage was freed, or is shorter; or it has no storage of its own (sparse).
    """
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} has layout {tensor.layout}; allowed: {torch.strided}")
    if type(tensor) in _PLAIN and tensor.is_contiguous():
        # The usual case in one line: a step asks two dozen tensors.
        end = tensor.nbytes + tensor.storage_offset() * tensor.element_size()
        if tensor.untyped_storage().nbytes() >= end:
            return
    for part in tensors_in(tensor):
        needed = extent(part)
        if held(part) < needed:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} has {held(part)} bytes of memory; allowed: "
                f"at least {needed} (its storage was freed or resized)"
            )


def require(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check everything that a kernel takes on trust but strides: `require_kind` and memory.

    Raises:
        ValueError: The tensor differs, or its storage does not cover it.
    """
    require_kind(name, tensor, shape, dtypes, device)
    require_memory(name, tensor)


def require_kind(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Check what a tensor says of itself.

    Args:
        name: Of the argument, for messages.
        tensor: Any strides.
        shape: That it must have.
        dtypes: It must have one of these.
        device: That it must lie on.

    Raises:
        ValueError: It differs.
    """
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; allowed: {tuple(shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}; allowed: {', '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; allowed: {device}")


def require_bytes(name: str, tensor: torch.Tensor, count: int, device: torch.device) -> None:
    """Check a buffer of one-byte elements whose shape is the caller's own affair.

    Raises:
        ValueError: Its elements are wider, it has fewer than `count`, lies elsewhere, or its
            storage does not cover it.
    """
    if tensor.element_size() != 1:
        raise ValueError(f"{name} is {tensor.dtype}; allowed: uint8, or a format of one byte")
    if tensor.numel() < count:
        raise ValueError(
            f"{name} has {tensor.numel()} bytes (shape {tuple(tensor.shape)}); allowed: at least "
            f"{count}, by the shape"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; allowed: {device}")
    require_memory(name, tensor)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors with memory of their own in an argument.

    Args:
        value: A tensor, one of Transformer Engine's quantized or grouped ones (which keep their
            memory in attributes), a list or tuple of these, or anything else.
    """
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if hasattr(value, "get_data_tensors"):
        return [part for part in vars(value).values() if isinstance(part, torch.Tensor)]
    return [value] if isinstance(value, torch.Tensor) else []
