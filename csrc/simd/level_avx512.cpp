// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0

#include "level.inl"

namespace te_grouped_mlp {

// constexpr: no start-up code may run with this level's instructions.
constexpr KernelTable kAvx512Kernels = make_table("avx512");

}  // namespace te_grouped_mlp
