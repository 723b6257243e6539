// SwiGLU experts on the rows that were routed to them, on packed weights: what `fused_experts` and `adapted_experts` run.
//
// Shapes: T tokens, K slots of a token, A = T * K assignments, P experts stored here, D hidden, I expert intermediate.
//
// The A (token, slot) pairs are sorted by expert; those of one expert form blocks of tiles.  Of a block
//
//   fill       tile                    its hidden rows, packed
//   gate, up   16 of I                 inner = silu(gate) * up, packed
//   down       panel of D              slots[token, slot] = w2 . inner
//
// are items that any thread may take, phase by phase, or, where there are blocks enough, all the work of one thread: then
// its packed rows stay in the second level of the cache, and nobody waits between phases.  At last
//
//   combine    span of tokens          out[token] = sum over slots, in slot order
//
// A panel of w13 holds sixteen gate rows, then the sixteen up rows that go with them.  Rounding to the storage dtype
// happens where torch rounds: gate, up, silu(gate), their product, the expert's output, its product with the weight, the
// sum; and after every other operation of experts with biases or a clamp.
#pragma once

#include <optional>
#include <vector>

#include <ATen/ops/empty.h>

#include "matmul.h"
#include "packed_held.h"

namespace lockstep {

inline constexpr int64_t kMaxTokens = 2048;  // at a time: bounds the buffers
// From so many for each thread on a block is the work of one: what a thread waits for the last of another is little.
inline constexpr int64_t kBlocksEach = 8;

// Rows of one expert.
struct ExpertBlock {
  int64_t expert, first_tile, num_tiles;
};

// Assignments in the order of their experts; those of one expert keep their own order.
template <class T>
struct SortedAssignments {
  std::vector<int64_t> order;    // [A] flat (token, slot) index
  std::vector<TokenTile> tiles;  // of places in `order`
  std::vector<ExpertBlock> blocks;

  SortedAssignments(const int64_t* ids, int64_t num_assignments, int64_t num_experts) : order(num_assignments) {
    std::vector<int64_t> next(num_experts + 1, 0);
    for (int64_t a = 0; a < num_assignments; ++a) ++next[ids[a] + 1];
    for (int64_t e = 0; e < num_experts; ++e) {
      if (next[e + 1] > 0) add_expert(e, next[e], next[e + 1]);
      next[e + 1] += next[e];
    }
    for (int64_t a = 0; a < num_assignments; ++a) order[next[ids[a]]++] = a;
  }

 private:
  void add_expert(int64_t expert, int64_t begin, int64_t count) {
    const int64_t first = std::ssize(tiles);
    add_tiles<T>(begin, count, tiles);
    for (int64_t i = first; i < std::ssize(tiles); i += kMostTiles<T>) {
      blocks.push_back({expert, i, std::min(kMostTiles<T>, std::ssize(tiles) - i)});
    }
  }
};

// Of experts that are more than SwiGLU: biases [P, 2I], gate first, and [P, D], or null; with `clamped`, what
// `ClampedSwiGLU` says.
template <class T>
struct Extras {
  const T* w13_bias;
  const T* w2_bias;
  bool clamped;
  float limit, alpha;

  bool any() const { return w13_bias != nullptr || w2_bias != nullptr || clamped; }

  // Sixteen elements of expert `expert`'s row, or of half of it; zeros beyond I or D, and where there is no bias.
  F32x16 gate_bias(int64_t expert, int64_t inner_size, int64_t first) const {
    return some(w13_bias, 2 * expert * inner_size + first, inner_size - first);
  }
  F32x16 up_bias(int64_t expert, int64_t inner_size, int64_t first) const {
    return some(w13_bias, (2 * expert + 1) * inner_size + first, inner_size - first);
  }
  F32x16 down_bias(int64_t expert, int64_t hidden_size, int64_t first) const {
    return some(w2_bias, expert * hidden_size + first, hidden_size - first);
  }

  // A bound comes first, so that a NaN stays one.
  F32x16 activate(F32x16 gate, F32x16 up) const {
    if (!clamped) return round_to<T>(silu(gate)) * up;
    const F32x16 one = splat(1.0f), most = splat(limit);
    gate = min(most, gate);
    up = max(splat(-limit), min(most, up));
    const F32x16 powers = exp(splat(0.0f) - round_to<T>(gate * splat(alpha)));
    return round_to<T>(up + one) * round_to<T>(gate * round_to<T>(one / (one + powers)));
  }

