# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The operands of tex's grouped matrix products, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_grouped_mlp.integration.standalone.tex import mxfp8, rules, splits
from te_grouped_mlp.integration.standalone.tex.contract import Arguments, Refusal, Rule, own
from te_grouped_mlp.integration.standalone.tex.dense_storage import (
    extents,
    is_mxfp8,
    known_operand,
    packed_operand,
    usable_operand,
)
from te_grouped_mlp.integration.standalone.tex.gemm import dense_matrix, operand_axes
from te_grouped_mlp.integration.standalone.tex.grouped_storage import members

_SOURCE = "common/gemm/cublaslt_grouped_gemm.cu"
_MAX_LISTED = 64


class Groups:
    """The operands of a grouped GEMM, one float64 matrix at a time."""

    def __init__(self, operand: Any, axis: int) -> None:
        self._axis = axis
        self._quantized: list[mxfp8.Operand] = []
        self._plain: Sequence[Any] = ()
        if isinstance(operand, (list, tuple)):
            self._plain = operand
        elif operand.quantizer is None:
            self._plain = plain_members(operand)
        else:
            self._quantized = list(members(operand, axis))

    def matrix(self, index: int) -> torch.Tensor:
        """Return the values of one group."""
        if self._quantized:
            return self._quantized[index].dequantize(torch.float64)
        return dense_matrix(self._plain[index], self._axis)

    def shape(self, index: int) -> tuple[int, int]:
        """Return the extents of one group's data."""
        if self._quantized:
            return self._quantized[index].rows, self._quantized[index].columns
        return extents(self._plain[index])


def plain_members(storage: Any) -> tuple[torch.Tensor, ...]:
    """Return views of the groups of unquantized grouped storage."""
    rows, columns = storage.logical_shape
    sizes = splits.split_sizes(int(storage.num_tensors), rows, storage.first_dims).tolist()
    return tuple(torch.split(storage.rowwise_data.view(rows, columns)[: sum(sizes)], sizes))


# What is wrong with operands ----------------------------------------------------------------------


def storages(*names: str) -> tuple[Refusal, ...]:
    """Return the refusals of grouped storage under these names."""
    kinds = (rules.storage_tables, rules.storage_counts)
    return tuple(kind(name) for kind in kinds for name in names)


def _count(operand: Any) -> int:
    return len(operand) if isinstance(operand, (list, tuple)) else int(operand.num_tensors)


def same_count(first: str, *others: str) -> Rule:
    def rule(a: Arguments) -> str | None:
        counts = {name: _count(a[name]) for name in (first, *others)}
        if len(set(counts.values())) == 1 and counts[first]:
            return None
        return f"numbers of groups are {counts}; allowed: as many, at least 1"

    return rule


def _factors(a: Arguments) -> str | None:
    groups = _count(a["B"])
    for name in ("alpha", "beta"):
        if a[name].numel() != groups or a[name].dtype != torch.float32:
            return f"{name} is {a[name].dtype} with {a[name].numel()} elements; allowed: {groups}"
    return None


def _operands(question: Any) -> Rule:
    """Ask a question about A and B, in whatever they hold their groups."""

    def rule(a: Arguments) -> str | None:
        axes = operand_axes(a["transa"], a["transb"])
        found: str | None = question("A", a["A"], axes[0]) or question("B", a["B"], axes[1])
        return found

    return rule


def _dtype_problem(name: str, operand: Any, axis: int) -> str | None:
    """Operands are MXFP8, bf16 or fp16."""
    del axis
    if not isinstance(operand, (list, tuple)):
        if operand.quantizer is not None:
            return rules.class_problem(f"{name}.quantizer", operand.quantizer)
        operand = [] if operand.rowwise_data is None else [operand.rowwise_data]
    for value in operand:
        if not is_mxfp8(value) and value.dtype not in (torch.bfloat16, torch.float16):
            return f"{name} is {value.dtype}; allowed: bfloat16, float16 and MXFP8"
    return None


def _direction_problem(name: str, operand: Any, axis: int) -> str | None:
    if isinstance(operand, (list, tuple)):
        for index, value in enumerate(operand):
            words = usable_operand(f"{name}[{index}]", value, axis)
            if words is not None:
                return words
        return None
    if operand.quantizer is None:
        return f"{name} has no data; allowed: some" if operand.rowwise_data is None else None
    if axis in rules.directions(operand):
        return rules.scale_problem(name, operand, axis)
    return f"{name} has no {rules.WORDS[axis]} data; allowed: those that the layout reads"


