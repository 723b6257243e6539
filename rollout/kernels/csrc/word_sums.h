// Sums of words times 64-bit multipliers mod 2^64, the inner loops of the fingerprint (`weight_sync/fingerprint.py`).
// On the way they notice words that have all bits of a mask: with the exponent's, a value that is not finite.
//
// Words may lie at any address.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace lockstep {

// Runs that share what is read of the multipliers.  AVX2 has two registers of sums for each.
#if LOCKSTEP_AVX2
inline constexpr int64_t kTogether = 4;
#else
inline constexpr int64_t kTogether = 8;
#endif

template <class W>
inline uint64_t word_at(const uint8_t* words, int64_t j) {
  W word;
  std::memcpy(&word, words + j * sizeof(W), sizeof(W));
  return word;
}

#if LOCKSTEP_AVX512
// Eight words as 64-bit integers.
template <class W>
inline __m512i widened(const uint8_t* p) {
  if constexpr (sizeof(W) == 1) return _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  if constexpr (sizeof(W) == 2) return _mm512_cvtepu16_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  if constexpr (sizeof(W) == 4) return _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  if constexpr (sizeof(W) == 8) return _mm512_loadu_si512(p);
}

// Whether one of the words of a vector has all bits of `bits`, which holds the mask in every word.
template <class W>
inline bool any_masked(__m512i words, __m512i bits) {
  const __m512i found = _mm512_and_si512(words, bits);
  if constexpr (sizeof(W) == 1) return _mm512_cmpeq_epi8_mask(found, bits) != 0;
  if constexpr (sizeof(W) == 2) return _mm512_cmpeq_epi16_mask(found, bits) != 0;
  if constexpr (sizeof(W) == 4) return _mm512_cmpeq_epi32_mask(found, bits) != 0;
  if constexpr (sizeof(W) == 8) return _mm512_cmpeq_epi64_mask(found, bits) != 0;
}

// As unsigned integers, which wrap; the compiler's own sum of lanes is one of signed integers.
inline uint64_t added_lanes(__m512i sums) {
  uint64_t lanes[8], total = 0;
  _mm512_storeu_si512(lanes, sums);
  for (const uint64_t lane : lanes) total += lane;
  return total;
}

template <class W>
inline __m512i in_every_word(uint64_t mask) {
  constexpr int64_t kVector = sizeof(__m512i) / sizeof(W);
  W repeated[kVector];
  std::fill(repeated, repeated + kVector, static_cast<W>(mask));
  return _mm512_loadu_si512(repeated);
}

// The first words of `kRuns` runs of `size` words, as far as vectors reach; returns how many of each.
template <class W, int64_t kRuns>
inline int64_t sum_vectors(const uint8_t* const (&runs)[kRuns], const uint64_t* multipliers, int64_t size,
                           uint64_t mask, uint64_t (&to)[kRuns], bool (&masked)[kRuns]) {
  constexpr int64_t kWords = 8, kVector = sizeof(__m512i) / sizeof(W);
  const __m512i bits = in_every_word<W>(mask);
  __m512i sums[kRuns];
  bool found[kRuns] = {};
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  int64_t j = 0;
  for (; j + kVector <= size; j += kVector) {
    for (int64_t i = j; i < j + kVector; i += kWords) {
      const __m512i multiplier = _mm512_loadu_si512(multipliers + i);
#pragma GCC unroll 8
      for (int64_t n = 0; n < kRuns; ++n) {
        const __m512i words = widened<W>(runs[n] + i * sizeof(W));
        sums[n] = _mm512_add_epi64(sums[n], _mm512_mullo_epi64(multiplier, words));
      }
    }
#pragma GCC unroll 8
    for (int64_t n = 0; n < kRuns; ++n) {
      found[n] |= any_masked<W>(_mm512_loadu_si512(runs[n] + j * sizeof(W)), bits);
    }
  }
  for (int64_t n = 0; n < kRuns; ++n) {
    to[n] = added_lanes(sums[n]);
    masked[n] = found[n];
  }
  return j;
}
#elif LOCKSTEP_AVX2
// Four words as 64-bit integers.
template <class W>
inline __m256i widened(const uint8_t* p) {
  if constexpr (sizeof(W) == 1) return _mm256_cvtepu8_epi64(_mm_loadu_si32(p));
  if constexpr (sizeof(W) == 2) return _mm256_cvtepu16_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  if constexpr (sizeof(W) == 4) return _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  if constexpr (sizeof(W) == 8) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// Whether one of the words of a vector has all bits of `bits`, which holds the mask in every word.
template <class W>
inline bool any_masked(__m256i words, __m256i bits) {
  const __m256i found = _mm256_and_si256(words, bits);
  if constexpr (sizeof(W) == 1) return _mm256_movemask_epi8(_mm256_cmpeq_epi8(found, bits)) != 0;
  if constexpr (sizeof(W) == 2) return _mm256_movemask_epi8(_mm256_cmpeq_epi16(found, bits)) != 0;
  if constexpr (sizeof(W) == 4) return _mm256_movemask_epi8(_mm256_cmpeq_epi32(found, bits)) != 0;
  if constexpr (sizeof(W) == 8) return _mm256_movemask_epi8(_mm256_cmpeq_epi64(found, bits)) != 0;
}

inline uint64_t added_lanes(__m256i sums) {
  uint64_t lanes[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), sums);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3];
}