 private:
  static F32x16 some(const T* bias, int64_t first, int64_t count) {
    if (bias == nullptr || count <= 0) return splat(0.0f);
    return load(bias + first, static_cast<int>(std::min<int64_t>(kLanes, count)));
  }
};

// The adapters of a call in which no row has one.
struct NoAdapters {
  static constexpr bool kAny = false;
};

// `kPlain`: SwiGLU without biases; `extras` is not read.  `Panels`: of the weights, in T or in fewer bits.  `Adapters`:
// `NoAdapters`, or what `RowAdapters` has.
template <class T, bool kPlain, class Panels, class Adapters = NoAdapters>
struct Experts {
  const T* hidden;
  Panels w13, w2;
  const T* weights;  // [T, K], or null: leave the slots unweighted
  T* slots;          // [T, K, D]
  T* out;            // [T, D], or null
  int64_t num_tokens, num_slots, hidden_size, inner_size;
  const Extras<T>& extras;
  const SortedAssignments<T>& sorted;
  const Adapters& adapters;

  // The packed rows of a block or of all blocks, from row `first` on.
  struct PackedRows {
    uint32_t *hidden, *inner;
    int64_t first = 0;
  };

  int64_t inner_panels() const { return (inner_size + kLanes - 1) / kLanes; }
  uint32_t* hidden_of(const TokenTile& tile, const PackedRows& packed) const {
    return packed.hidden + (tile.begin - packed.first) * token_words<T>(hidden_size);
  }
  uint32_t* inner_of(const TokenTile& tile, const PackedRows& packed) const {
    return packed.inner + (tile.begin - packed.first) * token_words<T>(inner_size);
  }
  const TokenTile* tiles_of(const ExpertBlock& block) const { return &sorted.tiles[block.first_tile]; }

  // `put(tile, sums)` with the products of a panel and the rows of each tile of a block, which begins at `packed`.
  template <class Panel, class Put>
  void multiply(const ExpertBlock& block, const uint32_t* packed, const Panel& panel, int64_t depth, Put&& put) const {
    const TokenTile* tiles = tiles_of(block);
    F32x16 sums[kMostRows][kPanelVectors];
    multiply_panel(tiles, block.num_tiles, packed, panel, depth, sums);
    for (int64_t i = 0; i < block.num_tiles; ++i) put(tiles[i], sums + (tiles[i].begin - tiles[0].begin));
  }

  void fill(const TokenTile& tile, const PackedRows& packed) const {
    const T* rows[kTileTokens<T>];
    for (int row = 0; row < tile.rows; ++row) {
      rows[row] = hidden + sorted.order[tile.begin + row] / num_slots * hidden_size;
    }
    pack_tile(rows, tile.rows, hidden_size, hidden_of(tile, packed));
  }

  void gate_up(const ExpertBlock& block, int64_t panel, const PackedRows& packed) const {
    F32x16 gate_bias, up_bias;
    if constexpr (!kPlain) {
      gate_bias = extras.gate_bias(block.expert, inner_size, panel * kLanes);
      up_bias = extras.up_bias(block.expert, inner_size, panel * kLanes);
    }
    const auto matrix = w13.panel(block.expert * inner_panels() + panel, hidden_size);
    const uint32_t* rows = hidden_of(*tiles_of(block), packed);
    multiply(block, rows, matrix, hidden_size, [&](const TokenTile& tile, const F32x16(*sums)[kPanelVectors]) {
      F32x16 inner[kTileTokens<T>];  // zeros beyond I, as the weights and biases are zeros there
      for (int row = 0; row < tile.rows; ++row) {
        F32x16 gate_sum = sums[row][0], up_sum = sums[row][1];
        if constexpr (Adapters::kAny) adapters.add_gate_up(tile.begin + row, panel * kLanes, gate_sum, up_sum);
        F32x16 gate = round_to<T>(gate_sum), up = round_to<T>(up_sum);
        if constexpr (kPlain) {
          inner[row] = round_to<T>(round_to<T>(silu(gate)) * up);
        } else {
          if (extras.w13_bias != nullptr) {
            gate = round_to<T>(gate + gate_bias);
            up = round_to<T>(up + up_bias);
          }
          inner[row] = round_to<T>(extras.activate(gate, up));
        }
        if constexpr (Adapters::kAny) adapters.keep_inner(tile.begin + row, panel * kLanes, inner[row]);
      }
      put_elements<T>(inner, tile.rows, inner_size, panel * kLanes, inner_of(tile, packed));
    });
  }

