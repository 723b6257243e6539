// What attention needs of sixteen lanes beyond simd.h: parts of rows in three dtypes, 2^x, a transposition.
//
// Knows instruction sets.  Does not know attention.
#pragma once

#include <c10/util/Half.h>

#include "simd.h"

#define LOCKSTEP_INLINE inline __attribute__((always_inline))

namespace lockstep::attention {

LOCKSTEP_INLINE F32x16 zeros() { return splat(0.0f); }

// `load_some` reads the first `count` elements, at most kLanes, as floats with zeros behind them; `store_some` writes
// as many lanes.
template <class Scalar>
LOCKSTEP_INLINE F32x16 load_some(const Scalar* p, int count) {
  return count < kLanes ? load(p, count) : load(p);
}

template <class Scalar>
LOCKSTEP_INLINE void store_some(Scalar* p, F32x16 x, int count) {
  count < kLanes ? store(p, x, count) : store(p, x);
}

#if LOCKSTEP_AVX512
LOCKSTEP_INLINE __mmask16 some_lanes(int count) { return count < kLanes ? (1u << count) - 1 : 0xffff; }

LOCKSTEP_INLINE F32x16 load_some(const c10::Half* p, int count) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some_lanes(count), p))};
}

LOCKSTEP_INLINE void store_some(c10::Half* p, F32x16 x, int count) {
  const __m256i halves = _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_mask_storeu_epi16(p, some_lanes(count), halves);
}

// The first `count` lanes of x, `other` in the rest.
LOCKSTEP_INLINE F32x16 keep_first(F32x16 x, int count, float other) {
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), some_lanes(count > 0 ? count : 0), x.v)};
}

// The largest lane.
LOCKSTEP_INLINE float largest(F32x16 x) { return _mm512_reduce_max_ps(x.v); }

// Lane j of rows[i] -> out[j * stride + i]; out and stride in whole vectors.
LOCKSTEP_INLINE void store_transposed(const F32x16 (&rows)[16], float* out, int stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_castps_si512(rows[i].v);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  // a[4 r + c]: column 4 q + c of rows 4 r .. 4 r + 3 in its quarter q.
  for (int c = 0; c < 4; ++c) {
    const __m512i even01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);  // quarters 0 and 2 of both
    const __m512i odd01 = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);   // quarters 1 and 3
    const __m512i even23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
    const __m512i odd23 = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
    _mm512_store_si512(out + c * stride, _mm512_shuffle_i32x4(even01, even23, 0x88));
    _mm512_store_si512(out + (4 + c) * stride, _mm512_shuffle_i32x4(odd01, odd23, 0x88));
    _mm512_store_si512(out + (8 + c) * stride, _mm512_shuffle_i32x4(even01, even23, 0xdd));
    _mm512_store_si512(out + (12 + c) * stride, _mm512_shuffle_i32x4(odd01, odd23, 0xdd));
  }
}
#else
LOCKSTEP_INLINE F32x16 load_some(const c10::Half* p, int count) {
  float x[kLanes] = {};
  for (int i = 0; i < kLanes && i < count; ++i) x[i] = static_cast<float>(p[i]);
  return load(x);
}

LOCKSTEP_INLINE void store_some(c10::Half* p, F32x16 x, int count) {
  float lanes[kLanes];
  store(lanes, x);
  for (int i = 0; i < kLanes && i < count; ++i) p[i] = static_cast<c10::Half>(lanes[i]);
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
// Eight rows of eight lanes.
LOCKSTEP_INLINE void store_transposed(const Part (&rows)[8], float* out, int stride) {
  Part a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  // b[4 r + c]: column 4 h + c of rows 4 r .. 4 r + 3 in its half h.
  for (int c = 0; c < 4; ++c) {
    _mm256_storeu_ps(out + c * stride, _mm256_permute2f128_ps(b[c], b[4 + c], 0x20));
    _mm256_storeu_ps(out + (4 + c) * stride, _mm256_permute2f128_ps(b[c], b[4 + c], 0x31));
  }
}

LOCKSTEP_INLINE void store_transposed(const F32x16 (&rows)[16], float* out, int stride) {
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 16; i += 8) {
      Part tile[8];
      for (int k = 0; k < 8; ++k) tile[k] = rows[i + k].v[half];
      store_transposed(tile, out + half * 8 * stride + i, stride);
    }
  }
}
#else
LOCKSTEP_INLINE void store_transposed(const F32x16 (&rows)[16], float* out, int stride) {
  float lanes[16][kLanes];
  for (int i = 0; i < 16; ++i) store(lanes[i], rows[i]);
  for (int j = 0; j < kLanes; ++j) {
    for (int i = 0; i < 16; ++i) out[j * stride + i] = lanes[i][j];
  }
}
#endif
#endif

// 2^x for x <= 0: exactly 1 at 0, exactly 0 below -150, NaN of NaN, relative error below 1e-7 where the result is a
// normal number.  x = n + f with n the nearest integer; the polynomial for 2^f minimises the largest relative error.
LOCKSTEP_INLINE F32x16 exp2(F32x16 x) {
  const F32x16 clamped = max(splat(-160.0f), x);
  const F32x16 n = round_to_integer(clamped);
  const F32x16 f = clamped - n;
  F32x16 y = splat(1.535336196e-04f);
  y = fma(y, f, splat(1.339887502e-03f));
  y = fma(y, f, splat(9.618436918e-03f));
  y = fma(y, f, splat(5.550332367e-02f));
  y = fma(y, f, splat(2.402264774e-01f));
  y = fma(y, f, splat(6.931471825e-01f));
  y = fma(y, f, splat(1.0f));
  return scale_by_power(y, n);
}

LOCKSTEP_INLINE float first_lane(F32x16 x) {
  float lanes[kLanes];
  store(lanes, x);
  return lanes[0];
}

}  // namespace lockstep::attention
