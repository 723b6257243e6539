// SwiGLU experts whose matrices have low-rank adapters; each token has an adapter of its own, or none.
//
//   shrink    (tile of rows)       hidden times A of gate and of up, to float32
//   gate, up  as in `experts.h`    plus the products with B, before they are rounded
//   shrink    (tile of rows)       inner times A of down, to float32
//   down      as in `experts.h`    plus the product with B, before it is rounded
//
// A tile has rows of one expert and one adapter.  Every sum runs over features, then over ranks, one after the other, for
// each row by itself.  Nothing is added to a row without an adapter, so that it keeps its bits.
//
// Shapes: T tokens, K slots of a token, A = T * K assignments, N of them with an adapter, P experts stored here,
// S slots of adapters, D hidden, I expert intermediate, R greatest rank.
#include <torch/library.h>

#include "experts.h"
#include "lora.h"

namespace lockstep {
namespace {

// The matrices of all adapters: a13 [P, S, 2, D, R], b13 [P, S, R, 2I], a2 [P, S, I, R], b2 [P, S, R, D], the scale of
// an adapter within B; and ranks [P, S, 3] of gate, up and down.
struct AdapterMatrices {
  const at::Tensor &a13, &b13, &a2, &b2, &ranks;
  int64_t num_slots, hidden_size, inner_size, rank;
};

// Rows of one expert that have one adapter.
struct AdaptedTile {
  int64_t expert, slot;
  int count;
  int64_t positions[kLoraRows];  // in the order of experts
};

// The adapters of the sorted assignments of a call, and their products with A.
template <class T>
struct RowAdapters {
  static constexpr bool kAny = true;

  // `slots` [T]: the adapter of each token, or -1.
  RowAdapters(const AdapterMatrices& matrices, const T* hidden, const int64_t* slots, int64_t slots_of_token,
              const SortedAssignments<T>& sorted)
      : sizes_(matrices),
        a13_(matrices.a13.const_data_ptr<T>()),
        b13_(matrices.b13.const_data_ptr<T>()),
        a2_(matrices.a2.const_data_ptr<T>()),
        b2_(matrices.b2.const_data_ptr<T>()),
        ranks_(matrices.ranks.const_data_ptr<int64_t>()),
        hidden_(hidden),
        slots_of_token_(slots_of_token),
        order_(sorted.order),
        rows_(sorted.order.size(), Row{-1, 0}) {
    for (const ExpertBlock& block : sorted.blocks) {
      first_tiles_.push_back(std::ssize(tiles_));
      const TokenTile& last = sorted.tiles[block.first_tile + block.num_tiles - 1];
      add_tiles_of(block.expert, sorted.tiles[block.first_tile].begin, last.end(), slots);
    }
    first_tiles_.push_back(std::ssize(tiles_));
    const auto floats = matrices.a13.options().dtype(at::kFloat);
    of_hidden_ = at::empty({num_rows_, 2, sizes_.rank}, floats);
    of_inner_ = at::empty({num_rows_, sizes_.rank}, floats);
    inner_ = at::empty({num_rows_, sizes_.inner_size}, matrices.a13.options());
  }

  int64_t num_tiles() const { return std::ssize(tiles_); }
  int64_t first_of(int64_t block) const { return first_tiles_[block]; }

  void shrink_hidden(int64_t index) const {
    const AdaptedTile& tile = tiles_[index];
    const T* rows[kLoraRows];
    for (int i = 0; i < tile.count; ++i) {
      rows[i] = hidden_ + order_[tile.positions[i]] / slots_of_token_ * sizes_.hidden_size;
    }
    for (int64_t part = 0; part < 2; ++part) {
      const T* matrix = a13_ + (pair_of(tile) * 2 + part) * sizes_.hidden_size * sizes_.rank;
      shrink(tile, rows, matrix, sizes_.hidden_size, part, of_hidden_, 2);
    }
  }

