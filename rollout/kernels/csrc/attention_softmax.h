// The running softmax of some rows, in base 2 (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023).
//
// Earlier sums are rescaled when a larger maximum comes, and two parts become one.
#pragma once

#include <algorithm>
#include <limits>

#include "attention_vector.h"

namespace lockstep::attention {

inline constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct RunningSoftmax {
  float* maxima;        // [rows] largest score so far, not scaled
  float* denominators;  // [rows][kLanes]
  float* numerators;    // [rows][columns]

  static int64_t floats(int64_t rows, int columns) { return rows * (1 + kLanes + columns); }

  // In `memory` of that many floats, aligned to a cache line if the number of rows is a multiple of 16.
  static RunningSoftmax in(float* memory, int64_t rows, int columns) {
    return {memory + rows * (kLanes + columns), memory + rows * columns, memory};
  }

  void reset(int first, int last, int columns) const {
    std::fill(maxima + first, maxima + last, kMinusInfinity);
    std::fill(denominators + first * kLanes, denominators + last * kLanes, 0.0f);
    std::fill(numerators + first * columns, numerators + last * columns, 0.0f);
  }
};

// What scores are taken relative to: the largest so far, and a number where all are -inf so that -inf - (-inf) does not
// arise.
LOCKSTEP_INLINE F32x16 reference_of(F32x16 maxima) {
  return max(splat(std::numeric_limits<float>::lowest()), maxima);
}

// 2^((old - now) * scale): what sums relative to `old` are multiplied by.
LOCKSTEP_INLINE F32x16 correction(F32x16 old, F32x16 now, F32x16 scale) {
  return exp2<kExact>((old - reference_of(now)) * scale);
}

// Rows [first, last) of `total` also cover what `part` covers.
inline void merge(const RunningSoftmax& total, const RunningSoftmax& part, int first, int last, int columns,
                  float scale) {
  alignas(64) float old_factors[kLanes], new_factors[kLanes];
  for (int row = first; row < last; row += kLanes) {
    const int count = std::min(kLanes, last - row);
    const SomeLanes some = first_of(count);
    const F32x16 old = load_some(total.maxima + row, some), more = load_some(part.maxima + row, some);
    const F32x16 now = max(old, more);
    store(old_factors, correction(old, now, splat(scale)));
    store(new_factors, correction(more, now, splat(scale)));
    store_some(total.maxima + row, now, some);
    for (int i = 0; i < count; ++i) {
      const F32x16 old_factor = splat(old_factors[i]), new_factor = splat(new_factors[i]);
      const auto add = [&](float* sums, const float* more, int size) {
        for (int j = 0; j < size; j += kLanes) {
          store(sums + j, fma(load(more + j), new_factor, load(sums + j) * old_factor));
        }
      };
      add(total.denominators + (row + i) * kLanes, part.denominators + (row + i) * kLanes, kLanes);
      add(total.numerators + (row + i) * columns, part.numerators + (row + i) * columns, columns);
    }
  }
}

}  // namespace lockstep::attention
