// Dot products of weight rows with token rows, a register tile at a time.
//
// Every product keeps its own sixteen partial sums, filled in ascending order of K and added up as in `sum4`.  So a
// result is the same in every tile shape: it depends on its two rows and nothing else.
#pragma once

#include <algorithm>

#include "simd.h"

namespace lockstep {

inline constexpr int kTileRows = 4;    // weight rows of a tile
inline constexpr int kTileTokens = 6;  // token rows of a tile: 24 sums fill the registers of AVX-512

// How elements of type T are read and multiplied, `kWidth` at a time.
template <class T>
struct Dot {
  static constexpr int kWidth = kLanes;
  using Chunk = F32x16;
  static Chunk read(const T* p) { return load(p); }
  static Chunk read(const T* p, int n) { return load(p, n); }
  static F32x16 add_product(F32x16 sums, Chunk a, Chunk b) { return fma(a, b, sums); }
};

#if LOCKSTEP_AVX512_BF16
template <>
struct Dot<bf16> {
  static constexpr int kWidth = 32;
  using Chunk = __m512i;
  static Chunk read(const bf16* p) { return _mm512_loadu_si512(p); }
  static Chunk read(const bf16* p, int n) { return _mm512_maskz_loadu_epi16((1u << n) - 1, p); }
  static F32x16 add_product(F32x16 sums, Chunk a, Chunk b) {
    return {_mm512_dpbf16_ps(sums.v, (__m512bh)a, (__m512bh)b)};
  }
};
#endif

// out[token * out_stride + row] = weights[row] . tokens[token] over `depth` elements, for kTileRows rows and N tokens.
// Meanwhile `lines` chunks a step are brought into the cache from `upcoming` on.
template <int N, class T>
[[gnu::always_inline]] inline void dot_tile(const T* const* weights, const T* const* tokens, int64_t depth,
                                            const T* upcoming, int lines, float* out, int64_t out_stride) {
  using D = Dot<T>;
  F32x16 sums[N][kTileRows];
  const T* w[kTileRows];
  const T* x[N];
#pragma GCC unroll 4
  for (int r = 0; r < kTileRows; ++r) w[r] = weights[r];
#pragma GCC unroll 6
  for (int t = 0; t < N; ++t) {
    x[t] = tokens[t];
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; ++r) sums[t][r] = splat(0.0f);
  }
  int64_t k = 0;
  const auto step = [&](auto... rest) {
    typename D::Chunk rows[kTileRows];
#pragma GCC unroll 4
    for (int r = 0; r < kTileRows; ++r) rows[r] = D::read(w[r] + k, rest...);
#pragma GCC unroll 6
    for (int t = 0; t < N; ++t) {
      const typename D::Chunk token = D::read(x[t] + k, rest...);
#pragma GCC unroll 4
      for (int r = 0; r < kTileRows; ++r) sums[t][r] = D::add_product(sums[t][r], rows[r], token);
    }
  };
  for (; k + D::kWidth <= depth; k += D::kWidth) {
    step();
    for (int line = 0; line < lines; ++line, upcoming += D::kWidth) __builtin_prefetch(upcoming);
  }
  if (k < depth) step(static_cast<int>(depth - k));
#pragma GCC unroll 6
  for (int t = 0; t < N; ++t) sum4(sums[t], out + t * out_stride);
}

template <class T>
inline void dot_tile(int num_tokens, const T* const* weights, const T* const* tokens, int64_t depth,
                     const T* upcoming, int lines, float* out, int64_t out_stride) {
  switch (num_tokens) {
    case 1: return dot_tile<1>(weights, tokens, depth, upcoming, lines, out, out_stride);
    case 2: return dot_tile<2>(weights, tokens, depth, upcoming, lines, out, out_stride);
    case 3: return dot_tile<3>(weights, tokens, depth, upcoming, lines, out, out_stride);
    case 4: return dot_tile<4>(weights, tokens, depth, upcoming, lines, out, out_stride);
    case 5: return dot_tile<5>(weights, tokens, depth, upcoming, lines, out, out_stride);
    default: return dot_tile<6>(weights, tokens, depth, upcoming, lines, out, out_stride);
  }
}

// The rows [first, last) of a row-major weight times `num_tokens` token rows: out[token * out_stride + row - first].
// Each weight row is brought into the cache once for all tokens; `next` is what this thread will read after `last`.
template <class T>
inline void dot_rows(const T* weight, int64_t first, int64_t last, int64_t depth, const T* const* tokens,
                     int64_t num_tokens, const T* next, float* out, int64_t out_stride) {
  const int64_t num_tiles = (num_tokens + kTileTokens - 1) / kTileTokens;
  // The tiles share the work of fetching the next rows, so that memory and arithmetic are busy at the same time.
  const int lines = num_tiles >= kTileRows ? 1 : (kTileRows + num_tiles - 1) / num_tiles;
  for (int64_t row = first; row < last; row += kTileRows) {
    const int rows = static_cast<int>(last - row < kTileRows ? last - row : kTileRows);
    const T* w[kTileRows];
    for (int r = 0; r < kTileRows; ++r) w[r] = weight + (row + (r < rows ? r : rows - 1)) * depth;
    const T* upcoming = row + kTileRows < last ? weight + (row + kTileRows) * depth : next;
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      // Tiles of nearly equal size: 4 + 4 tokens are faster than 6 + 2.
      const int64_t begin = num_tokens * tile / num_tiles, end = num_tokens * (tile + 1) / num_tiles;
      const bool fetches = tile * lines < kTileRows;
      float rest[kTileTokens * kTileRows];
      float* place = out + begin * out_stride + row - first;
      dot_tile(static_cast<int>(end - begin), w, tokens + begin, depth, upcoming + (fetches ? tile * lines * depth : 0),
               fetches ? lines : 0, rows == kTileRows ? place : rest, rows == kTileRows ? out_stride : kTileRows);
      if (rows < kTileRows) {
        for (int64_t t = 0; t < end - begin; ++t) std::copy_n(rest + t * kTileRows, rows, place + t * out_stride);
      }
    }
  }
}

// About what it takes to apply `numel` weights to `num_tokens` rows: to read them, and to multiply.
inline int64_t nanoseconds_of_dots(int64_t num_tokens, int64_t numel) { return numel / 20 + num_tokens * numel / 64; }

}  // namespace lockstep
