# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks of what a caller hands in; each raises before any work and names argument and value."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from te_grouped_mlp.op.tensors import capacity

_HOST = torch.device("cpu")
_SPLIT_DTYPES = (torch.int32, torch.int64)
_PROB_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def tokens(name: str, tensor: torch.Tensor, features: int, device: torch.device) -> None:
    """Check a token tensor: its last dimension, dtype and device.

    Raises:
        ValueError: The last dimension is not `features`, the device differs, or there is less
            memory than the shape takes.
        TypeError: The dtype is not a floating-point one.
    """
    if tensor.dim() < 2 or tensor.size(-1) != features:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}; allowed: (..., {features}) with at least "
            "two dimensions"
        )
    if not tensor.dtype.is_floating_point:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: a floating-point dtype")
    if tensor.device != device:
        raise elsewhere(name, tensor, device)
    capacity.require_memory(name, tensor)


def elsewhere(name: str, tensor: torch.Tensor, device: torch.device) -> ValueError:
    """Return the error for a tensor that does not lie on the op's device."""
    return ValueError(f"{name} is on {tensor.device}; allowed: {device}, where the weights are")


def rows(name: str, count: int, multiple: int) -> None:
    """Check the number of token rows.

    Raises:
        ValueError: It is not a multiple of `multiple`.
    """
    if count % multiple:
        raise ValueError(f"{name} has {count} rows; allowed: a multiple of {multiple}")


def split_sizes(
    first: torch.Tensor, second: torch.Tensor, num_groups: int, device: torch.device
) -> None:
    """Check the two split tensors that FC1 and FC2 receive.

    Raises:
        RuntimeError: They are not the same tensor.
        ValueError: The number of splits is not `num_groups`, they lie on a third device, or there
            is less memory than they take.
        TypeError: The dtype is not int32 or int64.
    """
    if first.size() != second.size() or first.data_ptr() != second.data_ptr():
        raise RuntimeError(
            "split_sizes of FC1 and FC2 are different tensors "
            f"({first.numel()} values at {first.data_ptr():#x}, {second.numel()} values at "
            f"{second.data_ptr():#x}); allowed: the same tensor for both"
        )
    if first.dim() != 1:
        raise ValueError(f"split_sizes has shape {tuple(first.shape)}; allowed: ({num_groups},)")
    if first.numel() != num_groups:
        raise ValueError(f"split_sizes has {first.numel()} values; allowed: {num_groups}")
    if first.dtype not in _SPLIT_DTYPES:
        raise TypeError(f"split_sizes has dtype {first.dtype}; allowed: int32 or int64")
    if first.device not in (device, _HOST):
        raise ValueError(
            f"split_sizes is on {first.device}; allowed: {device}, where the weights are, or cpu"
        )
    capacity.require_memory("split_sizes", first)


def split_values(values: Sequence[int], buffer_rows: int, multiple: int) -> None:
    """Check split sizes that the host can read.

    Raises:
        ValueError: A split is negative or no multiple of `multiple`, or the sum exceeds the buffer.
    """
    if values and (min(values) < 0 or math.gcd(*values) % multiple):
        wrong = next(i for i, value in enumerate(values) if value < 0 or value % multiple)
        raise ValueError(
            f"split_sizes[{wrong}] is {values[wrong]}; allowed: 0 or a positive multiple of "
            f"{multiple}"
        )
    if sum(values) > buffer_rows:
        raise ValueError(
            f"split_sizes sum to {sum(values)}; allowed: at most {buffer_rows}, the input's rows"
        )


def full_rows(values: Sequence[int], buffer_rows: int, promise: str) -> None:
    """Check the promise that the groups fill the buffer, where the host can read the splits.

    Raises:
        ValueError: They do not.
    """
    if sum(values) != buffer_rows:
        raise ValueError(
            f"split_sizes sum to {sum(values)}, but {promise} says that they fill the "
            f"{buffer_rows} rows of the input"
        )


def probabilities(
    name: str, prob: torch.Tensor, row_count: int, device: torch.device
) -> torch.Tensor:
    """Check one probability per row and return them as a vector.

    Raises:
        ValueError: The number of values is not `row_count`, the device differs, or there is less
            memory than they take.
        TypeError: The dtype is not a floating-point one.
    """
    if prob.numel() != row_count:
        raise ValueError(
            f"{name} has {prob.numel()} values (shape {tuple(prob.shape)}); allowed: {row_count}, "
            "one per row of the input"
        )
    if prob.dtype not in _PROB_DTYPES:
        raise TypeError(
            f"{name} has dtype {prob.dtype}; allowed: float64, float32, bfloat16 or float16"
        )
    if prob.device != device:
        raise elsewhere(name, prob, device)
    capacity.require_memory(name, prob)
    flat = prob.detach()
    if flat.dim() != 1 or not flat.is_contiguous():
        flat = flat.reshape(-1).contiguous()
    # No kernel takes double: a float64 router's values are rounded once, to fp32.
    return flat.float() if flat.dtype == torch.float64 else flat


def same_values(first: torch.Tensor, second: torch.Tensor) -> None:
    """Check that the activation and FC2's bias are given the same probabilities.

    Raises:
        ValueError: They are different tensors: the gradient of the bias scale is part of the
            gradient of the activation's probabilities, so two tensors cannot be told apart.
    """
    flat, other = first.reshape(-1), second.reshape(-1)
    same = first is second or (
        flat.data_ptr() == other.data_ptr()
        and flat.shape == other.shape
        and flat.stride() == other.stride()
        and first.dtype == second.dtype
        and first.requires_grad == second.requires_grad
    )
    if not same:
        raise ValueError(
            "the scale of FC2's bias is another tensor than the probabilities of the activation; "
            "allowed: the same tensor for both when scale_bias is set"
        )


def buffer(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    apart_from: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Check a caller's output buffer and return it.

    Raises:
        ValueError: Shape, device, memory, strides or requires_grad do not fit, or it overlaps a
            tensor of `apart_from`.
        TypeError: The dtype differs.
    """
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; allowed: {shape}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {dtype}")
    if tensor.device != device:
        raise elsewhere(name, tensor, device)
    capacity.require_memory(name, tensor)
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; allowed: contiguous")
    if tensor.requires_grad:
        raise ValueError(f"{name} requires a gradient; allowed: a tensor that does not (detach it)")
    for other in apart_from:
        if _overlap(tensor, other):
            raise ValueError(f"{name} shares memory with a tensor that the op reads")
    return tensor


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether the address ranges of two tensors overlap."""
    if not first.numel() or not second.numel():
        return False
    start, other = first.data_ptr(), second.data_ptr()
    limits = start + capacity.extent(first), other + capacity.extent(second)
    return bool(start < limits[1] and other < limits[0])


def gradient(name: str, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Check that a gradient buffer fits its weight and can hold a gradient.

    Raises:
        RuntimeError: It has another shape, lies elsewhere, its dtype is no floating-point one, or
            there is less memory than its shape takes.
    """
    if tensor.shape != shape:
        raise RuntimeError(f"{name} has shape {tuple(tensor.shape)}; allowed: {shape}")
    if tensor.device != device:
        raise RuntimeError(f"{name} is on {tensor.device}; allowed: {device}, as its weight")
    if not tensor.dtype.is_floating_point:
        raise RuntimeError(f"{name} has dtype {tensor.dtype}; allowed: a floating-point dtype")
    try:
        capacity.require_memory(name, tensor)
    except ValueError as error:
        raise RuntimeError(str(error)) from None
