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

// sums[token][vector] = panel . tokens, for one tile of `rows` tokens and one panel; `groups` of K in all.
template <class T>
void multiply_panel(int rows, const uint32_t* tokens, const T* panel, int64_t groups, F32x16 (*sums)[kPanelVectors]);

// About what it takes to apply `numel` weights to `num_tokens` rows: to read them, and to multiply.
inline int64_t nanoseconds_of_products(int64_t num_tokens, int64_t numel) {
  return numel / 20 + num_tokens * numel / 64;
}

}  // namespace lockstep
