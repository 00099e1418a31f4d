// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0

#include "common.hpp"

#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <thread>

namespace te_grouped_mlp {

namespace {

// Below this a second thread costs more than it gives.
constexpr std::int64_t kSerialBytes = std::int64_t{1} << 20;
constexpr int kMaxDefaultThreads = 16;

// The CPUs that the calling thread may run on now; its new threads may run on the same.
int usable_cpus() {
#ifdef __linux__
  // The system refuses a set that is smaller than its own.
  for (int room = CPU_SETSIZE; room <= CPU_SETSIZE * 64; room *= 2) {
    cpu_set_t* set = CPU_ALLOC(static_cast<std::size_t>(room));
    if (set == nullptr) break;
    const std::size_t size = CPU_ALLOC_SIZE(static_cast<std::size_t>(room));
    const bool known = sched_getaffinity(0, size, set) == 0;
    const bool too_small = !known && errno == EINVAL;
    const int count = known ? CPU_COUNT_S(size, set) : 0;
    CPU_FREE(set);
    if (known) return std::max(1, count);
    if (!too_small) break;
  }
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

std::vector<const KernelTable*> supported_tables() {
  std::vector<const KernelTable*> tables{&kBaselineKernels};
#ifdef TE_GROUPED_MLP_X86_LEVELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) tables.push_back(&kAvx2Kernels);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    tables.push_back(&kAvx512Kernels);
  }
#endif
  return tables;
}

std::atomic<const KernelTable*>& current_table() {
  static std::atomic<const KernelTable*> table{supported_tables().back()};
  return table;
}

}  // namespace

std::vector<std::string> available_simd_levels() {
  std::vector<std::string> names;
  for (const KernelTable* table : supported_tables()) names.emplace_back(table->name);
  return names;
}

const KernelTable& kernels() { return *current_table().load(); }

void set_simd_level(const std::string& name) {
  std::string allowed;
  for (const KernelTable* table : supported_tables()) {
    if (name == table->name) {
      current_table().store(table);
      return;
    }
    allowed += (allowed.empty() ? "" : ", ") + std::string(table->name);
  }
  throw std::invalid_argument("name is '" + name + "', allowed on this CPU: " + allowed);
}

std::int64_t size_of(SourceType type) {
  switch (type) {
    case SourceType::kF32:
      return 4;
    case SourceType::kF64:
      return 8;
    case SourceType::kF16:
    case SourceType::kBF16:
      return 2;
  }
  return 0;
}

const void* Source::at(std::int64_t row, std::int64_t col) const {
  return static_cast<const char*>(data) + (row * row_stride + col) * size_of(type);
}

TileGrid::TileGrid(const Groups& groups, std::int64_t cols)
    : cols_(cols), tiles_per_row_(round_up(cols, kTile) / kTile) {
  for (const Group& group : groups) {
    const std::int64_t count = round_up(group.rows, kTile) / kTile;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t rows = std::min<std::int64_t>(kTile, group.rows - i * kTile);
      tile_rows_.push_back(
          {group.first_row + i * kTile, static_cast<int>(rows), group.first_row, i, count});
    }
  }
}

Tile TileGrid::operator[](std::int64_t index) const {
  constexpr std::int64_t kTileBytes = kTile * kBlocksPerTile;
  const TileRow& tile_row = tile_rows_[static_cast<std::size_t>(index / tiles_per_row_)];
  const std::int64_t tile_col = index % tiles_per_row_;
  Tile tile;
  tile.row = tile_row.row;
  tile.col = tile_col * kTile;
  tile.rows = tile_row.rows;
  tile.cols = static_cast<int>(std::min<std::int64_t>(kTile, cols_ - tile.col));
  // Along rows the tile is found by its row in the whole matrix; along columns each group starts
  // anew, and the group's own number of tiles is the inner extent.
  tile.row_swizzled = (tile_row.row / kTile * tiles_per_row_ + tile_col) * kTileBytes;
  tile.col_swizzled = tile_row.group_first_row * tiles_per_row_ * kTile / kBlock +
                      (tile_col * tile_row.count_in_group + tile_row.index_in_group) * kTileBytes;
  return tile;
}

int decide_threads(int requested, std::int64_t bytes) {
  if (requested > 0) return requested;
  if (bytes < kSerialBytes || requested == -1) return 1;
  const int most = requested == 0 ? kMaxDefaultThreads : std::min(-requested, kMaxDefaultThreads);
  return std::min(most, usable_cpus());
}

void parallel_for(std::int64_t count, int threads,
                  const std::function<void(std::int64_t, std::int64_t)>& body) {
  // Several ranges per thread, so that a thread that the system delays does not delay the rest.
  constexpr std::int64_t kRangesPerThread = 8;
  const std::int64_t workers = std::min<std::int64_t>(threads, count);
  const std::int64_t step = workers <= 1
                                ? std::max<std::int64_t>(count, 1)
                                : std::max<std::int64_t>(1, count / (workers * kRangesPerThread));
  std::atomic<std::int64_t> next{0};
  const auto work = [&] {
    const DefaultFloatEnvironment environment;
    for (;;) {
      const std::int64_t first = next.fetch_add(step);
      if (first >= count) return;
      body(first, std::min(count, first + step));
    }
  };
  std::vector<std::thread> others;
  try {
    for (std::int64_t i = 1; i < workers; ++i) others.emplace_back(work);
  } catch (const std::system_error&) {
    // The system gives no more threads: those that run, and this one, do the work.
  }
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace te_grouped_mlp
