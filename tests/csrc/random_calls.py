# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""Random calls of the extension, some with memory that is too short, and numbers of nonsense.

What a call needs is computed here from the shapes alone. Every buffer is as long as that to the
byte, so that a sanitizer sees the first access past it; without one, marks behind it show a write.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from te_grouped_mlp import _C
from te_grouped_mlp.op.tensors.capacity import Span
from tests.csrc.naive_mxfp8 import scale_shape

MARK, MARKS = 0xA5, 64
SIZES = {0: 4, 1: 2, 2: 2, 3: 8}
NONSENSE = (-(2**63), -1, 0, 7, 2**31, 2**62, 2**63 - 1, 2**64)
NUMBERS = ("rows", "cols", "row_stride", "num_groups", "src_dtype", "out_dtype", "fp8", "axis")


@dataclass
class Call:
    """A call in the making.

    Attributes:
        name: Of the function.
        arguments: By name.
        short: The arguments whose memory does not suffice.
        kept: Everything that the memory is part of, with the length of that memory.
        strange: A number was replaced, so nothing is known of what must happen.
    """

    name: str
    draw: random.Random
    marked: bool
    arguments: dict[str, Any] = field(default_factory=dict)
    short: set[str] = field(default_factory=set)
    kept: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    strange: bool = False

    def memory(self, name: str, needed: int, values: torch.Tensor | None = None) -> None:
        """Give an argument memory: usually enough, to the byte."""
        size = needed
        if needed and self.draw.random() < 0.12:
            size = self.draw.choice([0, 1, needed // 2, needed - 1, self.draw.randrange(needed)])
        raw = torch.full((size + MARKS * self.marked,), MARK, dtype=torch.uint8)
        if values is not None:
            raw[:size] = values.view(torch.uint8).flatten()[:size]
        else:
            raw[:size] = 0x3C
        if size < needed:
            self.short.add(name)
        self.kept.append((raw, size))
        span: Span | None = (raw.data_ptr() if size else 0, size)
        if needed and self.draw.random() < 0.02:
            span = None
            self.short.add(name)
        self.arguments[name] = span

    def run(self) -> Exception | None:
        """Call, and check that nothing was written past the memory that was given."""
        try:
            getattr(_C, self.name)(**self.arguments)
            raised = None
        except (TypeError, ValueError) as error:
            raised = error
        for raw, size in self.kept:
            assert (raw[size:] == MARK).all(), (self.name, self.arguments)
        return raised


def draw_call(draw: random.Random, *, marked: bool = True) -> Call:
    """Draw a call; `marked` buffers are followed by marks, the others end where they end."""
    names = ("mxfp8_quantize", "mxfp8_dequantize", "swizzle_scales", "column_sums")
    name = draw.choice((*names, "weighted_column_sums", "row_dots"))
    call = Call(name, draw, marked)
    if name in names[:3]:
        _draw_block_scaled(call)
    else:
        _draw_sums(call)
    if draw.random() < 0.1:
        number = draw.choice([each for each in NUMBERS if each in call.arguments])
        call.arguments[number] = draw.choice(NONSENSE)
        call.strange = True
    return call


def _draw_block_scaled(call: Call) -> None:
    draw, given = call.draw, call.arguments
    axis = draw.randrange(2)
    by_row, by_col = call.name == "mxfp8_quantize", draw.random() < 0.7
    two_d = by_row and draw.random() < 0.3
    if call.name == "mxfp8_quantize":
        by_row = not by_col or draw.random() < 0.7
    else:
        by_row, by_col = axis == 0, axis == 1
    rows = 32 * draw.randint(1, 9) if by_col or two_d else draw.randint(1, 280)
    cols = 32 * draw.randint(1, 9) if by_row or two_d else draw.randint(1, 280)
    rows = _splits(call, rows, 128)
    given.update(rows=rows, cols=cols)
    if call.name == "swizzle_scales":
        size = _scales(rows, cols, axis)
        call.memory("src", size)
        call.memory("dst", size)
        given.update(axis=axis, inverse=draw.random() < 0.5)
        return
    given.update(
        fp8=draw.randrange(2), swizzled=draw.random() < 0.5, threads=draw.choice([0, 1, 3])
    )
    if call.name == "mxfp8_dequantize":
        kind = draw.choice(list(SIZES))
        call.memory("data", rows * cols)
        call.memory("scale", _scales(rows, cols, axis))
        call.memory("out", rows * cols * SIZES[kind])
        given.update(axis=axis, out_dtype=kind)
        return
    _source(call, rows, cols)
    for direction, wanted, along in (("row", by_row, 0), ("col", by_col, 1)):
        if wanted:
            call.memory(f"{direction}_data", rows * cols)
            call.memory(f"{direction}_scale", _scales(rows, cols, along))
        else:
            given.update({f"{direction}_data": None, f"{direction}_scale": None})
    given.update(two_d=two_d, nan_in_scale=draw.random() < 0.5)
    if by_row and by_col and given["row_data"] is given["row_scale"] is None:
        # As if they were not wanted.
        call.short -= {"row_data", "row_scale"}
    if by_row and by_col and given["col_data"] is given["col_scale"] is None:
        call.short -= {"col_data", "col_scale"}
        call.strange = True


def _draw_sums(call: Call) -> None:
    draw, given = call.draw, call.arguments
    rows, cols = _splits(call, draw.randint(1, 280), 1), draw.randint(1, 300)
    groups = max(given["num_groups"], 1)
    given.update(rows=rows, cols=cols, threads=draw.choice([0, 1, 3]))
    _source(call, rows, cols)
    call.memory("out_f32", 4 * (rows if call.name == "row_dots" else groups * cols))
    if call.name == "weighted_column_sums":
        call.memory("weights_f32", 4 * rows)
    elif call.name == "row_dots":
        call.memory("table_f32", 4 * groups * cols)


def _source(call: Call, rows: int, cols: int) -> None:
    kind, stride = call.draw.choice(list(SIZES)), cols + call.draw.choice([0, 0, 1, 24])
    call.arguments.update(src_dtype=kind, row_stride=stride)
    call.memory("src", ((rows - 1) * stride + cols) * SIZES[kind])


def _splits(call: Call, rows: int, multiple: int) -> int:
    """Divide the rows, or leave them one group; return how many they are."""
    call.arguments.update(splits=None, num_groups=0)
    if call.draw.random() < 0.5:
        return rows
    counts = [multiple * call.draw.randint(0, 200 // multiple + 1) for _ in range(3)]
    counts.append(multiple)
    call.arguments["num_groups"] = len(counts)
    call.memory("splits", 8 * len(counts), torch.tensor(counts, dtype=torch.int64))
    return sum(counts) + 128 * call.draw.randrange(2)


def _scales(rows: int, cols: int, axis: int) -> int:
    shape = scale_shape(rows, cols, axis)
    return shape[0] * shape[1]
