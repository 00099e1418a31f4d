# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex functions over dense MXFP8 tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from te_grouped_mlp.standalone import column_sums
from te_grouped_mlp.standalone.tex import mxfp8
from te_grouped_mlp.standalone.tex.codes import COLUMN, ROW, fp8_code, high_precision_dtype
from te_grouped_mlp.standalone.tex.guard import tex_function_on_gpu_too


def _make_tensor(
    shape: Sequence[int], dtype: torch.dtype, quantizer: Any, buffers: mxfp8.Buffers
) -> Any:
    """Wrap buffers in TE's storage (for an internal quantizer) or tensor."""
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Tensor
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    options = {
        "rowwise_data": buffers.row_data,
        "rowwise_scale_inv": buffers.row_scale,
        "columnwise_data": buffers.column_data,
        "columnwise_scale_inv": buffers.column_scale,
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
        "with_gemm_swizzled_scales": bool(quantizer.optimize_for_gemm),
    }
    if quantizer.internal:
        return MXFP8TensorStorage(**options, fake_dtype=dtype)
    given = (
        buffers.row_data,
        buffers.column_data,
    )
    device = next((data.device for data in given if data is not None), torch.device("cpu"))
    return MXFP8Tensor(shape=list(shape), dtype=dtype, device=device, **options)


def _coerce(
    output: Any, shape: Sequence[int], quantizer: Any, device: torch.device
) -> mxfp8.Buffers:
    """Give an existing MXFP8 tensor the buffers that the quantizer wants, reusing what fits."""
    fresh = mxfp8.allocate(shape, quantizer, flat=False, device=device)
    wanted = {
        "_rowwise_data": fresh.row_data,
        "_rowwise_scale_inv": fresh.row_scale,
        "_columnwise_data": fresh.column_data,
        "_columnwise_scale_inv": fresh.column_scale,
    }
    for name, new in wanted.items():
        old = getattr(output, name)
        if new is not None and old is not None:
            if name.endswith("data") and tuple(old.shape) != tuple(new.shape):
                raise ValueError(
                    f"quantize: output has shape {tuple(old.shape)}, tensor {tuple(new.shape)}"
                )
            if tuple(old.shape) == tuple(new.shape) and old.is_contiguous():
                new = old
        setattr(output, name, new)
    output._fp8_dtype = quantizer.dtype
    output._with_gemm_swizzled_scales = bool(quantizer.optimize_for_gemm)
    return mxfp8.Buffers(
        output._rowwise_data,
        output._rowwise_scale_inv,
        output._columnwise_data,
        output._columnwise_scale_inv,
    )


