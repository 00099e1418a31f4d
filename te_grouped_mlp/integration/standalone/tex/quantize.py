# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex functions that make dense MXFP8 tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from te_grouped_mlp.integration.standalone.tex import mxfp8, rules
from te_grouped_mlp.integration.standalone.tex.codes import COLUMN, ROW
from te_grouped_mlp.integration.standalone.tex.contract import (
    Arguments,
    Refusal,
    Size,
    own,
    tex_function,
)
from te_grouped_mlp.integration.standalone.tex.dense_storage import (
    SLOTS,
    is_mxfp8,
    slots,
    stride_problem,
)
from te_grouped_mlp.op.kernels import group_reductions


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


def _coerce(output: Any, quantizer: Any, device: torch.device) -> mxfp8.Buffers:
    """Give an existing MXFP8 tensor the buffers that the quantizer wants, keeping what it has."""
    shape = slots(output)[0].shape
    fresh = mxfp8.allocate(shape, quantizer, flat=False, device=device)
    wanted = {
        "_rowwise_data": fresh.row_data,
        "_rowwise_scale_inv": fresh.row_scale,
        "_columnwise_data": fresh.column_data,
        "_columnwise_scale_inv": fresh.column_scale,
    }
    for name, new in wanted.items():
        if new is None or getattr(output, name) is None:
            setattr(output, name, new)
    output._fp8_dtype = quantizer.dtype
    output._with_gemm_swizzled_scales = bool(quantizer.optimize_for_gemm)
    return mxfp8.Buffers(*(getattr(output, name) for name in wanted))


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


def _extents(a: Arguments) -> tuple[int, int]:
    shape = a["tensor"].shape
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def _mxfp8_output(a: Arguments) -> str | None:
    output = a["output"]
    if output is None or is_mxfp8(output):
        return None
    return f"output is a {type(output).__name__}; allowed: an MXFP8 tensor"


def _output_data(a: Arguments) -> str | None:
    if a["output"] is None or slots(a["output"]):
        return None
    return "output has no data; allowed: at least one direction"


def _output_shape(a: Arguments) -> str | None:
    shapes = set() if a["output"] is None else {tuple(data.shape) for data in slots(a["output"])}
    if shapes <= {tuple(a["tensor"].shape)}:
        return None
    return f"output has shape {sorted(shapes)}; allowed: {tuple(a['tensor'].shape)}"


def _output_scales(a: Arguments) -> str | None:
    """Those that stay: what is missing is allocated, what is not wanted is dropped."""
    output, quantizer = a["output"], a["quantizer"]
    if output is None:
        return None
    usages = ((ROW, quantizer.rowwise_usage), (COLUMN, quantizer.columnwise_usage))
    for axis, wanted in usages:
        scale = getattr(output, f"{SLOTS[axis]}_scale_inv")
        shape = mxfp8.scale_shape(*_extents(a), axis)
        found = shape if scale is None or not wanted else tuple(scale.shape)
        if found != shape:
            return f"output has {rules.WORDS[axis]} scales of shape {found}; allowed: {shape}"
    return None


def _output_strides(a: Arguments) -> str | None:
    return None if a["output"] is None else stride_problem("output", a["output"])


def _no_dimensions(a: Arguments) -> str | None:
    return None if a["tensor"].dim() else "tensor has no dimensions; allowed: at least one"


