// Weights that are held in fewer bits than bf16, read as bf16: their panels, and the formats with scales as published.
//
//   w8     packed_w8.h
//   fp8    float8_e4m3, and a float32 scale for 128 x 128 elements
//   int4   integers -8 .. 7, and a bf16 scale for each 32 neighbouring elements of a row, or a multiple of it
//
// A value is float32(element) * float32(scale), rounded to bf16.  So products are those of packed.h with these values,
// bit for bit.  A step is 32 elements of K, 32 rows:
//
//   fp8    uint8 [group][element in group][32 rows], then float [2], the scales of the vectors of rows
//   int4   uint8 [group][32 rows], the even element in the low half; then bf16 [32 rows]
//
// A scale is stored with every step, so that a panel is read as one stream.  Panels are filled up to a cache line.
#pragma once

#include "packed_w8.h"

namespace lockstep {

inline constexpr int64_t kHeldStep = kW8Step;  // elements of K
inline constexpr int64_t kScaleBlock = 128;    // rows and columns of a scale of fp8
inline constexpr int64_t kFp8StepNumel = kHeldStep * kPanelRows;
inline constexpr int64_t kInt4StepNumel = kFp8StepNumel / 2;  // bytes
static_assert(kW8Step * kPanelRows == kFp8StepNumel && kScaleBlock % kHeldStep == 0 && kScaleBlock % kLanes == 0);

inline int64_t held_steps_of(int64_t depth) { return (depth + kHeldStep - 1) / kHeldStep; }

// Of a panel of `depth` columns.
template <class Step>
inline int64_t held_panel_bytes(int64_t depth) {
  return (held_steps_of(depth) * Step::kBytes + 63) / 64 * 64;
}

// Where a row of a panel begins: `row` within the packed matrix; blocks of sixteen rows alternate as in pack.cpp.
struct HeldRow {
  int64_t panel, vector, lane;

  HeldRow(int64_t row, int64_t step, int64_t offset) {
    const int64_t half = row / kLanes * step + offset;
    panel = half / kPanelVectors;
    vector = half % kPanelVectors;
    lane = row % kLanes;
  }

