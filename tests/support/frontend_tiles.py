# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Operands and outputs of the frontend stand-ins: which bytes and scales belong to which rows.

Scales are found from a base pointer and the operand's shape, as the kernels do; the strides of the
views that a caller passes are not looked at.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from te_grouped_mlp import _C
from te_grouped_mlp.op.formats import MXFP8
from te_grouped_mlp.op.tensors.capacity import Span, span
from te_grouped_mlp.op.tensors.scale_layout import (
    TILE_BYTES,
    column_group_offset,
    column_scale_shape,
    row_scale_shape,
    to_kernel_view,
)
from tests.support.frontend_machine import TILE, Block, Machine

_ROW, _COLUMN = 0, 1
_F32, _F64, _E4M3 = 0, 3, 0


def dequantize(data: Span, scale: Span, axis: int, rows: int, cols: int) -> torch.Tensor:
    """Return MXFP8 values in two places as float64 (rows, cols)."""
    out = torch.empty(rows, cols, dtype=torch.float64)
    if out.numel():
        _C.mxfp8_dequantize(data, scale, _E4M3, axis, True, rows, cols, span(out), _F64, None, 0, 1)
    return out


class Tokens:
    """A (M, K, 1) operand with row scales in the kernel view."""

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, name: str) -> None:
        if data.dim() != 3 or data.shape[2] != 1 or data.stride()[:2] != (data.shape[1], 1):
            raise ValueError(
                f"{name}_tensor has shape {tuple(data.shape)} and strides {data.stride()}; "
                "allowed: (M, K, 1) with strides (K, 1, M*K)"
            )
        self.rows, self.cols = data.shape[0], data.shape[1]
        require_view(scale, self.rows, self.cols, 1, f"sf{name}_tensor")
        self._data, self._scale = data, scale

    def read(self, block: Block) -> torch.Tensor:
        """Return the block's rows as float64 (stop - start, K)."""
        stop = min(block.stop, self.rows)
        count = max(stop - block.start, 0)
        values = dequantize(
            span(self._data, block.start * self.cols),
            span(self._scale, block.start * row_scale_shape(0, self.cols, MXFP8)[1]),
            _ROW,
            count,
            self.cols,
        )
        pad = block.stop - block.start - count
        return torch.cat((values, values.new_zeros(pad, self.cols))) if pad else values


class Weights:
    """The experts' weights, stacked in one tensor or behind a table of addresses."""

    def __init__(self, data: list[Span], scale: list[Span], n: int, k: int, major: str) -> None:
        self.count, self.n = len(data), n
        self._data, self._scale, self._k, self._major = data, scale, k, major

    @classmethod
    def stacked(cls, data: torch.Tensor, scale: torch.Tensor) -> Weights:
        """Read `b_tensor` (N, K, L), K-major or N-major, and `sfb_tensor`."""
        n, k, count = data.shape
        majors = {(k, 1): "k", (1, n): "n"}
        major = majors.get(data.stride()[:2])
        if major is None or (count > 1 and data.stride()[2] != n * k):
            raise ValueError(f"b_tensor has strides {data.stride()} for shape {tuple(data.shape)}")
        require_view(scale, n, k, count, "sfb_tensor")
        size = row_scale_shape(n, k, MXFP8)
        return cls(
            [span(data, index * n * k) for index in range(count)],
            [span(scale, index * size[0] * size[1]) for index in range(count)],
            n,
            k,
            major,
        )

    @classmethod
    def behind(cls, data: torch.Tensor, scale: torch.Tensor, n: int, k: int, major: str) -> Weights:
        """Read the tables `b_ptrs` and `sfb_ptrs`."""
        for name, table in (("b_ptrs", data), ("sfb_ptrs", scale)):
            if table.dtype != torch.int64 or table.dim() != 1 or not table.is_contiguous():
                raise ValueError(
                    f"{name} is {table.dtype} {tuple(table.shape)}; allowed: int64 (L)"
                )
            if any(address == 0 or address % 16 for address in table.tolist()):
                raise ValueError(f"{name} has an address that is null or not 16-byte aligned")
        # A kernel has the addresses alone: how much lies there is for those to check who made them.
        rows, cols = (
            row_scale_shape(n, k, MXFP8) if major == "k" else column_scale_shape(k, n, MXFP8)
        )
        return cls(
            [(address, n * k) for address in data.tolist()],
            [(address, rows * cols) for address in scale.tolist()],
            n,
            k,
            major,
        )

    def read(self, expert: int) -> torch.Tensor:
        """Return one expert's weight as float64 (K, N)."""
        data, scale = self._data[expert], self._scale[expert]
        if self._major == "k":
            return dequantize(data, scale, _ROW, self.n, self._k).T
        return dequantize(data, scale, _COLUMN, self._k, self.n)


