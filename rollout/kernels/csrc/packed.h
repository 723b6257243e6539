// Weights packed for multiplication, the token rows that go with them, and the tile where they meet.
//
// A group is what one 32-bit lane holds: two neighbouring elements of K in bf16, one in float32.  A step is what one
// instruction takes of K: sixteen groups for matrix tiles, else one.  A matrix [O, K] becomes
//
//   weight   [panel of 32 rows][group of K][row in panel][element in group]            zeros where O or K end inside
//   tokens   [tile of M rows][step of K][row in tile][group in step][element in group]    M <= kTileTokens, by `Tiles`
//
// Elements of tokens are floats where the processor multiplies floats: they are widened once for all panels.
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

// `count` token rows in tiles.  For vectors they are of nearly equal size: 7 + 6 tokens are faster than 12 + 1; matrix
// tiles take as long for one row as for sixteen.
template <class T>
struct Tiles {
  int64_t count;
  int64_t size = (count + kTileTokens<T> - 1) / kTileTokens<T>;

  int64_t begin(int64_t tile) const {
    return kTiled<T> ? std::min<int64_t>(count, tile * kTileTokens<T>) : count * tile / size;
  }
  int rows(int64_t tile) const { return static_cast<int>(begin(tile + 1) - begin(tile)); }
};

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

// Puts group `group` of row `row` into a tile of `rows` rows.
template <class T>
inline void put_group(const T* elements, int rows, int row, int64_t group, uint32_t* tile) {
  constexpr int64_t kStep = kStepGroups<T>;
  TokenElement<T> packed[kGroup<T>];
  for (int64_t i = 0; i < kGroup<T>; ++i) packed[i] = static_cast<TokenElement<T>>(elements[i]);
  std::memcpy(tile + ((group / kStep * rows + row) * kStep + group % kStep) * kGroupWords<T>, packed, sizeof packed);
}

// Row `row` of a tile of `rows` rows, from `depth` elements.
template <class T>
inline void pack_token(const T* source, int64_t depth, int rows, int row, uint32_t* tile) {
  constexpr int64_t kElements = kStepGroups<T> * kGroup<T>, kWords = kStepGroups<T> * kGroupWords<T>;
  const int64_t whole = depth / kElements;
  const auto put = [&](const T* elements, int64_t step) {
    TokenElement<T> packed[kElements];
    for (int64_t i = 0; i < kElements; ++i) packed[i] = static_cast<TokenElement<T>>(elements[i]);
    std::memcpy(tile + (step * rows + row) * kWords, packed, sizeof packed);
  };
  for (int64_t step = 0; step < whole; ++step) put(source + step * kElements, step);
  if (whole * kElements < depth) {
    T last[kElements] = {};
    std::copy(source + whole * kElements, source + depth, last);
    put(last, whole);
  }
}

// sums[token][vector] = panel . tokens, for one tile of `rows` tokens and one panel; `groups` of K in all.  Called within
// the life of a `PanelScope` of the thread.
template <class T>
void multiply_panel(int rows, const uint32_t* tokens, const T* panel, int64_t groups, F32x16 (*sums)[kPanelVectors]);

// Whether `PanelTiles` computes the same bits as `EmulatedTiles` on this processor.
bool tiles_agree();

// About what it takes to apply `numel` weights to `num_tokens` rows: to read them, and to multiply.
inline int64_t nanoseconds_of_products(int64_t num_tokens, int64_t numel) {
  return numel / 20 + num_tokens * numel / 64;
}

}  // namespace lockstep
