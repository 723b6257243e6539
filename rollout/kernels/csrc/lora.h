// Products of tokens with matrices of their adapters: the tokens of a step in tiles of one adapter each.
//
// Every sum runs over features in one order, for each token by itself: which tokens share a tile does not change the
// bits.
#pragma once

#include <algorithm>
#include <vector>

#include <c10/util/Exception.h>

#include "simd.h"

namespace lockstep {

inline constexpr int kLoraRows = 4;  // tokens of a tile: each vector of a matrix is loaded once for all of them

struct LoraTile {
  int64_t slot;
  int count;
  int64_t tokens[kLoraRows];
};

// The tokens that have an adapter, in tiles of one adapter each.
inline std::vector<LoraTile> tiles_of(const int64_t* slots, int64_t num_tokens, int64_t num_slots) {
  std::vector<std::vector<int64_t>> by_slot(num_slots);
  for (int64_t token = 0; token < num_tokens; ++token) {
    TORCH_CHECK(-1 <= slots[token] && slots[token] < num_slots, "there is no adapter slot ", slots[token]);
    if (slots[token] >= 0) by_slot[slots[token]].push_back(token);
  }
  std::vector<LoraTile> tiles;
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    const auto& tokens = by_slot[slot];
    for (size_t first = 0; first < tokens.size(); first += kLoraRows) {
      LoraTile tile{slot, static_cast<int>(std::min<size_t>(kLoraRows, tokens.size() - first)), {}};
      std::copy_n(tokens.begin() + first, tile.count, tile.tokens);
      tiles.push_back(tile);
    }
  }
  return tiles;
}

// `sums[row]` = sum over k of rows[row][k] times `n` elements of row k of a matrix, whose rows are `stride` apart.
template <int kCount, class X, class T>
inline void products(const X* const* rows, const T* matrix, int64_t stride, int64_t depth, int n, F32x16* sums) {
  F32x16 total[kCount];
  for (int row = 0; row < kCount; ++row) total[row] = splat(0.0f);
  for (int64_t k = 0; k < depth; ++k) {
    const F32x16 column = n == kLanes ? load(matrix + k * stride) : load(matrix + k * stride, n);
    for (int row = 0; row < kCount; ++row) total[row] = fma(splat(static_cast<float>(rows[row][k])), column, total[row]);
  }
  for (int row = 0; row < kCount; ++row) sums[row] = total[row];
}

template <class X, class T>
inline void products(int count, const X* const* rows, const T* matrix, int64_t stride, int64_t depth, int n,
                     F32x16* sums) {
  switch (count) {
    case 1: return products<1>(rows, matrix, stride, depth, n, sums);
    case 2: return products<2>(rows, matrix, stride, depth, n, sums);
    case 3: return products<3>(rows, matrix, stride, depth, n, sums);
    default: return products<kLoraRows>(rows, matrix, stride, depth, n, sums);
  }
}

}  // namespace lockstep
