// Steps of weights with scales (packed_held.h), decoded to panels of bf16 with AVX2.
//
// The values are those of the steps, bit for bit, in fewer instructions; a scale outside of the ranges below is left to
// the steps themselves.
//
//   fp8    A scale belongs to 16 rows and 128 columns, so the values of a byte are looked up.  Its low four bits choose
//          a bf16 from a table of sixteen; the upper three of the exponent are added to that.  A second table has the
//          bytes whose upper bits are zero, where the numbers below 2^-6 are.
//   int4   integer * scale is exact in float32.  It is rounded to bf16 as Veltkamp splits a number (Dekker, 1971): with
//          c = (2^16 + 1) x, the upper part of x is c + (x - c).  All integers and mantissas were tried; ties are even.
#pragma once

#include "packed_held.h"

namespace lockstep {

#if LOCKSTEP_AVX2

template <class Step>
class Decoder;

template <>
class Decoder<Fp8Step> {
 public:
  // Takes the scales of a step; returns whether it can decode it.
  bool begin(const int8_t* step) {
    float scales[kPanelVectors];
    std::memcpy(scales, step + kFp8StepNumel, sizeof scales);
    if (std::memcmp(scales, scales_, sizeof scales) == 0) return decodes_;
    std::memcpy(scales_, scales, sizeof scales);
    decodes_ = true;
    for (const float scale : scales) decodes_ &= scale >= kLeast && scale < kMost;
    if (!decodes_) return false;
    normal_ = table_of(0x1p-10f * 8.0f, 0x1p-10f, scales);
    small_ = table_of(0.0f, 0x1p-9f, scales);
    return true;
  }

  // The values of group `g`, [32 rows][2].
  [[gnu::always_inline]] void group(const int8_t* step, int64_t g, bf16* out) const {
    const Bytes even = look_up(step + 2 * g * kPanelRows), odd = look_up(step + (2 * g + 1) * kPanelRows);
    const __m256i evens[2] = {_mm256_unpacklo_epi8(even.low, even.high), _mm256_unpackhi_epi8(even.low, even.high)};
    const __m256i odds[2] = {_mm256_unpacklo_epi8(odd.low, odd.high), _mm256_unpackhi_epi8(odd.low, odd.high)};
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {  // a lane has rows of one vector, eight from 8 * half on
      const __m256i first = _mm256_unpacklo_epi16(evens[half], odds[half]);
      const __m256i next = _mm256_unpackhi_epi16(evens[half], odds[half]);
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v) {
        bf16* to = out + 2 * (v * kLanes + 8 * half);
        put(to, v == 0 ? _mm256_castsi256_si128(first) : _mm256_extracti128_si256(first, 1));
        put(to + 8, v == 0 ? _mm256_castsi256_si128(next) : _mm256_extracti128_si256(next, 1));
      }
    }
  }

 private:
  static_assert(kPanelVectors == 2 && kLanes == 16);
  // All values are normal numbers then.
  static constexpr float kLeast = 0x1p-116f, kMost = 0x1p119f;

  struct Bytes {
    __m256i low, high;  // of the bf16 of 32 rows, or of the sixteen of a table for each vector
  };

