// What attention needs of sixteen lanes beyond simd.h: parts of rows in three dtypes, 2^x, a transposition.
//
// Knows instruction sets.  Does not know attention.
#pragma once

#include <c10/util/Half.h>

#include "simd.h"

#define LOCKSTEP_INLINE inline __attribute__((always_inline))

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

// The largest lane.
LOCKSTEP_INLINE float largest(F32x16 x) { return _mm512_reduce_max_ps(x.v); }

// Lane j of rows[i] -> lane i of rows[j].
LOCKSTEP_INLINE void transpose(F32x16 (&rows)[16]) {
  __m512i a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = _mm512_castps_si512(rows[i].v);
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // a[4 r + c]: column 4 q + c of rows 4 r .. 4 r + 3 in its quarter q.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i even01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);  // quarters 0 and 2 of both
    const __m512i odd01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);   // quarters 1 and 3
    const __m512i even23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    const __m512i odd23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    rows[c].v = _mm512_castsi512_ps(_mm512_shuffle_i32x4(even01, even23, 0x88));
    rows[4 + c].v = _mm512_castsi512_ps(_mm512_shuffle_i32x4(odd01, odd23, 0x88));
    rows[8 + c].v = _mm512_castsi512_ps(_mm512_shuffle_i32x4(even01, even23, 0xdd));
    rows[12 + c].v = _mm512_castsi512_ps(_mm512_shuffle_i32x4(odd01, odd23, 0xdd));
  }
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

LOCKSTEP_INLINE F32x16 keep_first(F32x16 x, int count, float other) {
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes; ++i) lanes[i] = i < count ? lanes[i] : other;
  return load(lanes);
}

LOCKSTEP_INLINE float largest(F32x16 x) {
  float lanes[kLanes];
  store(lanes, x);
  float result = lanes[0];
  for (int i = 1; i < kLanes; ++i) result = lanes[i] > result ? lanes[i] : result;
  return result;
}

#if LOCKSTEP_AVX2
LOCKSTEP_INLINE void transpose(Part (&rows)[8]) {
  Part a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  // b[4 r + c]: column 4 h + c of rows 4 r .. 4 r + 3 in its half h.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    rows[c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
    rows[4 + c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
  }
}

LOCKSTEP_INLINE void transpose(F32x16 (&rows)[16]) {
  F32x16 result[16];
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 16; i += 8) {
      Part tile[8];
      for (int k = 0; k < 8; ++k) tile[k] = rows[i + k].v[half];
      transpose(tile);
      for (int k = 0; k < 8; ++k) result[half * 8 + k].v[i / 8] = tile[k];
    }
  }
  for (int i = 0; i < 16; ++i) rows[i] = result[i];
}
#else
LOCKSTEP_INLINE void transpose(F32x16 (&rows)[16]) {
  float lanes[16][kLanes], columns[kLanes][16];
  for (int i = 0; i < 16; ++i) store(lanes[i], rows[i]);
  for (int j = 0; j < kLanes; ++j) {
    for (int i = 0; i < 16; ++i) columns[j][i] = lanes[i][j];
  }
  for (int j = 0; j < kLanes; ++j) rows[j] = load(columns[j]);
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
