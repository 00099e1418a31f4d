# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands of the device operations: data, scales, format, axis and layout travel together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from te_grouped_mlp.op.formats import Format
from te_grouped_mlp.op.layout import GroupLayout


class Axis(Enum):
    """The direction along which elements share a block scale."""

    ROW = "row"
    """Blocks run along the columns of a row: the operand is contracted over its columns."""
    COLUMN = "column"
    """Blocks run down a column: the operand is contracted over its rows."""


@dataclass(frozen=True)
class Splits:
    """How the rows of a token buffer are divided among the groups.

    Attributes:
        sizes: int64 (G,), rows of each group, on the op's device.
        ends: int32 (G,), inclusive prefix sums of `sizes`.
        offsets: int64 (G + 1,), row offsets with a leading zero.
        element_offsets: Feature width to int64 (G + 1,) ``offsets * width``.
        host: The sizes as Python integers where the host can read them without synchronising
            with a GPU (CPU tensors), else None.
    """

    sizes: torch.Tensor
    ends: torch.Tensor
    offsets: torch.Tensor
    element_offsets: dict[int, torch.Tensor]
    host: tuple[int, ...] | None


@dataclass(frozen=True)
class QuantizedCopy:
    """One copy of a matrix, quantized along one axis.

    Attributes:
        data: uint8 (rows, cols), the element bytes, row-major whatever the axis.
        scale: uint8, flat, one byte per block.
        axis: Which blocks share a scale.
        swizzled: Whether `scale` is in the tile order of `scale_layout`; else compact.
    """

    data: torch.Tensor
    scale: torch.Tensor
    axis: Axis
    swizzled: bool


@dataclass(frozen=True)
class GroupedOperand:
    """A token tensor whose rows belong to groups.

    Attributes:
        format: Of the values.
        shape: (buffer rows, features).
        layout: The row layout that the buffers were made for.
        splits: Division of the rows.
        row, column: Quantized copies; None when not made or already dropped.
        plain: The values themselves, (rows, features), for UNQUANTIZED.
    """

    format: Format
    shape: tuple[int, int]
    layout: GroupLayout
    splits: Splits
    row: QuantizedCopy | None = None
    column: QuantizedCopy | None = None
    plain: torch.Tensor | None = None


@dataclass(frozen=True)
class WeightOperand:
    """The weights of all experts of one linear, for one pass.

    Attributes:
        format: Of the values.
        shape: (out features, in features) of one expert.
        axis: ROW for the forward product (contracted over in features), COLUMN for the backward.
        copies: One per expert; for UNQUANTIZED `plain` is used instead.
        plain: One (out, in) tensor per expert.
        stacked: The (G, out, in) tensor behind the members when they lie in one buffer, else None.
    """

    format: Format
    shape: tuple[int, int]
    axis: Axis
    copies: tuple[QuantizedCopy, ...] = ()
    plain: tuple[torch.Tensor, ...] = ()
    stacked: torch.Tensor | None = None

    @property
    def num_groups(self) -> int:
        """Number of experts."""
        return len(self.copies) or len(self.plain)


def torch_dtype(dtype: object) -> torch.dtype:
    """Return the torch dtype of a `formats.DType` member."""
    found = getattr(torch, dtype.value)  # type: ignore[attr-defined]
    assert isinstance(found, torch.dtype)
    return found
