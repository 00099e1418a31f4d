// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0
//
// What every kernel family shares: argument records, the list of tiles, threads, dispatch.
#pragma once

#include <cfenv>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels.hpp"

namespace te_grouped_mlp {

enum class Axis : int { kRow = 0, kColumn = 1 };

constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

std::int64_t size_of(SourceType type);

// Rows of one group. Dense data is one group of all rows.
struct Group {
  std::int64_t first_row;
  std::int64_t rows;
};
using Groups = std::vector<Group>;

// A matrix in the caller's memory; strides count elements.
struct Source {
  const void* data;
  SourceType type;
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t row_stride;
  const void* at(std::int64_t row, std::int64_t col) const;
};

// One 128 x 128 scale tile of a grouped matrix and the place of its 512 scale bytes.
struct Tile {
  std::int64_t row;  // first row and column in the whole matrix
  std::int64_t col;
  int rows;  // elements inside the matrix, at most 128
  int cols;
  std::int64_t row_swizzled;  // byte offset of the tile in the swizzled buffer of each axis
  std::int64_t col_swizzled;
};

// The tiles of all groups, numbered along columns first.
class TileGrid {
 public:
  TileGrid(const Groups& groups, std::int64_t cols);
  std::int64_t size() const {
    return static_cast<std::int64_t>(tile_rows_.size()) * tiles_per_row_;
  }
  Tile operator[](std::int64_t index) const;

 private:
  struct TileRow {
    std::int64_t row;
    int rows;
    std::int64_t group_first_row;
    std::int64_t index_in_group;
    std::int64_t count_in_group;
  };
  std::vector<TileRow> tile_rows_;
  std::int64_t cols_;
  std::int64_t tiles_per_row_;
};

// Where one axis's scale bytes live and in which order.
struct ScaleBuffer {
  std::uint8_t* data;
  bool swizzled;
};

// Copy one tile's 512 scale bytes from or to the buffer of a matrix with that many columns.
// Storing writes the whole tile, padding included.
void load_scales(const ScaleBuffer& buffer, std::int64_t cols, const Tile& tile, RowScaleTile& out);
void load_scales(const ScaleBuffer& buffer, std::int64_t cols, const Tile& tile, ColScaleTile& out);
void store_scales(const RowScaleTile& in, std::int64_t cols, const Tile& tile,
                  const ScaleBuffer& buffer);
void store_scales(const ColScaleTile& in, std::int64_t cols, const Tile& tile,
                  const ScaleBuffer& buffer);

// The number of threads for a request and that many bytes of work. n > 0: n. -n: at most n, and no
// more than the CPUs that the calling thread may use; one for little work. 0: as without the n.
int decide_threads(int requested, std::int64_t bytes);

// Calls body(first, last) on disjoint ranges that cover [0, count). No pool is kept: a pool would
// not survive fork(), and the work that is split lasts far longer than starting a thread.
void parallel_for(std::int64_t count, int threads,
                  const std::function<void(std::int64_t, std::int64_t)>& body);

// Round to nearest and keep subnormals while in scope, whatever the caller set for its thread.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  std::fenv_t saved_;
};

// SIMD levels that were compiled in and that this CPU runs, weakest first.
std::vector<std::string> available_simd_levels();
const KernelTable& kernels();
void set_simd_level(const std::string& name);

// ---- the families ---------------------------------------------------------------------------

struct QuantizeOutputs {
  std::uint8_t* row_data;
  std::uint8_t* row_scale;
  std::uint8_t* col_data;
  std::uint8_t* col_scale;
};

struct QuantizeOptions {
  Fp8Format format;
  bool swizzled;
  bool two_d;
  bool nan_in_scale;
};

void quantize(const Source& src, const Groups& groups, const QuantizeOutputs& out,
              const QuantizeOptions& options, int threads);

struct DequantizeInput {
  const std::uint8_t* data;
  std::uint8_t* scale;
  Fp8Format format;
  Axis axis;
  bool swizzled;
};

void dequantize(const DequantizeInput& in, const Groups& groups, std::int64_t cols, void* out,
                SourceType out_type, int threads);

void swizzle_scales(std::uint8_t* src, std::uint8_t* dst, Axis axis, const Groups& groups,
                    std::int64_t cols, bool inverse);

// weights: one per row, or null. out: (groups, cols).
void column_sums(const Source& src, const Groups& groups, const float* weights, float* out,
                 int threads);

// table: (groups, cols). out: one value per row.
void row_dots(const Source& src, const Groups& groups, const float* table, float* out, int threads);

}  // namespace te_grouped_mlp
