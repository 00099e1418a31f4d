// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0

#include <cstring>

#include "common.hpp"

namespace te_grouped_mlp {

namespace {

// Place of (outer, inner) inside a swizzled tile of 512 bytes: outer is the row for scales along
// rows and the column for scales along columns, inner the block.
constexpr int place_in_tile(int outer, int inner) {
  return outer % 32 * 16 + outer / 32 * 4 + inner;
}

std::int64_t row_offset(const Tile& tile, std::int64_t cols, int row) {
  return (tile.row + row) * round_up(cols / kBlock, kBlocksPerTile) + tile.col / kBlock;
}

std::int64_t col_offset(const Tile& tile, std::int64_t cols, int block) {
  return (tile.row / kBlock + block) * round_up(cols, kTile) + tile.col;
}

// Row blocks of a compact column buffer that belong to this tile. A dense matrix whose rows end
// inside a tile still owns the tile's padding: its buffer is rounded up to whole tiles.
void clear_padding(RowScaleTile& scales, const Tile& tile) {
  for (int r = 0; r < kTile; ++r) {
    const int valid = r < tile.rows ? tile.cols / kBlock : 0;
    for (int b = valid; b < kBlocksPerTile; ++b) scales[r][b] = 0;
  }
}

void clear_padding(ColScaleTile& scales, const Tile& tile) {
  for (int b = 0; b < kBlocksPerTile; ++b) {
    const int valid = b < tile.rows / kBlock ? tile.cols : 0;
    std::memset(&scales[b][valid], 0, static_cast<std::size_t>(kTile - valid));
  }
}

template <typename ScaleTile>
void move_tiles(const ScaleBuffer& src, const ScaleBuffer& dst, const TileGrid& grid,
                std::int64_t cols) {
  for (std::int64_t i = 0; i < grid.size(); ++i) {
    const Tile tile = grid[i];
    ScaleTile scales;
    load_scales(src, cols, tile, scales);
    clear_padding(scales, tile);
    store_scales(scales, cols, tile, dst);
  }
}

}  // namespace

void load_scales(const ScaleBuffer& buffer, std::int64_t cols, const Tile& tile,
                 RowScaleTile& out) {
  const std::uint8_t* swizzled = buffer.data + tile.row_swizzled;
  for (int r = 0; r < kTile; ++r) {
    const std::uint8_t* from =
        buffer.swizzled ? swizzled + place_in_tile(r, 0) : buffer.data + row_offset(tile, cols, r);
    std::memcpy(out[r], from, kBlocksPerTile);
  }
}

void store_scales(const RowScaleTile& in, std::int64_t cols, const Tile& tile,
                  const ScaleBuffer& buffer) {
  std::uint8_t* swizzled = buffer.data + tile.row_swizzled;
  for (int r = 0; r < kTile; ++r) {
    std::uint8_t* to =
        buffer.swizzled ? swizzled + place_in_tile(r, 0) : buffer.data + row_offset(tile, cols, r);
    std::memcpy(to, in[r], kBlocksPerTile);
  }
}

void load_scales(const ScaleBuffer& buffer, std::int64_t cols, const Tile& tile,
                 ColScaleTile& out) {
  const std::uint8_t* swizzled = buffer.data + tile.col_swizzled;
  for (int b = 0; b < kBlocksPerTile; ++b) {
    if (buffer.swizzled) {
      for (int c = 0; c < kTile; ++c) out[b][c] = swizzled[place_in_tile(c, b)];
    } else {
      std::memcpy(out[b], buffer.data + col_offset(tile, cols, b), kTile);
    }
  }
}

void store_scales(const ColScaleTile& in, std::int64_t cols, const Tile& tile,
                  const ScaleBuffer& buffer) {
  std::uint8_t* swizzled = buffer.data + tile.col_swizzled;
  for (int b = 0; b < kBlocksPerTile; ++b) {
    if (buffer.swizzled) {
      for (int c = 0; c < kTile; ++c) swizzled[place_in_tile(c, b)] = in[b][c];
    } else {
      std::memcpy(buffer.data + col_offset(tile, cols, b), in[b], kTile);
    }
  }
}

void swizzle_scales(std::uint8_t* src, std::uint8_t* dst, Axis axis, const Groups& groups,
                    std::int64_t cols, bool inverse) {
  const TileGrid grid(groups, cols);
  const ScaleBuffer from{src, inverse};
  const ScaleBuffer to{dst, !inverse};
  if (axis == Axis::kRow) {
    move_tiles<RowScaleTile>(from, to, grid, cols);
  } else {
    move_tiles<ColScaleTile>(from, to, grid, cols);
  }
}

}  // namespace te_grouped_mlp
