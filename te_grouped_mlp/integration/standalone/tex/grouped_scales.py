# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""tex functions that make grouped MXFP8 storage ready for a GEMM, in place."""

from __future__ import annotations

import math
from typing import Any

import torch

from te_grouped_mlp.integration.standalone import on_gpu
from te_grouped_mlp.integration.standalone.tex import mxfp8, rules, splits
from te_grouped_mlp.integration.standalone.tex.codes import COLUMN, ROW
from te_grouped_mlp.integration.standalone.tex.contract import (
    Arguments,
    Refusal,
    Rule,
    Size,
    TeDType,
    own,
    tex_function,
)
from te_grouped_mlp.integration.standalone.tex.grouped_storage import (
    group_dequantize,
    member_scales,
)
from te_grouped_mlp.op.tensors import memory


def _swizzle_direction(grouped: Any, axis: int) -> torch.Tensor:
    """Return swizzled scales: of one matrix for given row counts, else padded for each group."""
    rows, columns = grouped.logical_shape
    if grouped.first_dims is not None:
        scale = rules.scale_of(grouped, axis)
        assert scale is not None
        return mxfp8.run_swizzle(scale.view(torch.uint8), axis, rows, columns, grouped.first_dims)
    groups = int(grouped.num_tensors)
    shape = mxfp8.scale_shape(rows // groups, columns, axis)
    parts = member_scales(grouped, axis)
    missing = shape[0] - parts.shape[1]
    if missing:
        parts = torch.nn.functional.pad(parts, (0, 0, 0, missing))
    # The outer index of a swizzled layout is the data's column for column-wise scales.
    outer = shape[0] if axis == ROW else shape[1]
    out = memory.empty((groups * outer, math.prod(shape) // outer), torch.uint8, parts.device)
    if on_gpu.serves(parts):
        on_gpu.block_scale().swizzle(
            parts.reshape(-1), None, rows, columns, out, axis_column=axis == COLUMN, members=groups
        )
    else:
        swizzled = [mxfp8.run_swizzle(part, axis, rows // groups, columns) for part in parts]
        torch.stack(swizzled, out=out.view(groups, *shape))
    return out


def _swizzles(a: Arguments) -> bool:
    """Whether a call has anything to do; upstream looks at nothing else before."""
    tensor = a["tensor"]
    if tensor._with_gemm_swizzled_scales or rules.class_problem("", tensor.quantizer) is not None:
        return False
    return bool(_wanted(tensor, a["rowwise"], a["columnwise"]))


def _wanted(tensor: Any, rowwise: bool, columnwise: bool) -> list[int]:
    chosen = ((ROW, rowwise), (COLUMN, columnwise))
    return [axis for axis, wanted in chosen if wanted and rules.scale_of(tensor, axis) is not None]


def _where_it_swizzles(refusal: Refusal) -> Refusal:
    def rule(a: Arguments) -> str | None:
        return refusal.rule(a) if _swizzles(a) else None

    return Refusal(refusal.name, refusal.source, rule, refusal.error)


@tex_function(
    *map(
        _where_it_swizzles,
        (
            rules.storage_tables("tensor"),
            rules.storage_scales("tensor"),
            rules.storage_counts("tensor"),
        ),
    )
)
def grouped_swizzle_for_gemm(tensor: Any, rowwise: bool, columnwise: bool) -> None:
    """Swizzle the wanted directions of grouped MXFP8 storage, in place.

    The storage gets new scale buffers; a direction that is not swizzled is set to None, since one
    flag tells the layout of both. Nothing happens for other formats, for scales that are swizzled
    already, or if no wanted direction has scales.
    """
    if not _swizzles({"tensor": tensor, "rowwise": rowwise, "columnwise": columnwise}):
        return
    axes = _wanted(tensor, rowwise, columnwise)
    row, column = (
        _swizzle_direction(tensor, axis) if axis in axes else None for axis in (ROW, COLUMN)
    )
    tensor.scale_inv, tensor.columnwise_scale_inv = row, column
    tensor._with_gemm_swizzled_scales = True


def _has(storage: Any, axis: int) -> bool:
    return axis in rules.directions(storage) and rules.scale_of(storage, axis) is not None


def _row_data(a: Arguments) -> str | None:
    return None if _has(a["grouped_x"], ROW) else "grouped_x has no row-wise data and scales"


def _same_format(a: Arguments) -> str | None:
    has, wanted = a["grouped_x"].quantizer, a["quantizer"]
    if type(has) is type(wanted) and int(has.dtype) == int(wanted.dtype):
        return None
    return f"grouped_x was quantized by {has!r}; allowed: the format of {wanted!r}"


def _swizzled_column(a: Arguments) -> str | None:
    grouped = a["grouped_x"]
    if not grouped._with_gemm_swizzled_scales or not a["quantizer"].columnwise_usage:
        return None
    return None if _has(grouped, COLUMN) else "swizzled grouped_x has no column-wise data"


def _swizzled_values(a: Arguments) -> str | None:
    if a["grouped_x"]._with_gemm_swizzled_scales and a["return_dequantized"]:
        return "return_dequantized with swizzled scales; allowed: compact ones"
    return None


def _compact_column(a: Arguments) -> str | None:
    grouped = a["grouped_x"]
    if grouped._with_gemm_swizzled_scales or not _has(grouped, COLUMN):
        return None
    return "grouped_x has compact column-wise data; allowed: row-wise alone"


def _tiles(a: Arguments) -> str | None:
    rows, columns = a["grouped_x"].logical_shape
    if rows % mxfp8.TILE == 0 and columns % mxfp8.TILE == 0:
        return None
    return f"grouped_x is {rows} x {columns}; allowed: multiples of {mxfp8.TILE}"


def _counts(a: Arguments) -> str | None:
    shape, groups = a["grouped_x"].logical_shape, a["num_tensors"]
    tables = a["first_dims"], a["tensor_offsets"]
    if tables[0] is None and shape[0] % groups:
        return f"grouped_x has {shape[0]} rows; allowed: {groups} equal groups"
    return splits.counts_problem(groups, shape, *tables, mxfp8.TILE)


def _of_compact(name: str, source: str, rule: Rule) -> Refusal:
    """What matters only where kernels run."""

    def compact(a: Arguments) -> str | None:
        return None if a["grouped_x"]._with_gemm_swizzled_scales else rule(a)

    return Refusal(name, source, compact)


_STORAGE = (rules.storage_tables("grouped_x"), rules.storage_scales("grouped_x"))


@tex_function(
    Refusal("row-wise data of grouped_x", "extensions/cast.cpp:843", _row_data),
    Refusal("format of grouped_x", "extensions/cast.cpp:849", _same_format),
    Refusal("column-wise data of ready grouped_x", "extensions/cast.cpp:863", _swizzled_column),
    Refusal("values of ready grouped_x", "extensions/cast.cpp:866", _swizzled_values),
    Refusal("column-wise data of grouped_x", "extensions/cast.cpp:872", _compact_column),
    *rules.quantizer("extensions/cast.cpp:877"),
    _of_compact("extents of grouped_x", "extensions/cast.cpp:886", _tiles),
    # The fused kernel of 2.20.2 reads neither; the chain of kernels, which is all that 2.19.0 has,
    # asks for both.
    *(_of_compact(r.name, r.source, r.rule) for r in _STORAGE),
    *(_of_compact(r.name, r.source, r.rule) for r in rules.TABLES),
    own("counts", lambda a: None if a["grouped_x"]._with_gemm_swizzled_scales else _counts(a)),
)
def group_requantize_inplace(
    grouped_x: Any,
    quantizer: Any,
    num_tensors: Size,
    first_dims: torch.Tensor | None,
    otype: TeDType,
    tensor_offsets: torch.Tensor | None = None,
    return_dequantized: bool = False,
) -> torch.Tensor | None:
    """Make row-wise MXFP8 storage ready for the GEMMs: swizzle it, add column-wise data if wanted.

    Args:
        grouped_x: Storage with row-wise data and compact scales and no column-wise data (or one
            that is ready: then nothing happens). Its buffers are not written; it gets new ones.
        quantizer: Says whether column-wise data are wanted. Not changed.
        num_tensors, first_dims, tensor_offsets: The groups, as in `group_quantize`.
        otype: TE's dtype through which the values pass.
        return_dequantized: Also return the values.

    Returns:
        None, or the (rows, columns) values, unwritten past the groups.
    """
    del tensor_offsets
    if grouped_x._with_gemm_swizzled_scales:
        return None
    rows, columns = grouped_x.logical_shape
    counts = splits.split_sizes(num_tensors, rows, first_dims, grouped_x.rowwise_data.device)
    values = None
    if quantizer.columnwise_usage or return_dequantized:
        values = group_dequantize(grouped_x, otype).rowwise_data.view(rows, columns)
    row_scale = grouped_x.scale_inv.contiguous().view(torch.uint8)
    grouped_x.scale_inv = mxfp8.run_swizzle(row_scale.view(-1), ROW, rows, columns, counts)
    grouped_x._with_gemm_swizzled_scales = True
    if quantizer.columnwise_usage:
        column_only = quantizer.copy()
        column_only.set_usage(rowwise=False, columnwise=True)
        device = row_scale.device
        buffers = mxfp8.allocate((rows, columns), column_only, flat=True, device=device)
        mxfp8.run_quantize(values, buffers, column_only, counts, swizzled=True)
        grouped_x.columnwise_data = buffers.column_data
        grouped_x.columnwise_scale_inv = buffers.column_scale
    return values if return_dequantized else None
