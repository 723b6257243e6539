// What the sampler asks of vectors beyond simd.h: comparisons, sums in double.
#pragma once

#include <algorithm>
#include <limits>

#include "simd.h"

namespace lockstep::sampler {

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The first n lanes from memory, the others -infinity, which is never the largest and weighs nothing.
inline F32x16 load_padded(const float* p, int n) {
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, -kInfinity);
  std::copy(p, p + n, lanes);
  return load(lanes);
}

// Bit i: whether lane i is at least `bound`.
inline uint32_t lanes_at_least(F32x16 x, float bound) {
#if LOCKSTEP_AVX512
  return _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(bound), _CMP_GE_OQ);
#else
  uint32_t bits = 0;
#if LOCKSTEP_AVX2
  const __m256 bounds = _mm256_set1_ps(bound);
  for (int i = 0; i < kParts; ++i) {
    bits |= static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(x.v[i], bounds, _CMP_GE_OQ))) << (i * kPart);
  }
#else
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) bits |= static_cast<uint32_t>(lanes[i] >= bound) << i;
#endif
  return bits;
#endif
}

// The lanes of `values` where x is at least `bound`, 0 elsewhere.
inline F32x16 where_at_least(F32x16 x, float bound, F32x16 values) {
#if LOCKSTEP_AVX512
  return {_mm512_maskz_mov_ps(static_cast<__mmask16>(lanes_at_least(x, bound)), values.v)};
#elif LOCKSTEP_AVX2
  const __m256 bounds = _mm256_set1_ps(bound);
  return each_part([&](int i) { return _mm256_and_ps(_mm256_cmp_ps(x.v[i], bounds, _CMP_GE_OQ), values.v[i]); });
#else
  return each_part([&](int i) { return x.v[i] >= bound ? values.v[i] : 0.0f; });
#endif
}

// Sixteen running sums in double, one a lane.
class LaneSums {
 public:
  void add(F32x16 x) {
#if LOCKSTEP_AVX512
    low_ = _mm512_add_pd(low_, _mm512_cvtps_pd(_mm512_castps512_ps256(x.v)));
    high_ = _mm512_add_pd(high_, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1)));
#else
    float lanes[kLanes];
    store(lanes, x);
    for (int i = 0; i < kLanes; ++i) lanes_[i] += lanes[i];
#endif
  }

  // Lane i with lane i + 8, then i + 4, i + 2, i + 1.
  double total() const {
    double lanes[kLanes];
#if LOCKSTEP_AVX512
    _mm512_storeu_pd(lanes, low_);
    _mm512_storeu_pd(lanes + 8, high_);
#else
    std::copy(lanes_, lanes_ + kLanes, lanes);
#endif
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
  }

 private:
#if LOCKSTEP_AVX512
  __m512d low_ = _mm512_setzero_pd(), high_ = _mm512_setzero_pd();
#else
  double lanes_[kLanes] = {};
#endif
};

}  // namespace lockstep::sampler