  int64_t column() const { return vector * kLanes + lane; }
};

// The value of float8_e4m3 over 256, exact in a half, of which it has the bits.
inline uint16_t fp8_half_bits(uint8_t x) {
  return static_cast<uint16_t>((x & 0x80u) << 8 | (x & 0x7fu) << 7);
}
inline constexpr float kFp8OverHalf = 256.0f;

#if LOCKSTEP_AVX512
inline F32x16 load_fp8_over_256(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i twice = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8), 1);  // the sign twice
  return {_mm512_cvtph_ps(_mm256_and_si256(twice, _mm256_set1_epi16(static_cast<int16_t>(0xbfff))))};
}
// The low halves of bytes, the high ones.
inline F32x16 load_low_int4(const uint8_t* p) {
  const __m512i x = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 28), 28))};
}
inline F32x16 load_high_int4(const uint8_t* p) {
  const __m512i x = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(x, 4))};
}
#else
#if LOCKSTEP_AVX2
inline Part part_load_fp8_over_256(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i twice = _mm_srai_epi16(_mm_unpacklo_epi8(_mm_setzero_si128(), bytes), 1);  // the sign twice
  return _mm256_cvtph_ps(_mm_and_si128(twice, _mm_set1_epi16(static_cast<int16_t>(0xbfff))));
}
inline __m256i part_bytes(const uint8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Part part_load_low_int4(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(part_bytes(p), 28), 28));
}
inline Part part_load_high_int4(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(part_bytes(p), 4));
}
// What is finite, rounded to bf16.
inline Part part_round_finite(Part x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  return _mm256_castsi256_ps(_mm256_and_si256(rounded, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
#else
inline Part part_load_fp8_over_256(const uint8_t* p) {
  const uint32_t magnitude = *p & 0x7fu, exponent = magnitude >> 3, mantissa = magnitude & 7u;
  const float number = exponent == 0 ? static_cast<float>(mantissa) / 131072.0f
                                     : std::ldexp(8.0f + static_cast<float>(mantissa), static_cast<int>(exponent) - 18);
  return (*p & 0x80u) != 0 ? -number : number;
}
inline Part part_load_low_int4(const uint8_t* p) { return static_cast<Part>(static_cast<int8_t>(*p << 4) >> 4); }
inline Part part_load_high_int4(const uint8_t* p) { return static_cast<Part>(static_cast<int8_t>(*p) >> 4); }
inline Part part_round_finite(Part x) { return part_round_bf16(x); }
#endif
inline F32x16 load_fp8_over_256(const uint8_t* p) {
  return each_part([&](int i) { return part_load_fp8_over_256(p + i * kPart); });
}
inline F32x16 load_low_int4(const uint8_t* p) {
  return each_part([&](int i) { return part_load_low_int4(p + i * kPart); });
}
inline F32x16 load_high_int4(const uint8_t* p) {
  return each_part([&](int i) { return part_load_high_int4(p + i * kPart); });
}
#endif

// One step of a panel: its elements, and the scales of its rows.
struct Fp8Step {
  static constexpr int64_t kBytes = kFp8StepNumel + kPanelVectors * sizeof(float);
  const uint8_t* elements;
  F32x16 scales[kPanelVectors];  // times 256

  explicit Fp8Step(const int8_t* from) : elements(reinterpret_cast<const uint8_t*>(from)) {
    float each[kPanelVectors];
    std::memcpy(each, from + kFp8StepNumel, sizeof each);
    for (int v = 0; v < kPanelVectors; ++v) scales[v] = splat(each[v] * kFp8OverHalf);
  }

  // The values of group `g`, sixteen rows.
  EvenOdd pairs(int64_t g, int vector) const {
    const uint8_t* even = elements + 2 * g * kPanelRows + vector * kLanes;
    return {round_bf16(load_fp8_over_256(even) * scales[vector]),
            round_bf16(load_fp8_over_256(even + kPanelRows) * scales[vector])};
  }

#if LOCKSTEP_AVX2
  // Of one element of K, part `i` of a vector.
  Part part(int64_t element, int vector, int i) const {
    const uint8_t* at = elements + element * kPanelRows + vector * kLanes + i * kPart;
    return part_round_finite(part_mul(part_load_fp8_over_256(at), scales[vector].v[i]));
  }
#endif

  void prefetch(int64_t g) const {
    constexpr int64_t kAhead = 48 * 2 * kPanelRows;
    __builtin_prefetch(elements + 2 * g * kPanelRows + kAhead, 0, kStreamLocality);
  }
};

struct Int4Step {
  static constexpr int64_t kBytes = kInt4StepNumel + kPanelRows * sizeof(bf16);
  const uint8_t* elements;
  F32x16 scales[kPanelVectors];

  explicit Int4Step(const int8_t* from) : elements(reinterpret_cast<const uint8_t*>(from)) {
    const auto* each = reinterpret_cast<const bf16*>(from + kInt4StepNumel);
    for (int v = 0; v < kPanelVectors; ++v) scales[v] = load(each + v * kLanes);
  }

  EvenOdd pairs(int64_t g, int vector) const {
    const uint8_t* at = elements + g * kPanelRows + vector * kLanes;
    return {round_bf16(load_low_int4(at) * scales[vector]), round_bf16(load_high_int4(at) * scales[vector])};
  }

#if LOCKSTEP_AVX2
  Part part(int64_t element, int vector, int i) const {
    const uint8_t* at = elements + element / 2 * kPanelRows + vector * kLanes + i * kPart;
    const Part integers = element % 2 == 0 ? part_load_low_int4(at) : part_load_high_int4(at);
    return part_round_finite(part_mul(integers, scales[vector].v[i]));
  }
#endif

  void prefetch(int64_t g) const {
    constexpr int64_t kAhead = 96 * kPanelRows;
    if (g % 2 == 0) __builtin_prefetch(elements + g * kPanelRows + kAhead, 0, kStreamLocality);
  }
};

// All values of a step, as packed.h has them: [16 groups][32 rows][2].
template <class Step>
inline void store_values(const Step& step, bf16* out) {
  for (int64_t g = 0; g < kHeldStep / 2; ++g, out += 2 * kPanelRows) {
    step.prefetch(g);
    for (int v = 0; v < kPanelVectors; ++v) store_pairs(out + v * 2 * kLanes, step.pairs(g, v));
  }
}

template <class Step>
struct HeldPanel {
  const int8_t* steps;

  Step step(int64_t s) const { return Step(steps + s * Step::kBytes); }
};

template <class Step>
struct HeldPanels {
  const int8_t* first;

  // Panel `i` of matrices of `depth` columns.
  HeldPanel<Step> panel(int64_t i, int64_t depth) const { return {first + i * held_panel_bytes<Step>(depth)}; }
};

// As bf16 or float32 panels lie.
template <class T>
struct PlainPanels {
  const T* first;

  const T* panel(int64_t i, int64_t depth) const { return first + i * panel_numel<T>(depth); }
};

// `multiply_panel` of packed.h.
template <class Step>
void multiply_panel(const TokenTile* tiles, int64_t count, const uint32_t* packed, const HeldPanel<Step>& panel,
                    int64_t depth, F32x16 (*sums)[kPanelVectors]);

}  // namespace lockstep
