# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory that a kernel can address, TMA or not: the tensor itself, or a copy.

A built kernel of the frontend refuses every tensor that begins between multiples of 16 bytes, even
a probability; cuBLAS wants as much of scales. A slice of a caller's tensor often begins there.
"""

from __future__ import annotations

import dataclasses

import torch

from te_grouped_mlp.op.tensors.operands import QuantizedCopy

BYTES = 16


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a kernel can address the memory of a tensor."""
    return bool(tensor.data_ptr() % BYTES == 0)


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the values of another, in one piece and aligned; itself if it is so."""
    if tensor.is_contiguous() and is_aligned(tensor):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


writable = readable
"""The same for a buffer that is written: the caller copies back what is not the buffer itself."""


def readable_scales(copy: QuantizedCopy) -> QuantizedCopy:
    """Return a quantized copy whose scales are aligned; itself if they are."""
    if is_aligned(copy.scale):
        return copy
    return dataclasses.replace(copy, scale=copy.scale.clone())
