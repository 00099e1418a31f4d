// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0
//
// Sums in one fixed order. Included inside the anonymous namespace of a SIMD level.
//
// Every addition belongs to one column (or, for a dot product, to one of 32 lanes by column
// number), so the width of the vector registers cannot change the order.

constexpr int kDotLanes = 32;

template <typename Source, bool kWeighted>
void add_column_sums(const ColumnSumTile& tile) {
  using Sum = typename Accumulator<Source>::type;
  alignas(64) Sum partial[kSumColumns] = {};
  const Source* src = static_cast<const Source*>(tile.src);
  for (int r = 0; r < tile.rows; ++r, src += tile.src_stride) {
    const Sum weight = kWeighted ? static_cast<Sum>(tile.weights[r]) : Sum(1);
    for (int c = 0; c < tile.cols; ++c) {
      const Sum x = to_accumulator(src[c]);
      partial[c] += kWeighted ? x * weight : x;
    }
  }
  Sum* totals = static_cast<Sum*>(tile.totals);
  for (int c = 0; c < tile.cols; ++c) totals[c] += partial[c];
}

template <typename Source>
void column_sums(const ColumnSumTile& tile) {
  if (tile.weights != nullptr) {
    add_column_sums<Source, true>(tile);
  } else {
    add_column_sums<Source, false>(tile);
  }
}

template <typename Source>
void row_dots(const RowDotTile& tile) {
  using Sum = typename Accumulator<Source>::type;
  const Source* src = static_cast<const Source*>(tile.src);
  const std::int64_t whole = tile.cols / kDotLanes * kDotLanes;
  for (std::int64_t r = 0; r < tile.rows; ++r, src += tile.src_stride) {
    alignas(64) Sum lane[kDotLanes] = {};
    for (std::int64_t c = 0; c < whole; c += kDotLanes) {
      for (int l = 0; l < kDotLanes; ++l) {
        lane[l] += to_accumulator(src[c + l]) * static_cast<Sum>(tile.table[c + l]);
      }
    }
    for (std::int64_t c = whole; c < tile.cols; ++c) {
      lane[c - whole] += to_accumulator(src[c]) * static_cast<Sum>(tile.table[c]);
    }
    for (int width = kDotLanes / 2; width > 0; width /= 2) {
      for (int l = 0; l < width; ++l) lane[l] += lane[l + width];
    }
    tile.out[r] = static_cast<float>(lane[0]);
  }
}