  void down(const ExpertBlock& block, int64_t panel, const PackedRows& packed) const {
    F32x16 biases[kPanelVectors];
    for (int v = 0; v < kPanelVectors && !kPlain; ++v) {
      biases[v] = extras.down_bias(block.expert, hidden_size, panel * kPanelRows + v * kLanes);
    }
    const auto matrix = w2.panel(block.expert * panels_of(hidden_size) + panel, inner_size);
    const uint32_t* rows = inner_of(*tiles_of(block), packed);
    multiply(block, rows, matrix, inner_size, [&](const TokenTile& tile, const F32x16(*sums)[kPanelVectors]) {
      for (int row = 0; row < tile.rows; ++row) {
        T* slot = slots + sorted.order[tile.begin + row] * hidden_size;
        for (int v = 0; v < kPanelVectors; ++v) {
          const int64_t d = panel * kPanelRows + v * kLanes, n = std::min<int64_t>(kLanes, hidden_size - d);
          if (n <= 0) break;
          F32x16 sum = sums[row][v];
          if constexpr (Adapters::kAny) adapters.add_down(tile.begin + row, d, sum);
          if (!kPlain && extras.w2_bias != nullptr) sum = round_to<T>(sum) + biases[v];
          store(slot + d, sum, static_cast<int>(n));
        }
      }
    });
  }

  void combine(int64_t token) const {
    for (int64_t d = 0; d < hidden_size; d += kLanes) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, hidden_size - d));
      F32x16 sum = splat(0.0f);
      for (int64_t k = 0; k < num_slots; ++k) {
        const int64_t slot = token * num_slots + k;
        sum = sum + round_to<T>(load(slots + slot * hidden_size + d, n) * splat(static_cast<float>(weights[slot])));
      }
      store(out + token * hidden_size + d, sum, n);
    }
  }

  void run() const {
    const int64_t num_blocks = std::ssize(sorted.blocks), num_rows = std::ssize(sorted.order);
    const int64_t rows_each = (num_rows + num_blocks - 1) / std::max<int64_t>(num_blocks, 1);
    const int threads = team_size(nanoseconds_of_products(rows_each, num_blocks * 3 * hidden_size * inner_size));
    ItemQueue spans((num_tokens + kFinishSpan - 1) / kFinishSpan);
    const auto combine_span = [&](int64_t span) {
      const int64_t end = std::min(num_tokens, (span + 1) * kFinishSpan);
      for (int64_t t = span * kFinishSpan; out != nullptr && t < end; ++t) combine(t);
    };
    if (num_blocks < kBlocksEach * threads) return run_by_phases(threads, num_rows, Phase{spans, combine_span});
    ItemQueue blocks(num_blocks);
    const auto run_block = [&](int64_t i) { this->run_block(i); };
    run_phases(threads, multiplying(blocks, run_block), Phase{spans, combine_span});
  }

  template <class Combine>
  void run_by_phases(int threads, int64_t num_rows, Combine combine) const {
    const at::Tensor hidden_buffer = packed_token_buffer<T>(num_rows, hidden_size);
    const at::Tensor inner_buffer = packed_token_buffer<T>(num_rows, inner_size);
    const PackedRows packed{words_of(hidden_buffer), words_of(inner_buffer)};
    const int64_t num_blocks = std::ssize(sorted.blocks);
    ItemQueue tiles(std::ssize(sorted.tiles)), inner_items(num_blocks * inner_panels());
    ItemQueue down_items(num_blocks * panels_of(hidden_size));
    const auto fill_tile = [&](int64_t i) { fill(sorted.tiles[i], packed); };
    const auto inner_item = [&](int64_t i) { gate_up(sorted.blocks[i / inner_panels()], i % inner_panels(), packed); };
    const auto down_item = [&](int64_t i) {
      down(sorted.blocks[i / panels_of(hidden_size)], i % panels_of(hidden_size), packed);
    };
    if constexpr (Adapters::kAny) {
      ItemQueue of_hidden(adapters.num_tiles()), of_inner(adapters.num_tiles());
      const auto shrink_hidden = [&](int64_t i) { adapters.shrink_hidden(i); };
      const auto shrink_inner = [&](int64_t i) { adapters.shrink_inner(i); };
      run_phases(threads, Phase{tiles, fill_tile}, Phase{of_hidden, shrink_hidden},
                 multiplying(inner_items, inner_item), Phase{of_inner, shrink_inner},
                 multiplying(down_items, down_item), combine);
    } else {
      run_phases(threads, Phase{tiles, fill_tile}, multiplying(inner_items, inner_item),
                 multiplying(down_items, down_item), combine);
    }
  }

  void run_block(int64_t index) const {
    const ExpertBlock& block = sorted.blocks[index];
    thread_local std::vector<uint32_t> hidden_rows, inner_rows;
    const TokenTile* tiles = tiles_of(block);
    const int64_t num_rows = tiles[block.num_tiles - 1].end() - tiles[0].begin;
    hidden_rows.resize(tokens_numel<T>(num_rows, hidden_size));
    inner_rows.resize(tokens_numel<T>(num_rows, inner_size));
    const PackedRows packed{hidden_rows.data(), inner_rows.data(), tiles[0].begin};
    for (int64_t i = 0; i < block.num_tiles; ++i) fill(tiles[i], packed);
    if constexpr (Adapters::kAny) {
      for (int64_t i = adapters.first_of(index); i < adapters.first_of(index + 1); ++i) adapters.shrink_hidden(i);
    }
    for (int64_t panel = 0; panel < inner_panels(); ++panel) gate_up(block, panel, packed);
    if constexpr (Adapters::kAny) {
      for (int64_t i = adapters.first_of(index); i < adapters.first_of(index + 1); ++i) adapters.shrink_inner(i);
    }
    for (int64_t panel = 0; panel < panels_of(hidden_size); ++panel) down(block, panel, packed);
  }
};

