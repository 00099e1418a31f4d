# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands of the device operations: data, scales, format, axis and layout travel together."""

from __future__ import annotations

import functools
from enum import Enum

import torch

from te_grouped_mlp.op.formats import Format
from te_grouped_mlp.op.layout import GroupLayout
from te_grouped_mlp.op.tensors.stacking import Experts
from te_grouped_mlp.op.tensors.tensor_dataclass import tensor_dataclass


class Axis(Enum):
    """The direction along which elements share a block scale."""

    ROW = "row"
    """Blocks run along the columns of a row: the operand is contracted over its columns."""
    COLUMN = "column"
    """Blocks run down a column: the operand is contracted over its rows."""


@tensor_dataclass
class Splits:
    """How the rows of a token buffer are divided among the groups.

    Attributes:
        sizes: int64 (G,), rows of each group, on the op's device.
        group_end_offsets: int32 (G,), inclusive prefix sums of `sizes`.
        group_offsets: int64 (G + 1,), row offsets with a leading zero.
        element_offsets: Feature width to int64 (G + 1,) ``group_offsets * width``.
        sizes_on_host: The sizes as Python integers where the host can read them without
            synchronising with a GPU (CPU tensors), else None.
        fault: int64 (1,), not 0 if the sizes that a device holds did not fit and were taken for
            zeros (`split_guard`); None where the host looked at them.
        group_offsets_int32: int32 (G + 1,), `group_offsets` as the kernels on plain values take
            them; or None.
    """

    sizes: torch.Tensor
    group_end_offsets: torch.Tensor
    group_offsets: torch.Tensor
    element_offsets: dict[int, torch.Tensor]
    sizes_on_host: tuple[int, ...] | None
    group_offsets_int32: torch.Tensor | None = None
    fault: torch.Tensor | None = None


@tensor_dataclass
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


@tensor_dataclass
class DequantizedCopy:
    """A quantized copy kept as the bf16 values that its bytes stand for, instead of them.

    An E4M3 number times a power of two is one of bf16's, unless it is below 2**-130.

    Attributes:
        values: bf16 (rows, cols), row-major; rows past the valid ones are unwritten.
        axis: Which blocks shared a scale.
    """

    values: torch.Tensor
    axis: Axis


@tensor_dataclass
class GroupedOperand:
    """A token tensor whose rows belong to groups.

    Attributes:
        format: Of the values.
        shape: (buffer rows, features).
        layout: The row layout that the buffers were made for.
        splits: Division of the rows.
        row, column: Quantized copies; None when not made or already dropped. A plan that reads
            values has an DequantizedCopy where the copy is read in the pass that makes it.
        plain: The values themselves, (rows, features), for UNQUANTIZED.
    """

    format: Format
    shape: tuple[int, int]
    layout: GroupLayout
    splits: Splits
    row: QuantizedCopy | DequantizedCopy | None = None
    column: QuantizedCopy | DequantizedCopy | None = None
    plain: torch.Tensor | None = None

    def without_row(self) -> GroupedOperand:
        """Return the operand without its row copy, for passes that read its columns alone."""
        return GroupedOperand(
            self.format, self.shape, self.layout, self.splits, None, self.column, self.plain
        )


@tensor_dataclass
class WeightOperand:
    """The weights of all experts of one linear, along one axis.

    From the parameters to the launch this is what a weight is: as a parameter holds it, as a step
    made it, as the state between the passes keeps it, and as a backend takes it.

    Attributes:
        format: Of the values.
        shape: (out features, in features) of one expert.
        axis: ROW for the forward product (contracted over in features), COLUMN for the backward.
        data: (out, in) for each expert: element bytes; or the values, for UNQUANTIZED and a plan
            that reads values.
        scale: Block scales for each expert, in any shape; empty with values. Stacked or scattered
            like `data` or not.
        swizzled: Whether the scales are in the tile order of `scale_layout`.
    """

    format: Format
    shape: tuple[int, int]
    axis: Axis
    data: Experts
    scale: Experts = ()
    swizzled: bool = False

    @property
    def num_groups(self) -> int:
        """Number of experts."""
        return len(self.data)


@tensor_dataclass
class WeightCopies:
    """The weights of one linear along both axes, as its parameters hold or a step reads them.

    Attributes:
        row, column: None for a copy that is not there. Of plain weights both have the values.
    """

    row: WeightOperand | None
    column: WeightOperand | None


@functools.cache
def torch_dtype(dtype: object) -> torch.dtype:
    """Return the torch dtype of a `formats.DType` member."""
    converted = getattr(torch, dtype.value)  # type: ignore[attr-defined]
    assert isinstance(converted, torch.dtype)
    return converted
