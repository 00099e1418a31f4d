# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What launches give: live values in float64, in the columns of TE's order, and their errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from te_grouped_mlp.op.backends.base import Backend
from te_grouped_mlp.op.backends.cutedsl.backend import CuteDslBackend
from te_grouped_mlp.op.backends.reference import arguments as reference
from te_grouped_mlp.op.layout import RowExtent
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors.operands import Axis, GroupedOperand, Splits

INTERLEAVE = 32
"""Columns of a block of gate or linear columns, where they are interleaved."""

BOUNDS = {"quantized": 0.02, torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}
"""Relative error (2-norm) by how a result is stored: its own rounding, and that of a value which
lies between two of its neighbours and falls to the other side."""

ATOMIC_BOUND = 2e-2
"""Of FC1's bias gradient where the frontend adds it in bf16, block after block."""

Values = dict[str, "tuple[torch.Tensor, float]"]
"""Name of a result to its live values in float64, and the bound of their error."""


def is_interleaved(plan: Plan, backend: Backend) -> bool:
    """Whether a backend keeps gate and linear columns side by side, instead of in blocks."""
    return isinstance(backend, CuteDslBackend) and plan.problem.activation.is_gated


def interleaved(values: torch.Tensor, plan: Plan, backend: Backend) -> torch.Tensor:
    """Return columns as a backend keeps them: gate and linear side by side, or as they are."""
    if not is_interleaved(plan, backend):
        return values
    rows, cols = values.shape
    blocks = values.view(rows, cols // (2 * INTERLEAVE), 2, INTERLEAVE)
    return blocks.transpose(2, 3).reshape(rows, cols)


def interleaved_operand(operand: GroupedOperand, plan: Plan, backend: Backend) -> GroupedOperand:
    """Return an operand of plain values whose columns are as a backend keeps them."""
    if operand.plain is None:
        return operand
    values = interleaved(operand.plain, plan, backend)
    return GroupedOperand(
        operand.format, operand.shape, operand.layout, operand.splits, plain=values
    )


def in_blocks(values: torch.Tensor, plan: Plan, backend: Backend | None) -> torch.Tensor:
    """Return columns in blocks, from as a backend keeps them."""
    if backend is None or not is_interleaved(plan, backend):
        return values
    rows, cols = values.shape
    pairs = values.view(rows, cols // (2 * INTERLEAVE), INTERLEAVE, 2)
    return pairs.transpose(2, 3).reshape(rows, cols)


def plain_values(values: torch.Tensor, splits: Splits, plan: Plan) -> tuple[torch.Tensor, float]:
    """Return the live rows in float64, and the bound of their error."""
    live = (
        int(splits.group_end_offsets[-1]) if plan.layout.extent is RowExtent.PACKED else len(values)
    )
    return values[:live].double(), BOUNDS[values.dtype]


def values_of(
    name: str, operand: GroupedOperand, plan: Plan, backend: Backend | None = None
) -> Values:
    """Return the live values of every copy of a token operand."""
    if operand.plain is not None:
        values = in_blocks(operand.plain, plan, backend)
        return {name: plain_values(values, operand.splits, plan)}
    found = {}
    for axis, copy in ((Axis.ROW, operand.row), (Axis.COLUMN, operand.column)):
        if copy is not None:
            parts = list(_segments(operand, axis, plan))
            found[f"{name} ({axis.value})"] = torch.cat(parts), BOUNDS["quantized"]
    return found


def _segments(operand: GroupedOperand, axis: Axis, plan: Plan) -> Iterator[torch.Tensor]:
    extent = plan.layout.extent
    for segment in reference.segments(plan.layout, extent, operand.splits, operand.format):
        yield reference.read(operand, axis, segment, "result")


@dataclass(frozen=True)
class Difference:
    """One result beside the reference's.

    Attributes:
        name: Of the result.
        error: Relative error, 2-norm; of NaN where a value is missing.
        bound: What is allowed.
    """

    name: str
    error: float
    bound: float

    @property
    def good(self) -> bool:
        """Whether it is as near as it has to be."""
        return self.error <= self.bound


def compare(found: Values, wanted: Values) -> list[Difference]:
    """Return how far results are from those of the reference backend."""
    assert found.keys() == wanted.keys(), (sorted(found), sorted(wanted))
    return [
        Difference(name, relative_error(value, wanted[name][0]), bound)
        for name, (value, bound) in found.items()
    ]


def relative_error(found: Any, wanted: Any) -> float:
    """Return the error's 2-norm over that of the wanted values, or the error's where that is 0."""
    error, size = float((found - wanted).norm()), float(wanted.norm())
    return error / size if size else error
