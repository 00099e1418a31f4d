// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0

#include <cstring>

#include "common.hpp"

namespace te_grouped_mlp {

void quantize(const Source& src, const Groups& groups, const QuantizeOutputs& out,
              const QuantizeOptions& options, int threads) {
  const TileGrid grid(groups, src.cols);
  const auto kernel =
      kernels().quantize[static_cast<int>(src.type)][static_cast<int>(options.format)];
  const ScaleBuffer row_scale{out.row_scale, options.swizzled};
  const ScaleBuffer col_scale{out.col_scale, options.swizzled};
  const std::int64_t bytes = grid.size() * kTile * kTile * size_of(src.type);
  parallel_for(grid.size(), decide_threads(threads, bytes),
               [&](std::int64_t first, std::int64_t last) {
                 for (std::int64_t i = first; i < last; ++i) {
                   const Tile tile = grid[i];
                   const std::int64_t offset = tile.row * src.cols + tile.col;
                   RowScaleTile row_scales;
                   ColScaleTile col_scales;
                   std::memset(row_scales, 0, sizeof(row_scales));
                   std::memset(col_scales, 0, sizeof(col_scales));
                   QuantizeTile work;
                   work.src = src.at(tile.row, tile.col);
                   work.src_stride = src.row_stride;
                   work.row_data = out.row_data == nullptr ? nullptr : out.row_data + offset;
                   work.col_data = out.col_data == nullptr ? nullptr : out.col_data + offset;
                   work.data_stride = src.cols;
                   work.rows = tile.rows;
                   work.cols = tile.cols;
                   work.two_d = options.two_d;
                   work.nan_in_scale = options.nan_in_scale;
                   work.row_scale = &row_scales;
                   work.col_scale = &col_scales;
                   kernel(work);
                   if (out.row_data != nullptr) store_scales(row_scales, src.cols, tile, row_scale);
                   if (out.col_data != nullptr) store_scales(col_scales, src.cols, tile, col_scale);
                 }
               });
}

}  // namespace te_grouped_mlp
