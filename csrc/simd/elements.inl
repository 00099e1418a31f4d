// Copyright (c) 2026, the te-grouped-mlp authors.
// SPDX-License-Identifier: Apache-2.0
//
// Element conversions, written without branches so that every loop over them vectorises.
// Included inside the anonymous namespace of a SIMD level.

template <typename To, typename From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

inline std::uint32_t bits_of(float x) { return bit_cast<std::uint32_t>(x); }
inline float float_of(std::uint32_t bits) { return bit_cast<float>(bits); }

constexpr std::uint32_t kAbsMask = 0x7FFFFFFFu;
constexpr std::uint32_t kInfBits = 0x7F800000u;

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

inline float to_float(float x) { return x; }
// A float64 source stands for a float32 accumulator that was kept wider: it is rounded first.
inline float to_float(double x) { return static_cast<float>(x); }
inline float to_float(BFloat16 x) { return float_of(static_cast<std::uint32_t>(x.bits) << 16); }
inline float to_float(Half x) {
  const std::uint32_t magnitude = x.bits & 0x7FFFu;
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t normal = (magnitude << 13) + (112u << 23);
  const std::uint32_t subnormal =
      bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
  const std::uint32_t special = (magnitude << 13) | kInfBits;
  std::uint32_t result = magnitude < 0x0400u ? subnormal : normal;
  result = magnitude >= 0x7C00u ? special : result;
  return float_of(result | sign);
}

// What a sum over elements is held in: float, and double for a float64 source.
template <typename Source>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};
template <typename Source>
inline typename Accumulator<Source>::type to_accumulator(Source x) {
  return to_float(x);
}
template <>
inline double to_accumulator<double>(double x) {
  return x;
}

// From float32, round to nearest even; a NaN becomes the canonical quiet NaN.
template <typename Out>
inline Out from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline BFloat16 from_float<BFloat16>(float x) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool nan = (bits & kAbsMask) > kInfBits;
  return BFloat16{static_cast<std::uint16_t>(nan ? 0x7FC0u : rounded)};
}
template <>
inline Half from_float<Half>(float x) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t magnitude = bits & kAbsMask;
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t normal = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // 0.5 has an ulp of 2^-24, the quantum of float16 subnormals: the addition rounds to it.
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  std::uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
  result = magnitude >= 0x477FF000u ? 0x7C00u : result;  // 65520 and above round to infinity
  result = magnitude > kInfBits ? 0x7E00u : result | sign;
  return Half{static_cast<std::uint16_t>(result)};
}

template <Fp8Format>
struct Fp8Traits;
template <>
struct Fp8Traits<Fp8Format::kE4M3> {
  static constexpr int kMantissaBits = 3;
  static constexpr std::uint32_t kBias = 7;
  static constexpr std::uint32_t kMaxCode = 0x7E;
  static constexpr std::uint32_t kInfCode = 0x7F;  // none: the code after the largest value is NaN
  static constexpr float kMaxReciprocal = 1.0f / 448.0f;
  static constexpr float kQuantum = 0x1p-9f;
};
template <>
struct Fp8Traits<Fp8Format::kE5M2> {
  static constexpr int kMantissaBits = 2;
  static constexpr std::uint32_t kBias = 15;
  static constexpr std::uint32_t kMaxCode = 0x7B;
  static constexpr std::uint32_t kInfCode = 0x7C;
  static constexpr float kMaxReciprocal = 1.0f / 57344.0f;
  static constexpr float kQuantum = 0x1p-16f;
};

// Round to nearest even, saturate to the largest finite value (infinity too), NaN to 0x7F.
template <Fp8Format F>
inline std::uint32_t to_fp8(float x) {
  using T = Fp8Traits<F>;
  constexpr int shift = 23 - T::kMantissaBits;
  constexpr std::uint32_t rebias = 127u - T::kBias;
  constexpr float magic = T::kQuantum * 0x1p23f;  // its ulp is the quantum of the subnormals
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t magnitude = bits & kAbsMask;
  const std::uint32_t half_ulp = (1u << (shift - 1)) - 1u;
  const std::uint32_t normal =
      ((magnitude + half_ulp + ((magnitude >> shift) & 1u)) >> shift) -
      (rebias << T::kMantissaBits);
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + magic) - bits_of(magic);
  std::uint32_t code = magnitude < ((rebias + 1u) << 23) ? subnormal : normal;
  code = code < T::kMaxCode ? code : T::kMaxCode;
  code |= (bits >> 24) & 0x80u;
  return magnitude > kInfBits ? 0x7Fu : code;
}

template <Fp8Format F>
inline float from_fp8(std::uint8_t code) {
  using T = Fp8Traits<F>;
  constexpr int shift = 23 - T::kMantissaBits;
  const std::uint32_t magnitude = code & 0x7Fu;
  const std::uint32_t sign = static_cast<std::uint32_t>(code & 0x80u) << 24;
  const std::uint32_t normal = (magnitude << shift) + ((127u - T::kBias) << 23);
  const std::uint32_t subnormal =
      bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * T::kQuantum);
  std::uint32_t result = magnitude < (1u << T::kMantissaBits) ? subnormal : normal;
  result = magnitude >= T::kInfCode ? kInfBits : result;
  result = magnitude > T::kMaxCode && magnitude != 0x7Cu ? 0x7FC00000u : result;
  return float_of(result | sign);
}

// E8M0 scale of a block whose largest magnitude has these float32 bits: amax / max_fp8 rounded up
// to a power of two. Zero gives 0x00, infinity 0xFE, NaN 0xFF.
template <Fp8Format F>
inline std::uint32_t e8m0_of_amax(std::uint32_t amax_bits) {
  const std::uint32_t bits = bits_of(float_of(amax_bits) * Fp8Traits<F>::kMaxReciprocal);
  const std::uint32_t exponent = bits >> 23;
  const std::uint32_t mantissa = bits & 0x7FFFFFu;
  // 2^-127, the smallest scale, is the subnormal 0x400000: up to there nothing is rounded up.
  const std::uint32_t threshold = exponent == 0u ? 0x400000u : 0u;
  std::uint32_t scale = exponent + (mantissa > threshold ? 1u : 0u);
  scale = scale < 0xFEu ? scale : 0xFEu;
  return bits > kInfBits ? 0xFFu : scale;
}

// 2^(127 - scale): what an element is multiplied by.
inline float reciprocal_of_e8m0(std::uint32_t scale) {
  std::uint32_t bits = (254u - scale) << 23;
  bits = scale == 254u ? 0x00400000u : bits;
  return float_of(scale == 255u ? 0x7FC00000u : bits);
}

// 2^(scale - 127).
inline float value_of_e8m0(std::uint32_t scale) {
  std::uint32_t bits = scale << 23;
  bits = scale == 0u ? 0x00400000u : bits;
  return float_of(scale == 255u ? 0x7FC00000u : bits);
}
