// How numbers are packed for the products: a *unit* is 32 bits, the step of a sum.
//
//   FloatUnits<Scalar>   one element as float; a step is one fused multiply-add
//   PairUnits            two neighbouring bfloat16 elements; a step is vdpbf16ps, which adds both products in float32
//
// Knows packing and steps.  Does not know softmax, causality or how work is divided.
//
// Packed:  queries        [row][unit of hd]
//          keys           [unit of hd][kBlock]         one lane for each key
//          probabilities  [row][unit of kBlock]
//          values         [unit of kBlock][padded hd]  one lane for each column of the output
#pragma once

#include <type_traits>

#include "attention_vector.h"

namespace lockstep::attention {

// Keys that are packed and attended to together.  Blocks start at multiples of it in the sequence.
inline constexpr int kBlock = 64;
// Of which so many at a time.
inline constexpr int kPackedKeys = kLanes;

LOCKSTEP_INLINE constexpr int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

template <class Scalar_>
struct FloatUnits {
  using Scalar = Scalar_;
  static constexpr int kPerUnit = 1;

  static LOCKSTEP_INLINE F32x16 step(F32x16 acc, F32x16 units, float unit) { return fma(units, splat(unit), acc); }

  // One row of `hd` elements -> its units, up to a multiple of kLanes with zeros.
  static void pack_query(const Scalar* query, int hd, float* out) {
    for (int d = 0; d < hd; d += kLanes) store(out + d, load_some(query + d, hd - d));
  }

  // kPackedKeys rows of `hd` elements -> as many lanes.
  static void pack_keys(const Scalar* const* rows, int hd, float* out) {
    for (int d = 0; d < hd; d += kLanes) {
      F32x16 tile[kPackedKeys];
      for (int i = 0; i < kPackedKeys; ++i) tile[i] = load_some(rows[i] + d, hd - d);
      store_transposed(tile, out + d * kBlock, kBlock);
    }
  }

  // kPackedKeys rows of `hd` elements -> their units, hd rounded up to a multiple of kLanes with zeros.
  static void pack_values(const Scalar* const* rows, int hd, float* out) {
    const int columns = round_up(hd, kLanes);
    for (int i = 0; i < kPackedKeys; ++i) {
      for (int d = 0; d < hd; d += kLanes) store(out + i * columns + d, load_some(rows[i] + d, hd - d));
    }
  }

  // `probabilities` [vectors * kLanes] -> units at `out`.  Returns their lane-wise sum on top of `total`.
  static LOCKSTEP_INLINE F32x16 pack_probabilities(const F32x16* probabilities, int vectors, float* out, F32x16 total) {
    for (int v = 0; v < vectors; ++v) {
      store(out + v * kLanes, probabilities[v]);
      total = total + probabilities[v];
    }
    return total;
  }
};

#if LOCKSTEP_AVX512_BF16
struct PairUnits {
  using Scalar = bf16;
  static constexpr int kPerUnit = 2;

  static LOCKSTEP_INLINE F32x16 step(F32x16 acc, F32x16 units, float unit) {
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)units.v, (__m512bh)_mm512_set1_ps(unit))};
  }

  static LOCKSTEP_INLINE F32x16 load_pairs(const Scalar* p, int count) {
    return {_mm512_maskz_loadu_ps(some_lanes(count / 2), p)};
  }

  static void pack_query(const Scalar* query, int hd, float* out) {
    for (int d = 0; d < hd; d += 32) store(out + d / 2, load_pairs(query + d, hd - d));
  }

  static void pack_keys(const Scalar* const* rows, int hd, float* out) {
    for (int d = 0; d < hd; d += 32) {
      F32x16 tile[kPackedKeys];
      for (int i = 0; i < kPackedKeys; ++i) tile[i] = load_pairs(rows[i] + d, hd - d);
      store_transposed(tile, out + d / 2 * kBlock, kBlock);
    }
  }

  static void pack_values(const Scalar* const* rows, int hd, float* out) {
    // Element i of the first row, element i of the second: words 0, 32, 1, 33, ...
    const __m512i even = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i low = _mm512_or_si512(even, _mm512_slli_epi32(_mm512_add_epi32(even, _mm512_set1_epi32(32)), 16));
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(16 << 16 | 16));
    const int columns = round_up(hd, kLanes);
    for (int i = 0; i < kPackedKeys; i += 2) {
      for (int d = 0; d < hd; d += 32) {
        const __m512i first = _mm512_castps_si512(load_pairs(rows[i] + d, hd - d).v);
        const __m512i second = _mm512_castps_si512(load_pairs(rows[i + 1] + d, hd - d).v);
        float* target = out + i / 2 * columns + d;
        _mm512_store_si512(target, _mm512_permutex2var_epi16(first, low, second));
        if (d + 16 < hd) _mm512_store_si512(target + 16, _mm512_permutex2var_epi16(first, high, second));
      }
    }
  }

  // Sums what the products will use, the rounded probabilities, so that the weights of a row add up to one.
  static LOCKSTEP_INLINE F32x16 pack_probabilities(const F32x16* probabilities, int vectors, float* out, F32x16 total) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
    for (int v = 0; v < vectors; v += 2) {
      const F32x16 next = v + 1 < vectors ? probabilities[v + 1] : zeros();
      const __m512bh pairs = _mm512_cvtne2ps_pbh(next.v, probabilities[v].v);
      store(out + v * kLanes / 2, {(__m512)pairs});
      total.v = _mm512_dpbf16_ps(total.v, pairs, ones);
    }
    return total;
  }
};
template <class Scalar>
using Units = std::conditional_t<std::is_same_v<Scalar, bf16>, PairUnits, FloatUnits<Scalar>>;
#else
template <class Scalar>
using Units = FloatUnits<Scalar>;
#endif

}  // namespace lockstep::attention
