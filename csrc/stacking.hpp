// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace te_grouped_mlp {

struct Description;

// The head of DLPack 1's table of functions by which a framework exchanges tensors with C. Up to
// `older`, a table of any version looks like this.
struct ExchangeTable {
  std::uint32_t major;
  std::uint32_t minor;
  const ExchangeTable* older;
  int (*allocate)();
  int (*own)();
  int (*give_back)();
  // Returns 0, or sets a Python error. What `out` points to belongs to the tensor.
  int (*describe)(void* tensor, Description* out);
};

struct Stacking {
  // Whether all tensors have one shape, strides, element type and device. False also where that
  // cannot be seen: no table of DLPack 1, or a tensor that the framework does not describe.
  bool uniform;
  // Bytes from each tensor to the next; 0 where that differs, or for a single tensor.
  std::int64_t stride;
  // Whether the address of a tensor with elements is so low that it may be no more than the place
  // in a storage that was freed.
  bool low;
};

// `tensors` are objects of the framework that `table` belongs to, which must not change meanwhile:
// the caller holds the GIL. Of a table and its older ones that of DLPack 1 is used. Reads no
// element. A Python error may be set afterwards.
Stacking stacking(const ExchangeTable& table, void* const* tensors, std::size_t count);

}  // namespace te_grouped_mlp
