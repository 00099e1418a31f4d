# Copyright (c) 2026, the te-grouped-mlp authors.
# SPDX-License-Identifier: Apache-2.0
"""The 128 x 4 block-scale tile: sizes, offsets and views, in both directions.

Compact scales are a padded matrix. Swizzled scales are a sequence of 512-byte tiles; a tile holds
the scales of 128 outer positions (data rows for row scales, data columns for column scales) times
4 blocks along the quantized axis, in the order [outer % 32][outer // 32 % 4][block % 4]. Tiles lie
with the outer tile index first. (cuBLAS, "1D block scaling factors layout".)
"""

from __future__ import annotations

import functools
from typing import Any

from te_grouped_mlp.op.formats import SCALE_TILE_INNER, SCALE_TILE_OUTER, Format

TILE_BYTES = SCALE_TILE_OUTER * SCALE_TILE_INNER


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@functools.lru_cache(maxsize=256)
def row_scale_shape(rows: int, cols: int, fmt: Format) -> tuple[int, int]:
    """Return the padded shape of compact row scales of a (rows, cols) matrix."""
    return round_up(rows, SCALE_TILE_OUTER), round_up(-(-cols // fmt.block), SCALE_TILE_INNER)


@functools.lru_cache(maxsize=256)
def column_scale_shape(rows: int, cols: int, fmt: Format) -> tuple[int, int]:
    """Return the padded shape of compact column scales of a (rows, cols) matrix."""
    return round_up(-(-rows // fmt.block), SCALE_TILE_INNER), round_up(cols, SCALE_TILE_OUTER)


def swizzled_offset(outer: int, block: int, blocks: int) -> int:
    """Return the byte offset of one scale in the swizzled layout.

    Args:
        outer: Data row (row scales) or data column (column scales).
        block: Block index along the quantized axis.
        blocks: Number of blocks along the quantized axis, of the matrix that the layout spans.
            For column scales this is the row extent over the block size: reading with another
            extent than the writer's finds other bytes in every tile column past the first.
    """
    tiles = -(-blocks // SCALE_TILE_INNER)
    tile = outer // SCALE_TILE_OUTER * tiles + block // SCALE_TILE_INNER
    inside = outer % 32 * 16 + outer % SCALE_TILE_OUTER // 32 * 4 + block % SCALE_TILE_INNER
    return tile * TILE_BYTES + inside


def column_group_offset(first_row: int, cols: int, fmt: Format) -> int:
    """Return the byte at which a group's swizzled column scales begin in a packed buffer.

    Args:
        first_row: First row of the group, a multiple of 128.
        cols: Columns of the matrix.
        fmt: A block-scaled format.
    """
    return first_row // fmt.block * round_up(cols, SCALE_TILE_OUTER)


def to_kernel_view(scales: Any, outer: int, blocks: int, groups: int = 1) -> Any:
    """View swizzled scales as the six-dimensional tensor that grouped-GEMM wrappers take.

    Args:
        scales: Flat or shaped buffer of one byte per scale (torch tensor), contiguous.
        outer: Outer extent (rows or columns) of one group, before padding.
        blocks: Blocks along the quantized axis of one group, before padding.
        groups: Number of equal members stacked in the buffer.

    Returns:
        A view of shape (32, 4, ceil(outer / 128), 4, ceil(blocks / 4), groups), sharing memory.
    """
    outer_tiles = -(-outer // SCALE_TILE_OUTER)
    inner_tiles = -(-blocks // SCALE_TILE_INNER)
    tiles = scales.view(groups, outer_tiles, inner_tiles, 32, 4, SCALE_TILE_INNER)
    return tiles.permute(3, 4, 1, 5, 2, 0)


def from_kernel_view(scales: Any) -> Any:
    """Return the flat buffer behind a view made by `to_kernel_view`, sharing memory."""
    return scales.permute(5, 2, 4, 0, 1, 3).reshape(-1)


def tiled_rows(scales: Any, rows: int, cols: int) -> Any:
    """Return compact row scales of a (rows, cols) matrix in tile order, as a new flat buffer.

    Args:
        scales: Contiguous buffer of one byte per scale, padded to whole tiles.
        rows, cols: Extents of the data; 32 columns share a scale. Groups of whole tiles of rows
            need no more: their tiles follow each other.

    Returns:
        The padding is zero, whatever it was.
    """
    outer_tiles = -(-rows // SCALE_TILE_OUTER)
    blocks = -(-cols // 32)
    inner_tiles = -(-blocks // SCALE_TILE_INNER)
    tiles = scales.view(outer_tiles, 4, 32, inner_tiles, SCALE_TILE_INNER)
    tiled = tiles.permute(0, 3, 2, 1, 4).contiguous()
    if blocks % SCALE_TILE_INNER:
        tiled[:, -1, ..., blocks % SCALE_TILE_INNER :] = 0
    return tiled.view(-1)


def compact_rows(scales: Any, rows: int, cols: int) -> Any:
    """Return swizzled row scales of a (rows, cols) matrix in compact order, as a new flat buffer.

    Args:
        scales: Contiguous buffer of one byte per scale, padded to whole tiles.
        rows, cols: Extents of the data; 32 columns share a scale.
    """
    outer_tiles = -(-rows // SCALE_TILE_OUTER)
    inner_tiles = -(-cols // (32 * SCALE_TILE_INNER))
    tiles = scales.view(outer_tiles, inner_tiles, 32, 4, SCALE_TILE_INNER)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
