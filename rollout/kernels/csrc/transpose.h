// Sixteen vectors of sixteen lanes, turned over: for AVX-512, AVX2 and plain C++.
//
// Lanes are moved and never computed with, so that any 32 bits pass through unchanged.
#pragma once

#include "simd.h"

#define LOCKSTEP_INLINE inline __attribute__((always_inline))

namespace lockstep {

#if LOCKSTEP_AVX512
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
#elif LOCKSTEP_AVX2
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

}  // namespace lockstep