  void shrink_inner(int64_t index) const {
    const AdaptedTile& tile = tiles_[index];
    const T* rows[kLoraRows];
    for (int i = 0; i < tile.count; ++i) {
      rows[i] = inner_.const_data_ptr<T>() + rows_[tile.positions[i]].place * sizes_.inner_size;
    }
    shrink(tile, rows, a2_ + pair_of(tile) * sizes_.inner_size * sizes_.rank, sizes_.inner_size, 2, of_inner_, 1);
  }

  // Sixteen inner features from `first` on, of the row at `position` in the order of experts.
  void add_gate_up(int64_t position, int64_t first, F32x16& gate, F32x16& up) const {
    const Row& row = rows_[position];
    if (row.place < 0) return;
    const T* b = b13_ + row.pair * sizes_.rank * 2 * sizes_.inner_size + first;
    const float* x = of_hidden_.const_data_ptr<float>() + row.place * 2 * sizes_.rank;
    expand(x, b, 2 * sizes_.inner_size, row.pair * 3, sizes_.inner_size - first, gate);
    expand(x + sizes_.rank, b + sizes_.inner_size, 2 * sizes_.inner_size, row.pair * 3 + 1, sizes_.inner_size - first,
           up);
  }

  void keep_inner(int64_t position, int64_t first, F32x16 inner) const {
    const int64_t place = rows_[position].place;
    if (place < 0) return;
    T* to = inner_.mutable_data_ptr<T>() + place * sizes_.inner_size + first;
    store(to, inner, static_cast<int>(std::min<int64_t>(kLanes, sizes_.inner_size - first)));
  }

  // Sixteen features of the result from `first` on.
  void add_down(int64_t position, int64_t first, F32x16& sum) const {
    const Row& row = rows_[position];
    if (row.place < 0) return;
    const T* b = b2_ + row.pair * sizes_.rank * sizes_.hidden_size + first;
    const float* x = of_inner_.const_data_ptr<float>() + row.place * sizes_.rank;
    expand(x, b, sizes_.hidden_size, row.pair * 3 + 2, sizes_.hidden_size - first, sum);
  }

 private:
  // `place` among the rows with an adapter, -1: none; `pair`: the expert's entry of the adapter.
  struct Row {
    int64_t place, pair;
  };

  int64_t pair_of(const AdaptedTile& tile) const { return tile.expert * sizes_.num_slots + tile.slot; }

  void add_tiles_of(int64_t expert, int64_t begin, int64_t end, const int64_t* slots) {
    std::vector<int64_t> open(sizes_.num_slots, -1);  // the tile of each adapter that has room
    for (int64_t position = begin; position < end; ++position) {
      const int64_t slot = slots[order_[position] / slots_of_token_];
      if (slot < 0) continue;
      rows_[position] = {num_rows_++, expert * sizes_.num_slots + slot};
      if (open[slot] < 0 || tiles_[open[slot]].count == kLoraRows) {
        open[slot] = std::ssize(tiles_);
        tiles_.push_back({expert, slot, 0, {}});
      }
      AdaptedTile& tile = tiles_[open[slot]];
      tile.positions[tile.count++] = position;
    }
  }

