# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The scale tile against the index formula written out, for all sizes modulo 128."""

from __future__ import annotations

import pytest
import torch

from te_grouped_mlp.op.formats import MXFP8, NVFP4
from te_grouped_mlp.op.tensors import scale_layout


def naive_offset(outer: int, block: int, blocks: int) -> int:
    """Walk the memory order [outer tile][block tile][outer % 32][outer // 32 % 4][block % 4]."""
    tiles_along_blocks = (blocks + 3) // 4
    position = outer // 128
    for digit, base in (
        (block // 4, tiles_along_blocks),
        (outer % 32, 32),
        ((outer // 32) % 4, 4),
        (block % 4, 4),
    ):
        position = position * base + digit
    return position


SIZES = [(1, 1), (32, 1), (127, 3), (128, 4), (129, 5), (256, 8), (257, 9), (384, 2)]


@pytest.mark.parametrize("blocks", [1, 2, 3, 4, 5, 7, 8, 9])
def test_every_offset_for_all_sizes_modulo_a_tile(blocks):
    for outer in range(1, 2 * 128 + 1):
        for block in range(blocks):
            got = scale_layout.swizzled_offset(outer - 1, block, blocks)
            assert got == naive_offset(outer - 1, block, blocks)


@pytest.mark.parametrize(("outer", "blocks"), SIZES)
def test_offsets_are_a_bijection_into_the_padded_buffer(outer, blocks):
    padded_outer = scale_layout.round_up(outer, 128)
    padded_blocks = scale_layout.round_up(blocks, 4)
    offsets = {
        scale_layout.swizzled_offset(i, j, blocks)
        for i in range(padded_outer)
        for j in range(padded_blocks)
    }
    assert offsets == set(range(padded_outer * padded_blocks))


def test_another_extent_moves_every_tile_column_past_the_first():
    """The fault that the row layout prevents: a writer with 4 blocks, a reader with 8."""
    for column in range(384):
        same = scale_layout.swizzled_offset(column, 0, 4) == scale_layout.swizzled_offset(
            column, 0, 8
        )
        assert same == (column < 128)


@pytest.mark.parametrize("fmt", [MXFP8, NVFP4], ids=lambda fmt: fmt.name)
def test_compact_shapes_for_all_sizes_modulo_a_tile(fmt):
    for size in range(0, 300, fmt.block):
        for other in (0, 32, 64, 96, 128, 160, 288):
            rows, cols = scale_layout.row_scale_shape(other, size, fmt)
            assert rows % 128 == 0
            assert cols % 4 == 0
            assert 0 <= rows - other < 128
            assert 0 <= cols - size / fmt.block < 4
            assert scale_layout.column_scale_shape(size, other, fmt) == (cols, rows)


def test_round_up():
    for value in range(300):
        got = scale_layout.round_up(value, 128)
        assert got % 128 == 0
        assert value <= got < value + 128


@pytest.mark.parametrize("fmt", [MXFP8, NVFP4], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("cols", [64, 128, 192, 320])
def test_column_scales_of_packed_groups_follow_each_other(fmt, cols):
    offset = first_row = 0
    for rows in (128, 0, 384, 256):
        assert scale_layout.column_group_offset(first_row, cols, fmt) == offset
        shape = scale_layout.column_scale_shape(rows, cols, fmt)
        offset += shape[0] * shape[1]
        first_row += rows


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize(("outer", "blocks"), SIZES)
def test_kernel_view(outer, blocks, groups):
    size = scale_layout.round_up(outer, 128) * scale_layout.round_up(blocks, 4)
    buffer = torch.arange(groups * size)
    view = scale_layout.to_kernel_view(buffer, outer, blocks, groups)
    assert view.shape == (32, 4, -(-outer // 128), 4, -(-blocks // 4), groups)
    for group in range(groups):
        for i in range(0, outer, 7):
            for j in range(blocks):
                got = int(view[i % 32, i // 32 % 4, i // 128, j % 4, j // 4, group])
                assert got == group * size + naive_offset(i, j, blocks)
    back = scale_layout.from_kernel_view(view)
    assert torch.equal(back, buffer)
    assert view.data_ptr() == back.data_ptr() == buffer.data_ptr()


@pytest.mark.parametrize(("rows", "blocks"), SIZES)
def test_compact_rows(rows, blocks):
    shape = scale_layout.row_scale_shape(rows, 32 * blocks, MXFP8)
    compact = torch.arange(shape[0] * shape[1]).reshape(shape)
    swizzled = torch.empty(compact.numel(), dtype=compact.dtype)
    for i in range(shape[0]):
        for j in range(shape[1]):
            swizzled[naive_offset(i, j, blocks)] = compact[i, j]
    got = scale_layout.compact_rows(swizzled, rows, 32 * blocks)
    assert torch.equal(got, compact.reshape(-1))
    tiled = scale_layout.tiled_rows(compact, rows, 32 * blocks)
    padding = compact.clone()
    padding[:, :blocks] = 0
    assert torch.equal(tiled, torch.where(torch.isin(swizzled, padding), 0, swizzled))


@pytest.mark.parametrize("cols", [64, 96, 128, 192])
def test_tiled_rows_have_zeros_where_there_is_no_block(cols: int) -> None:
    """A NaN there would survive the product with the zeros that fill a tile."""
    rows, blocks = 256, cols // 32
    compact = torch.randint(1, 255, scale_layout.row_scale_shape(rows, cols, MXFP8)).byte()
    tiled = scale_layout.tiled_rows(compact, rows, cols)
    for outer in range(0, rows, 37):
        for block in range(compact.shape[1]):
            wanted = int(compact[outer, block]) if block < blocks else 0
            assert int(tiled[naive_offset(outer, block, blocks)]) == wanted
