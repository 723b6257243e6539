// How numbers are packed for the products: a *unit* is 32 bits, the step of a sum.
//
//   FloatUnits<Scalar>   one element as float; a step is one fused multiply-add
//   PairUnits            two neighbouring bfloat16 elements; a step is vdpbf16ps, which adds both products in float32, or
//                        matrix tiles take sixteen at a time (attention_matrix.h)
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_vector.h"

namespace lockstep::attention {

LOCKSTEP_INLINE constexpr int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

template <class Scalar_>
struct FloatUnits {
  using Scalar = Scalar_;
  static constexpr int kPerUnit = 1;
  static constexpr int kExponential = kExact;

  static LOCKSTEP_INLINE F32x16 step(F32x16 acc, F32x16 units, float unit) { return fma(units, splat(unit), acc); }

  // So many units of a row, with zeros behind them; kLanes of them if kWhole, which is faster.
  template <bool kWhole>
  static LOCKSTEP_INLINE F32x16 row_units(const Scalar* row, SomeLanes units) {
    return load_some<kWhole>(row, units);
  }

  // One unit, of kPerUnit rows, for each of `some_columns(left)` columns, with zeros behind them.
  static LOCKSTEP_INLINE SomeLanes some_columns(int left) { return first_of(left); }
  template <bool kWhole>
  static LOCKSTEP_INLINE F32x16 column_units(const Scalar* const* rows, int64_t column, SomeLanes some) {
    return load_some<kWhole>(rows[0] + column, some);
  }

  // The units of kLanes * kPerUnit probabilities -> out.  Returns their lane-wise sum on top of `total`.
  static LOCKSTEP_INLINE F32x16 pack_probabilities(const F32x16 (&probabilities)[kPerUnit], float* out, F32x16 total) {
    store(out, probabilities[0]);
    return total + probabilities[0];
  }
};

#if LOCKSTEP_PAIRS || LOCKSTEP_TILES
struct PairUnits {
  using Scalar = bf16;
  static constexpr int kPerUnit = 2;
  static constexpr int kExponential = kForBfloat16;

#if LOCKSTEP_PAIRS
  static LOCKSTEP_INLINE F32x16 step(F32x16 acc, F32x16 units, float unit) {
    return {_mm512_dpbf16_ps(acc.v, (__m512bh)units.v, (__m512bh)_mm512_set1_ps(unit))};
  }
#endif

  template <bool kWhole>
  static LOCKSTEP_INLINE F32x16 row_units(const Scalar* row, SomeLanes units) {
    return load_some<kWhole>(reinterpret_cast<const float*>(row), units);
  }

  static LOCKSTEP_INLINE SomeLanes some_columns(int left) { return first_of(std::min(left, kLanes) / 2); }
#if LOCKSTEP_AVX512
  template <bool kWhole>
  static LOCKSTEP_INLINE F32x16 column_units(const Scalar* const* rows, int64_t column, SomeLanes some) {
    // Element i of the first row, element i of the second: words 0, 32, 1, 33, ...
    const __m512i even = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i order = _mm512_or_si512(even, _mm512_slli_epi32(_mm512_add_epi32(even, _mm512_set1_epi32(32)), 16));
    const auto load = [&](const Scalar* p) {
      if constexpr (kWhole) return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
      return _mm512_castps_si512(load_some(reinterpret_cast<const float*>(p), some).v);
    };
    const __m512i first = load(rows[0] + column), second = load(rows[1] + column);
    return {_mm512_castsi512_ps(_mm512_permutex2var_epi16(first, order, second))};
  }
#else
  template <bool kWhole>
  static F32x16 column_units(const Scalar* const* rows, int64_t column, SomeLanes some) {
    Scalar pairs[2 * kLanes] = {};
    float units[kLanes];
    for (int i = 0; i < (kWhole ? kLanes : 2 * some); ++i) {
      for (int n = 0; n < 2; ++n) pairs[2 * i + n] = rows[n][column + i];
    }
    std::memcpy(units, pairs, sizeof units);
    return load(units);
  }
#endif

  // Sums what the products will use, the rounded probabilities, so that the weights of a row add up to one.
  static LOCKSTEP_INLINE F32x16 pack_probabilities(const F32x16 (&probabilities)[kPerUnit], float* out, F32x16 total) {
#if LOCKSTEP_PAIRS
    const __m512bh pairs = _mm512_cvtne2ps_pbh(probabilities[1].v, probabilities[0].v);
    store(out, {(__m512)pairs});
    return {_mm512_dpbf16_ps(total.v, pairs, (__m512bh)_mm512_set1_epi16(0x3f80))};
#else
    Scalar* pairs = reinterpret_cast<Scalar*>(out);
    for (int n = 0; n < kPerUnit; ++n) {
      store(pairs + n * kLanes, probabilities[n]);
      total = total + round_bf16(probabilities[n]);
    }
    return total;
#endif
  }
};

template <class Scalar>
using Units = std::conditional_t<std::is_same_v<Scalar, bf16>, PairUnits, FloatUnits<Scalar>>;
#else
template <class Scalar>
using Units = FloatUnits<Scalar>;
#endif

// Whether products are by matrix tiles.
template <class U>
inline constexpr bool kByTiles = LOCKSTEP_TILES && U::kPerUnit == 2;

// Calls `body` with the smaller of `count` and kMost as a constant.
template <int kMost, class Body>
LOCKSTEP_INLINE void with_count(int count, Body body) {
  if constexpr (kMost > 1) {
    if (count < kMost) return with_count<kMost - 1>(count, body);
  }
  body.template operator()<kMost>();
}

}  // namespace lockstep::attention
