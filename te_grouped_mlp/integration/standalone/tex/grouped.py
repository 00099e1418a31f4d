# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex functions that make grouped MXFP8 storage: groups packed by rows, all buffers flat.

Group g of a (rows, columns) matrix holds `splits[g]` rows from row `start[g]` on. Rows past the
sum of the splits belong to no group: their data and scales are never read or written.
"""

from __future__ import annotations

from typing import Any

import torch

from te_grouped_mlp.integration.standalone.tex import mxfp8, rules, splits
from te_grouped_mlp.integration.standalone.tex.contract import (
    Arguments,
    Refusal,
    Size,
    own,
    tex_function,
)
from te_grouped_mlp.op.kernels import group_reductions


def _swizzled_groups(a: Arguments) -> str | None:
    """Of whole tiles only: other groups' swizzled scales would overlap."""
    rows, groups = a["tensor"].shape[0], a["num_tensors"]
    quantizer, output = a["quantizer"], a.get("output")
    if splits.whole_tiles(groups, rows, a["first_dims"]):
        return None
    if quantizer.optimize_for_gemm if output is None else output._with_gemm_swizzled_scales:
        return f"swizzled scales of {groups} x {rows // groups} rows; allowed: multiples of 128"
    for axis in () if output is None else rules.directions(output):
        scale = rules.scale_of(output, axis)
        assert scale is not None, "of a direction that it has"
        if scale.numel() != mxfp8.grouped_scale_sizes(output, axis)[-1]:
            return "output has scales padded for each group; allowed: the scales of one matrix"
    return splits.equal_groups_problem(groups, rows, columnwise=quantizer.columnwise_usage)


def _uniform_output(a: Arguments) -> str | None:
    tables = a["first_dims"], a["last_dims"], a["tensor_offsets"]
    if a["output"] is None or all(table is None for table in tables):
        return None
    return "first_dims, last_dims or tensor_offsets is given with output; allowed: None"


def _fitting_output(a: Arguments) -> str | None:
    output = a["output"]
    if output is None:
        return None
    wanted = (a["num_tensors"], tuple(a["tensor"].shape))
    found = (output.num_tensors, tuple(output.logical_shape))
    if found != wanted:
        return f"output is {found[0]} groups of {found[1]}; allowed: {wanted[0]} of {wanted[1]}"
    if output.quantizer is not a["quantizer"]:
        return "output has another quantizer; allowed: the one that made it"
    return rules.storage_problem("output", output, offsets=True)


def _scaled_output(a: Arguments) -> str | None:
    return None if a["output"] is None else rules.storage_scales("output").rule(a)


@tex_function(
    rules.dimensions("tensor", 2, "extensions/cast.cpp:286"),
    *rules.quantizer(),
    *rules.GROUPS,
    rules.flag("noop_flag"),
    Refusal("tables with output", "extensions/cast.cpp:317", _uniform_output),
    Refusal("output", "extensions/cast.cpp:319", _fitting_output),
    Refusal("scales of output", "common/transformer_engine.cpp:341", _scaled_output),
    rules.last_dims("", NotImplementedError),
    own("scales of groups", _swizzled_groups),
)
def group_quantize(
    tensor: torch.Tensor,
    quantizer: Any,
    num_tensors: Size,
    first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None,
    noop_flag: torch.Tensor | None = None,
    output: Any = None,
) -> Any:
    """Quantize each group of a matrix's rows.

    Args:
        tensor: Contiguous (rows, columns) fp32, fp16 or bf16; rows a multiple of 128, columns of
            32.
        quantizer: TE's MXFP8Quantizer; the result keeps this object, not a copy.
        num_tensors: Number of groups, 1 to 64.
        first_dims: int64 (groups,) row counts, multiples of 128, or None for equal groups (of
            multiples of 32 if their scales stay compact).
        last_dims: None.
        tensor_offsets: int64 (groups + 1,) element offsets; None: they follow from `first_dims`.
        noop_flag: One fp32 number; unless it is 0, nothing is written. On a GPU the kernel reads
            it.
        output: Storage of equal groups that this quantizer made: the directions that it has are
            written, its scales in the order that it says. None makes a new one.

    Returns:
        `output`, or a new `GroupedTensorStorage` (internal quantizer) or `GroupedTensor` of
        logical shape (rows, columns), with offsets where there are row counts. The column-wise
        scales restart for each group if swizzled.
    """
    del last_dims
    if output is None:
        output = _make_grouped(tensor, quantizer, num_tensors, first_dims, tensor_offsets)
    _fill(output, tensor, quantizer, noop_flag)
    return output