  static void put(bf16* to, __m128i values) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), values); }

  // Eight numbers times a scale, rounded to bf16, each in 32 bits.
  static __m256i words_of(float first, float unit, float scale) {
    const __m256 steps = _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256 numbers = _mm256_add_ps(_mm256_set1_ps(first), _mm256_mul_ps(steps, _mm256_set1_ps(unit)));
    const Part rounded = part_round_finite(_mm256_mul_ps(numbers, _mm256_set1_ps(scale)));
    return _mm256_srli_epi32(_mm256_castps_si256(rounded), 16);
  }

  // The sixteen bytes of a table, for each vector: first + unit * 0 .. 7, then 2^-6 + 2^-9 * 0 .. 7.
  static Bytes table_of(float first, float unit, const float* scales) {
    __m128i low[kPanelVectors], high[kPanelVectors];
    const __m256i bytes = _mm256_set1_epi16(0xff);
    for (int v = 0; v < kPanelVectors; ++v) {
      const __m256i one = words_of(first, unit, scales[v]), two = words_of(0x1p-6f, 0x1p-9f, scales[v]);
      const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(one, two), 0xd8);
      const __m256i lows = _mm256_and_si256(words, bytes), highs = _mm256_srli_epi16(words, 8);
      const __m256i both = _mm256_permute4x64_epi64(_mm256_packus_epi16(lows, highs), 0xd8);
      low[v] = _mm256_castsi256_si128(both);
      high[v] = _mm256_extracti128_si256(both, 1);
    }
    return {_mm256_set_m128i(low[1], low[0]), _mm256_set_m128i(high[1], high[0])};
  }

  [[gnu::always_inline]] Bytes look_up(const int8_t* rows) const {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows));
    const __m256i index = _mm256_and_si256(x, _mm256_set1_epi8(15));
    const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(7));
    const __m256i is_small = _mm256_cmpeq_epi8(upper, _mm256_setzero_si256());
    const auto chosen = [&](__m256i normal, __m256i small) {
      return _mm256_blendv_epi8(_mm256_shuffle_epi8(normal, index), _mm256_shuffle_epi8(small, index), is_small);
    };
    const __m256i sign = _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(0x80)));
    const __m256i high = _mm256_add_epi8(chosen(normal_.high, small_.high), upper);
    return {chosen(normal_.low, small_.low), _mm256_or_si256(high, sign)};
  }

  float scales_[kPanelVectors] = {};
  bool decodes_ = false;
  Bytes normal_, small_;
};

template <>
class Decoder<Int4Step> {
 public:
  bool begin(const int8_t* step) {
    const auto* each = reinterpret_cast<const bf16*>(step + kInt4StepNumel);
    bool decodes = true;
#pragma GCC unroll 4
    for (int i = 0; i < kAll; ++i) {
      scales_[i] = part_load(each + i * kPart);
      spread_[i] = _mm256_mul_ps(scales_[i], _mm256_set1_ps(kSpread));
      const __m256 size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), scales_[i]);
      const __m256 is_zero = _mm256_cmp_ps(size, _mm256_setzero_ps(), _CMP_EQ_OQ);  // of rows behind the last
      const __m256 is_large = _mm256_cmp_ps(size, _mm256_set1_ps(0x1p-100f), _CMP_GE_OQ);
      const __m256 is_small = _mm256_cmp_ps(size, _mm256_set1_ps(0x1p100f), _CMP_LE_OQ);
      decodes &= _mm256_movemask_ps(_mm256_or_ps(is_zero, _mm256_and_ps(is_large, is_small))) == 0xff;
    }
    return decodes;
  }

  [[gnu::always_inline]] void group(const int8_t* step, int64_t g, bf16* out) const {
    const auto* rows = reinterpret_cast<const uint8_t*>(step) + g * kPanelRows;
#pragma GCC unroll 4
    for (int i = 0; i < kAll; ++i) {
      const __m256i both = part_bytes(rows + i * kPart);
      const __m256i low = _mm256_srai_epi32(_mm256_slli_epi32(both, 28), 28);
      const __m256i even = rounded(low, i), odd = rounded(_mm256_srai_epi32(both, 4), i);
      const __m256i pairs = _mm256_blend_epi16(_mm256_srli_epi32(even, 16), odd, 0xaa);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 2 * i * kPart), pairs);
    }
  }

 private:
  static constexpr int kAll = kPanelVectors * kParts;
  static constexpr float kSpread = 65537.0f;

  // The products with the scales of part `i`, rounded to bf16, in the upper halves.
  [[gnu::always_inline]] __m256i rounded(__m256i integers, int i) const {
    const __m256 x = _mm256_cvtepi32_ps(integers), c = _mm256_mul_ps(x, spread_[i]);
    return _mm256_castps_si256(_mm256_add_ps(c, _mm256_fmsub_ps(x, scales_[i], c)));
  }

  __m256 scales_[kAll], spread_[kAll];
};

#endif

}  // namespace lockstep
