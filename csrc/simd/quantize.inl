// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0
//
// MXFP8 quantization of one tile. Included inside the anonymous namespace of a SIMD level.
//
// A tile is worked off in panels of 32 rows, one block high: the panel is copied once, and both
// directions are quantized from the copy while it is in the first-level cache. A panel at the edge
// is filled up with zeros: they change no maximum, and the scale of a block of zeros is 0x00,
// which is what padding must hold.

// What a panel holds: bfloat16 as it is, because its magnitudes compare in half the vector width
// and widening is one shift; everything else as float32.
template <typename Source>
struct PanelElement {
  using type = float;
  using Magnitude = std::int32_t;
  static float load(Source x) { return to_float(x); }
  static Magnitude magnitude(float x) { return static_cast<Magnitude>(bits_of(x) & kAbsMask); }
  static std::uint32_t float_bits(Magnitude m) { return static_cast<std::uint32_t>(m); }
  static constexpr bool kScalesByShift = false;
  static constexpr Magnitude kInf = static_cast<Magnitude>(kInfBits);
  static constexpr Magnitude kLargestNan = static_cast<Magnitude>(kAbsMask);
};
template <>
struct PanelElement<BFloat16> {
  using type = BFloat16;
  using Magnitude = std::int16_t;
  static BFloat16 load(BFloat16 x) { return x; }
  static Magnitude magnitude(BFloat16 x) { return static_cast<Magnitude>(x.bits & 0x7FFF); }
  static std::uint32_t float_bits(Magnitude m) { return static_cast<std::uint32_t>(m) << 16; }
  static constexpr bool kScalesByShift = true;
  static constexpr Magnitude kInf = 0x7F80;
  static constexpr Magnitude kLargestNan = 0x7FFF;
};

template <typename Source>
struct Panel {
  using Element = PanelElement<Source>;
  alignas(64) typename Element::type value[kBlock][kTile];
  alignas(64) std::uint32_t row_amax[kBlock][kBlocksPerTile];  // float32 bits
  alignas(64) std::uint32_t col_amax[kTile];                   // float32 bits
};

template <typename Source>
void load_panel(const QuantizeTile& tile, int first_row, int rows, Panel<Source>& panel) {
  using Element = PanelElement<Source>;
  const Source* src = static_cast<const Source*>(tile.src) + first_row * tile.src_stride;
  if (rows == kBlock && tile.cols == kTile) {
    for (int r = 0; r < kBlock; ++r, src += tile.src_stride) {
      for (int c = 0; c < kTile; ++c) panel.value[r][c] = Element::load(src[c]);
    }
    return;
  }
  __builtin_memset(panel.value, 0, sizeof(panel.value));
  for (int r = 0; r < rows; ++r, src += tile.src_stride) {
    for (int c = 0; c < tile.cols; ++c) panel.value[r][c] = Element::load(src[c]);
  }
}

// Magnitudes compare like integers. A NaN lies above infinity; it counts as 0 where it must not
// reach the scale.
template <typename Source>
void find_amax(Panel<Source>& panel, bool nan_in_scale) {
  using Element = PanelElement<Source>;
  using Magnitude = typename Element::Magnitude;
  const Magnitude limit = nan_in_scale ? Element::kLargestNan : Element::kInf;
  alignas(64) Magnitude col_amax[kTile] = {};
  for (int r = 0; r < kBlock; ++r) {
    alignas(64) Magnitude magnitude[kTile];
    for (int c = 0; c < kTile; ++c) {
      const Magnitude m = Element::magnitude(panel.value[r][c]);
      magnitude[c] = m > limit ? Magnitude{0} : m;
    }
    for (int c = 0; c < kTile; ++c) {
      col_amax[c] = col_amax[c] > magnitude[c] ? col_amax[c] : magnitude[c];
    }
    for (int b = 0; b < kBlocksPerTile; ++b) {
      Magnitude amax = 0;
      for (int c = b * kBlock; c < (b + 1) * kBlock; ++c) {
        amax = amax > magnitude[c] ? amax : magnitude[c];
      }
      panel.row_amax[r][b] = Element::float_bits(amax);
    }
  }
  for (int c = 0; c < kTile; ++c) panel.col_amax[c] = Element::float_bits(col_amax[c]);
}

// One maximum per 32 x 32 block, for both directions.
template <typename Source>
void share_amax(Panel<Source>& panel) {
  for (int b = 0; b < kBlocksPerTile; ++b) {
    std::uint32_t amax = 0;
    for (int r = 0; r < kBlock; ++r) {
      amax = amax > panel.row_amax[r][b] ? amax : panel.row_amax[r][b];
    }
    for (int r = 0; r < kBlock; ++r) panel.row_amax[r][b] = amax;
    for (int c = 0; c < kBlock; ++c) panel.col_amax[b * kBlock + c] = amax;
  }
}