def _as_bytes(buffers: mxfp8.Buffers) -> mxfp8.Buffers:
    """View every buffer as bytes: another producer may have typed them as float8."""

    def view(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.view(torch.uint8)

    return mxfp8.Buffers(
        view(buffers.row_data),
        view(buffers.row_scale),
        view(buffers.column_data),
        view(buffers.column_scale),
    )


@tex_function_on_gpu_too
def quantize(
    tensor: torch.Tensor,
    quantizer: Any,
    output: Any = None,
    noop: torch.Tensor | None = None,
) -> Any:
    """Quantize all rows of a tensor as one matrix.

    Args:
        tensor: fp32, fp16 or bf16; the last dimension and the product of the others are multiples
            of 32. Read only.
        quantizer: TE's MXFP8Quantizer.
        output: MXFP8 tensor to write. Its buffers follow the quantizer's usages: a missing one is
            allocated, an unwanted one is dropped. None makes a new one.
        noop: One number; if it is 1, nothing is written. On a GPU the kernel reads it.

    Returns:
        `output`, or a new `MXFP8TensorStorage` (internal quantizer) or `MXFP8Tensor`.
    """
    mxfp8.check_quantizer("quantize", quantizer)
    mxfp8.check_source("quantize", tensor)
    shape = tuple(tensor.shape)
    if not shape:
        raise ValueError("quantize: tensor has no dimensions; MXFP8 needs at least one")
    rows = math.prod(shape[:-1])
    mxfp8.check_blocks("quantize", rows, shape[-1])
    if output is None:
        buffers = mxfp8.allocate(shape, quantizer, flat=False, device=tensor.device)
        result = _make_tensor(shape, tensor.dtype, quantizer, buffers)
    else:
        buffers, result = _coerce(output, shape, quantizer, tensor.device), output
    matrix = tensor.detach().reshape(rows, shape[-1])
    mxfp8.run_quantize(matrix, _as_bytes(buffers), quantizer, noop=noop)
    return result


@tex_function_on_gpu_too
def bgrad_quantize(tensor: torch.Tensor, quantizer: Any) -> tuple[torch.Tensor, Any]:
    """Sum a tensor over all but its last dimension and quantize it.

    Returns:
        (columns,) sums in `tensor.dtype`, added in fp32 in the order of `column_sums`; and what
        `quantize` returns.
    """
    quantized = quantize(tensor, quantizer)
    matrix = tensor.detach().reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    rows = torch.full((1,), matrix.shape[0], dtype=torch.int64, device=matrix.device)
    return column_sums.column_sums(matrix, rows)[0].to(tensor.dtype), quantized


@tex_function_on_gpu_too
def create_empty_quantized_tensor(
    quantizer: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    pin_memory: bool = False,
) -> Any:
    """Make an MXFP8 tensor of a shape whose bytes are unwritten. `pin_memory` has no effect."""
    del pin_memory
    mxfp8.check_quantizer("create_empty_quantized_tensor", quantizer)
    rows = math.prod(int(size) for size in shape[:-1])
    mxfp8.check_blocks("create_empty_quantized_tensor", rows, int(shape[-1]))
    buffers = mxfp8.allocate(shape, quantizer, flat=False, device=device)
    return _make_tensor(shape, dtype, quantizer, buffers)


def dense_operand(function: str, tensor: Any, axis: int) -> mxfp8.Operand:
    """Return one direction of an MXFP8 tensor as a matrix.

    Raises:
        ValueError: The tensor does not hold that direction.
    """
    prefix, words = ("_rowwise", "row-wise") if axis == ROW else ("_columnwise", "column-wise")
    data = getattr(tensor, f"{prefix}_data")
    scale = getattr(tensor, f"{prefix}_scale_inv")
    if data is None or scale is None:
        raise ValueError(f"{function}: the MXFP8 operand has no {words} data and scales")
    columns = data.shape[-1]
    return mxfp8.Operand(
        data=data.contiguous(),
        scale=scale.contiguous(),
        rows=math.prod(data.shape[:-1]),
        columns=columns,
        axis=axis,
        swizzled=bool(tensor._with_gemm_swizzled_scales),
        fp8=fp8_code(tensor._fp8_dtype),
    )


def is_mxfp8(value: Any) -> bool:
    """Return whether a value is TE's MXFP8 tensor or storage."""
    from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage

    return isinstance(value, MXFP8TensorStorage)


@tex_function_on_gpu_too
def dequantize(input: Any, otype: Any) -> torch.Tensor:  # the binding's name
    """Return an MXFP8 tensor's values: row-wise data if it has any, else column-wise.

    Args:
        input: `MXFP8Tensor` or `MXFP8TensorStorage`, scales compact or swizzled.
        otype: TE's dtype of the result (fp32, fp16, bf16).

    Returns:
        A new contiguous tensor of the data's shape, each value rounded once.
    """
    if not is_mxfp8(input):
        raise NotImplementedError(
            f"dequantize with {type(input).__name__}; standalone implements MXFP8"
        )
    axis = ROW if input._rowwise_data is not None else COLUMN
    operand = dense_operand("dequantize", input, axis)
    return operand.dequantize(high_precision_dtype(otype)).view(operand.data.shape)


@tex_function_on_gpu_too
def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Split a tensor along its first dimension and quantize each part on its own.

    Args:
        tensor: fp32, fp16 or bf16, at least two dimensions.
        split_sections: Row counts, one for each quantizer; their sum is the first dimension.
        quantizer_list: One quantizer for each part.
        disable_bulk_allocation: No effect: each part owns its buffers.

    Returns:
        One quantized tensor for each part, empty parts included.
    """
    del disable_bulk_allocation
    sections = [int(section) for section in split_sections]
    if len(sections) != len(quantizer_list):
        raise ValueError(
            f"split_quantize: split_sections has {len(sections)} entries, quantizer_list "
            f"{len(quantizer_list)}"
        )
    if min(sections, default=0) < 0 or sum(sections) != tensor.shape[0]:
        raise ValueError(
            f"split_quantize: split_sections is {sections}; allowed: counts >= 0 with the sum "
            f"{tensor.shape[0]}"
        )
    parts = torch.split(tensor, sections)
    return [quantize(part, one) for part, one in zip(parts, quantizer_list, strict=True)]
