// Token rows times a packed weight, by a team of threads, with work before and after in the same region.
//
//   fill     tile of tokens               their rows, into the packed buffer
//   product  (block of tiles, panel)      a panel stays in the cache while the tiles of a block pass over it
//   finish   span of tokens               what needs whole rows of the result
#pragma once

#include <optional>

#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>

#include "checks.h"
#include "packed_held.h"
#include "parallel.h"

namespace lockstep {

inline constexpr int64_t kFinishSpan = 8;

// The dtype of packed weights says how they are held.
inline bool is_held_dtype(at::ScalarType dtype) {
  return dtype == at::kChar || dtype == at::kFloat8_e4m3fn || dtype == at::kByte;
}

// Calls `run` with a null pointer to the step of the format.
template <class Run>
inline auto with_step(at::ScalarType dtype, Run&& run) {
  if (dtype == at::kChar) return run(static_cast<W8Step*>(nullptr));
  if (dtype == at::kFloat8_e4m3fn) return run(static_cast<Fp8Step*>(nullptr));
  return run(static_cast<Int4Step*>(nullptr));
}

// Elements of the storage's dtype in a panel of `depth` columns.
template <class T>
inline int64_t stored_panel_numel(at::ScalarType dtype, int64_t depth) {
  if (!is_held_dtype(dtype)) return panel_numel<T>(depth);
  return with_step(dtype, [&](auto* step) { return held_panel_bytes<std::remove_pointer_t<decltype(step)>>(depth); });
}

// Calls `run` with the panels of packed weights.
template <class T, class Run>
inline void with_panels(const at::Tensor& weight, Run&& run) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (is_held_dtype(weight.scalar_type())) {
      return with_step(weight.scalar_type(), [&](auto* step) {
        using Panels = HeldPanels<std::remove_pointer_t<decltype(step)>>;
        run(Panels{static_cast<const int8_t*>(weight.const_data_ptr())});
      });
    }
  }
  run(PlainPanels<T>{weight.const_data_ptr<T>()});
}

// A weight packed in the input's dtype, or for bf16 in fewer bits.
inline void check_weight(const at::Tensor& input, const at::Tensor& weight, int64_t out_size) {
  TORCH_CHECK(input.dim() == 2 && weight.is_contiguous() && out_size > 0, "the input must be [T, D], the weight packed");
  const at::ScalarType dtype = weight.scalar_type();
  TORCH_CHECK(!is_held_dtype(dtype) || input.scalar_type() == at::kBFloat16,
              "weights in 8 or 4 bits go with bfloat16 rows");
  if (!is_held_dtype(dtype)) check_same_dtype(input, {weight});
  const int64_t depth = input.size(1);
  const bool is_bf16 = input.scalar_type() == at::kBFloat16;
  const int64_t numel = is_bf16 ? stored_panel_numel<bf16>(dtype, depth) : stored_panel_numel<float>(dtype, depth);
  TORCH_CHECK(weight.numel() == panels_of(out_size) * numel, "the packed weight is not [", out_size, ", ", depth, "]");
}

inline void check_bias(const at::Tensor& input, const std::optional<at::Tensor>& bias, int64_t out_size) {
  if (!bias) return;
  TORCH_CHECK(bias->dim() == 1 && bias->size(0) == out_size && bias->is_contiguous(), "the bias must be [", out_size, "]");
  check_same_dtype(input, {*bias});
}

// A `put` of `packed_matmul`: it adds the bias to the float32 sums, before they are rounded, and stores the rows.
template <class T>
struct PutRow {
  T* out;
  const T* bias;
  int64_t out_size;

  PutRow(at::Tensor& result, const std::optional<at::Tensor>& added)
      : out(result.mutable_data_ptr<T>()),
        bias(added ? added->const_data_ptr<T>() : nullptr),
        out_size(result.size(1)) {}

  void operator()(int64_t token, int64_t column, int n, F32x16 sums) const {
    if (bias != nullptr) sums = sums + load(bias + column, n);
    store(out + token * out_size + column, sums, n);
  }
};

// Room for `num_tokens` packed rows.
template <class T>
inline at::Tensor packed_token_buffer(int64_t num_tokens, int64_t depth) {
  return at::empty({tokens_numel<T>(num_tokens, depth)}, at::TensorOptions().dtype(at::kInt));
}

inline uint32_t* words_of(const at::Tensor& buffer) {
  return reinterpret_cast<uint32_t*>(buffer.mutable_data_ptr<int32_t>());
}

// A phase in which items call `multiply_panel`.
template <class F>
inline Phase<F, PanelScope> multiplying(ItemQueue& queue, F& work) {
  return {queue, work};
}

// `weight`: its panels.  `row_of(token, row of its tile)` is where a token's elements lie until the next tile;
// `put(token, first column, columns, vector)`; `finish(first token, last token)`.
template <class T, class Panels, class RowOf, class Put, class Finish>
inline void packed_matmul(int64_t num_tokens, int64_t depth, int64_t out_size, const Panels& weight, RowOf&& row_of,
                          Put&& put, Finish&& finish) {
  c10::SmallVector<TokenTile, 8> tiles;
  add_tiles<T>(0, num_tokens, tiles);
  const int64_t num_tiles = std::ssize(tiles), panels = panels_of(out_size);
  const int64_t blocks = (num_tiles + kMostTiles<T> - 1) / kMostTiles<T>;
  const at::Tensor buffer = packed_token_buffer<T>(num_tokens, depth);
  uint32_t* packed = words_of(buffer);
  ItemQueue fills(num_tiles), products(blocks * panels), finishes((num_tokens + kFinishSpan - 1) / kFinishSpan);

  const auto fill_tile = [&](int64_t i) {
    const TokenTile& tile = tiles[i];
    const T* rows[kTileTokens<T>];
    for (int row = 0; row < tile.rows; ++row) rows[row] = row_of(tile.begin + row, row);
    pack_tile(rows, tile.rows, depth, packed + tile.begin * token_words<T>(depth));
  };
  const auto multiply = [&](int64_t item) {
    const int64_t panel = item % panels, first_tile = item / panels * kMostTiles<T>;
    const int64_t count = std::min(kMostTiles<T>, num_tiles - first_tile);
    const int64_t first_row = tiles[first_tile].begin, end_row = tiles[first_tile + count - 1].end();
    F32x16 sums[kMostRows][kPanelVectors];
    multiply_panel(&tiles[first_tile], count, packed + first_row * token_words<T>(depth), weight.panel(panel, depth),
                   depth, sums);
    for (int64_t row = first_row; row < end_row; ++row) {
      for (int v = 0; v < kPanelVectors; ++v) {
        const int64_t first = panel * kPanelRows + v * kLanes, n = std::min<int64_t>(kLanes, out_size - first);
        if (n > 0) put(row, first, static_cast<int>(n), sums[row - first_row][v]);
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
