// Sixteen float lanes: the one vector type of the operators, for AVX-512, for AVX2 with FMA, and in plain C++.
//
// Every operation works lane by lane in one fixed order, so that a result depends on its inputs and the instruction set
// only.  Without FMA hardware `fma` rounds twice.  bf16 rounding is to nearest even.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <c10/util/BFloat16.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace lockstep {

using bf16 = c10::BFloat16;

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define LOCKSTEP_AVX512 1
#define LOCKSTEP_AVX512_BF16 1
#define LOCKSTEP_VECTOR_ISA "avx512_bf16"
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define LOCKSTEP_AVX512 1
#define LOCKSTEP_VECTOR_ISA "avx512"
#elif defined(__AVX2__) && defined(__FMA__)
#define LOCKSTEP_AVX2 1
#define LOCKSTEP_VECTOR_ISA "avx2"
#else
#define LOCKSTEP_VECTOR_ISA "portable"
#endif

// Matrix tiles multiply what is packed (tiles.h): those of the processor, or their emulation, for tests on any machine.
#if defined(LOCKSTEP_EMULATED_TILES)
#define LOCKSTEP_TILES 1
inline constexpr const char* kIsa = "emulated_amx";
#elif defined(__AMX_TILE__) && defined(__AMX_BF16__) && LOCKSTEP_AVX512_BF16
#define LOCKSTEP_TILES 1
inline constexpr const char* kIsa = "amx_bf16";
#else
#define LOCKSTEP_TILES 0
inline constexpr const char* kIsa = LOCKSTEP_VECTOR_ISA;
#endif

// Vectors multiply pairs of bf16 (vdpbf16ps).  Not beside tiles: Intel's processors, which alone have them, take four
// times as long for it as for a multiplication of floats, of which it does the work of two.
#if LOCKSTEP_AVX512_BF16 && !LOCKSTEP_TILES
#define LOCKSTEP_PAIRS 1
#else
#define LOCKSTEP_PAIRS 0
#endif

inline constexpr int kLanes = 16;

// Elements 0 .. n - 1 are about to be accessed by a masked instruction, which the address sanitizer does not see.
template <class T>
inline void reveal([[maybe_unused]] const T* p, [[maybe_unused]] int n) {
#if defined(__SANITIZE_ADDRESS__)
  if (n > 0) {
    [[maybe_unused]] const volatile unsigned char first = *reinterpret_cast<const unsigned char*>(p);
    [[maybe_unused]] const volatile unsigned char last = *(reinterpret_cast<const unsigned char*>(p + n) - 1);
  }
#endif
}

#if LOCKSTEP_AVX512

struct F32x16 {
  __m512 v;
};

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline F32x16 splat(float x) { return {_mm512_set1_ps(x)}; }
inline F32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F32x16 load(const float* p, int n) {
  reveal(p, n);
  return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
}
inline F32x16 widen(__m256i x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16))}; }
inline F32x16 load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F32x16 load(const bf16* p, int n) {
  reveal(p, n);
  return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
inline void store(float* p, F32x16 x) { _mm512_storeu_ps(p, x.v); }
inline void store(float* p, F32x16 x, int n) {
  reveal(p, n);
  _mm512_mask_storeu_ps(p, first_lanes(n), x.v);
}
inline F32x16 operator+(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32x16 operator-(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32x16 operator*(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32x16 operator/(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// A NaN in `a` becomes `b`; callers that must keep NaN pass it as `b`.
inline F32x16 max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32x16 min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32x16 round_to_integer(F32x16 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT)}; }
// a * 2^n for integral n.
inline F32x16 scale_by_power(F32x16 a, F32x16 n) { return {_mm512_scalef_ps(a.v, n.v)}; }

#if LOCKSTEP_AVX512_BF16
inline __m256i narrow(F32x16 x) { return (__m256i)_mm512_cvtneps_pbh(x.v); }
#else
inline __m256i narrow(F32x16 x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}
#endif
inline void store(bf16* p, F32x16 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
inline void store(bf16* p, F32x16 x, int n) {
  reveal(p, n);
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x));
}
inline F32x16 round_bf16(F32x16 x) { return widen(narrow(x)); }

// Thirty-two neighbouring elements: those at even places and those at odd places.
struct EvenOdd {
  F32x16 even, odd;
};
inline EvenOdd load_even_odd(const bf16* p) {
  const __m512i bits = _mm512_loadu_si512(p);
  const __m512i odd = _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))}, {_mm512_castsi512_ps(odd)}};
}

