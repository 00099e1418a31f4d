# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Dense MXFP8 tensors read: one direction as an operand, and the values."""

from __future__ import annotations

import math
from typing import Any

import torch

from te_grouped_mlp.integration.standalone.tex import mxfp8, rules
from te_grouped_mlp.integration.standalone.tex.codes import (
    COLUMN,
    ROW,
    fp8_code,
    high_precision_dtype,
)
from te_grouped_mlp.integration.standalone.tex.contract import (
    Arguments,
    Refusal,
    TeDType,
    own,
    tex_function,
)

SLOTS = {ROW: "_rowwise", COLUMN: "_columnwise"}


def is_mxfp8(value: Any) -> bool:
    """Return whether a value is TE's MXFP8 tensor or storage."""
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    return isinstance(value, MXFP8TensorStorage)


def slots(tensor: Any) -> list[torch.Tensor]:
    """Return the data of each direction that an MXFP8 tensor has."""
    parts = [getattr(tensor, f"{prefix}_data") for prefix in SLOTS.values()]
    return [part for part in parts if part is not None]


def scale_problem(name: str, tensor: Any) -> str | None:
    """Say what is wrong with the scales of a dense MXFP8 tensor's data, or return None."""
    for axis, prefix in SLOTS.items():
        data, scale = (getattr(tensor, f"{prefix}_{part}") for part in ("data", "scale_inv"))
        if data is None:
            continue
        if scale is None:
            return f"{name} has {rules.WORDS[axis]} data without scales; allowed: both"
        wanted = mxfp8.scale_shape(math.prod(data.shape[:-1]), data.shape[-1], axis)
        if tuple(scale.shape) != wanted:
            shape = tuple(scale.shape)
            return f"{name} has {rules.WORDS[axis]} scales of shape {shape}; allowed: {wanted}"
    return None


def stride_problem(name: str, tensor: Any) -> str | None:
    """Say which buffer of a dense MXFP8 tensor is not contiguous, or return None."""
    for prefix in SLOTS.values():
        for part in ("data", "scale_inv"):
            found = getattr(tensor, f"{prefix}_{part}")
            if found is not None and not found.is_contiguous():
                return f"{name}.{prefix}_{part} has stride {found.stride()}; allowed: contiguous"
    return None


def dense_operand(tensor: Any, axis: int) -> mxfp8.Operand:
    """Return one direction that an MXFP8 tensor has as a matrix."""
    data = getattr(tensor, f"{SLOTS[axis]}_data")
    scale = getattr(tensor, f"{SLOTS[axis]}_scale_inv")
    columns = data.shape[-1]
    return mxfp8.Operand(
        data=data,
        scale=scale,
        rows=math.prod(data.shape[:-1]),
        columns=columns,
        axis=axis,
        swizzled=bool(tensor._with_gemm_swizzled_scales),
        fp8=fp8_code(tensor._fp8_dtype),
    )


# The operands of a product: MXFP8, or plain tensors ----------------------------------------------


def operand_shape(value: Any) -> tuple[int, ...]:
    """Return the shape of a dense operand's data."""
    return tuple((slots(value)[0] if is_mxfp8(value) else value).shape)


def extents(value: Any) -> tuple[int, int]:
    """Return the extents of a dense operand's data as a matrix."""
    shape = operand_shape(value)
    return math.prod(shape[:-1]), shape[-1]


def known_operand(name: str, value: Any) -> str | None:
    """Say that standalone does not read such an operand, or return None."""
    if is_mxfp8(value):
        return None
    if not isinstance(value, torch.Tensor) or hasattr(value, "get_data_tensors"):
        return f"{name} is a {type(value).__name__}; standalone implements MXFP8 and plain tensors"
    if value.dtype not in rules.HIGH_PRECISION:
        return f"{name} is {value.dtype}; allowed: float32, float16, bfloat16"
    return None


def usable_operand(name: str, value: Any, axis: int) -> str | None:
    """Say that an operand has not the direction that is read, or not its scales; or None."""
    if not is_mxfp8(value):
        return None
    if getattr(value, f"{SLOTS[axis]}_data") is None:
        return f"{name} has no {rules.WORDS[axis]} data; allowed: those that the layout reads"
    return scale_problem(name, value)


def packed_operand(name: str, value: Any) -> str | None:
    """Say that an operand is not contiguous, or return None."""
    if is_mxfp8(value):
        return stride_problem(name, value)
    if value.is_contiguous():
        return None
    return f"{name} has stride {tuple(value.stride())}; allowed: contiguous"


# Their values -------------------------------------------------------------------------------------


def _no_input(a: Arguments) -> str | None:
    return "input is None; allowed: an MXFP8 tensor" if a["input"] is None else None


def _mxfp8_input(a: Arguments) -> str | None:
    if is_mxfp8(a["input"]):
        return None
    return f"input is a {type(a['input']).__name__}; standalone implements MXFP8"


def _input_data(a: Arguments) -> str | None:
    return None if slots(a["input"]) else "input has no data; allowed: at least one direction"


def _input_dimensions(a: Arguments) -> str | None:
    found = slots(a["input"])[0].dim()
    return None if found >= 2 else f"input has {found} dimensions; allowed: at least 2"


@tex_function(
    Refusal("no input", "common.cpp:115", _no_input),
    Refusal(
        "class of input",
        "common/cast/dispatch/dequantize.cuh:36",
        _mxfp8_input,
        NotImplementedError,
    ),
    Refusal("data of input", "type_converters.cpp:62", _input_data),
    Refusal("dimensions of input", "common/cast/mxfp8/dequantize_mxfp8.cuh:243", _input_dimensions),
    Refusal(
        "scales of input",
        "common/transformer_engine.cpp:98",
        lambda a: scale_problem("input", a["input"]),
    ),
    own("strides of input", lambda a: stride_problem("input", a["input"])),
    rules.result_dtype("common/cast/mxfp8/dequantize_mxfp8.cuh:255"),
)
def dequantize(input: Any, otype: TeDType) -> torch.Tensor:  # the binding's name
    """Return an MXFP8 tensor's values: row-wise data if it has any, else column-wise.

    Args:
        input: `MXFP8Tensor` or `MXFP8TensorStorage`, scales compact or swizzled.
        otype: TE's dtype of the result (fp32, fp16, bf16).

    Returns:
        A new contiguous tensor of the data's shape, each value rounded once.
    """
    axis = ROW if input._rowwise_data is not None else COLUMN
    operand = dense_operand(input, axis)
    return operand.dequantize(high_precision_dtype(otype)).view(operand.data.shape)
