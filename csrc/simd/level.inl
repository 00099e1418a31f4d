// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0
//
// One SIMD level: the file that includes this names the level and is compiled with its flags.
// No standard-library templates in here (see kernels.hpp), and -ffp-contract=off: a fused
// multiply-add on one level only would make the levels differ.

#include <cstddef>

#include "../kernels.hpp"

namespace te_grouped_mlp {
namespace {

#include "elements.inl"

#include "quantize.inl"

#include "dequantize.inl"

#include "reduce.inl"

constexpr KernelTable make_table(const char* name) {
  constexpr Fp8Format e4m3 = Fp8Format::kE4M3;
  constexpr Fp8Format e5m2 = Fp8Format::kE5M2;
  return KernelTable{
      name,
      {{quantize_tile<float, e4m3>, quantize_tile<float, e5m2>},
       {quantize_tile<Half, e4m3>, quantize_tile<Half, e5m2>},
       {quantize_tile<BFloat16, e4m3>, quantize_tile<BFloat16, e5m2>},
       {quantize_tile<double, e4m3>, quantize_tile<double, e5m2>}},
      {{dequantize_tile<float, e4m3>, dequantize_tile<float, e5m2>},
       {dequantize_tile<Half, e4m3>, dequantize_tile<Half, e5m2>},
       {dequantize_tile<BFloat16, e4m3>, dequantize_tile<BFloat16, e5m2>},
       {dequantize_tile<double, e4m3>, dequantize_tile<double, e5m2>}},
      {column_sums<float>, column_sums<Half>, column_sums<BFloat16>, column_sums<double>},
      {row_dots<float>, row_dots<Half>, row_dots<BFloat16>, row_dots<double>}};
}

}  // namespace
}  // namespace te_grouped_mlp