inline F32x16 load_integers(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
// Powers of two by their exponents plus 127; 0 for 0.
inline F32x16 load_powers(const int8_t* p) {
  const __m512i exponents = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(exponents, 23))};
}
// Thirty-two neighbouring elements of bf16, from numbers that are exact in it.
inline __m512i pair_bits(const EvenOdd& pairs) {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(pairs.even.v), 16);
  // low | (odd & high)
  return _mm512_ternarylogic_epi32(low, _mm512_castps_si512(pairs.odd.v), high, 0xf8);
}
inline void store_pairs(bf16* p, const EvenOdd& pairs) { _mm512_storeu_si512(p, pair_bits(pairs)); }

// The sums of four vectors.  Each is ((0+2)+(1+3)) within every quarter, then the quarters as ((0+2)+(1+3)).
inline void sum4(const F32x16 (&x)[4], float* out) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(x[0].v, x[1].v), _mm512_unpackhi_ps(x[0].v, x[1].v));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(x[2].v, x[3].v), _mm512_unpackhi_ps(x[2].v, x[3].v));
  const __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 quarters = _mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}

#else  // AVX2 or plain: sixteen lanes as an array of narrower parts

#if LOCKSTEP_AVX2
using Part = __m256;
inline constexpr int kPart = 8;
inline Part part_splat(float x) { return _mm256_set1_ps(x); }
inline Part part_load(const float* p) { return _mm256_loadu_ps(p); }
inline void part_store(float* p, Part x) { _mm256_storeu_ps(p, x); }
inline Part part_add(Part a, Part b) { return _mm256_add_ps(a, b); }
inline Part part_sub(Part a, Part b) { return _mm256_sub_ps(a, b); }
inline Part part_mul(Part a, Part b) { return _mm256_mul_ps(a, b); }
inline Part part_div(Part a, Part b) { return _mm256_div_ps(a, b); }
inline Part part_fma(Part a, Part b, Part c) { return _mm256_fmadd_ps(a, b, c); }
// The same, sums first; they stay in their register, which the compiler does not see to where all sixteen are in use.
inline Part part_add_product(Part sums, Part a, Part b) {
  asm("vfmadd231ps %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));
  return sums;
}
inline Part part_max(Part a, Part b) { return _mm256_max_ps(a, b); }
inline Part part_min(Part a, Part b) { return _mm256_min_ps(a, b); }
inline Part part_round(Part a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// a * 2^n for integral n in [-252, 254], in two steps so that neither factor leaves the range of a float.
inline Part part_scale(Part a, Part n) {
  const __m256i power = _mm256_cvtps_epi32(n), first = _mm256_srai_epi32(power, 1), bias = _mm256_set1_epi32(127);
  const __m256i second = _mm256_sub_epi32(power, first);
  const Part once = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23)));
  return _mm256_mul_ps(once, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(second, bias), 23)));
}
inline Part part_load(const bf16* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
// Of eight pairs of bf16 the first elements, the second ones.
inline Part part_even(Part pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs), 16)); }
inline Part part_odd(Part pairs) {
  const __m256i mask = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs), mask));
}
inline Part part_load_pairs(const bf16* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
inline Part part_load_even(const bf16* p) { return part_even(part_load_pairs(p)); }
inline Part part_load_odd(const bf16* p) { return part_odd(part_load_pairs(p)); }
// The bits of bf16, each in the low half of its lane.
inline __m256i part_narrow(Part x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}
inline void part_store(bf16* p, Part x) {
  const __m256i bits = part_narrow(x);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
inline Part part_round_bf16(Part x) { return _mm256_castsi256_ps(_mm256_slli_epi32(part_narrow(x), 16)); }
inline void part_store_pairs(bf16* p, Part even, Part odd) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000));
  const __m256i low = _mm256_srli_epi32(_mm256_castps_si256(even), 16);
  const __m256i pairs = _mm256_or_si256(low, _mm256_and_si256(_mm256_castps_si256(odd), high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pairs);
}
inline __m128i eight_bytes(const int8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
inline Part part_load_integers(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight_bytes(p))); }
inline Part part_load_powers(const int8_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(eight_bytes(p)), 23));
}
#else
using Part = float;
inline constexpr int kPart = 1;
inline Part part_splat(float x) { return x; }
inline Part part_load(const float* p) { return *p; }
inline void part_store(float* p, Part x) { *p = x; }
inline Part part_add(Part a, Part b) { return a + b; }
inline Part part_sub(Part a, Part b) { return a - b; }
inline Part part_mul(Part a, Part b) { return a * b; }
inline Part part_div(Part a, Part b) { return a / b; }
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
inline Part part_fma(Part a, Part b, Part c) { return __builtin_fmaf(a, b, c); }
#else
inline Part part_fma(Part a, Part b, Part c) { return a * b + c; }
#endif
inline Part part_max(Part a, Part b) { return a > b ? a : b; }
inline Part part_min(Part a, Part b) { return a < b ? a : b; }
inline Part part_round(Part a) { return __builtin_rintf(a); }
inline Part part_load(const bf16* p) { return static_cast<float>(*p); }
inline Part part_load_even(const bf16* p) { return static_cast<float>(p[0]); }
inline Part part_load_odd(const bf16* p) { return static_cast<float>(p[1]); }
inline void part_store(bf16* p, Part x) { *p = static_cast<bf16>(x); }
inline Part part_round_bf16(Part x) { return static_cast<float>(static_cast<bf16>(x)); }
inline void part_store_pairs(bf16* p, Part even, Part odd) {
  p[0] = static_cast<bf16>(even);
  p[1] = static_cast<bf16>(odd);
}
inline Part part_load_integers(const int8_t* p) { return *p; }
inline Part part_load_powers(const int8_t* p) {
  const uint32_t bits = static_cast<uint32_t>(static_cast<uint8_t>(*p)) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return power;
}
inline Part part_scale(Part a, Part n) {
  const int32_t power = n == n ? static_cast<int32_t>(n) : 0, first = power / 2;
  const int32_t bits[2] = {(first + 127) << 23, (power - first + 127) << 23};
  float factors[2];
  std::memcpy(factors, bits, sizeof bits);
  return a * factors[0] * factors[1];
}
#endif