@tex_function(
    *rules.quantizer(),
    rules.high_precision("tensor"),
    own("dimensions of tensor", _no_dimensions),
    rules.whole_blocks(_extents, "quantizer.cpp:1514"),
    rules.flag("noop"),
    Refusal("class of output", "quantizer.cpp:1727", _mxfp8_output),
    Refusal("data of output", "quantizer.cpp:1744", _output_data),
    Refusal("shape of output", "quantizer.cpp:1752", _output_shape),
    Refusal("scales of output", "common/transformer_engine.cpp:98", _output_scales),
    own("strides of output", _output_strides),
)
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
        noop: One fp32 number; unless it is 0, nothing is written. On a GPU the kernel reads it.

    Returns:
        `output`, or a new `MXFP8TensorStorage` (internal quantizer) or `MXFP8Tensor`.
    """
    shape = tuple(tensor.shape)
    if output is None:
        buffers = mxfp8.allocate(shape, quantizer, flat=False, device=tensor.device)
        result = _make_tensor(shape, tensor.dtype, quantizer, buffers)
    else:
        buffers, result = _coerce(output, quantizer, tensor.device), output
    matrix = tensor.detach().reshape(math.prod(shape[:-1]), shape[-1])
    swizzled = bool(quantizer.optimize_for_gemm)
    mxfp8.run_quantize(matrix, _as_bytes(buffers), quantizer, noop=noop, swizzled=swizzled)
    return result


@tex_function(
    *rules.quantizer(optional=True),
    rules.high_precision("input"),
    own(
        "dimensions of input",
        lambda a: None if a["input"].dim() else "input has no dimensions; allowed: at least one",
    ),
)
def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:  # the binding's name
    """Sum a tensor over all but its last dimension and quantize it.

    Returns:
        [(columns,) sums in `input.dtype`, added in fp32 in the order of `group_reductions`; what
        `quantize` returns, or `input` without a quantizer].
    """
    quantized = input.contiguous() if quantizer is None else quantize(input, quantizer)
    matrix = input.detach().reshape(math.prod(input.shape[:-1]), input.shape[-1])
    return [group_reductions.column_sums(matrix)[0].to(input.dtype), quantized]


def _shape_extents(a: Arguments) -> tuple[int, int]:
    sizes = [int(size) for size in a["shape"]]
    return (math.prod(sizes[:-1]), sizes[-1]) if sizes else (1, 1)


@tex_function(
    *rules.quantizer(),
    rules.whole_blocks(_shape_extents, "quantizer.cpp:1514"),
)
def create_empty_quantized_tensor(
    quantizer: Any,
    shape: Sequence[Size],
    dtype: torch.dtype,
    device: torch.device,
    pin_memory: bool,
) -> Any:
    """Make an MXFP8 tensor of a shape whose bytes are unwritten. `pin_memory` has no effect."""
    del pin_memory
    buffers = mxfp8.allocate(shape, quantizer, flat=False, device=device)
    return _make_tensor(shape, dtype, quantizer, buffers)


def _one_quantizer_each(a: Arguments) -> str | None:
    counts = len(a["split_sections"]), len(a["quantizer_list"])
    if counts[0] == counts[1]:
        return None
    return f"split_sections has {counts[0]} entries, quantizer_list {counts[1]}; allowed: as many"


def _sections_fit(a: Arguments) -> str | None:
    sections, shape = [int(section) for section in a["split_sections"]], a["tensor"].shape
    if not sections or (shape and sum(sections) <= shape[0]):
        return None
    return f"split_sections is {sections}; tensor has shape {tuple(shape)}"


@tex_function(
    Refusal("number of quantizers", "extensions/cast.cpp:2035", _one_quantizer_each),
    Refusal("sum of sections", "extensions/cast.cpp:2060", _sections_fit),
)
def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[Size],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Split a tensor along its first dimension and quantize each part on its own.

    Args:
        tensor: fp32, fp16 or bf16, at least two dimensions.
        split_sections: Row counts, one for each quantizer; rows past their sum are not read.
        quantizer_list: One quantizer for each part.
        disable_bulk_allocation: No effect: each part owns its buffers.

    Returns:
        One quantized tensor for each part, empty parts included.
    """
    del disable_bulk_allocation
    sections = [int(section) for section in split_sections]
    parts = torch.split(tensor[: sum(sections)], sections) if sections else ()
    return [quantize(part, one) for part, one in zip(parts, quantizer_list, strict=True)]
