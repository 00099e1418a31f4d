# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The refusals that several tex functions share.

Lines of the core library (`common/`) that is not part of the extension's source are those of its
development version 2.20.0.dev0.
"""

from __future__ import annotations

from typing import Any

import torch

from te_grouped_mlp.integration.standalone.tex import mxfp8, splits
from te_grouped_mlp.integration.standalone.tex.codes import COLUMN, ROW
from te_grouped_mlp.integration.standalone.tex.contract import Arguments, Refusal, own
from te_grouped_mlp.op.formats import MAX_QUANTIZED_GROUPS

HIGH_PRECISION = (torch.float32, torch.float16, torch.bfloat16)
_OTYPES = {4: torch.float32, 5: torch.float16, 6: torch.bfloat16}
_METADATA = "quantizer.cpp:109"
WORDS = {ROW: "row-wise", COLUMN: "column-wise"}


def dimensions(name: str, count: int, source: str) -> Refusal:
    """The tensor `name` has another number of dimensions."""

    def rule(a: Arguments) -> str | None:
        found = a[name].dim()
        return None if found == count else f"{name} has {found} dimensions; allowed: {count}"

    return Refusal(f"dimensions of {name}", source, rule)


def high_precision(name: str, source: str = "common.h:517") -> Refusal:
    """The tensor `name` is quantized, or not of fp32, fp16 or bf16."""

    def rule(a: Arguments) -> str | None:
        tensor = a[name]
        if hasattr(tensor, "get_data_tensors"):
            return f"{name} is a {type(tensor).__name__}; dequantize it first"
        if tensor.dtype not in HIGH_PRECISION:
            return f"{name} is {tensor.dtype}; allowed: float32, float16, bfloat16"
        return None

    return Refusal(f"dtype of {name}", source, rule)


def result_dtype(source: str) -> Refusal:
    """`otype` is none of fp32, fp16 and bf16."""

    def rule(a: Arguments) -> str | None:
        if int(a["otype"]) in _OTYPES:
            return None
        return f"otype is {a['otype']!r}; allowed: kFloat32, kFloat16, kBFloat16"

    return Refusal("otype", source, rule)


def contiguous(name: str) -> Refusal:
    """The tensor `name` has gaps or another order: upstream reads it as if it had not."""

    def rule(a: Arguments) -> str | None:
        tensor = a[name]
        if tensor is None or tensor.is_contiguous():
            return None
        strides = tuple(tensor.stride())
        return f"{name} has stride {strides}; allowed: contiguous, as the extension reads it"

    return own(f"stride of {name}", rule)


def quantizer(unknown: str = "common.cpp:77", *, optional: bool = False) -> tuple[Refusal, ...]:
    """`quantizer` is of no class that upstream knows, or of one that standalone has not.

    Upstream compares the exact class: an instance of a subclass is unknown.
    """

    def is_unknown(a: Arguments) -> str | None:
        found = a["quantizer"]
        if (found is None and optional) or type(found) in _quantizer_classes():
            return None
        return f"quantizer is a {type(found).__name__}; allowed: MXFP8Quantizer, no subclass"

    def is_missing(a: Arguments) -> str | None:
        found = a["quantizer"]
        if found is None or type(found) is _quantizer_classes()[0]:
            return None
        return f"quantizer is a {type(found).__name__}; standalone implements MXFP8Quantizer"

    return (
        Refusal("class of quantizer", unknown, is_unknown),
        own("format of quantizer", is_missing, NotImplementedError),
    )


def _quantizer_classes() -> tuple[type, ...]:
    from transformer_engine.pytorch import tensor

    return (
        tensor.MXFP8Quantizer,
        tensor.Float8Quantizer,
        tensor.Float8CurrentScalingQuantizer,
        tensor.Float8BlockQuantizer,
        tensor.NVFP4Quantizer,
    )


def class_problem(name: str, quantizer: Any) -> str | None:
    """Say why standalone does not read storage of this quantizer, or return None."""
    if type(quantizer) is _quantizer_classes()[0]:
        return None
    return f"{name} is a {type(quantizer).__name__}; standalone implements MXFP8Quantizer"


def whole_blocks(rows_and_columns: Any, source: str) -> Refusal:
    """A matrix is not made of whole blocks of 32; `rows_and_columns` reads its extents."""

    def rule(a: Arguments) -> str | None:
        rows, columns = rows_and_columns(a)
        if rows % mxfp8.BLOCK == 0 and columns % mxfp8.BLOCK == 0:
            return None
        return f"tensor is {rows} x {columns}; allowed: multiples of {mxfp8.BLOCK} in both"

    return Refusal("whole blocks", source, rule)


def flag(name: str) -> Refusal:
    """The tensor `name` is not one fp32 number."""

    def rule(a: Arguments) -> str | None:
        tensor = a[name]
        if tensor is None or (tensor.numel() == 1 and tensor.dtype == torch.float32):
            return None
        return f"{name} is {tensor.dtype} with {tensor.numel()} elements; allowed: one float32"

    return Refusal(name, "common/transformer_engine.cpp:60", rule)


# The groups of a matrix ---------------------------------------------------------------------------


def _first_dims_form(a: Arguments) -> str | None:
    return splits.table_problem("first_dims", a["first_dims"], a["num_tensors"])


def _offsets_form(a: Arguments) -> str | None:
    return splits.table_problem("tensor_offsets", a["tensor_offsets"], a["num_tensors"] + 1)


def _no_groups(a: Arguments) -> str | None:
    return None if a["num_tensors"] else "num_tensors is 0; allowed: at least 1"


def _group_count(a: Arguments) -> str | None:
    if a["num_tensors"] <= MAX_QUANTIZED_GROUPS:
        return None
    return f"num_tensors is {a['num_tensors']}; allowed: 1 to {MAX_QUANTIZED_GROUPS}"


TABLES = (
    Refusal("form of first_dims", _METADATA, _first_dims_form),
    Refusal("form of tensor_offsets", _METADATA, _offsets_form),
)


def _tile_rows(a: Arguments) -> str | None:
    rows, columns = a["tensor"].shape
    if rows % mxfp8.TILE == 0:
        return None
    return f"tensor is {rows} x {columns}; allowed: rows a multiple of {mxfp8.TILE}"


def _equal_rows(a: Arguments) -> str | None:
    rows, groups = a["tensor"].shape[0], a["num_tensors"]
    if a["first_dims"] is not None or rows % groups == 0:
        return None
    return f"tensor has {rows} rows; allowed: {groups} equal groups where first_dims is None"


def _counts(a: Arguments) -> str | None:
    shape = (a["tensor"].shape[0], a["tensor"].shape[1])
    groups, first_dims = a["num_tensors"], a["first_dims"]
    return splits.counts_problem(groups, shape, first_dims, a["tensor_offsets"], mxfp8.TILE)


def _no_last_dims(a: Arguments) -> str | None:
    return None if a["last_dims"] is None else "last_dims is given; allowed: None"


def _directions(a: Arguments) -> str | None:
    if a["quantizer"].rowwise_usage or a["quantizer"].columnwise_usage:
        return None
    return "quantizer wants neither row-wise nor column-wise data; allowed: at least one"


_KERNEL = "common/cast/mxfp8/group_quantize_mxfp8.cuh"
GROUPS = (
    Refusal("no groups", f"{_KERNEL}:153", _no_groups),
    Refusal("num_tensors", f"{_KERNEL}:1174", _group_count, not_in="2.19"),
    *TABLES,
    high_precision("tensor"),
    whole_blocks(lambda a: a["tensor"].shape, "quantizer.cpp:1861"),
    Refusal("rows", f"{_KERNEL}:1184", _tile_rows),
    Refusal("equal rows", f"{_KERNEL}:153", _equal_rows),
    Refusal("directions of quantizer", f"{_KERNEL}:1132", _directions),
    contiguous("tensor"),
    own("counts", _counts),
)
"""For arguments tensor, quantizer, num_tensors, first_dims and tensor_offsets."""


def last_dims(source: str, error: type[Exception]) -> Refusal:
    """`last_dims` is given: standalone groups by rows only."""
    return Refusal("last_dims", source, _no_last_dims, error)


# Grouped storage ----------------------------------------------------------------------------------


def directions(storage: Any) -> list[int]:
    """Return the directions that storage holds data of."""
    data = ((ROW, storage.rowwise_data), (COLUMN, storage.columnwise_data))
    return [axis for axis, tensor in data if tensor is not None]


def scale_of(storage: Any, axis: int) -> torch.Tensor | None:
    """Return the scales of one direction of grouped storage, or None."""
    scale: torch.Tensor | None = storage.scale_inv if axis == ROW else storage.columnwise_scale_inv
    return scale


def storage_problem(name: str, storage: Any, *, offsets: bool) -> str | None:
    """Say what is wrong with the tables and sizes of grouped storage, or return None.

    Args:
        name: Of the argument.
        storage: Grouped storage.
        offsets: Whether row counts need offsets beside them.
    """
    groups = int(storage.num_tensors)
    rows, columns = (int(size) for size in storage.logical_shape)
    if groups < 1:
        return f"{name} has {groups} groups; allowed: at least 1"
    first_dims, tensor_offsets = storage.first_dims, storage.tensor_offsets
    for words in (
        splits.table_problem(f"{name}.first_dims", first_dims, groups),
        splits.table_problem(f"{name}.tensor_offsets", tensor_offsets, groups + 1),
    ):
        if words is not None:
            return words
    if offsets and first_dims is not None and tensor_offsets is None:
        return f"{name} has first_dims and no tensor_offsets; allowed: both, or neither"
    if first_dims is None and rows % groups:
        return f"{name} has {rows} rows; allowed: {groups} equal groups where first_dims is None"
    for data in (storage.rowwise_data, storage.columnwise_data):
        if data is not None and data.numel() != rows * columns:
            return f"{name} has {data.numel()} elements; allowed: {rows} x {columns}"
    return None


def storage_tables(name: str) -> Refusal:
    """The tables or sizes of grouped storage are wrong.

    Row counts need offsets beside them where scales are read in compact order; a product finds
    its groups without.
    """

    def rule(a: Arguments) -> str | None:
        storage = a[name]
        compact = storage.quantizer is not None and not storage._with_gemm_swizzled_scales
        return storage_problem(name, storage, offsets=compact)

    return Refusal(f"tables of {name}", "common/transformer_engine.cpp:265", rule)


def storage_counts(name: str) -> Refusal:
    """The numbers in the tables of grouped storage do not fit it; `last_dims` is one of them."""

    def rule(a: Arguments) -> str | None:
        storage = a[name]
        if storage.last_dims is not None:
            return f"{name} has last_dims; standalone groups by rows only"
        rows, columns = (int(size) for size in storage.logical_shape)
        multiple = 1 if storage.quantizer is None else mxfp8.TILE
        groups, tables = int(storage.num_tensors), (storage.first_dims, storage.tensor_offsets)
        return splits.counts_problem(groups, (rows, columns), *tables, multiple)

    return own(f"counts of {name}", rule)


def scale_problem(name: str, storage: Any, axis: int) -> str | None:
    """Say what is wrong with the scales of one direction of quantized storage, or return None."""
    words, scale = WORDS[axis], scale_of(storage, axis)
    if scale is None:
        return f"{name} has {words} data without scales; allowed: both"
    allowed = mxfp8.grouped_scale_sizes(storage, axis)
    if scale.numel() in allowed:
        return None
    sizes = " or ".join(map(str, sorted(set(allowed))))
    return f"{name} has {scale.numel()} {words} scales; allowed: {sizes}"


def storage_scales(name: str) -> Refusal:
    """Quantized storage has data without scales, or scales of no size that upstream knows."""

    def rule(a: Arguments) -> str | None:
        found = (scale_problem(name, a[name], axis) for axis in directions(a[name]))
        return next((words for words in found if words is not None), None)

    return Refusal(f"scales of {name}", "common/transformer_engine.cpp:341", rule)