inline void check_extras(const at::Tensor& hidden, int64_t num_experts, int64_t inner_size,
                  const std::optional<at::Tensor>& w13_bias, const std::optional<at::Tensor>& w2_bias) {
  const auto check = [&](const std::optional<at::Tensor>& bias, int64_t size) {
    if (!bias) return;
    TORCH_CHECK(bias->dim() == 2 && bias->size(0) == num_experts && bias->size(1) == size && bias->is_contiguous(),
                "a bias of the experts must be [", num_experts, ", ", size, "] and contiguous");
    check_same_dtype(hidden, {*bias});
  };
  check(w13_bias, 2 * inner_size);
  check(w2_bias, hidden.size(1));
}

inline void check_experts(const at::Tensor& hidden, const at::Tensor& ids, const std::optional<at::Tensor>& weights,
                   const at::Tensor& w13, const at::Tensor& w2, int64_t inner_size) {
  TORCH_CHECK(hidden.dim() == 2 && ids.dim() == 2 && w13.dim() >= 2 && w2.dim() >= 2, "wrong number of dimensions");
  TORCH_CHECK(ids.size(0) == hidden.size(0) && ids.scalar_type() == at::kLong, "ids must be [T, K] int64");
  TORCH_CHECK(w13.is_contiguous() && w2.is_contiguous(), "expert weights must be contiguous");
  TORCH_CHECK(!weights || weights->sizes() == ids.sizes(), "weights must be [T, K]");
  const bool is_held = is_held_dtype(w13.scalar_type());
  check_same_dtype(hidden, {is_held ? hidden : w13, is_held ? hidden : w2, weights ? *weights : hidden});
  TORCH_CHECK(!is_held || (w2.scalar_type() == w13.scalar_type() && hidden.scalar_type() == at::kBFloat16),
              "weights in 8 or 4 bits go with bfloat16 rows");
  with_dtype(hidden, [&](auto zero) {
    using T = decltype(zero);
    const int64_t hidden_size = hidden.size(1), inner_panels = (inner_size + kLanes - 1) / kLanes;
    const auto numel = [&](int64_t depth) { return stored_panel_numel<T>(w13.scalar_type(), depth); };
    TORCH_CHECK(w13.size(0) == w2.size(0) && w13.numel() == w13.size(0) * inner_panels * numel(hidden_size) &&
                    w2.numel() == w2.size(0) * panels_of(hidden_size) * numel(inner_size),
                "w13 must be the packed gate and up rows [P, 2I, D] and w2 the packed [P, D, I]");
  });
}