inline constexpr int kParts = kLanes / kPart;

struct F32x16 {
  Part v[kParts];
};

template <class F>
inline F32x16 each_part(F f) {
  F32x16 out;
#pragma GCC unroll 16
  for (int i = 0; i < kParts; ++i) out.v[i] = f(i);
  return out;
}

inline F32x16 splat(float x) {
  return each_part([&](int) { return part_splat(x); });
}
template <class T>
inline F32x16 load(const T* p) {
  return each_part([&](int i) { return part_load(p + i * kPart); });
}
template <class T>
inline F32x16 load(const T* p, int n) {
  if (n == kLanes) return load(p);
  if (n == kPart) return each_part([&](int i) { return i == 0 ? part_load(p) : part_splat(0.0f); });
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, n * sizeof(T));
  return load(static_cast<const T*>(buffer));
}
template <class T>
inline void store(T* p, F32x16 x) {
#pragma GCC unroll 16
  for (int i = 0; i < kParts; ++i) part_store(p + i * kPart, x.v[i]);
}
template <class T>
inline void store(T* p, F32x16 x, int n) {
  if (n == kLanes) return store(p, x);
  if (n == kPart) return part_store(p, x.v[0]);
  T buffer[kLanes];
  store(buffer, x);
  std::memcpy(static_cast<void*>(p), buffer, n * sizeof(T));
}
inline F32x16 round_bf16(F32x16 x) {
  return each_part([&](int i) { return part_round_bf16(x.v[i]); });
}
struct EvenOdd {
  F32x16 even, odd;
};
inline EvenOdd load_even_odd(const bf16* p) {
  return {each_part([&](int i) { return part_load_even(p + 2 * i * kPart); }),
          each_part([&](int i) { return part_load_odd(p + 2 * i * kPart); })};
}
inline F32x16 load_integers(const int8_t* p) {
  return each_part([&](int i) { return part_load_integers(p + i * kPart); });
}
inline F32x16 load_powers(const int8_t* p) {
  return each_part([&](int i) { return part_load_powers(p + i * kPart); });
}
inline void store_pairs(bf16* p, const EvenOdd& pairs) {
#pragma GCC unroll 16
  for (int i = 0; i < kParts; ++i) part_store_pairs(p + 2 * i * kPart, pairs.even.v[i], pairs.odd.v[i]);
}
inline F32x16 operator+(F32x16 a, F32x16 b) {
  return each_part([&](int i) { return part_add(a.v[i], b.v[i]); });
}
inline F32x16 operator-(F32x16 a, F32x16 b) {
  return each_part([&](int i) { return part_sub(a.v[i], b.v[i]); });
}
inline F32x16 operator*(F32x16 a, F32x16 b) {
  return each_part([&](int i) { return part_mul(a.v[i], b.v[i]); });
}
inline F32x16 operator/(F32x16 a, F32x16 b) {
  return each_part([&](int i) { return part_div(a.v[i], b.v[i]); });
}
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return each_part([&](int i) { return part_fma(a.v[i], b.v[i], c.v[i]); });
}
inline F32x16 max(F32x16 a, F32x16 b) {
  return each_part([&](int i) { return part_max(a.v[i], b.v[i]); });
}
inline F32x16 min(F32x16 a, F32x16 b) {
  return each_part([&](int i) { return part_min(a.v[i], b.v[i]); });
}
inline F32x16 round_to_integer(F32x16 a) {
  return each_part([&](int i) { return part_round(a.v[i]); });
}
inline F32x16 scale_by_power(F32x16 a, F32x16 n) {
  return each_part([&](int i) { return part_scale(a.v[i], n.v[i]); });
}
#if LOCKSTEP_AVX2
// The quarters 2 * part and 2 * part + 1 of four vectors, summed: [quarter][vector].
inline __m256 quarter_sums(const F32x16 (&x)[4], int part) {
  const __m256 a = x[0].v[part], b = x[1].v[part], c = x[2].v[part], d = x[3].v[part];
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256d lo = _mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
  const __m256d hi = _mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
  return _mm256_add_ps(_mm256_castpd_ps(lo), _mm256_castpd_ps(hi));
}
inline void sum4(const F32x16 (&x)[4], float* out) {
  const __m256 halves = _mm256_add_ps(quarter_sums(x, 0), quarter_sums(x, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}
#else
inline void sum4(const F32x16 (&x)[4], float* out) {
  for (int row = 0; row < 4; ++row) {
    float v[kLanes], quarter[4];
    store(v, x[row]);
    for (int q = 0; q < 4; ++q) quarter[q] = (v[4 * q] + v[4 * q + 2]) + (v[4 * q + 1] + v[4 * q + 3]);
    out[row] = (quarter[0] + quarter[2]) + (quarter[1] + quarter[3]);
  }
}
#endif

#endif

// Of lanes that are no NaN.
inline float largest_lane(F32x16 x) {
#if LOCKSTEP_AVX512
  return _mm512_reduce_max_ps(x.v);
#elif LOCKSTEP_AVX2
  const __m256 both = _mm256_max_ps(x.v[0], x.v[1]);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  float lanes[kLanes];
  store(lanes, x);
  return *std::max_element(lanes, lanes + kLanes);
#endif
}

inline float sum(F32x16 x) {
  const F32x16 rows[4] = {x, x, x, x};
  float out[4];
  sum4(rows, out);
  return out[0];
}

// Round to the storage type: what torch does between two operations.
template <class T>
inline F32x16 round_to(F32x16 x) {
  if constexpr (std::is_same_v<T, bf16>) {
    return round_bf16(x);
  } else {
    return x;
  }
}

// e^x, relative error below 2e-7 where the result is a normal number; 0 below -104, infinity above 88.8, NaN for NaN.
// Range reduction by ln 2 in two parts, then the Taylor polynomial of degree 7 on [-0.347, 0.347].
[[gnu::always_inline]] inline F32x16 exp(F32x16 x) {
  const F32x16 clamped = min(splat(89.0f), max(splat(-104.0f), x));
  const F32x16 n = round_to_integer(clamped * splat(1.44269504f));
  const F32x16 r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), clamped));
  F32x16 p = splat(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, splat(c));
  return scale_by_power(p, n);
}

inline F32x16 sigmoid(F32x16 x) { return splat(1.0f) / (splat(1.0f) + exp(splat(0.0f) - x)); }

// x / (1 + e^-x)
inline F32x16 silu(F32x16 x) { return x / (splat(1.0f) + exp(splat(0.0f) - x)); }

}  // namespace lockstep
