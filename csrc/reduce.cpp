// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include "common.hpp"

namespace te_grouped_mlp {

namespace {

// Sums one group's columns [first_col, first_col + cols): tile after tile, from the top.
template <typename Sum>
void sum_columns(const Source& src, const Group& group, const float* weights,
                 std::int64_t first_col, int cols, float* out) {
  const auto kernel = kernels().column_sums[static_cast<int>(src.type)];
  Sum totals[kSumColumns] = {};
  for (std::int64_t done = 0; done < group.rows; done += kTile) {
    const std::int64_t row = group.first_row + done;
    ColumnSumTile work;
    work.src = src.at(row, first_col);
    work.src_stride = src.row_stride;
    work.weights = weights == nullptr ? nullptr : weights + row;
    work.totals = totals;
    work.rows = static_cast<int>(std::min<std::int64_t>(kTile, group.rows - done));
    work.cols = cols;
    kernel(work);
  }
  for (int c = 0; c < cols; ++c) out[c] = static_cast<float>(totals[c]);
}

std::int64_t live_bytes(const Source& src, const Groups& groups) {
  std::int64_t rows = 0;
  for (const Group& group : groups) rows += group.rows;
  return rows * src.cols * size_of(src.type);
}

}  // namespace

void column_sums(const Source& src, const Groups& groups, const float* weights, float* out,
                 int threads) {
  const std::int64_t chunks = round_up(src.cols, kSumColumns) / kSumColumns;
  const std::int64_t count = static_cast<std::int64_t>(groups.size()) * chunks;
  parallel_for(count, decide_threads(threads, live_bytes(src, groups)),
               [&](std::int64_t first, std::int64_t last) {
                 for (std::int64_t i = first; i < last; ++i) {
                   const Group& group = groups[static_cast<std::size_t>(i / chunks)];
                   const std::int64_t col = i % chunks * kSumColumns;
                   const int cols =
                       static_cast<int>(std::min<std::int64_t>(kSumColumns, src.cols - col));
                   float* to = out + i / chunks * src.cols + col;
                   if (src.type == SourceType::kF64) {
                     sum_columns<double>(src, group, weights, col, cols, to);
                   } else {
                     sum_columns<float>(src, group, weights, col, cols, to);
                   }
                 }
               });
}

void row_dots(const Source& src, const Groups& groups, const float* table, float* out,
              int threads) {
  const auto kernel = kernels().row_dots[static_cast<int>(src.type)];
  // Tiles only split the rows here; one tile spans all columns.
  const TileGrid grid(groups, 1);
  std::vector<const float*> tables;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const std::int64_t tiles = round_up(groups[g].rows, kTile) / kTile;
    tables.insert(tables.end(), static_cast<std::size_t>(tiles),
                  table + static_cast<std::int64_t>(g) * src.cols);
  }
  parallel_for(grid.size(), decide_threads(threads, live_bytes(src, groups)),
               [&](std::int64_t first, std::int64_t last) {
                 for (std::int64_t i = first; i < last; ++i) {
                   const Tile tile = grid[i];
                   RowDotTile work;
                   work.src = src.at(tile.row, 0);
                   work.src_stride = src.row_stride;
                   work.table = tables[static_cast<std::size_t>(i)];
                   work.out = out + tile.row;
                   work.rows = tile.rows;
                   work.cols = src.cols;
                   kernel(work);
                 }
               });
}

}  // namespace te_grouped_mlp
