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
  static constexpr int kQuantumExponent = 9;
};
template <>
struct Fp8Traits<Fp8Format::kE5M2> {
  static constexpr int kMantissaBits = 2;
  static constexpr std::uint32_t kBias = 15;
  static constexpr std::uint32_t kMaxCode = 0x7B;
  static constexpr std::uint32_t kInfCode = 0x7C;
  static constexpr float kMaxReciprocal = 1.0f / 57344.0f;
  static constexpr float kQuantum = 0x1p-16f;
  static constexpr int kQuantumExponent = 16;
};

// Round to nearest even, saturate to the largest finite value (infinity too), NaN to 0x7F.
// Magnitudes are signed: SSE2 and AVX2 compare signed integers only.
template <Fp8Format F>
inline std::int32_t to_fp8(float x) {
  using T = Fp8Traits<F>;
  constexpr int shift = 23 - T::kMantissaBits;
  constexpr std::int32_t rebias = 127 - static_cast<std::int32_t>(T::kBias);
  constexpr std::int32_t max_code = static_cast<std::int32_t>(T::kMaxCode);
  constexpr float magic = T::kQuantum * 0x1p23f;  // its ulp is the quantum of the subnormals
  constexpr std::int32_t magic_bits = (127 + 23 - T::kQuantumExponent) << 23;
  constexpr std::int32_t below_half_ulp = (1 << (shift - 1)) - 1 - (rebias << 23);
  const std::int32_t bits = bit_cast<std::int32_t>(x);
  const std::int32_t magnitude = bits & static_cast<std::int32_t>(kAbsMask);
  const std::int32_t normal = (magnitude + below_half_ulp + ((magnitude >> shift) & 1)) >> shift;
  const std::int32_t subnormal =
      bit_cast<std::int32_t>(bit_cast<float>(magnitude) + magic) - magic_bits;
  std::int32_t code = magnitude < ((rebias + 1) << 23) ? subnormal : normal;
  code = code < max_code ? code : max_code;
  code |= (bits >> 24) & 0x80;
  return magnitude > static_cast<std::int32_t>(kInfBits) ? 0x7F : code;
}

// The number of thresholds that a scaled bfloat16 magnitude (its 16 bits) lies above: the code of
// a value in the subnormal range of the format, ties to even. Code i begins at i - 1/2 quanta.
template <Fp8Format F>
inline std::int16_t count_thresholds(std::int16_t t);
template <>
inline std::int16_t count_thresholds<Fp8Format::kE4M3>(std::int16_t t) {
  constexpr int half = (127 - 10) << 7;  // bits of half a quantum, 2^-10
  std::int16_t count = 0;
  count = static_cast<std::int16_t>(count + (t > half));              // 0.5 is a tie and stays 0
  count = static_cast<std::int16_t>(count + (t > half + 0xC0 - 1));   // 1.5 goes to 2
  count = static_cast<std::int16_t>(count + (t > half + 0x120));      // 2.5 stays 2
  count = static_cast<std::int16_t>(count + (t > half + 0x160 - 1));  // 3.5 goes to 4
  count = static_cast<std::int16_t>(count + (t > half + 0x190));      // 4.5 stays 4
  count = static_cast<std::int16_t>(count + (t > half + 0x1B0 - 1));  // 5.5 goes to 6
  count = static_cast<std::int16_t>(count + (t > half + 0x1D0));      // 6.5 stays 6
  count = static_cast<std::int16_t>(count + (t > half + 0x1F0 - 1));  // 7.5 goes to 8
  return count;
}
template <>
inline std::int16_t count_thresholds<Fp8Format::kE5M2>(std::int16_t t) {
  constexpr int half = (127 - 17) << 7;  // 2^-17
  std::int16_t count = 0;
  count = static_cast<std::int16_t>(count + (t > half));
  count = static_cast<std::int16_t>(count + (t > half + 0xC0 - 1));
  count = static_cast<std::int16_t>(count + (t > half + 0x120));
  count = static_cast<std::int16_t>(count + (t > half + 0x160 - 1));
  return count;
}

// to_fp8 of a bfloat16 times 2^(shift / 128), in 16-bit lanes: half the work of float32 lanes.
// The scale must be one of shift_is_exact; then the product is an addition to the exponent.
template <Fp8Format F>
inline std::int16_t to_fp8_by_shift(BFloat16 x, std::int16_t shift) {
  using T = Fp8Traits<F>;
  constexpr int drop = 7 - T::kMantissaBits;
  constexpr int below_half_ulp =
      (1 << (drop - 1)) - 1 - ((127 - static_cast<int>(T::kBias)) << 7);
  constexpr std::int16_t max_code = static_cast<std::int16_t>(T::kMaxCode);
  const std::int16_t bits = static_cast<std::int16_t>(x.bits);
  const std::int16_t magnitude = static_cast<std::int16_t>(bits & 0x7FFF);
  const std::int16_t t = static_cast<std::int16_t>(magnitude + shift);
  const std::int16_t odd = static_cast<std::int16_t>((t >> drop) & 1);
  const std::int16_t sum = static_cast<std::int16_t>(t + below_half_ulp + odd);
  const std::int16_t normal = static_cast<std::int16_t>(sum >> drop);
  // In the subnormal range the formula for normal codes is never above the right code, and above
  // it the count is never more than the first normal code: the larger of the two is right.
  const std::int16_t subnormal = count_thresholds<F>(t);
  std::int16_t code = normal > subnormal ? normal : subnormal;
  code = code < max_code ? code : max_code;
  code = static_cast<std::int16_t>(code | ((bits >> 8) & 0x80));
  return magnitude > 0x7F80 ? std::int16_t{0x7F} : code;
}

// Whether a block with this maximum and scale may use to_fp8_by_shift: no infinity, no NaN scale,
// and bfloat16 subnormals (whose exponent does not add) must be far below the smallest code. A
// block of zeros, whose scale of 0 does not meet that, is right without any shift.
template <Fp8Format F>
inline bool shift_is_exact(std::uint32_t amax_bits, std::uint32_t scale) {
  constexpr std::uint32_t least = Fp8Traits<F>::kQuantumExponent + 2;
  return amax_bits == 0u || scale - least < 254u - least;
}
inline std::int16_t shift_of_e8m0(std::uint32_t amax_bits, std::uint32_t scale) {
  const std::int32_t exponent = 127 - static_cast<std::int32_t>(scale);
  return static_cast<std::int16_t>(amax_bits == 0u ? 0 : exponent * 128);
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
