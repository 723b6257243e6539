// bf16 weights in 8 bits: integers, and a power of two for each 32 neighbouring elements of a row.
//
// An integer of seven bits times a power of two is exact in bf16.  So products are those of packed.h with these values,
// bit for bit, and values that are quantised again stay as they are.  A block's power is the largest one with which the
// largest magnitude is below 128; quotients are rounded to nearest even, and 128 becomes 127.
//
//   panel   int8 [step][group][element in group][32 rows]   then   uint8 [step][32 rows], filled up to a cache line
//
// A step is 32 elements of K, sixteen groups.  The bytes behind the integers are exponents, 127 more than what they are,
// 0 for a block of zeros.
#pragma once

#include <cstdint>
#include <vector>

#include "packed.h"

namespace lockstep {

inline constexpr int64_t kW8Step = 32;                                  // elements of K that share an exponent
inline constexpr int64_t kW8StepBytes = kW8Step * kPanelRows;           // of their integers, in a panel
inline constexpr int64_t kW8StepNumel = kW8Step * kPanelRows;           // of the bf16 values that they become

inline int64_t w8_steps_of(int64_t depth) { return (depth + kW8Step - 1) / kW8Step; }

inline int64_t w8_panel_bytes(int64_t depth) {
  return (w8_steps_of(depth) * (kW8StepBytes + kPanelRows) + 63) / 64 * 64;
}

// Integers and exponents of one step -> their values, as packed.h has them: [16 groups][32 rows][2].
inline void dequantise_step(const int8_t* integers, const uint8_t* exponents, bf16* out) {
  constexpr int64_t kAhead = 24 * 64;
  const F32x16 powers[kPanelVectors] = {load_powers(exponents), load_powers(exponents + kLanes)};
#pragma GCC unroll 4
  for (int64_t g = 0; g < kW8Step / 2; ++g, integers += 2 * kPanelRows, out += 2 * kPanelRows) {
    __builtin_prefetch(integers + kAhead, 0, kStreamLocality);
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) {
      const F32x16 even = load_integers(integers + v * kLanes) * powers[v];
      const F32x16 odd = load_integers(integers + kPanelRows + v * kLanes) * powers[v];
      store_pairs(out + v * 2 * kLanes, even, odd);
    }
  }
}

// One panel.  `whole`: its values, where they were computed before; else they are as they are needed.
struct W8Panel {
  const int8_t* integers;
  const uint8_t* exponents;
  const bf16* whole;
};

struct W8Panels {
  const int8_t* first;

  // Panel `i` of matrices of `depth` columns, for `num_tiles` tiles of tokens; valid until the thread's next one.
  W8Panel panel(int64_t i, int64_t depth, int64_t num_tiles) const {
    const int64_t steps = w8_steps_of(depth);
    const int8_t* integers = first + i * w8_panel_bytes(depth);
    const uint8_t* exponents = reinterpret_cast<const uint8_t*>(integers + steps * kW8StepBytes);
    if (num_tiles <= 1) return {integers, exponents, nullptr};
    thread_local std::vector<bf16> values;
    values.resize(steps * kW8StepNumel);
    for (int64_t s = 0; s < steps; ++s) {
      dequantise_step(integers + s * kW8StepBytes, exponents + s * kPanelRows, values.data() + s * kW8StepNumel);
    }
    return {integers, exponents, values.data()};
  }
};

// As bf16 or float32 panels lie.
template <class T>
struct PlainPanels {
  const T* first;

  const T* panel(int64_t i, int64_t depth, int64_t) const { return first + i * panel_numel<T>(depth); }
};

// `multiply_panel` of packed.h.
void multiply_panel(int rows, const uint32_t* tokens, const W8Panel& panel, int64_t groups,
                    F32x16 (*sums)[kPanelVectors]);

}  // namespace lockstep
