# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Dtypes as torch, Transformer Engine (TE) and our C++ kernels write them."""

from __future__ import annotations

from typing import Any

import torch

from te_grouped_mlp.integration.standalone.tex.enums import DType
from te_grouped_mlp.op.tensors.capacity import source_code

ROW, COLUMN = 0, 1

_FP8_CODES = {int(DType.kFloat8E4M3): 0, int(DType.kFloat8E5M2): 1}
_TORCH_DTYPES = {
    int(DType.kByte): torch.uint8,
    int(DType.kInt32): torch.int32,
    int(DType.kFloat32): torch.float32,
    int(DType.kFloat16): torch.float16,
    int(DType.kBFloat16): torch.bfloat16,
    int(DType.kFloat8E4M3): torch.float8_e4m3fn,
    int(DType.kFloat8E5M2): torch.float8_e5m2,
}


def fp8_code(dtype: Any) -> int:
    """Return the kernels' code of an FP8 format given as TE's dtype; TypeError for any other."""
    code = _FP8_CODES.get(int(dtype))
    if code is None:
        raise TypeError(f"FP8 dtype is {dtype!r}; allowed: kFloat8E4M3, kFloat8E5M2")
    return code


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype of a TE dtype (enum or integer); TypeError if there is none."""
    found = _TORCH_DTYPES.get(int(dtype))
    if found is None:
        raise TypeError(f"Transformer Engine dtype is {dtype!r}; torch has no such dtype")
    return found


def high_precision_dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype of a TE dtype that a dequantized result may have."""
    found = torch_dtype(dtype)
    source_code(found)
    return found
