# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands as the kernels of this folder take them: row segments, float64 values, memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from te_grouped_mlp.op.extension import _C
from te_grouped_mlp.op.formats import DType, Format
from te_grouped_mlp.op.layout import GroupLayout, RowExtent
from te_grouped_mlp.op.plan import Plan
from te_grouped_mlp.op.tensors import memory
from te_grouped_mlp.op.tensors.capacity import Span, source_code, span
from te_grouped_mlp.op.tensors.operands import (
    Axis,
    DequantizedCopy,
    GroupedOperand,
    QuantizedCopy,
    Splits,
    WeightOperand,
    torch_dtype,
)
from te_grouped_mlp.op.tensors.scale_layout import (
    column_group_offset,
    column_scale_shape,
    row_scale_shape,
)

T = TypeVar("T")

_ELEMENTS = {DType.E4M3: 0, DType.E5M2: 1}
_AXES = {Axis.ROW: 0, Axis.COLUMN: 1}
_DECIDE_THREADS = 0


@dataclass(frozen=True)
class Segment:
    """Rows that a kernel handles with the weights of one expert.

    Attributes:
        group: The expert.
        start, stop: Row range in the token buffer.
    """

    group: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    @property
    def span(self) -> slice:
        """The rows as an index."""
        return slice(self.start, self.stop)


def live_rows(splits: Splits) -> int:
    """Return ``sum(split_sizes)``; synchronises if the sizes lie on a GPU."""
    return sum(_sizes(splits))


def segments(
    layout: GroupLayout, extent: RowExtent, splits: Splits, fmt: Format
) -> tuple[Segment, ...]:
    """Return the rows that a kernel of this extent touches, empty groups included.

    Args:
        layout: The plan's.
        extent: What the kernel reads or writes; BUFFER ignores the split sizes.
        splits: Division of the rows.
        fmt: Of the operand, for the row alignment.

    Raises:
        ValueError: The split sizes do not fit the buffer, the group count or the format.
    """
    if extent is RowExtent.BUFFER:
        return (Segment(0, 0, layout.buffer_rows),)
    sizes = _sizes(splits)
    if len(sizes) != layout.num_groups:
        raise ValueError(f"splits has {len(sizes)} sizes; the plan has {layout.num_groups} groups")
    segments_of_groups, start = [], 0
    for group, size in enumerate(sizes):
        if size < 0 or size % fmt.rows_multiple:
            raise ValueError(
                f"splits[{group}] is {size}; {fmt.name} allows multiples of {fmt.rows_multiple}"
            )
        segments_of_groups.append(Segment(group, start, start + size))
        start += size
    if start > layout.buffer_rows:
        raise ValueError(f"splits sum to {start}; the buffer has {layout.buffer_rows} rows")
    return tuple(segments_of_groups)


def read(operand: GroupedOperand, axis: Axis, segment: Segment, name: str) -> torch.Tensor:
    """Return rows of a token operand as float64 (rows, features); a new tensor.

    Args:
        operand: Block-scaled (the copy of `axis` is read) or plain.
        axis: Which copy.
        segment: Which rows. The column scales are read as one block of ``segment.rows`` rows that
            begins where the segment does, which is how the GPU kernels address them.
        name: Of the operand, for messages.

    Raises:
        ValueError: The operand has no such copy.
    """
    if not operand.format.is_block_scaled:
        if operand.plain is None:
            raise ValueError(f"{name} has no plain values, which format unquantized needs")
        return operand.plain[segment.span].double()
    copy = operand.row if axis is Axis.ROW else operand.column
    if not isinstance(copy, QuantizedCopy):
        raise ValueError(f"{name} has no {axis.value} copy, which the kernel reads")
    return _dequantize(copy, operand.format, operand.shape[1], segment)


def read_weight(w: WeightOperand, axis: Axis, group: int, name: str) -> torch.Tensor:
    """Return one expert's weight as float64 (out, in); a new tensor.

    Raises:
        ValueError: The operand was quantized along the other axis.
    """
    if not w.format.is_block_scaled:
        return w.data[group].double()
    if w.axis is not axis:
        raise ValueError(f"{name} is quantized along {w.axis.value}; needed: {axis.value}")
    copy = QuantizedCopy(w.data[group], w.scale[group], w.axis, w.swizzled)
    return _dequantize(copy, w.format, w.shape[1], Segment(group, 0, w.shape[0]))


