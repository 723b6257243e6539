// Rows of weights with scales (packed_held.h), packed from their elements and scales.
//
// Blocks of sixteen rows alternate as in pack.cpp.
#pragma once

#include "packed_held.h"

namespace lockstep {

// Sixteen rows of sixteen bytes are turned over at once.
inline constexpr int64_t kTurned = 16;

// to[j * to_row + i] = from[i * from_row + j]
inline void turn_over(const uint8_t* from, int64_t from_row, uint8_t* to, int64_t to_row) {
#if LOCKSTEP_AVX512 || LOCKSTEP_AVX2
  __m128i a[kTurned], b[kTurned];
#pragma GCC unroll 16
  for (int i = 0; i < kTurned; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_row));
  // Four times rows i and i + 8 are shuffled together, byte by byte: the perfect shuffle of the bits of an index.
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < kTurned / 2; ++i) {
      b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + kTurned / 2]);
      b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + kTurned / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kTurned; ++i) a[i] = b[i];
  }
#pragma GCC unroll 16
  for (int j = 0; j < kTurned; ++j) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + j * to_row), a[j]);
#else
  for (int64_t i = 0; i < kTurned; ++i) {
    for (int64_t j = 0; j < kTurned; ++j) to[j * to_row + i] = from[i * from_row + j];
  }
#endif
}
static_assert(kLanes == kTurned, "rows of one vector are turned over at once");

inline int64_t blocks_of(int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; }

// The first byte of each step of a row's panel.
template <class Step, class Byte>
inline Byte* panel_of(Byte* packed, const HeldRow& row, int64_t depth) {
  return packed + row.panel * held_panel_bytes<Step>(depth);
}

// Of element k of a row, its byte.
inline int64_t fp8_place(const HeldRow& row, int64_t k) {
  return k / kHeldStep * Fp8Step::kBytes + k % kHeldStep * kPanelRows + row.column();
}

// Whether rows go to all lanes of one vector of rows, from packed row `row` on.
inline bool is_vector(int64_t row, int64_t count) { return count == kLanes && row % kLanes == 0; }

// Where the rows of one matrix of `depth` columns lie in packed weights: `step` and `offset` as in pack.cpp.
struct HeldRows {
  uint8_t* packed;
  int64_t depth, step, offset;
};

// Packs at most sixteen rows of FP8, `stride` bytes apart, from packed row `first` on.  `scale_of(n, k)`: the scale of
// element k of row n.
template <class F>
inline void pack_fp8(const uint8_t* from, int64_t stride, const HeldRows& rows, int64_t first, int64_t count,
                     F&& scale_of) {
  const auto [packed, depth, step, offset] = rows;
  int64_t turned = 0;  // elements of each row that are written sixteen rows at a time
  if (is_vector(first, count)) {
    const HeldRow row(first, step, offset);
    uint8_t* panel = panel_of<Fp8Step>(packed, row, depth);
    for (; turned + kTurned <= depth; turned += kTurned) {
      turn_over(from + turned, stride, panel + fp8_place(row, turned), kPanelRows);
    }
  }
  for (int64_t n = 0; n < count; ++n) {
    const HeldRow row(first + n, step, offset);
    uint8_t* panel = panel_of<Fp8Step>(packed, row, depth);
    for (int64_t k = turned; k < depth; ++k) panel[fp8_place(row, k)] = from[n * stride + k];
    if (row.lane != 0) continue;
    for (int64_t k = 0; k < depth; k += kHeldStep, panel += Fp8Step::kBytes) {
      const float one = scale_of(n, k);
      std::memcpy(panel + kFp8StepNumel + row.vector * sizeof(float), &one, sizeof(float));
    }
  }
}

// Of element k of a row, the byte with its integer, which is the upper half where k is odd.
inline int64_t int4_place(const HeldRow& row, int64_t k) {
  return k / kHeldStep * Int4Step::kBytes + k % kHeldStep / 2 * kPanelRows + row.column();
}

inline int64_t int4_scale_place(const HeldRow& row, int64_t k) {
  return k / kHeldStep * Int4Step::kBytes + kInt4StepNumel + row.column() * static_cast<int64_t>(sizeof(bf16));
}

// Of the integers of a step, two a byte, the even one in the low half.
inline void join_halves(const int8_t* from, uint8_t* to) {
#if LOCKSTEP_AVX512 || LOCKSTEP_AVX2
  const __m256i low = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), _mm256_set1_epi8(15));
  const __m256i pairs = _mm256_maddubs_epi16(low, _mm256_set1_epi16(16 << 8 | 1));  // even + 16 odd
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(bytes));
#else
  for (int64_t i = 0; i < kHeldStep / 2; ++i) {
    to[i] = static_cast<uint8_t>((from[2 * i] & 15) | (from[2 * i + 1] & 15) << 4);
  }
#endif
}

// Packs at most sixteen rows of integers, `stride` apart, from packed row `first` on.  `scale_of(n, k)`: the scale of
// element k of row n.
template <class F>
inline void pack_int4(const int8_t* from, int64_t stride, const HeldRows& rows, int64_t first, int64_t count,
                      F&& scale_of) {
  const auto [packed, depth, step, offset] = rows;
  int64_t turned = 0;  // elements of each row that are written sixteen rows at a time
  if (is_vector(first, count)) {
    const HeldRow row(first, step, offset);
    uint8_t* panel = panel_of<Int4Step>(packed, row, depth);
    for (; turned + kHeldStep <= depth; turned += kHeldStep) {
      uint8_t halves[kLanes][kHeldStep / 2];
      for (int64_t lane = 0; lane < kLanes; ++lane) join_halves(from + lane * stride + turned, halves[lane]);
      turn_over(halves[0], kHeldStep / 2, panel + int4_place(row, turned), kPanelRows);
    }
  }
  for (int64_t n = 0; n < count; ++n) {
    const HeldRow row(first + n, step, offset);
    uint8_t* panel = panel_of<Int4Step>(packed, row, depth);
    for (int64_t k = turned; k < depth; k += 2) {
      const uint8_t even = from[n * stride + k] & 15, odd = k + 1 < depth ? from[n * stride + k + 1] & 15 : 0;
      panel[int4_place(row, k)] = static_cast<uint8_t>(even | odd << 4);
    }
    for (int64_t k = 0; k < depth; k += kHeldStep) {
      const bf16 one = scale_of(n, k);
      std::memcpy(panel + int4_scale_place(row, k), &one, sizeof(bf16));
    }
  }
}

}  // namespace lockstep