// The arguments of `fused_experts`.
struct ExpertCall {
  const at::Tensor &hidden, &ids;
  const std::optional<at::Tensor>& weights;
  const at::Tensor &w13, &w2;
  int64_t inner_size;
  const std::optional<at::Tensor>&w13_bias, &w2_bias;
  std::optional<double> limit;
  double alpha;
};

// What `fused_experts` returns.  `adapters_of(zero, first, sorted)`: the adapters of the tokens from `first` on, where
// `zero` is of their dtype.
template <class AdaptersOf>
inline at::Tensor run_experts(const ExpertCall& call, AdaptersOf&& adapters_of) {
  const at::Tensor& hidden = call.hidden;
  const std::optional<at::Tensor>& weights = call.weights;
  check_experts(hidden, call.ids, weights, call.w13, call.w2, call.inner_size);
  check_extras(hidden, call.w13.size(0), call.inner_size, call.w13_bias, call.w2_bias);
  const int64_t num_tokens = hidden.size(0), num_slots = call.ids.size(1), hidden_size = hidden.size(1);
  const int64_t num_experts = call.w13.size(0), chunk = std::min(num_tokens, kMaxTokens);
  const at::Tensor rows = hidden.contiguous(), picks = call.ids.contiguous();
  const at::Tensor factors = weights ? weights->contiguous() : at::Tensor();
  const int64_t* pick = picks.const_data_ptr<int64_t>();
  for (int64_t a = 0; a < picks.numel(); ++a) {
    TORCH_CHECK(pick[a] >= 0 && pick[a] < num_experts, "expert id ", pick[a], " is not in 0..", num_experts - 1);
  }
  const at::Tensor slots = at::empty({weights ? chunk : num_tokens, num_slots, hidden_size}, hidden.options());
  const at::Tensor out = weights ? at::empty({num_tokens, hidden_size}, hidden.options()) : slots;
  with_dtype(hidden, [&](auto zero) {
    using T = decltype(zero);
    const Extras<T> extras{
        .w13_bias = call.w13_bias ? call.w13_bias->const_data_ptr<T>() : nullptr,
        .w2_bias = call.w2_bias ? call.w2_bias->const_data_ptr<T>() : nullptr,
        .clamped = call.limit.has_value(),
        .limit = static_cast<float>(call.limit.value_or(0.0)),
        .alpha = static_cast<float>(call.alpha),
    };
    for (int64_t first = 0; first < num_tokens; first += kMaxTokens) {
      const int64_t count = std::min(kMaxTokens, num_tokens - first);
      const SortedAssignments<T> sorted(pick + first * num_slots, count * num_slots, num_experts);
      const auto adapters = adapters_of(zero, first, sorted);
      using Adapters = std::remove_const_t<decltype(adapters)>;
      const auto run = [&](auto plain, auto w13_panels, auto w2_panels) {
        const Experts<T, decltype(plain)::value, decltype(w13_panels), Adapters> experts{
            .hidden = rows.const_data_ptr<T>() + first * hidden_size,
            .w13 = w13_panels,
            .w2 = w2_panels,
            .weights = weights ? factors.const_data_ptr<T>() + first * num_slots : nullptr,
            .slots = slots.mutable_data_ptr<T>() + (weights ? 0 : first * num_slots * hidden_size),
            .out = weights ? out.mutable_data_ptr<T>() + first * hidden_size : nullptr,
            .num_tokens = count,
            .num_slots = num_slots,
            .hidden_size = hidden_size,
            .inner_size = call.inner_size,
            .extras = extras,
            .sorted = sorted,
            .adapters = adapters,
        };
        experts.run();
      };
      with_panels<T>(call.w13, [&](auto w13_panels) {
        using Panels = decltype(w13_panels);
        const Panels w2_panels{static_cast<decltype(Panels::first)>(call.w2.const_data_ptr())};
        if constexpr (!Adapters::kAny) {
          if (!extras.any()) return run(std::true_type(), w13_panels, w2_panels);
        }
        run(std::false_type(), w13_panels, w2_panels);
      });
    }
  });
  return out;
}

}  // namespace lockstep