def new_operand(
    plan: Plan, splits: Splits, features: int, *, row: bool, column: bool
) -> GroupedOperand:
    """Return an operand over fresh, unwritten CPU buffers in the call's format.

    Args:
        plan: Of the call; gives format, rows, layout and the dtype of plain values.
        splits: Division of the rows.
        features: Columns.
        row, column: Which quantized copies to make; plain values are made whatever they say.
    """
    fmt, rows = plan.call.format, plan.layout.buffer_rows
    operand = GroupedOperand(fmt, (rows, features), plan.layout, splits)
    if not fmt.is_block_scaled:
        plain = memory.empty((rows, features), torch_dtype(plan.call.dtype), "cpu")
        return dataclasses.replace(operand, plain=plain)
    return dataclasses.replace(
        operand,
        row=_new_copy(fmt, rows, features, Axis.ROW) if row else None,
        column=_new_copy(fmt, rows, features, Axis.COLUMN) if column else None,
    )


def write(operand: GroupedOperand, values: torch.Tensor, segment: Segment) -> None:
    """Store fp32 values into every buffer of the operand, in the rows of the segment only.

    Args:
        operand: Made by `new_operand`.
        values: (segment.rows, features) fp32, contiguous.
        segment: Which rows; the column scales form one block of their own.
    """
    if not segment.rows:
        return
    if operand.plain is not None:
        operand.plain[segment.span] = values
        return
    fmt, cols = operand.format, operand.shape[1]
    row = _spans(operand.row, fmt, cols, segment.start)
    column = _spans(operand.column, fmt, cols, segment.start)
    element = _ELEMENTS[fmt.element]  # type: ignore[index]
    # One call per segment, dense: the segment is then the matrix that the scale layout spans. NaN
    # reaches the scale byte, as in the kernels' epilogues.
    _C.mxfp8_quantize(
        span(values), source_code(values.dtype), segment.rows, cols, values.stride(0),
        *row, *column, element, True, None, 0, False, True, _DECIDE_THREADS,
    )  # fmt: skip


def moved(value: T, device: torch.device) -> T:
    """Return `value` with every tensor in it on `device`; synchronises if a GPU is involved.

    Args:
        value: A tensor, a dataclass of the op, a tuple or dict of these, or anything else, which is
            returned as it is.
        device: Where to.
    """
    return cast(T, _moved(value, device))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Format, GroupLayout)):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        moves = {name: _moved(item, device) for name, item in fields.items()}
        return dataclasses.replace(value, **moves)
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    return value


def _sizes(splits: Splits) -> tuple[int, ...]:
    return (
        splits.sizes_on_host if splits.sizes_on_host is not None else tuple(splits.sizes.tolist())
    )


def _dequantize(copy: QuantizedCopy, fmt: Format, cols: int, segment: Segment) -> torch.Tensor:
    out = torch.empty(segment.rows, cols, dtype=torch.float64)
    if out.numel():
        data, scale = _spans(copy, fmt, cols, segment.start)
        element, axis = _ELEMENTS[fmt.element], _AXES[copy.axis]  # type: ignore[index]
        _C.mxfp8_dequantize(
            data, scale, element, axis, copy.swizzled, segment.rows, cols, span(out),
            source_code(out.dtype), None, 0, _DECIDE_THREADS,
        )  # fmt: skip
    return out


def _spans(
    copy: QuantizedCopy | DequantizedCopy | None, fmt: Format, cols: int, start: int
) -> tuple[Span | None, Span | None]:
    """Memory of the data and of the scales of the rows from `start` on; None for no copy."""
    if copy is None:
        return None, None
    assert isinstance(copy, QuantizedCopy)
    if not (copy.data.is_contiguous() and copy.scale.is_contiguous()):
        raise ValueError(f"{copy.axis.value} copy is not contiguous; only contiguous is allowed")
    # Compact and swizzled scales agree on where a 128-row boundary lies.
    if copy.axis is Axis.ROW:
        offset = start * row_scale_shape(0, cols, fmt)[1]
    else:
        offset = column_group_offset(start, cols, fmt)
    return span(copy.data, start * cols), span(copy.scale, offset)


def _new_copy(fmt: Format, rows: int, cols: int, axis: Axis) -> QuantizedCopy:
    shape = (row_scale_shape if axis is Axis.ROW else column_scale_shape)(rows, cols, fmt)
    data = memory.empty((rows, cols), torch.uint8, "cpu")
    scale = memory.empty((shape[0] * shape[1],), torch.uint8, "cpu")
    return QuantizedCopy(data, scale, axis, swizzled=True)