class Quantized:
    """An MXFP8 output: data and scales of the rows, of the columns, or of both."""

    def __init__(
        self, machine: Machine, rows: int, cols: int, *, row: bool = True, name: str = "d"
    ) -> None:
        self._machine, self._name = machine, name
        self._rows, self._cols = rows, cols
        fp8 = torch.float8_e4m3fn
        self.row = machine.matrix(rows, cols, fp8) if row else None
        self.column = machine.matrix(rows, cols, fp8)
        self._row_scale = self._scales(row_scale_shape(rows, cols, MXFP8)) if row else None
        self._column_scale = self._scales(column_scale_shape(rows, cols, MXFP8))

    def _scales(self, shape: tuple[int, int]) -> torch.Tensor:
        return self._machine.bytes(shape[0] * shape[1], scale=True)

    @property
    def row_scale(self) -> torch.Tensor | None:
        """The row scales as the wrappers return them, (32, 4, M/128, 4, N/128, 1)."""
        return None if self._row_scale is None else self._view(self._row_scale, row=True)

    @property
    def column_scale(self) -> torch.Tensor:
        """The column scales as the wrappers return them, (32, 4, N/128, 4, M/128, 1)."""
        return self._view(self._column_scale, row=False)

    def _view(self, scales: torch.Tensor, *, row: bool) -> torch.Tensor:
        outer, inner = (self._rows, self._cols) if row else (self._cols, self._rows)
        typed = scales.view(torch.float8_e8m0fnu)
        return to_kernel_view(typed, outer, -(-inner // MXFP8.block))

    def store(self, values: torch.Tensor, block: Block) -> None:
        """Quantize fp32 values (rows of the block, N) into every buffer."""
        values = values.contiguous()
        if block.spilled:
            self._store_spilled(values, block)
            return
        targets: list[Span | None] = [None, None]
        if self.row is not None and self._row_scale is not None:
            pitch = row_scale_shape(0, self._cols, MXFP8)[1]
            targets = [
                span(self.row, block.start * self._cols),
                span(self._row_scale, block.start * pitch),
            ]
        offset = column_group_offset(block.start, self._cols, MXFP8)
        targets += [
            span(self.column, block.start * self._cols),
            span(self._column_scale, offset),
        ]
        _quantize(values, targets)

    def _store_spilled(self, values: torch.Tensor, block: Block) -> None:
        """Store the 128 rows after an expert's end.

        Data and row scales land in the neighbour's rows. Column scales are addressed in the
        expert's own block, one row tile past its last: where the layout has the next column tile.
        """
        row_scales = row_scale_shape(TILE, self._cols, MXFP8)
        column_scales = column_scale_shape(TILE, self._cols, MXFP8)
        shapes = [(TILE, self._cols), row_scales, (TILE, self._cols), column_scales]
        parts = [torch.empty(shape, dtype=torch.uint8) for shape in shapes]
        _quantize(values, [span(part) for part in parts])
        # The TMA unit clips stores of data at the buffer's end; scales are stored by address.
        kept = max(min(block.stop, self._rows) - block.start, 0)
        for target, part in ((self.row, parts[0]), (self.column, parts[2])):
            if target is not None:
                flat = target.view(torch.uint8)[block.start : block.start + kept, :, 0]
                flat.copy_(part[:kept])
        if self._row_scale is not None:
            self._poke(self._row_scale, block.start * row_scales[1], parts[1], "sfd_row")
        tiles = block.extent // TILE
        base = column_group_offset(block.origin, self._cols, MXFP8)
        for index, tile in enumerate(parts[3].view(-1, TILE_BYTES)):
            offset = base + (index * tiles + tiles) * TILE_BYTES
            self._poke(self._column_scale, offset, tile, "sfd_col")

    def _poke(self, target: torch.Tensor, offset: int, source: torch.Tensor, name: str) -> None:
        source = source.reshape(-1)
        kept = max(min(source.numel(), target.numel() - offset), 0)
        target[offset : offset + kept] = source[:kept]
        if kept < source.numel():
            self._machine.out_of_bounds.append((f"{name}:{self._name}", source.numel() - kept))


def _quantize(values: torch.Tensor, targets: list[Span | None]) -> None:
    rows, cols = values.shape
    # NaN reaches the scale byte, as in the kernels' epilogues.
    _C.mxfp8_quantize(
        span(values), _F32, rows, cols, cols, *targets, _E4M3, True, None, 0, False, True, 1
    )


def require_view(scale: torch.Tensor, outer: int, inner: int, count: int, name: str) -> None:
    """Raise unless a scale tensor has the shape of the kernel view."""
    wanted = (32, 4, -(-outer // TILE), 4, -(-inner // TILE), count)
    if tuple(scale.shape) != wanted:
        raise ValueError(f"{name} has shape {tuple(scale.shape)}; allowed: {wanted}")
    if scale.element_size() != 1:
        raise ValueError(f"{name} is {scale.dtype}; allowed: float8_e8m0fnu")


def column_blocks(
    data: torch.Tensor, scale: torch.Tensor, ends: list[int], name: str
) -> Iterator[torch.Tensor]:
    """Yield every expert's rows of a (tokens, features) operand of the wgrad kernel, float64.

    Args:
        data: Row-major bytes; the blocks of 32 rows share a scale in every column.
        scale: Any shape; one block of scales per expert, back to back.
        ends: End row of every expert.
        name: Of the operand, for messages.
    """
    cols = data.shape[1]
    if data.stride() != (cols, 1):
        raise NotImplementedError(f"{name}_tensor has strides that the stand-in does not read")
    needed = column_group_offset(ends[-1] if ends else 0, cols, MXFP8)
    if scale.numel() < needed:
        raise ValueError(f"sf{name}_tensor has {scale.numel()} scales; needed: {needed}")
    start = 0
    for end in ends:
        yield dequantize(
            span(data, start * cols),
            span(scale, column_group_offset(start, cols, MXFP8)),
            _COLUMN,
            end - start,
            cols,
        )
        start = end


def tensor_at(address: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return the memory at an address as a tensor that does not own it."""
    count = shape[0] * shape[1]
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype, count=count).view(shape)
