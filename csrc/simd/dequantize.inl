// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0
//
// MXFP8 dequantization of one tile. Included inside the anonymous namespace of a SIMD level.

// The float32 product is exact unless it leaves float32's range; then it rounds as float32 does.
template <typename Out, Fp8Format F>
struct Dequantized {
  static Out value(std::uint8_t code, float factor) {
    return from_float<Out>(from_fp8<F>(code) * factor);
  }
};
// float64 holds every product exactly: it is the type for an oracle.
template <Fp8Format F>
struct Dequantized<double, F> {
  static double value(std::uint8_t code, float factor) {
    return static_cast<double>(from_fp8<F>(code)) * static_cast<double>(factor);
  }
};

template <typename Out, Fp8Format F>
void dequantize_tile(const DequantizeTile& tile) {
  const std::uint8_t* data = tile.data;
  Out* out = static_cast<Out*>(tile.out);
  alignas(64) float factor[kTile];
  for (int r = 0; r < tile.rows; ++r, data += tile.data_stride, out += tile.out_stride) {
    if (tile.row_scale != nullptr) {
      for (int b = 0; b < kBlocksPerTile; ++b) {
        const float block_factor = value_of_e8m0((*tile.row_scale)[r][b]);
        for (int c = b * kBlock; c < (b + 1) * kBlock; ++c) factor[c] = block_factor;
      }
    } else if (r % kBlock == 0) {
      const std::uint8_t* scales = (*tile.col_scale)[r / kBlock];
      for (int c = 0; c < kTile; ++c) factor[c] = value_of_e8m0(scales[c]);
    }
    for (int c = 0; c < tile.cols; ++c) out[c] = Dequantized<Out, F>::value(data[c], factor[c]);
  }
}
