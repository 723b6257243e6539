// bf16 weights in 8 bits: integers, and a power of two for each 32 neighbouring elements of a row.
//
// An integer of seven bits times a power of two is exact in bf16.  So products are those of packed.h with these values,
// bit for bit, and values that are quantised again stay as they are.  A block's power is the largest one with which the
// largest magnitude is below 128; quotients are rounded to nearest even, and 128 becomes 127.
//
//   panel   [step]: int8 [group][element in group][32 rows], then uint8 [32 rows]          filled up to a cache line
//
// A step is 32 elements of K, sixteen groups.  The bytes behind its integers are exponents, 127 more than what they are,
// 0 for a block of zeros; there, and not in a table of their own, as a panel is then read as one stream.
#pragma once

#include <cstdint>

#include "packed.h"

namespace lockstep {

inline constexpr int64_t kW8Step = 32;                                  // elements of K that share an exponent
inline constexpr int64_t kW8StepNumel = kW8Step * kPanelRows;           // of a panel
inline constexpr int64_t kW8StepBytes = kW8StepNumel + kPanelRows;

inline int64_t w8_steps_of(int64_t depth) { return (depth + kW8Step - 1) / kW8Step; }

inline int64_t w8_panel_bytes(int64_t depth) {
  return (w8_steps_of(depth) * kW8StepBytes + 63) / 64 * 64;
}

// One step of a panel: its integers, and the powers of its 32 rows.
struct W8Step {
  const int8_t* integers;
  F32x16 powers[kPanelVectors];

  explicit W8Step(const int8_t* from)
      : integers(from), powers{load_powers(from + kW8StepNumel), load_powers(from + kW8StepNumel + kLanes)} {}

  // The values of group `g`, sixteen rows.
  EvenOdd pairs(int64_t g, int vector) const {
    const int8_t* even = integers + 2 * g * kPanelRows + vector * kLanes;
    return {load_integers(even) * powers[vector], load_integers(even + kPanelRows) * powers[vector]};
  }

#if LOCKSTEP_AVX2
  // Of one element of K, part `i` of a vector.
  Part part(int64_t element, int vector, int i) const {
    const int8_t* at = integers + element * kPanelRows + vector * kLanes + i * kPart;
    return part_mul(part_load_integers(at), powers[vector].v[i]);
  }
#endif

  void prefetch(int64_t g) const {
    constexpr int64_t kAhead = 48 * 2 * kPanelRows;
    __builtin_prefetch(integers + 2 * g * kPanelRows + kAhead, 0, kStreamLocality);
  }

  // All values, as packed.h has them: [16 groups][32 rows][2].
  void store(bf16* out) const {
    for (int64_t g = 0; g < kW8Step / 2; ++g, out += 2 * kPanelRows) {
      prefetch(g);
      for (int v = 0; v < kPanelVectors; ++v) store_pairs(out + v * 2 * kLanes, pairs(g, v));
    }
  }
};

struct W8Panel {
  const int8_t* steps;

  W8Step step(int64_t s) const { return W8Step(steps + s * kW8StepBytes); }
};

struct W8Panels {
  const int8_t* first;

  // Panel `i` of matrices of `depth` columns.
  W8Panel panel(int64_t i, int64_t depth) const { return {first + i * w8_panel_bytes(depth)}; }
};

// As bf16 or float32 panels lie.
template <class T>
struct PlainPanels {
  const T* first;

  const T* panel(int64_t i, int64_t depth) const { return first + i * panel_numel<T>(depth); }
};

// `multiply_panel` of packed.h.
void multiply_panel(const TokenTile* tiles, int64_t count, const uint32_t* packed, const W8Panel& panel, int64_t depth,
                    F32x16 (*sums)[kPanelVectors]);

}  // namespace lockstep
