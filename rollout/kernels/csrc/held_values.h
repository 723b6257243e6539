// Between values and the elements and scales of FP8 blocks and INT4 groups (`weight_sync/fp8_blocks.py` and
// `weight_sync/int4_groups.py`): the arithmetic of one block, one group and one row.
//
// Shapes: N rows, K their elements.
#pragma once

#include "casts.h"
#include "fp8.h"
#include "packed_held.h"

namespace lockstep {

inline constexpr float kLargestFp8 = 448.0f;

// The largest magnitude of numbers, and whether all of them are finite.
class Largest {
 public:
  template <class T>
  void take(const T* from, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const F32x16 x = load(from + i, static_cast<int>(std::min<int64_t>(kLanes, count - i)));
      largest_ = max(largest_, max(x, splat(0.0f) - x));
      zeros_ = zeros_ + (x - x);  // NaN for what is not finite, and NaN from then on
    }
  }

  float value() const {
    float lanes[kLanes], found = 0.0f;
    store(lanes, largest_);
    for (const float x : lanes) found = std::max(found, x);
    return found;
  }

  bool is_finite() const {
    float lanes[kLanes], sum = 0.0f;
    store(lanes, zeros_);
    for (const float x : lanes) sum += x;
    return sum == 0.0f;
  }

 private:
  F32x16 largest_ = splat(0.0f), zeros_ = splat(0.0f);
};

// Quotients of `count` numbers, at most kScaleBlock, over `scale`, sixteen at a time; lanes behind the last have any.
template <class T>
inline void divide(const T* from, float scale, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store(to + i, load(from + i, static_cast<int>(std::min<int64_t>(kLanes, count - i))) / splat(scale));
  }
}

// Integers of 4 bits of `count` quotients.
inline void store_integers(float* from, int8_t* to, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store(from + i, min(splat(7.0f), max(splat(-8.0f), round_to_integer(load(from + i)))));
  }
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int8_t>(static_cast<int32_t>(from[i]));
}

// The integers and the scale of a group of `count` elements; returns whether all of them are finite.
template <class T>
inline bool quantise_int4_group(const T* from, int64_t count, int8_t* to, bf16& scale) {
  Largest largest;
  largest.take(from, count);
  const bf16 found(largest.value() / 7.5f);
  scale = static_cast<float>(found) > 0.0f ? found : bf16(1.0f);
  for (int64_t i = 0; i < count; i += kScaleBlock) {
    const int64_t some = std::min(kScaleBlock, count - i);
    float quotients[kScaleBlock];
    divide(from + i, static_cast<float>(scale), some, quotients);
    store_integers(quotients, to + i, some);
  }
  return largest.is_finite();
}

// Codes of at most kScaleBlock quotients, as `fp8_bits_of_float` has them, which compilers do not turn into vectors: it
// adds floats where it may not have to.  A scale below the normal numbers is rough: a quotient may be beyond the largest
// number, which is stored then.
inline void store_codes(const float* from, Fp8* to, int64_t count) {
  constexpr int32_t kLargest = std::bit_cast<int32_t>(kLargestFp8), kNormal = 121 << 23;
  constexpr float kRounds = 0x1p14f;  // whose last bit is that of the smallest number
  float sums[kScaleBlock];
  for (int64_t i = 0; i < count; i += kLanes) {
    const F32x16 x = load(from + i);
    store(sums + i, max(x, splat(0.0f) - x) + splat(kRounds));
  }
  for (int64_t i = 0; i < count; ++i) {
    const int32_t given = std::bit_cast<int32_t>(from[i]), bits = std::min(given & 0x7fffffff, kLargest);
    const int32_t normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
    const int32_t denormal = std::bit_cast<int32_t>(sums[i]) - std::bit_cast<int32_t>(kRounds);
    to[i].x = static_cast<uint8_t>((bits < kNormal ? denormal : normal) | (given >> 24 & 0x80));
  }
}

// The codes and the scale of a block: `rows` of at most kScaleBlock elements, `depth` apart; returns whether all of them
// are finite.
template <class T>
inline bool quantise_fp8_block(const T* from, int64_t depth, int64_t rows, int64_t count, Fp8* to, float& scale) {
  Largest largest;
  for (int64_t n = 0; n < rows; ++n) largest.take(from + n * depth, count);
  const float found = largest.value() / kLargestFp8;
  scale = found > 0.0f ? found : 1.0f;
  for (int64_t n = 0; n < rows; ++n) {
    float quotients[kScaleBlock];
    divide(from + n * depth, scale, count, quotients);
    store_codes(quotients, to + n * depth, count);
  }
  return largest.is_finite();
}

// Numbers of FP8, NaN among them.
inline void to_floats(const Fp8* from, float* to, int64_t count) {
  uint8_t not_a_number = 0;
  for (int64_t i = 0; i < count; ++i) not_a_number |= (from[i].x & 0x7f) == 0x7f;
  const int64_t whole = not_a_number != 0 ? 0 : count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    store(to + i, load_fp8_over_256(reinterpret_cast<const uint8_t*>(from + i)) * splat(kFp8OverHalf));
  }
  widen(from + whole, to + whole, count - whole);
}

// Stores products of elements and scales, rounded as torch's `.to` rounds.
inline void store_all(const float* from, bf16* to, int64_t count) {
  floats_to_bf16(from, reinterpret_cast<uint8_t*>(to), count);
}
inline void store_all(const float* from, float* to, int64_t count) { std::copy_n(from, count, to); }

// Calls `put(first, products, count)` with the values of a row of FP8, in float32; `scales`: one for each block.
template <class F>
inline void fp8_values(const Fp8* from, const float* scales, int64_t depth, F&& put) {
  float products[kScaleBlock];
  for (int64_t k = 0; k < depth; k += kScaleBlock) {
    const int64_t count = std::min(kScaleBlock, depth - k);
    const float scale = scales[k / kScaleBlock];
    to_floats(from + k, products, count);
    for (int64_t i = 0; i < count; ++i) products[i] *= scale;
    put(k, products, count);
  }
}

// The same of a row of integers of 4 bits; `scales`: one for each group.
template <class F>
inline void int4_values(const int8_t* from, const bf16* scales, int64_t depth, int64_t group, F&& put) {
  float products[kHeldStep];
  for (int64_t k = 0; k < depth;) {
    const int64_t count = std::min({kHeldStep, depth - k, group - k % group});
    const float scale = static_cast<float>(scales[k / group]);
    for (int64_t i = 0; i < count; ++i) products[i] = static_cast<float>(from[k + i]) * scale;
    put(k, products, count);
    k += count;
  }
}

}  // namespace lockstep
