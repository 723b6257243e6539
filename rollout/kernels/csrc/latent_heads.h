// Matrices of latent attention, one a head: how they lie, and products of tokens with them.
//
//   weight   by head: [packed W_k transposed: R rows of N] [packed W_v: v rows of R]
//
// Heads are multiplied apart.  An item is a head, a block of token tiles and some panels of its matrix: it packs the
// tokens' rows, which takes far less than the products, so that no phase waits for another.
//
// Shapes: T tokens, H heads, N elements of a query that meet the latent, R latent, v value size.
#pragma once

#include <vector>

#include "checks.h"
#include "matmul.h"

namespace lockstep {

inline constexpr int64_t kPanelsOfItem = 8;

// Elements of a packed matrix.
template <class T>
inline int64_t matrix_numel(int64_t rows, int64_t depth) {
  return panels_of(rows) * panel_numel<T>(depth);
}

// Rows of `depth` elements in one tensor, by token and head.
template <class T>
struct HeadRows {
  T* data;
  int64_t token_stride, head_stride;

  T* row(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

// out = the head's matrix [out_size, depth] . in, for every token and head.  `weight` is the first head's.
template <class T>
inline void multiply_heads(int64_t num_tokens, int64_t num_heads, int64_t depth, int64_t out_size, const T* weight,
                    int64_t weight_stride, const HeadRows<const T>& in, const HeadRows<T>& out) {
  c10::SmallVector<TokenTile, 8> tiles;
  add_tiles<T>(0, num_tokens, tiles);
  const int64_t num_tiles = std::ssize(tiles), words = token_words<T>(depth), panels = panels_of(out_size);
  const int64_t blocks = (num_tiles + kMostTiles<T> - 1) / kMostTiles<T>;
  const int64_t parts = (panels + kPanelsOfItem - 1) / kPanelsOfItem, work = num_heads * matrix_numel<T>(out_size, depth);
  const auto multiply = [&](int64_t item) {
    const int64_t part = item % parts, first_tile = item / parts % blocks * kMostTiles<T>, head = item / parts / blocks;
    const int64_t count = std::min(kMostTiles<T>, num_tiles - first_tile);
    const int64_t first_row = tiles[first_tile].begin, end_row = tiles[first_tile + count - 1].end();
    thread_local std::vector<uint32_t> packed;
    packed.resize(tokens_numel<T>(end_row - first_row, depth));
    for (int64_t i = first_tile; i < first_tile + count; ++i) {
      const TokenTile& tile = tiles[i];
      const T* rows[kTileTokens<T>];
      for (int row = 0; row < tile.rows; ++row) rows[row] = in.row(tile.begin + row, head);
      pack_tile(rows, tile.rows, depth, &packed[(tile.begin - first_row) * words]);
    }
    for (int64_t panel = part * kPanelsOfItem; panel < std::min(panels, (part + 1) * kPanelsOfItem); ++panel) {
      F32x16 sums[kMostRows][kPanelVectors];
      const T* rows = weight + head * weight_stride + panel * panel_numel<T>(depth);
      multiply_panel(&tiles[first_tile], count, packed.data(), rows, depth, sums);
      for (int64_t row = 0; row < end_row - first_row; ++row) {
        for (int v = 0; v < kPanelVectors; ++v) {
          const int64_t column = panel * kPanelRows + v * kLanes, n = std::min<int64_t>(kLanes, out_size - column);
          if (n > 0) store(out.row(first_row + row, head) + column, sums[row][v], static_cast<int>(n));
        }
      }
    }
  };
  for_spans(num_heads * blocks * parts, 1, nanoseconds_of_products(num_tokens, work),
            [&](int64_t first, int64_t last) {
              const PanelScope scope;
              for (int64_t item = first; item < last; ++item) multiply(item);
            });
}

inline void check_heads(const at::Tensor& weight, int64_t num_heads, int64_t least_numel) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.size(0) == num_heads && weight.size(1) >= least_numel,
              "the weight does not hold the packed matrices of ", num_heads, " heads");
}

}  // namespace lockstep
