// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0
//
// The boundary between scheduling (compiled once) and arithmetic (compiled once per SIMD level).
// Only plain structs and function pointers cross it: a translation unit that is compiled for a
// newer CPU must not emit a shared inline function, because the linker may keep that copy for all.
#pragma once

#include <cstdint>

namespace te_grouped_mlp {

enum class SourceType : int { kF32 = 0, kF16 = 1, kBF16 = 2, kF64 = 3 };
enum class Fp8Format : int { kE4M3 = 0, kE5M2 = 1 };

constexpr int kNumSourceTypes = 4;
constexpr int kNumFp8Formats = 2;

// One scale per 32 elements; a scale tile covers 128 x 128 elements of data in either direction.
constexpr int kBlock = 32;
constexpr int kTile = 128;
constexpr int kBlocksPerTile = kTile / kBlock;
// Columns that one call of a column-sum kernel handles.
constexpr int kSumColumns = 256;

// Scale bytes of one tile: [row][column block] or [row block][column].
using RowScaleTile = std::uint8_t[kTile][kBlocksPerTile];
using ColScaleTile = std::uint8_t[kBlocksPerTile][kTile];

// One tile of at most 128 x 128 elements. Data pointers address the tile's first element.
struct QuantizeTile {
  const void* src;
  std::int64_t src_stride;   // elements
  std::uint8_t* row_data;    // null: direction not wanted
  std::uint8_t* col_data;    // null: direction not wanted
  std::int64_t data_stride;  // bytes
  int rows;
  int cols;
  bool two_d;
  bool nan_in_scale;
  RowScaleTile* row_scale;  // zeroed by the caller; entries outside rows x cols stay zero
  ColScaleTile* col_scale;  // likewise
};

struct DequantizeTile {
  const std::uint8_t* data;
  std::int64_t data_stride;       // bytes
  const RowScaleTile* row_scale;  // exactly one of the two is set
  const ColScaleTile* col_scale;
  void* out;
  std::int64_t out_stride;  // elements
  int rows;
  int cols;
};

// At most 128 rows and kSumColumns columns: the tile's column sums are added to totals.
struct ColumnSumTile {
  const void* src;
  std::int64_t src_stride;  // elements
  const float* weights;     // one per row, or null
  void* totals;             // float[kSumColumns], double[kSumColumns] for F64
  int rows;
  int cols;
};

struct RowDotTile {
  const void* src;
  std::int64_t src_stride;  // elements
  const float* table;       // cols values
  float* out;               // rows values
  std::int64_t rows;
  std::int64_t cols;
};

struct KernelTable {
  const char* name;
  void (*quantize[kNumSourceTypes][kNumFp8Formats])(const QuantizeTile&);
  void (*dequantize[kNumSourceTypes][kNumFp8Formats])(const DequantizeTile&);
  void (*column_sums[kNumSourceTypes])(const ColumnSumTile&);
  void (*row_dots[kNumSourceTypes])(const RowDotTile&);
};

extern const KernelTable kBaselineKernels;
#ifdef TE_GROUPED_MLP_X86_LEVELS
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

}  // namespace te_grouped_mlp
