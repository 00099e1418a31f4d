// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0

#include "common.hpp"

namespace te_grouped_mlp {

void dequantize(const DequantizeInput& in, const Groups& groups, std::int64_t cols, void* out,
                SourceType out_type, int threads) {
  const TileGrid grid(groups, cols);
  const auto kernel = kernels().dequantize[static_cast<int>(out_type)][static_cast<int>(in.format)];
  const ScaleBuffer scale{in.scale, in.swizzled};
  const std::int64_t out_size = size_of(out_type);
  const std::int64_t bytes = grid.size() * kTile * kTile * out_size;
  parallel_for(grid.size(), decide_threads(threads, bytes),
               [&](std::int64_t first, std::int64_t last) {
                 for (std::int64_t i = first; i < last; ++i) {
                   const Tile tile = grid[i];
                   const std::int64_t offset = tile.row * cols + tile.col;
                   RowScaleTile row_scales;
                   ColScaleTile col_scales;
                   DequantizeTile work;
                   work.data = in.data + offset;
                   work.data_stride = cols;
                   work.row_scale = nullptr;
                   work.col_scale = nullptr;
                   work.out = static_cast<char*>(out) + offset * out_size;
                   work.out_stride = cols;
                   work.rows = tile.rows;
                   work.cols = tile.cols;
                   if (in.axis == Axis::kRow) {
                     load_scales(scale, cols, tile, row_scales);
                     work.row_scale = &row_scales;
                   } else {
                     load_scales(scale, cols, tile, col_scales);
                     work.col_scale = &col_scales;
                   }
                   kernel(work);
                 }
               });
}

}  // namespace te_grouped_mlp
