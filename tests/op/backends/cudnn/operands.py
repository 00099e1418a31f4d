# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands of arbitrary bytes in the shapes of a step, for tests that look at arguments."""

from __future__ import annotations

import torch
import transformer_engine.pytorch  # noqa: F401  (brings the functions that make tables of addresses)

from te_grouped_mlp.op.formats import MXFP8
from te_grouped_mlp.op.layout import GroupLayout, RowExtent
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    GroupedOperand,
    QuantizedCopy,
    Splits,
    WeightOperand,
)
from te_grouped_mlp.op.tensors.scale_layout import column_scale_shape, row_scale_shape


def copy(rows: int, cols: int, axis: Axis, *, swizzled: bool = True) -> QuantizedCopy:
    shape = (row_scale_shape if axis is Axis.ROW else column_scale_shape)(rows, cols, MXFP8)
    scale = torch.full((shape[0] * shape[1],), 127, dtype=torch.uint8)
    return QuantizedCopy(torch.full((rows, cols), 0x38, dtype=torch.uint8), scale, axis, swizzled)


def splits(*sizes: int) -> Splits:
    values = torch.tensor(sizes)
    ends = values.cumsum(0).int()
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), ends.long()))
    return Splits(values, ends, offsets, {}, sizes)


def tokens(cols: int, layout: GroupLayout, found: Splits) -> GroupedOperand:
    rows = layout.buffer_rows
    row, column = copy(rows, cols, Axis.ROW), copy(rows, cols, Axis.COLUMN)
    return GroupedOperand(MXFP8, (rows, cols), layout, found, row, column)


def layout(groups: int, rows: int, extent: RowExtent = RowExtent.PACKED) -> GroupLayout:
    return GroupLayout(groups, rows, extent)


def weights(
    groups: int, out: int, width: int, axis: Axis, *, stacked: bool, swizzled: bool
) -> WeightOperand:
    """Return weights; members of one buffer (and their scales, if swizzled) or of buffers apart."""
    shape = (row_scale_shape if axis is Axis.ROW else column_scale_shape)(out, width, MXFP8)
    if stacked:
        data = torch.full((groups, out, width), 0x38, dtype=torch.uint8).unbind(0)
        scale = torch.full((groups, *shape), 127, dtype=torch.uint8).unbind(0)
    else:
        # Every second member, so that no two lie next to each other.
        data = torch.full((2 * groups, out, width), 0x38, dtype=torch.uint8)[::2].unbind(0)
        scale = torch.full((2 * groups, *shape), 127, dtype=torch.uint8)[::2].unbind(0)
    return WeightOperand(MXFP8, (out, width), axis, tuple(data), tuple(scale), swizzled)
