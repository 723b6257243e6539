// Between the floating-point dtypes of weights, rounded as torch's `.to` rounds: to nearest even, by way of float32
// (a float64 becomes a bfloat16 or float16 in two steps), and with denormals, unlike the processor's own instruction
// for bfloat16.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include <c10/util/Half.h>

#include "simd.h"

namespace lockstep {

inline uint16_t bf16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

inline float from_bf16_bits(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// `count` elements, at most kCastLanes, of bfloat16, float16 or float64, at any address.
inline constexpr int64_t kCastLanes = 256;

inline void bf16_to_floats(const uint8_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, from + 2 * i, sizeof bits);
    to[i] = from_bf16_bits(bits);
  }
}

inline void floats_to_bf16(const float* from, uint8_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t bits = bf16_bits(from[i]);
    std::memcpy(to + 2 * i, &bits, sizeof bits);
  }
}

inline void half_to_floats(const uint8_t* from, float* to, int64_t count) {
  int64_t i = 0;
#if LOCKSTEP_AVX512
  for (; i + 16 <= count; i += 16) {
    _mm512_storeu_ps(to + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * i))));
  }
#elif defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i))));
  }
#endif
  for (; i < count; ++i) {
    c10::Half value;
    std::memcpy(&value, from + 2 * i, sizeof value);
    to[i] = static_cast<float>(value);
  }
}

inline void floats_to_half(const float* from, uint8_t* to, int64_t count) {
  int64_t i = 0;
#if LOCKSTEP_AVX512
  for (; i + 16 <= count; i += 16) {
    const __m256i bits = _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 2 * i), bits);
  }
#elif defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    const __m128i bits = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i), bits);
  }
#endif
  for (; i < count; ++i) {
    const c10::Half value(from[i]);
    std::memcpy(to + 2 * i, &value, sizeof value);
  }
}

inline void doubles_to_floats(const uint8_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    double value;
    std::memcpy(&value, from + 8 * i, sizeof value);
    to[i] = static_cast<float>(value);
  }
}

inline void floats_to_doubles(const float* from, uint8_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const double value = from[i];
    std::memcpy(to + 8 * i, &value, sizeof value);
  }
}

}  // namespace lockstep