// What 128 elements are multiplied by: 2^(127 - scale) as a float, and for bfloat16 as an addition
// to the exponent where that is exact for all of them.
struct Factors {
  alignas(64) float value[kTile];
  alignas(64) std::int16_t shift[kTile];
  bool by_shift;
};

// Scale bytes and factors of 128 blocks with these maxima.
template <typename Source, Fp8Format F>
void find_factors(const std::uint32_t* amax, std::uint8_t* scales, Factors& factors) {
  for (int i = 0; i < kTile; ++i) {
    const std::uint32_t scale = e8m0_of_amax<F>(amax[i]);
    scales[i] = static_cast<std::uint8_t>(scale);
    factors.value[i] = reciprocal_of_e8m0(scale);
  }
  factors.by_shift = false;
  if constexpr (PanelElement<Source>::kScalesByShift) {
    int exact = 0;
    for (int i = 0; i < kTile; ++i) {
      factors.shift[i] = shift_of_e8m0(amax[i], scales[i]);
      exact += shift_is_exact<F>(amax[i], scales[i]);
    }
    factors.by_shift = exact == kTile;
  }
}

// One row of a panel; columns past cols are computed and dropped.
template <typename Source, Fp8Format F>
inline void write_row(const typename PanelElement<Source>::type* value, const Factors& factors,
                      std::uint8_t* dst, int cols) {
  alignas(64) std::uint8_t codes[kTile];
  bool done = false;
  if constexpr (PanelElement<Source>::kScalesByShift) {
    if (factors.by_shift) {
      for (int c = 0; c < kTile; ++c) {
        codes[c] = static_cast<std::uint8_t>(to_fp8_by_shift<F>(value[c], factors.shift[c]));
      }
      done = true;
    }
  }
  if (!done) {
    for (int c = 0; c < kTile; ++c) {
      codes[c] = static_cast<std::uint8_t>(to_fp8<F>(to_float(value[c]) * factors.value[c]));
    }
  }
  __builtin_memcpy(dst, codes, static_cast<std::size_t>(cols));
}

template <typename Source, Fp8Format F>
void write_by_row(const Panel<Source>& panel, const QuantizeTile& tile, int first_row, int rows) {
  static_assert(kBlock * kBlocksPerTile == kTile, "a panel has as many row blocks as columns");
  Factors of_panel;
  find_factors<Source, F>(&panel.row_amax[0][0], &(*tile.row_scale)[first_row][0], of_panel);
  // A factor per element, so that the loop over a row has the length that vectorises best.
  Factors of_row;
  of_row.by_shift = of_panel.by_shift;
  std::uint8_t* dst = tile.row_data + first_row * tile.data_stride;
  for (int r = 0; r < rows; ++r, dst += tile.data_stride) {
    for (int b = 0; b < kBlocksPerTile; ++b) {
      const int block = r * kBlocksPerTile + b;
      if (of_panel.by_shift) {
        for (int c = 0; c < kBlock; ++c) of_row.shift[b * kBlock + c] = of_panel.shift[block];
      } else {
        for (int c = 0; c < kBlock; ++c) of_row.value[b * kBlock + c] = of_panel.value[block];
      }
    }
    write_row<Source, F>(panel.value[r], of_row, dst, tile.cols);
  }
}

template <typename Source, Fp8Format F>
void write_by_column(const Panel<Source>& panel, const QuantizeTile& tile, int first_row,
                     int rows) {
  Factors factors;
  find_factors<Source, F>(panel.col_amax, (*tile.col_scale)[first_row / kBlock], factors);
  std::uint8_t* dst = tile.col_data + first_row * tile.data_stride;
  for (int r = 0; r < rows; ++r, dst += tile.data_stride) {
    write_row<Source, F>(panel.value[r], factors, dst, tile.cols);
  }
}

template <typename Source, Fp8Format F>
void quantize_tile(const QuantizeTile& tile) {
  Panel<Source> panel;
  for (int first_row = 0; first_row < tile.rows; first_row += kBlock) {
    const int rows = tile.rows - first_row < kBlock ? tile.rows - first_row : kBlock;
    load_panel(tile, first_row, rows, panel);
    find_amax(panel, tile.nan_in_scale);
    if (tile.two_d) share_amax(panel);
    if (tile.row_data != nullptr) write_by_row<Source, F>(panel, tile, first_row, rows);
    if (tile.col_data != nullptr) write_by_column<Source, F>(panel, tile, first_row, rows);
  }
}