def _fill(
    output: Any, tensor: torch.Tensor, quantizer: Any, noop: torch.Tensor | None = None
) -> None:
    """Quantize a matrix into storage of its groups, in the directions that it has."""
    counts, rows = None, tensor.shape[0]
    if splits.whole_tiles(output.num_tensors, rows, output.first_dims):
        counts = splits.split_sizes(output.num_tensors, rows, output.first_dims, tensor.device)
    names = ("rowwise_data", "scale_inv", "columnwise_data", "columnwise_scale_inv")
    parts = (getattr(output, name) for name in names)
    # As flat bytes: another producer may have typed them.
    buffers = mxfp8.Buffers(*(p if p is None else p.view(torch.uint8).view(-1) for p in parts))
    swizzled = bool(output._with_gemm_swizzled_scales)
    mxfp8.run_quantize(tensor.detach(), buffers, quantizer, counts, noop, swizzled=swizzled)


def _make_grouped(
    tensor: torch.Tensor,
    quantizer: Any,
    num_tensors: int,
    first_dims: torch.Tensor | None,
    tensor_offsets: torch.Tensor | None,
) -> Any:
    """Return new storage whose bytes are unwritten; offsets follow from row counts."""
    from transformer_engine.pytorch.tensor.grouped_tensor import GroupedTensor
    from transformer_engine.pytorch.tensor.storage.grouped_tensor_storage import (
        GroupedTensorStorage,
    )

    rows, columns = tensor.shape
    buffers = mxfp8.allocate((rows, columns), quantizer, flat=True, device=tensor.device)
    if tensor_offsets is None:
        tensor_offsets = splits.element_offsets(first_dims, columns)
    grouped_class = GroupedTensorStorage if quantizer.internal else GroupedTensor
    return grouped_class(
        shape=list(tensor.shape),
        dtype=tensor.dtype,
        num_tensors=num_tensors,
        quantizer=quantizer,
        data=buffers.row_data,
        columnwise_data=buffers.column_data,
        scale_inv=buffers.row_scale,
        columnwise_scale_inv=buffers.column_scale,
        first_dims=first_dims,
        tensor_offsets=tensor_offsets,
        with_gemm_swizzled_scales=bool(quantizer.optimize_for_gemm),
    )


def _sums_of_whole_tiles(a: Arguments) -> str | None:
    rows, groups = a["tensor"].shape[0], a["num_tensors"]
    if splits.whole_tiles(groups, rows, a["first_dims"]):
        return None
    return f"first_dims is None: {groups} x {rows // groups} rows; allowed: multiples of 128"


@tex_function(
    rules.dimensions("tensor", 2, "extensions/cast.cpp:644"),
    rules.last_dims("extensions/cast.cpp:645", RuntimeError),
    *rules.quantizer("extensions/cast.cpp:658"),
    *rules.GROUPS,
    own("sums of groups", _sums_of_whole_tiles),
)
def bgrad_group_quantize(
    tensor: torch.Tensor,
    quantizer: Any,
    num_tensors: Size,
    first_dims: torch.Tensor | None,
    last_dims: torch.Tensor | None = None,
    tensor_offsets: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor]:
    """Quantize each group of rows and sum it down its columns.

    Returns:
        What `group_quantize` returns, and (groups, columns) sums in `tensor.dtype`: added in fp32
        in the order of `group_reductions`, rounded once. Rows past the groups are not read.
    """
    del last_dims
    grouped = _make_grouped(tensor, quantizer, num_tensors, first_dims, tensor_offsets)
    _fill(grouped, tensor, quantizer)
    counts = splits.split_sizes(num_tensors, tensor.shape[0], first_dims, tensor.device)
    return grouped, group_reductions.column_sums(tensor.detach(), counts).to(tensor.dtype)
