// Weights packed for multiplication, the token rows that go with them, and the tile where they meet.
//
// A group is what one 32-bit lane holds: two neighbouring elements of K in bf16, one in float32.  A matrix [O, K] becomes
//
//   weight   [panel of 32 rows][group of K][row in panel][element in group]     zeros where O or K end inside
//   tokens   [tile of M rows][group of K][row in tile][element in group]        M <= kTileTokens, given by `Tiles`
//
// so a tile reads both as one stream, whatever M is.  Every sum runs through K in ascending order in one float32 lane,
// block by block (which keeps its error near that of a tree): it depends on its two rows and on nothing else, which is
// what batch invariance rests on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd.h"

namespace lockstep {

inline constexpr int kPanelVectors = 2;                          // vectors of rows in a panel
inline constexpr int64_t kPanelRows = kPanelVectors * kLanes;

inline constexpr int64_t kBlockGroups = 64;

#if LOCKSTEP_AVX512
inline constexpr int kTileTokens = 12;  // 24 sums, two weight vectors and a token fill the registers
#else
inline constexpr int kTileTokens = 3;
#endif

template <class T>
inline constexpr int64_t kGroup = sizeof(uint32_t) / sizeof(T);

template <class T>
inline int64_t groups_of(int64_t depth) {
  return (depth + kGroup<T> - 1) / kGroup<T>;
}

inline int64_t panels_of(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// Elements of a panel.
template <class T>
inline int64_t panel_numel(int64_t depth) {
  return groups_of<T>(depth) * kPanelRows * kGroup<T>;
}

// `count` token rows in tiles of nearly equal size: 7 + 6 tokens are faster than 12 + 1.
struct Tiles {
  int64_t count;
  int64_t size = (count + kTileTokens - 1) / kTileTokens;

  int64_t begin(int64_t tile) const { return count * tile / size; }
  int rows(int64_t tile) const { return static_cast<int>(begin(tile + 1) - begin(tile)); }
};

// Row `row` of a tile of `rows` rows, from `depth` elements.
template <class T>
inline void pack_token(const T* source, int64_t depth, int rows, int row, uint32_t* tile) {
  const int64_t whole = depth / kGroup<T>;
  for (int64_t g = 0; g < whole; ++g) {
    std::memcpy(tile + g * rows + row, source + g * kGroup<T>, sizeof(uint32_t));
  }
  if (whole * kGroup<T> < depth) {
    uint32_t last = 0;
    std::memcpy(&last, source + whole * kGroup<T>, sizeof(T));
    tile[whole * rows + row] = last;
  }
}

// One group: `weights` is a vector of 16 rows, `token` the group of one token.
template <class T>
struct Groups {
  using Weights = F32x16;
  using Token = F32x16;
  static Weights weights(const float* p) { return load(p); }
  static Token token(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return splat(value);
  }
  static F32x16 add_product(F32x16 sums, Weights w, Token x) { return fma(w, x, sums); }
};

template <>
struct Groups<bf16> {
#if LOCKSTEP_AVX512_BF16
  using Weights = __m512i;
  using Token = __m512i;
  static Weights weights(const bf16* p) { return _mm512_loadu_si512(p); }
  static Token token(uint32_t bits) { return _mm512_set1_epi32(static_cast<int>(bits)); }
  static F32x16 add_product(F32x16 sums, Weights w, Token x) {
    return {_mm512_dpbf16_ps(sums.v, (__m512bh)w, (__m512bh)x)};
  }
#else
  using Weights = EvenOdd;
  struct Token {
    F32x16 even, odd;
  };
  static Weights weights(const bf16* p) { return load_even_odd(p); }
  static Token token(uint32_t bits) {
    const uint32_t halves[2] = {bits << 16, bits & 0xffff0000u};
    float values[2];
    std::memcpy(values, halves, sizeof values);
    return {splat(values[0]), splat(values[1])};
  }
  static F32x16 add_product(F32x16 sums, const Weights& w, const Token& x) {
    return fma(w.odd, x.odd, fma(w.even, x.even, sums));
  }
#endif
};

// sums[token][vector] += panel . tokens over `groups` groups.
template <int M, class T>
[[gnu::always_inline]] inline void multiply_block(const uint32_t* tokens, const T* panel, int64_t groups,
                                                  F32x16 (&sums)[M][kPanelVectors]) {
  using G = Groups<T>;
  constexpr int64_t kVector = kLanes * kGroup<T>;
  constexpr int64_t kAhead = 24 * kPanelRows * kGroup<T>;  // elements; the panels of a matrix are one stream
  F32x16 block[M][kPanelVectors];
#pragma GCC unroll 12
  for (int t = 0; t < M; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) block[t][v] = splat(0.0f);
  }
  for (int64_t g = 0; g < groups; ++g, panel += kPanelVectors * kVector, tokens += M) {
    typename G::Weights w[kPanelVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) {
      w[v] = G::weights(panel + v * kVector);
      __builtin_prefetch(panel + v * kVector + kAhead);
    }
#pragma GCC unroll 12
    for (int t = 0; t < M; ++t) {
      const typename G::Token x = G::token(tokens[t]);
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v) block[t][v] = G::add_product(block[t][v], w[v], x);
    }
  }
#pragma GCC unroll 12
  for (int t = 0; t < M; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) sums[t][v] = sums[t][v] + block[t][v];
  }
}

// sums[token][vector] = panel . tokens over all groups.
template <int M, class T>
[[gnu::always_inline]] inline void multiply_tile(const uint32_t* tokens, const T* panel, int64_t groups,
                                                 F32x16 (&sums)[M][kPanelVectors]) {
  for (int t = 0; t < M; ++t) {
    for (int v = 0; v < kPanelVectors; ++v) sums[t][v] = splat(0.0f);
  }
  for (int64_t g = 0; g < groups; g += kBlockGroups) {
    multiply_block<M, T>(tokens + g * M, panel + g * kPanelRows * kGroup<T>, std::min(kBlockGroups, groups - g), sums);
  }
}

// Calls `body(std::integral_constant<int, rows>)`.
template <class F, int M = 1>
[[gnu::always_inline]] inline void with_tile_rows(int rows, F&& body) {
  if constexpr (M == kTileTokens) {
    body(std::integral_constant<int, M>());
  } else {
    if (rows == M) return body(std::integral_constant<int, M>());
    with_tile_rows<F, M + 1>(rows, std::forward<F>(body));
  }
}

// About what it takes to apply `numel` weights to `num_tokens` rows: to read them, and to multiply.
inline int64_t nanoseconds_of_products(int64_t num_tokens, int64_t numel) {
  return numel / 20 + num_tokens * numel / 64;
}

}  // namespace lockstep