template <class W>
inline __m256i in_every_word(uint64_t mask) {
  constexpr int64_t kVector = sizeof(__m256i) / sizeof(W);
  W repeated[kVector];
  std::fill(repeated, repeated + kVector, static_cast<W>(mask));
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(repeated));
}

// The sum of products of 64 bits, from products of 32: `high` counts 2^32 times.
struct HalfSums {
  __m256i low = _mm256_setzero_si256(), high = _mm256_setzero_si256();

  uint64_t total() const { return added_lanes(low) + (added_lanes(high) << 32); }
};

// `upper`: the upper halves of the multipliers.
template <class W>
inline void add_products(HalfSums& sums, __m256i words, __m256i multipliers, __m256i upper) {
  sums.low = _mm256_add_epi64(sums.low, _mm256_mul_epu32(words, multipliers));
  sums.high = _mm256_add_epi64(sums.high, _mm256_mul_epu32(words, upper));
  if constexpr (sizeof(W) == 8) {
    sums.high = _mm256_add_epi64(sums.high, _mm256_mul_epu32(_mm256_srli_epi64(words, 32), multipliers));
  }
}

// The first words of `kRuns` runs of `size` words, as far as vectors reach; returns how many of each.
template <class W, int64_t kRuns>
inline int64_t sum_vectors(const uint8_t* const (&runs)[kRuns], const uint64_t* multipliers, int64_t size,
                           uint64_t mask, uint64_t (&to)[kRuns], bool (&masked)[kRuns]) {
  constexpr int64_t kWords = 4, kVector = sizeof(__m256i) / sizeof(W);
  const __m256i bits = in_every_word<W>(mask);
  HalfSums sums[kRuns];
  bool found[kRuns] = {};
  int64_t j = 0;
  for (; j + kVector <= size; j += kVector) {
    for (int64_t i = j; i < j + kVector; i += kWords) {
      const __m256i multiplier = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(multipliers + i));
      const __m256i upper = _mm256_srli_epi64(multiplier, 32);
#pragma GCC unroll 4
      for (int64_t n = 0; n < kRuns; ++n) {
        add_products<W>(sums[n], widened<W>(runs[n] + i * sizeof(W)), multiplier, upper);
      }
    }
#pragma GCC unroll 4
    for (int64_t n = 0; n < kRuns; ++n) {
      const auto* words = reinterpret_cast<const __m256i*>(runs[n] + j * sizeof(W));
      found[n] |= any_masked<W>(_mm256_loadu_si256(words), bits);
    }
  }
  for (int64_t n = 0; n < kRuns; ++n) {
    to[n] = sums[n].total();
    masked[n] = found[n];
  }
  return j;
}
#else
template <class W, int64_t kRuns>
inline int64_t sum_vectors(const uint8_t* const (&)[kRuns], const uint64_t*, int64_t, uint64_t, uint64_t (&to)[kRuns],
                           bool (&masked)[kRuns]) {
  std::fill(to, to + kRuns, 0);
  std::fill(masked, masked + kRuns, false);
  return 0;
}
#endif

// to[n] = sum over j of multipliers[j] * word j of run n, of `size` words; masked[n]: a word has all bits of `mask`.
template <class W, int64_t kRuns>
inline void sum_runs(const uint8_t* const (&runs)[kRuns], const uint64_t* multipliers, int64_t size, uint64_t mask,
                     uint64_t (&to)[kRuns], bool (&masked)[kRuns]) {
  const int64_t done = sum_vectors<W>(runs, multipliers, size, mask, to, masked);
  for (int64_t n = 0; n < kRuns; ++n) {
    uint64_t sum = 0;
    bool found = false;
    for (int64_t j = done; j < size; ++j) {
      const uint64_t word = word_at<W>(runs[n], j);
      sum += multipliers[j] * word;
      found |= (word & mask) == mask;
    }
    to[n] += sum;
    masked[n] |= found;
  }
}

}  // namespace lockstep
