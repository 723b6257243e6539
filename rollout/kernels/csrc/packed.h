// Weights packed for multiplication, the token rows that go with them, and the tile where they meet.
//
// A group is what one 32-bit lane holds: two neighbouring elements of K in bf16, one in float32.  A step is what one
// instruction takes of K: sixteen groups for matrix tiles, else one.  A matrix [O, K] becomes
//
//   weight   [panel of 32 rows][group of K][row in panel][element in group]            zeros where O or K end inside
//   tokens   [tile of M rows][step of K][row in tile][group in step][element in group]    M <= kTileTokens, by `Tiles`
//
// Where the processor multiplies floats, tokens in bf16 are widened when they are packed, as if they were float32.
//
// with K filled up to whole steps, so a tile reads both as one stream, whatever M is.  The order of every sum is fixed by
// K alone, whatever M is, which is what batch invariance rests on.  Vectors sum through K in ascending order in one
// float32 lane, block by block (which keeps the error near that of a tree); tiles.h says how tiles do.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simd.h"
#include "tiles.h"
#include "transpose.h"

namespace lockstep {

// Where weights are fetched to, ahead of their use.  Past the caches is faster on AMD (sse4a is theirs alone); on an
// Intel Xeon it halves what a core reads, as such fetches wait in the few line buffers of the first level.
#if defined(__SSE4A__)
inline constexpr int kStreamLocality = 0;
#else
inline constexpr int kStreamLocality = 3;
#endif

inline constexpr int kPanelVectors = 2;                          // vectors of rows in a panel
inline constexpr int64_t kPanelRows = kPanelVectors * kLanes;

inline constexpr int64_t kBlockGroups = 64;

template <class T>
inline constexpr bool kTiled = LOCKSTEP_TILES && std::is_same_v<std::remove_const_t<T>, bf16>;

inline constexpr int kTileRows = 16;  // of a matrix tile, and its groups in a row

// Whether products take pairs of bf16 as they are.
template <class T>
inline constexpr bool kPaired = kTiled<T> || (LOCKSTEP_PAIRS && std::is_same_v<std::remove_const_t<T>, bf16>);

// Of a packed token.
template <class T>
using TokenElement = std::conditional_t<kPaired<T>, T, float>;

#if LOCKSTEP_AVX512
inline constexpr int kVectorTokens = 12;  // 24 sums, two weight vectors and a token fill the registers
#else
inline constexpr int kVectorTokens = 3;
#endif

template <class T>
inline constexpr int kTileTokens = kTiled<T> ? 2 * kTileRows : kVectorTokens;

template <class T>
inline constexpr int64_t kGroup = sizeof(uint32_t) / sizeof(T);

template <class T>
inline constexpr int64_t kStepGroups = kTiled<T> ? kTileRows : 1;

// 32-bit words of a packed token that a group takes.
template <class T>
inline constexpr int64_t kGroupWords = kGroup<T> * sizeof(TokenElement<T>) / sizeof(uint32_t);

// Whole steps.
template <class T>
inline int64_t groups_of(int64_t depth) {
  constexpr int64_t kStep = kGroup<T> * kStepGroups<T>;
  return (depth + kStep - 1) / kStep * kStepGroups<T>;
}

inline int64_t panels_of(int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows; }

// Elements of a panel.
template <class T>
inline int64_t panel_numel(int64_t depth) {
  return groups_of<T>(depth) * kPanelRows * kGroup<T>;
}

// The rows of a tile.
struct TokenTile {
  int64_t begin;
  int rows;

