# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""What the frontend stand-ins do with memory, and which rows they go through in which order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

TILE = 128
"""Rows that one CTA stores; two of them form a tile of 256."""
_SPILLS = (None, "first", "last")


@dataclass
class Machine:
    """What the stand-ins do where a caller cannot see it, and what they saw.

    Attributes:
        unwritten_byte: Content of fresh buffers.
        unwritten_scale_byte: Content of fresh scale buffers; None for `unwritten_byte`.
        spill: Whether the second CTA of the last 256-row tile of an expert that ends on an odd
            multiple of 128 stores, and whether it does so before ("first") or after ("last") all
            others; None for kernels that stop at the expert's end.
        out_of_bounds: (buffer, bytes) of every store past a buffer's end; none is carried out.
    """

    unwritten_byte: int = 0xFF
    unwritten_scale_byte: int | None = None
    spill: str | None = None
    out_of_bounds: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.spill not in _SPILLS:
            raise ValueError(f"spill is {self.spill!r}; allowed: {_SPILLS}")

    def bytes(self, count: int, *, scale: bool = False) -> torch.Tensor:
        """Return `count` unwritten bytes."""
        byte = self.unwritten_byte
        if scale and self.unwritten_scale_byte is not None:
            byte = self.unwritten_scale_byte
        return torch.full((count,), byte, dtype=torch.uint8)

    def matrix(self, rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an unwritten tensor (rows, cols, 1) in the wrappers' strides."""
        flat = self.bytes(rows * cols * dtype.itemsize).view(dtype)
        return flat.as_strided((rows, cols, 1), (cols, 1, rows * cols))


@dataclass(frozen=True)
class Block:
    """Rows that go through the weights of one expert together.

    Attributes:
        expert: Which weights.
        start, stop: Rows; `stop` may lie past the buffer for a spilled block.
        extent: Rows of the whole expert, which its column scales span.
        spilled: Whether these are the 128 rows after the expert's end.
    """

    expert: int
    start: int
    stop: int
    extent: int
    spilled: bool = False

    @property
    def origin(self) -> int:
        """First row of the expert."""
        return self.start - self.extent if self.spilled else self.start


def blocks(offsets: torch.Tensor, rows: int, *, all_rows: bool, machine: Machine) -> list[Block]:
    """Return what a kernel computes, in the order in which it stores.

    Args:
        offsets: int32 end row of every expert.
        rows: Of the buffer.
        all_rows: Ignore the offsets: one expert has every row.
        machine: Decides about spilled blocks.

    Raises:
        ValueError: The offsets do not lie in the buffer in order, or not on multiples of 128.
    """
    ends = [rows] if all_rows else offsets.tolist()
    proper, spilled, start = [], [], 0
    for expert, end in enumerate(ends):
        extent = end - start
        if extent < 0 or end > rows or extent % TILE:
            raise ValueError(f"padded_offsets is {ends}; allowed: multiples of 128 up to {rows}")
        if extent:
            proper.append(Block(expert, start, end, extent))
        if machine.spill and extent % (2 * TILE):
            spilled.append(Block(expert, end, end + TILE, extent, spilled=True))
        start = end
    return spilled + proper if machine.spill == "first" else proper + spilled


def rows_of(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    """Return the rows of a block as float64; rows past the buffer read as zero."""
    found = tensor[block.start : block.stop].double()
    missing = block.stop - block.start - found.shape[0]
    return torch.cat((found, found.new_zeros(missing, *found.shape[1:]))) if missing else found


def require(fits: bool, name: str, value: Any, allowed: Any) -> None:
    """Raise ValueError naming the argument, its value and what is allowed, unless it fits."""
    if not fits:
        raise ValueError(f"{name} is {value}; allowed: {allowed}")


def int32_offsets(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return row offsets that are what a kernel can read, else raise ValueError."""
    fits = tensor.dtype == torch.int32 and tensor.dim() == 1 and tensor.is_contiguous()
    require(fits, name, tensor, "int32, 1-D, contiguous")
    return tensor