def _same_scaling(a: Arguments) -> str | None:
    quantized = [
        {is_mxfp8(value) for value in operand}
        if isinstance(operand, (list, tuple))
        else {operand.quantizer is not None}
        for operand in (a["A"], a["B"])
    ]
    if len(quantized[0] | quantized[1]) == 1:
        return None
    return "some of A and B is quantized and some is not; allowed: both or none"


def list_members(name: str) -> Refusal:
    def rule(a: Arguments) -> str | None:
        if len(a[name]) > _MAX_LISTED:
            return f"{name} has {len(a[name])} entries; allowed: {_MAX_LISTED}"
        for index, value in enumerate(a[name]):
            words = known_operand(f"{name}[{index}]", value) or packed_operand(
                f"{name}[{index}]", value
            )
            if words is not None:
                return words
        return None

    return Refusal(f"members of {name}", f"{_SOURCE}:580", rule)


def _plain_storage(name: str, source: str) -> Refusal:
    def rule(a: Arguments) -> str | None:
        storage = a[name]
        if storage is None:
            return None
        if storage.quantizer is None and storage.rowwise_data is not None:
            dtype = storage.rowwise_data.dtype
            return None if dtype in rules.HIGH_PRECISION else f"{name} is {dtype}; allowed: floats"
        return f"{name} is quantized or has no data; allowed: fp32, fp16 or bf16"

    return Refusal(f"dtype of {name}", source, rule)


def extents_fit(outputs: Any) -> Refusal:
    """Groups do not share their inner size, or the output has another shape."""

    def rule(a: Arguments) -> str | None:
        axes = operand_axes(a["transa"], a["transb"])
        one, other = Groups(a["A"], axes[0]), Groups(a["B"], axes[1])
        for index, out in enumerate(outputs(a)):
            (ar, ac), (br, bc) = one.shape(index), other.shape(index)
            inner = (ac if a["transa"] else ar), (br if a["transb"] else bc)
            wanted = (bc if a["transb"] else br), (ar if a["transa"] else ac)
            if inner[0] != inner[1]:
                return f"group {index} has inner sizes {inner}; allowed: equal ones"
            if tuple(out.shape) != wanted:
                return f"group {index} of D has shape {tuple(out.shape)}; allowed: {wanted}"
        return None

    return own("extents", rule)


OPERANDS = (
    Refusal("dtype of operands", f"{_SOURCE}:267", _operands(_dtype_problem)),
    Refusal("scaling of operands", f"{_SOURCE}:288", _same_scaling),
    Refusal("directions of operands", f"{_SOURCE}:496", _operands(_direction_problem)),
    Refusal("alpha and beta", f"{_SOURCE}:253", _factors),
)


def _bias_table(a: Arguments) -> str | None:
    bias, (_, columns) = a["bias"], a["D"].logical_shape
    wanted = _count(a["D"]), columns
    if bias is None or tuple(bias.logical_shape) == wanted:
        return None
    return f"bias has shape {tuple(bias.logical_shape)}; allowed: {wanted}"


def _bias_width(a: Arguments) -> str | None:
    bias = a["bias"]
    if bias is None:
        return None
    dtypes = bias.rowwise_data.dtype, a["D"].rowwise_data.dtype
    if dtypes[0] != dtypes[1]:
        return f"bias is {dtypes[0]} and D {dtypes[1]}; allowed: one dtype"
    columns, multiple = bias.logical_shape[1], 4 if dtypes[0] == torch.float32 else 8
    return (
        f"bias has {columns} columns; allowed: a multiple of {multiple}"
        if columns % multiple
        else None
    )


def _bias_scale(a: Arguments) -> str | None:
    scale, rows = a["bias_scale"], a["D"].logical_shape[0]
    if a["bias"] is None or scale is None:
        return None
    if scale.dtype == torch.float32 and tuple(scale.shape) == (rows,):
        return None
    return f"bias_scale is {scale.dtype} of shape {tuple(scale.shape)}; allowed: float32 ({rows},)"


INTO_STORAGE = (
    _plain_storage("D", f"{_SOURCE}:314"),
    _plain_storage("bias", f"{_SOURCE}:1912"),
    Refusal("shape of bias", f"{_SOURCE}:1918", _bias_table),
    Refusal("width of bias", f"{_SOURCE}:1945", _bias_width),
    Refusal("bias_scale", f"{_SOURCE}:2008", _bias_scale),
    extents_fit(lambda a: plain_members(a["D"])),
)