  int64_t end() const { return begin + rows; }
};

// Adds the tiles of `count` rows from `begin` on.  For vectors they are of nearly equal size: 7 + 6 tokens are faster than
// 12 + 1; matrix tiles take as long for one row as for sixteen.
template <class T, class Vector>
inline void add_tiles(int64_t begin, int64_t count, Vector& tiles) {
  const int64_t size = (count + kTileTokens<T> - 1) / kTileTokens<T>;
  const auto first = [&](int64_t i) {
    return kTiled<T> ? std::min<int64_t>(count, i * kTileTokens<T>) : count * i / size;
  };
  for (int64_t i = 0; i < size; ++i) tiles.push_back({begin + first(i), static_cast<int>(first(i + 1) - first(i))});
}

// Words of a packed row of `depth` elements; a tile starts at its first row times that.
template <class T>
inline int64_t token_words(int64_t depth) {
  return groups_of<T>(depth) * kGroupWords<T>;
}

// Room for the tiles of `rows` rows of `depth` elements, in words.  Matrix tiles read sixteen rows where there are fewer;
// what the rows behind hold touches no other row's sums.
template <class T>
inline int64_t tokens_numel(int64_t rows, int64_t depth) {
  return rows * token_words<T>(depth) + (kTiled<T> ? (kTileRows - 1) * kTileRows : 0);
}

// Puts sixteen elements of each row into a tile of `rows` rows, from element `first` on, a multiple of sixteen; `values` hold
// them, zeros behind the last.
template <class T>
inline void put_elements(const F32x16* values, int rows, int64_t depth, int64_t first, uint32_t* tile) {
  if constexpr (kPaired<T>) {
    constexpr int64_t kStep = kStepGroups<T>, kCount = kLanes / kGroup<T>;
    const int64_t begin = first / kGroup<T>, end = std::min(begin + kCount, groups_of<T>(depth));
    // Of the last step all groups.
    const int64_t filled = first + kLanes < depth ? end : groups_of<T>(depth);
    for (int row = 0; row < rows; ++row) {
      T elements[kLanes];
      store(elements, values[row]);
      for (int64_t g = begin; g < filled; ++g) {
        uint32_t group = 0;
        if (g < end) std::memcpy(&group, elements + (g - begin) * kGroup<T>, sizeof group);
        tile[(g / kStep * rows + row) * kStep + g % kStep] = group;
      }
    }
  } else {
    const int count = static_cast<int>(std::min<int64_t>(kLanes, token_words<T>(depth) - first));
    float* place = reinterpret_cast<float*>(tile) + first * rows;
    if (rows == 1) return store(place, values[0], count);
    if (rows < 4) {
      for (int row = 0; row < rows; ++row) {
        float elements[kLanes];
        store(elements, values[row]);
        for (int i = 0; i < count; ++i) place[i * rows + row] = elements[i];
      }
      return;
    }
    F32x16 square[kLanes];
    for (int row = 0; row < kLanes; ++row) square[row] = row < rows ? values[row] : splat(0.0f);
    transpose(square);
    for (int i = 0; i < count; ++i) store(place + i * rows, square[i], rows);
  }
}

// A tile of `count` rows of `depth` elements.
template <class T>
inline void pack_tile(const T* const* rows, int count, int64_t depth, uint32_t* tile) {
  if constexpr (kPaired<T>) {
    constexpr int64_t kStep = kStepGroups<T>, kElements = kStep * kGroup<T>;
    for (int row = 0; row < count; ++row) {
      for (int64_t first = 0, step = 0; first < depth; first += kElements, ++step) {
        T elements[kElements] = {};
        std::copy_n(rows[row] + first, std::min(kElements, depth - first), elements);
        std::memcpy(tile + (step * count + row) * kStep, elements, sizeof elements);
      }
    }
  } else {
    for (int64_t first = 0; first < depth; first += kLanes) {
      F32x16 values[kVectorTokens];
      const int n = static_cast<int>(std::min<int64_t>(kLanes, depth - first));
      for (int row = 0; row < count; ++row) values[row] = load(rows[row] + first, n);
      put_elements<T>(values, count, depth, first, tile);
    }
  }
}

inline constexpr int64_t kMostRows = 192;  // of a call: with a panel they fit the second-level cache
template <class T>
inline constexpr int64_t kMostTiles = kMostRows / kTileTokens<T>;

// sums[row][vector] = panel . row, for the rows of `count` consecutive tiles, at most `kMostTiles`, and a panel of `depth`
// columns.  `packed` begins with the first of these rows.  Called within the life of a `PanelScope` of the thread.
template <class T>
void multiply_panel(const TokenTile* tiles, int64_t count, const uint32_t* packed, const T* panel, int64_t depth,
                    F32x16 (*sums)[kPanelVectors]);

// Whether `PanelTiles` computes the same bits as `EmulatedTiles` on this processor.
bool tiles_agree();

// About what it takes to apply `numel` weights to `num_tokens` rows: to read them, and to multiply.
inline int64_t nanoseconds_of_products(int64_t num_tokens, int64_t numel) {
  return numel / 20 + num_tokens * numel / 64;
}

}  // namespace lockstep
