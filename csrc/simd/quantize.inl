// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0
//
// MXFP8 quantization of one tile. Included inside the anonymous namespace of a SIMD level.
//
// A tile is worked off in panels of 32 rows, one block high: the panel is converted to float32
// once, and both directions are quantized from that copy while it is in the first-level cache.
// A panel at the edge is filled up with zeros: they change no maximum, and the scale of a block of
// zeros is 0x00, which is what padding must hold.

struct Panel {
  alignas(64) float value[kBlock][kTile];
  alignas(64) std::uint32_t row_amax[kBlock][kBlocksPerTile];  // float32 bits
  alignas(64) std::uint32_t col_amax[kTile];                   // float32 bits
};

template <typename Source>
void load_panel(const QuantizeTile& tile, int first_row, Panel& panel) {
  const Source* src = static_cast<const Source*>(tile.src) + first_row * tile.src_stride;
  const int rows = tile.rows - first_row < kBlock ? tile.rows - first_row : kBlock;
  if (rows == kBlock && tile.cols == kTile) {
    for (int r = 0; r < kBlock; ++r, src += tile.src_stride) {
      for (int c = 0; c < kTile; ++c) panel.value[r][c] = to_float(src[c]);
    }
    return;
  }
  __builtin_memset(panel.value, 0, sizeof(panel.value));
  for (int r = 0; r < rows; ++r, src += tile.src_stride) {
    for (int c = 0; c < tile.cols; ++c) panel.value[r][c] = to_float(src[c]);
  }
}

// Magnitudes compare like integers. A NaN lies above infinity; it counts as 0 where it must not
// reach the scale.
void find_amax(Panel& panel, bool nan_in_scale) {
  const std::int32_t limit = static_cast<std::int32_t>(nan_in_scale ? kAbsMask : kInfBits);
  alignas(64) std::int32_t col_amax[kTile] = {};
  for (int r = 0; r < kBlock; ++r) {
    alignas(64) std::int32_t magnitude[kTile];
    for (int c = 0; c < kTile; ++c) {
      const std::int32_t bits = static_cast<std::int32_t>(bits_of(panel.value[r][c]) & kAbsMask);
      magnitude[c] = bits > limit ? 0 : bits;
      col_amax[c] = col_amax[c] > magnitude[c] ? col_amax[c] : magnitude[c];
    }
    for (int b = 0; b < kBlocksPerTile; ++b) {
      std::int32_t amax = 0;
      for (int c = b * kBlock; c < (b + 1) * kBlock; ++c) {
        amax = amax > magnitude[c] ? amax : magnitude[c];
      }
      panel.row_amax[r][b] = static_cast<std::uint32_t>(amax);
    }
  }
  for (int c = 0; c < kTile; ++c) panel.col_amax[c] = static_cast<std::uint32_t>(col_amax[c]);
}

// One maximum per 32 x 32 block, for both directions.
void share_amax(Panel& panel) {
  for (int b = 0; b < kBlocksPerTile; ++b) {
    std::uint32_t amax = 0;
    for (int r = 0; r < kBlock; ++r) amax = amax > panel.row_amax[r][b] ? amax : panel.row_amax[r][b];
    for (int r = 0; r < kBlock; ++r) panel.row_amax[r][b] = amax;
    for (int c = 0; c < kBlock; ++c) panel.col_amax[b * kBlock + c] = amax;
  }
}

inline void store_row(std::uint8_t* dst, const std::uint8_t* codes, int cols) {
  if (cols == kTile) {
    __builtin_memcpy(dst, codes, kTile);
  } else {
    __builtin_memcpy(dst, codes, static_cast<unsigned>(cols));
  }
}

template <Fp8Format F>
void write_rows(const Panel& panel, const QuantizeTile& tile, int first_row, int rows) {
  alignas(64) float factor[kBlock][kBlocksPerTile];
  for (int i = 0; i < kBlock * kBlocksPerTile; ++i) {
    const std::uint32_t scale = e8m0_of_amax<F>((&panel.row_amax[0][0])[i]);
    (&(*tile.row_scale)[first_row][0])[i] = static_cast<std::uint8_t>(scale);
    (&factor[0][0])[i] = reciprocal_of_e8m0(scale);
  }
  std::uint8_t* dst = tile.row_data + first_row * tile.data_stride;
  for (int r = 0; r < rows; ++r, dst += tile.data_stride) {
    alignas(64) std::uint8_t codes[kTile];
    for (int b = 0; b < kBlocksPerTile; ++b) {
      const float block_factor = factor[r][b];
      for (int c = b * kBlock; c < (b + 1) * kBlock; ++c) {
        codes[c] = static_cast<std::uint8_t>(to_fp8<F>(panel.value[r][c] * block_factor));
      }
    }
    store_row(dst, codes, tile.cols);
  }
}

template <Fp8Format F>
void write_columns(const Panel& panel, const QuantizeTile& tile, int first_row, int rows) {
  alignas(64) float factor[kTile];
  std::uint8_t* scales = (*tile.col_scale)[first_row / kBlock];
  for (int c = 0; c < kTile; ++c) {
    const std::uint32_t scale = e8m0_of_amax<F>(panel.col_amax[c]);
    scales[c] = static_cast<std::uint8_t>(scale);
    factor[c] = reciprocal_of_e8m0(scale);
  }
  std::uint8_t* dst = tile.col_data + first_row * tile.data_stride;
  for (int r = 0; r < rows; ++r, dst += tile.data_stride) {
    alignas(64) std::uint8_t codes[kTile];
    for (int c = 0; c < kTile; ++c) {
      codes[c] = static_cast<std::uint8_t>(to_fp8<F>(panel.value[r][c] * factor[c]));
    }
    store_row(dst, codes, tile.cols);
  }
}

template <typename Source, Fp8Format F>
void quantize_tile(const QuantizeTile& tile) {
  Panel panel;
  for (int first_row = 0; first_row < tile.rows; first_row += kBlock) {
    const int rows = tile.rows - first_row < kBlock ? tile.rows - first_row : kBlock;
    load_panel<Source>(tile, first_row, panel);
    find_amax(panel, tile.nan_in_scale);
    if (tile.two_d) share_amax(panel);
    if (tile.row_data != nullptr) write_rows<F>(panel, tile, first_row, rows);
    if (tile.col_data != nullptr) write_columns<F>(panel, tile, first_row, rows);
  }
}
