// Between FP8 (e4m3fn: 4 bits of exponent, 3 of mantissa, no infinity) and the dtypes of models.
//
// Plain loops over integers, which the compiler turns into vectors.  Widening is exact.  Narrowing rounds to nearest even
// and saturates: beyond 448 a number becomes 448, NaN stays NaN.  So it equals torch's `.clamp(-448, 448).to(...)`, of the
// quotient in float where there is a scale.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include <c10/util/Float8_e4m3fn.h>
#include <c10/util/Half.h>

#include "simd.h"

namespace lockstep {

using Fp8 = c10::Float8_e4m3fn;

inline uint32_t float_bits_of_fp8(uint8_t x) {
  const uint32_t magnitude = x & 0x7fu;
  // Below 2^-6 there is no leading one: it is added with the exponent, and subtracted again.
  const bool denormal = magnitude < 8;
  const float with_one = std::bit_cast<float>((magnitude << 20) + (denormal ? 121u << 23 : 120u << 23));
  const uint32_t bits = std::bit_cast<uint32_t>(with_one - (denormal ? 0x1p-6f : 0.0f));
  return (magnitude == 0x7f ? 0x7fc00000u : bits) | static_cast<uint32_t>(x & 0x80u) << 24;
}

inline uint8_t fp8_bits_of_float(float x) {
  const uint32_t given = std::bit_cast<uint32_t>(x), magnitude = given & 0x7fffffffu;
  const uint32_t bits = std::min(magnitude, std::bit_cast<uint32_t>(448.0f));
  const uint32_t normal = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  // The last bit of 2^14 is that of the smallest number: the addition rounds.
  const uint32_t denormal = std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + 0x1p14f) - std::bit_cast<uint32_t>(0x1p14f);
  const uint32_t rounded = bits < (121u << 23) ? denormal : normal;
  return static_cast<uint8_t>((magnitude > 0x7f800000u ? 0x7fu : rounded) | (given >> 24 & 0x80u));
}

inline void widen(const Fp8* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = std::bit_cast<float>(float_bits_of_fp8(from[i].x));
}

inline void widen(const Fp8* from, bf16* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i].x = static_cast<uint16_t>(float_bits_of_fp8(from[i].x) >> 16);
}

inline void widen(const Fp8* from, c10::Half* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<c10::Half>(std::bit_cast<float>(float_bits_of_fp8(from[i].x)));
}

// Of float or bf16.
template <class Scalar>
inline void narrow(const Scalar* from, Fp8* to, int64_t count, float scale = 1.0f) {
  for (int64_t i = 0; i < count; ++i) to[i].x = fp8_bits_of_float(static_cast<float>(from[i]) / scale);
}

}  // namespace lockstep