  void shrink(const AdaptedTile& tile, const T* const* rows, const T* matrix, int64_t depth, int64_t part,
              const at::Tensor& result, int64_t parts) const {
    const int64_t rank = ranks_[pair_of(tile) * 3 + part];
    F32x16 sums[kLoraRows];
    for (int64_t first = 0; first < rank; first += kLanes) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, rank - first));
      products(tile.count, rows, matrix + first, sizes_.rank, depth, n, sums);
      for (int i = 0; i < tile.count; ++i) {
        const int64_t at = (rows_[tile.positions[i]].place * parts + part % parts) * sizes_.rank + first;
        store(result.mutable_data_ptr<float>() + at, sums[i], n);
      }
    }
  }

  void expand(const float* x, const T* b, int64_t stride, int64_t rank_at, int64_t left, F32x16& sum) const {
    if (ranks_[rank_at] == 0) return;
    F32x16 product[1];
    const int n = static_cast<int>(std::min<int64_t>(kLanes, left));
    products<1>(&x, b, stride, ranks_[rank_at], n, product);
    sum = sum + product[0];
  }

  const AdapterMatrices& sizes_;
  const T *a13_, *b13_, *a2_, *b2_;
  const int64_t* ranks_;
  const T* hidden_;
  int64_t slots_of_token_;
  const std::vector<int64_t>& order_;
  std::vector<Row> rows_;
  std::vector<AdaptedTile> tiles_;
  std::vector<int64_t> first_tiles_;  // of each block
  int64_t num_rows_ = 0;
  at::Tensor of_hidden_, of_inner_, inner_;  // float32 [N, 2, R] and [N, R]; [N, I]
};

void check_adapters(const at::Tensor& hidden, const at::Tensor& slots, int64_t num_experts, const AdapterMatrices& m) {
  const int64_t p = num_experts, s = m.num_slots, d = m.hidden_size, i = m.inner_size, r = m.rank;
  const auto check = [](const at::Tensor& given, std::vector<int64_t> shape, const char* name) {
    TORCH_CHECK(given.sizes() == at::IntArrayRef(shape) && given.is_contiguous(), name, " must be ", shape);
  };
  check(m.a13, {p, s, 2, d, r}, "a13");
  check(m.b13, {p, s, r, 2 * i}, "b13");
  check(m.a2, {p, s, i, r}, "a2");
  check(m.b2, {p, s, r, d}, "b2");
  check(m.ranks, {p, s, 3}, "ranks");
  check(slots, {hidden.size(0)}, "slots");
  TORCH_CHECK(slots.scalar_type() == at::kLong && m.ranks.scalar_type() == at::kLong, "slots and ranks must be int64");
  check_same_dtype(hidden, {m.a13, m.b13, m.a2, m.b2});
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < slots.numel(); ++t) {
    TORCH_CHECK(-1 <= slot[t] && slot[t] < s, "there is no adapter slot ", slot[t]);
  }
  const int64_t* rank = m.ranks.const_data_ptr<int64_t>();
  for (int64_t n = 0; n < m.ranks.numel(); ++n) {
    TORCH_CHECK(0 <= rank[n] && rank[n] <= r, "a rank is over that of the storage: ", rank[n]);
  }
}

at::Tensor adapted_experts(const at::Tensor& hidden, const at::Tensor& ids, const std::optional<at::Tensor>& weights,
                           const at::Tensor& w13, const at::Tensor& w2, int64_t inner_size,
                           const std::optional<at::Tensor>& w13_bias, const std::optional<at::Tensor>& w2_bias,
                           std::optional<double> limit, double alpha, const at::Tensor& slots, const at::Tensor& a13,
                           const at::Tensor& b13, const at::Tensor& a2, const at::Tensor& b2, const at::Tensor& ranks) {
  TORCH_CHECK(a13.dim() == 5 && hidden.dim() == 2, "a13 must be [P, S, 2, D, R]");
  const AdapterMatrices matrices{a13, b13, a2, b2, ranks, a13.size(1), hidden.size(1), inner_size, a13.size(4)};
  check_adapters(hidden, slots, w13.size(0), matrices);
  const at::Tensor rows = hidden.contiguous();
  const ExpertCall call{rows, ids, weights, w13, w2, inner_size, w13_bias, w2_bias, limit, alpha};
  return run_experts(call, [&](auto zero, int64_t first, const auto& sorted) {
    using T = decltype(zero);
    const T* hidden_rows = rows.const_data_ptr<T>() + first * hidden.size(1);
    return RowAdapters<T>(matrices, hidden_rows, slots.const_data_ptr<int64_t>() + first, ids.size(1), sorted);
  });
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("adapted_experts", &lockstep::adapted_experts); }
