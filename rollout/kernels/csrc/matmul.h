// Token rows times a packed weight, by a team of threads, with work before and after in the same region.
//
//   fill     tile of tokens               their rows, into the packed buffer
//   product  (block of tiles, panel)      a panel stays in the cache while the tiles of a block pass over it
//   finish   span of tokens               what needs whole rows of the result
#pragma once

#include <optional>

#include <ATen/ops/empty.h>

#include "checks.h"
#include "packed.h"
#include "parallel.h"

namespace lockstep {

inline constexpr int64_t kBlockTokens = 192;  // their rows and a panel fit the second-level cache
template <class T>
inline constexpr int64_t kTilesOfBlock = kBlockTokens / kTileTokens<T>;
inline constexpr int64_t kFinishSpan = 8;

inline void check_weight(const at::Tensor& input, const at::Tensor& weight, int64_t out_size) {
  TORCH_CHECK(input.dim() == 2 && weight.is_contiguous() && out_size > 0, "the input must be [T, D], the weight packed");
  check_same_dtype(input, {weight});
  const int64_t depth = input.size(1);
  const bool is_bf16 = weight.scalar_type() == at::kBFloat16;
  TORCH_CHECK(weight.numel() == panels_of(out_size) * (is_bf16 ? panel_numel<bf16>(depth) : panel_numel<float>(depth)),
              "the packed weight is not [", out_size, ", ", depth, "]");
}

inline void check_bias(const at::Tensor& input, const std::optional<at::Tensor>& bias, int64_t out_size) {
  if (!bias) return;
  TORCH_CHECK(bias->dim() == 1 && bias->size(0) == out_size && bias->is_contiguous(), "the bias must be [", out_size, "]");
  check_same_dtype(input, {*bias});
}

// Room for `num_tokens` packed rows.
template <class T>
inline at::Tensor packed_token_buffer(int64_t num_tokens, int64_t depth) {
  return at::empty({tokens_numel<T>(num_tokens, depth)}, at::TensorOptions().dtype(at::kInt));
}

// A phase in which items call `multiply_panel`.
template <class F>
inline Phase<F, PanelScope> multiplying(ItemQueue& queue, F& work) {
  return {queue, work};
}

// `fill(token, row, rows, tile)` for each token of a tile; `put(token, first column, columns, vector)`;
// `finish(first token, last token)`.
template <class T, class Fill, class Put, class Finish>
inline void packed_matmul(int64_t num_tokens, int64_t depth, int64_t out_size, const T* weight, Fill&& fill, Put&& put,
                          Finish&& finish) {
  const Tiles<T> tiles{num_tokens};
  const int64_t groups = groups_of<T>(depth), words = token_words<T>(depth), panels = panels_of(out_size);
  const int64_t blocks = (tiles.size + kTilesOfBlock<T> - 1) / kTilesOfBlock<T>;
  const at::Tensor buffer = packed_token_buffer<T>(num_tokens, depth);
  uint32_t* packed = reinterpret_cast<uint32_t*>(buffer.mutable_data_ptr<int32_t>());
  ItemQueue fills(tiles.size), products(blocks * panels), finishes((num_tokens + kFinishSpan - 1) / kFinishSpan);

  const auto fill_tile = [&](int64_t tile) {
    const int rows = tiles.rows(tile);
    uint32_t* place = packed + tiles.begin(tile) * words;
    for (int row = 0; row < rows; ++row) fill(tiles.begin(tile) + row, row, rows, place);
  };
  const auto multiply = [&](int64_t item) {
    const int64_t panel = item % panels, first_tile = item / panels * kTilesOfBlock<T>;
    const int64_t last_tile = std::min(first_tile + kTilesOfBlock<T>, tiles.size), column = panel * kPanelRows;
    const T* rows = weight + panel * panel_numel<T>(depth);
    for (int64_t tile = first_tile; tile < last_tile; ++tile) {
      const int64_t begin = tiles.begin(tile);
      F32x16 sums[kTileTokens<T>][kPanelVectors];
      multiply_panel(tiles.rows(tile), packed + begin * words, rows, groups, sums);
      for (int t = 0; t < tiles.rows(tile); ++t) {
        for (int v = 0; v < kPanelVectors; ++v) {
          const int64_t first = column + v * kLanes, count = std::min<int64_t>(kLanes, out_size - first);
          if (count > 0) put(begin + t, first, static_cast<int>(count), sums[t][v]);
        }
      }
    }
  };
  const auto finish_span = [&](int64_t span) {
    finish(span * kFinishSpan, std::min(num_tokens, (span + 1) * kFinishSpan));
  };
  run_phases(team_size(nanoseconds_of_products(num_tokens, panels * panel_numel<T>(depth))),
             Phase{fills, fill_tile}, multiplying(products, multiply), Phase{finishes, finish_span});
}

}  // namespace lockstep
