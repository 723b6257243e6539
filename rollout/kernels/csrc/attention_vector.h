// What attention needs of sixteen lanes beyond simd.h: parts of rows in three dtypes, 2^x.
#pragma once

#include <c10/util/Half.h>

#include "simd.h"
#include "transpose.h"

namespace lockstep::attention {

LOCKSTEP_INLINE F32x16 zeros() { return splat(0.0f); }

// Calls `body` with whether it holds as a constant.
template <class Body>
LOCKSTEP_INLINE void with_constant(bool holds, Body body) {
  holds ? body.template operator()<true>() : body.template operator()<false>();
}

// Some first lanes: `first_of(count)` are at most kLanes.  `load_some` reads as many elements as floats, with zeros in
// the other lanes; `store_some` writes as many.
#if LOCKSTEP_AVX512
using SomeLanes = __mmask16;
LOCKSTEP_INLINE SomeLanes first_of(int count) { return count < kLanes ? (1u << count) - 1 : 0xffff; }

template <class T>
LOCKSTEP_INLINE void reveal_some(const T* p, SomeLanes lanes) {
  reveal(p, __builtin_popcount(lanes));
}

LOCKSTEP_INLINE F32x16 load_some(const float* p, SomeLanes lanes) {
  reveal_some(p, lanes);
  return {_mm512_maskz_loadu_ps(lanes, p)};
}

LOCKSTEP_INLINE F32x16 load_some(const bf16* p, SomeLanes lanes) {
  reveal_some(p, lanes);
  return widen(_mm256_maskz_loadu_epi16(lanes, p));
}

LOCKSTEP_INLINE F32x16 load_some(const c10::Half* p, SomeLanes lanes) {
  reveal_some(p, lanes);
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, p))};
}

LOCKSTEP_INLINE void store_some(float* p, F32x16 x, SomeLanes lanes) {
  reveal_some(p, lanes);
  _mm512_mask_storeu_ps(p, lanes, x.v);
}

LOCKSTEP_INLINE void store_some(bf16* p, F32x16 x, SomeLanes lanes) {
  reveal_some(p, lanes);
  _mm256_mask_storeu_epi16(p, lanes, narrow(x));
}

LOCKSTEP_INLINE void store_some(c10::Half* p, F32x16 x, SomeLanes lanes) {
  reveal_some(p, lanes);
  const __m256i halves = _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_mask_storeu_epi16(p, lanes, halves);
}

// The first `count` lanes of x, `other` in the rest.
LOCKSTEP_INLINE F32x16 keep_first(F32x16 x, int count, float other) {
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), first_of(count > 0 ? count : 0), x.v)};
}

// The others: `other` in the first `count` lanes, x in the rest.
LOCKSTEP_INLINE F32x16 drop_first(F32x16 x, int count, float other) {
  return {_mm512_mask_mov_ps(x.v, first_of(count > 0 ? count : 0), _mm512_set1_ps(other))};
}
#else
using SomeLanes = int;
LOCKSTEP_INLINE SomeLanes first_of(int count) { return count < kLanes ? count : kLanes; }

template <class Scalar>
LOCKSTEP_INLINE F32x16 load_some(const Scalar* p, SomeLanes lanes) {
  return lanes < kLanes ? load(p, lanes) : load(p);
}

LOCKSTEP_INLINE F32x16 load_some(const c10::Half* p, SomeLanes lanes) {
  float x[kLanes] = {};
  for (int i = 0; i < lanes; ++i) x[i] = static_cast<float>(p[i]);
  return load(x);
}

template <class Scalar>
LOCKSTEP_INLINE void store_some(Scalar* p, F32x16 x, SomeLanes lanes) {
  lanes < kLanes ? store(p, x, lanes) : store(p, x);
}

LOCKSTEP_INLINE void store_some(c10::Half* p, F32x16 x, SomeLanes lanes) {
  float values[kLanes];
  store(values, x);
  for (int i = 0; i < lanes; ++i) p[i] = static_cast<c10::Half>(values[i]);
}

#if LOCKSTEP_AVX2
// All bits of the lanes of a part that are among the first `count` of all lanes.
LOCKSTEP_INLINE Part among_first(int part, int count) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(count - part * kPart), lanes));
}

LOCKSTEP_INLINE F32x16 keep_first(F32x16 x, int count, float other) {
  return each_part([&](int i) { return _mm256_blendv_ps(part_splat(other), x.v[i], among_first(i, count)); });
}

LOCKSTEP_INLINE F32x16 drop_first(F32x16 x, int count, float other) {
  return each_part([&](int i) { return _mm256_blendv_ps(x.v[i], part_splat(other), among_first(i, count)); });
}
#else
LOCKSTEP_INLINE F32x16 keep_first(F32x16 x, int count, float other) {
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? lanes[i] : other;
  return load(lanes);
}

LOCKSTEP_INLINE F32x16 drop_first(F32x16 x, int count, float other) {
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? other : lanes[i];
  return load(lanes);
}
#endif
#endif

template <bool kWhole, class Scalar>
LOCKSTEP_INLINE F32x16 load_some(const Scalar* p, SomeLanes lanes) {
  return load_some(p, kWhole ? first_of(kLanes) : lanes);
}

// Degrees of the polynomial in exp2: relative error below 1e-7 and 3e-6 where the result is a normal number.
inline constexpr int kExact = 6, kForBfloat16 = 4;

// 2^x for x <= 0: exactly 1 at 0, exactly 0 below -150, NaN of NaN.  x = n + f with n an integer and f from 0 to 1; the
// polynomial for 2^f minimises the largest relative error among those that are 1 at 0.
template <int kDegree>
LOCKSTEP_INLINE F32x16 exp2(F32x16 x) {
#if LOCKSTEP_AVX512
  const F32x16 f = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};  // 0 of -inf
#else
  const F32x16 clamped = max(splat(-160.0f), x);
  const F32x16 n = round_to_integer(clamped - splat(0.5f));
  const F32x16 f = clamped - n;
#endif
  F32x16 y;
  if constexpr (kDegree == kExact) {
    y = fma(splat(2.161291632e-04f), f, splat(1.246784581e-03f));
    y = fma(y, f, splat(9.675451554e-03f));
    y = fma(y, f, splat(5.548528209e-02f));
    y = fma(y, f, splat(2.402293086e-01f));
    y = fma(y, f, splat(6.931470633e-01f));
  } else {
    y = fma(splat(1.342668571e-02f), f, splat(5.224247277e-02f));
    y = fma(y, f, splat(2.412802130e-01f));
    y = fma(y, f, splat(6.930448413e-01f));
  }
  y = fma(y, f, splat(1.0f));
#if LOCKSTEP_AVX512
  return {_mm512_scalef_ps(y.v, x.v)};  // times 2^floor(x)
#else
  return scale_by_power(y, n);
#endif
}

}  // namespace lockstep::attention
