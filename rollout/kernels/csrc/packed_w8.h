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

#include <algorithm>
#include <cmath>
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

// 127 more than the exponent of the power of two of a block: seven bits below that of its largest magnitude; 0 for zeros,
// and where a value is infinite.
inline uint8_t w8_exponent_of(const bf16* block, int64_t count) {
  float largest = 0.0f;
  for (int64_t k = 0; k < count; ++k) largest = std::max(largest, std::fabs(static_cast<float>(block[k])));
  if (largest == 0.0f || std::isinf(largest)) return 0;
  return static_cast<uint8_t>(std::max(std::ilogb(largest) - 6 + 127, 1));
}

inline float w8_power_of(uint8_t exponent) { return exponent == 0 ? 0.0f : std::ldexp(1.0f, exponent - 127); }
inline float w8_inverse_of(uint8_t exponent) { return exponent == 0 ? 0.0f : std::ldexp(1.0f, 127 - exponent); }

// 0 for what is not finite.
inline int8_t w8_integer_of(bf16 value, float inverse) {
  const float quotient = std::nearbyint(static_cast<float>(value) * inverse);
  return quotient == quotient ? static_cast<int8_t>(std::clamp(quotient, -127.0f, 127.0f)) : int8_t{0};
}

// The values that a row is held with; returns whether one of them is not finite.
inline bool w8_round(const bf16* row, int64_t depth, bf16* to) {
  bool infinite = false;
  for (int64_t begin = 0; begin < depth; begin += kW8Step) {
    const int64_t end = std::min(begin + kW8Step, depth);
    const uint8_t exponent = w8_exponent_of(row + begin, end - begin);
    const float power = w8_power_of(exponent), inverse = w8_inverse_of(exponent);
    for (int64_t k = begin; k < end; ++k) {
      infinite |= !std::isfinite(static_cast<float>(row[k]));
      to[k] = static_cast<bf16>(static_cast<float>(w8_integer_of(row[k], inverse)) * power);
    }
  }
  return infinite;
}

// Where the first element of a logical row lies; blocks of sixteen rows alternate as in pack.cpp.
struct W8Row {
  int8_t* first;

  W8Row(int8_t* packed, int64_t depth, int64_t row, int64_t step, int64_t offset) {
    const int64_t half = row / kLanes * step + offset, lane = half % kPanelVectors * kLanes + row % kLanes;
    first = packed + half / kPanelVectors * w8_panel_bytes(depth) + lane;
  }

  int8_t& integer(int64_t k) const { return first[k / kW8Step * kW8StepBytes + k % kW8Step * kPanelRows]; }
  uint8_t& exponent(int64_t k) const {
    return reinterpret_cast<uint8_t&>(first[k / kW8Step * kW8StepBytes + kW8StepNumel]);
  }

  void quantise(const bf16* row, int64_t depth) const {
    for (int64_t begin = 0; begin < depth; begin += kW8Step) {
      const int64_t end = std::min(begin + kW8Step, depth);
      const uint8_t of_block = w8_exponent_of(row + begin, end - begin);
      exponent(begin) = of_block;
      const float inverse = w8_inverse_of(of_block);
      for (int64_t k = begin; k < end; ++k) integer(k) = w8_integer_of(row[k], inverse);
    }
  }
};

// One step of a panel: its integers, and the powers of its 32 rows.
struct W8Step {
  static constexpr int64_t kBytes = kW8StepBytes;
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
};

}  // namespace lockstep
