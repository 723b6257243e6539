// SwiGLU experts on the rows that were routed to them, in one call.
//
// Shapes: T tokens, K slots of a token, A = T * K assignments, P experts stored here, D hidden, I expert intermediate.
//
// The A (token, slot) pairs are sorted by expert.  Three phases, each a queue of items that any thread may take:
//
//   gate, up   (expert, block of I)   inner[a] = silu(gate) * up
//   down       (expert, block of D)   slots[token, slot] = w2 . inner[a]
//   combine    token                  out[token] = sum over slots, in slot order
//
// Rounding to the storage dtype happens where torch rounds: gate, up, silu(gate), their product, the expert's output, its
// product with the weight, the sum.
#include <algorithm>
#include <optional>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "dot.h"
#include "parallel.h"

namespace lockstep {
namespace {

constexpr int64_t kInnerBlock = 16;   // columns of I of an item: 32 rows of w13
constexpr int64_t kHiddenBlock = 32;  // columns of D of an item
constexpr int64_t kTokenChunk = 48;   // tokens whose rows stay in the cache while a block is applied to them

// Assignments in the order of their experts; those of one expert keep their own order.
struct SortedAssignments {
  std::vector<int64_t> order;   // [A] flat (token, slot) index
  std::vector<int64_t> starts;  // [used + 1] first sorted position of each used expert
  std::vector<int64_t> experts; // [used]
};

SortedAssignments sort_by_expert(const int64_t* ids, int64_t num_assignments, int64_t num_experts) {
  std::vector<int64_t> next(num_experts + 1, 0);
  for (int64_t a = 0; a < num_assignments; ++a) {
    TORCH_CHECK(ids[a] >= 0 && ids[a] < num_experts, "expert id ", ids[a], " is not in 0..", num_experts - 1);
    ++next[ids[a] + 1];
  }
  SortedAssignments sorted;
  for (int64_t e = 0; e < num_experts; ++e) {
    if (next[e + 1] > 0) {
      sorted.experts.push_back(e);
      sorted.starts.push_back(next[e]);
    }
    next[e + 1] += next[e];
  }
  sorted.starts.push_back(num_assignments);
  sorted.order.resize(num_assignments);
  for (int64_t a = 0; a < num_assignments; ++a) sorted.order[next[ids[a]]++] = a;
  return sorted;
}

template <class T>
struct Experts {
  const T* hidden;
  const T* w13;
  const T* w2;
  const T* weights;  // [T, K], or null: leave the slots unweighted
  T* inner;          // [A, I], sorted by expert
  T* slots;          // [T, K, D]
  T* out;            // [T, D], or null
  int64_t num_slots, hidden_size, inner_size;
  SortedAssignments sorted;

  void gate_up(int64_t used, int64_t first) const {
    const int64_t last = std::min(first + kInnerBlock, inner_size), columns = last - first;
    const T* gate_rows = w13 + sorted.experts[used] * 2 * inner_size * hidden_size;
    const T* up_rows = gate_rows + inner_size * hidden_size;
    float gate[kTokenChunk * kInnerBlock], up[kTokenChunk * kInnerBlock];
    const T* tokens[kTokenChunk];
    for (int64_t a = sorted.starts[used]; a < sorted.starts[used + 1]; a += kTokenChunk) {
      const int64_t count = std::min(kTokenChunk, sorted.starts[used + 1] - a);
      for (int64_t t = 0; t < count; ++t) tokens[t] = hidden + sorted.order[a + t] / num_slots * hidden_size;
      dot_rows(gate_rows, first, last, hidden_size, tokens, count, up_rows + first * hidden_size, gate, kInnerBlock);
      dot_rows(up_rows, first, last, hidden_size, tokens, count, gate_rows + last * hidden_size, up, kInnerBlock);
      for (int64_t t = 0; t < count; ++t) {
        const F32x16 g = round_to<T>(silu(round_to<T>(load(gate + t * kInnerBlock, columns))));
        const F32x16 u = round_to<T>(load(up + t * kInnerBlock, columns));
        store(inner + (a + t) * inner_size + first, g * u, static_cast<int>(columns));
      }
    }
  }

  void down(int64_t used, int64_t first) const {
    const int64_t last = std::min(first + kHiddenBlock, hidden_size);
    const T* rows = w2 + sorted.experts[used] * hidden_size * inner_size;
    float sums[kTokenChunk * kHiddenBlock];
    const T* tokens[kTokenChunk];
    for (int64_t a = sorted.starts[used]; a < sorted.starts[used + 1]; a += kTokenChunk) {
      const int64_t count = std::min(kTokenChunk, sorted.starts[used + 1] - a);
      for (int64_t t = 0; t < count; ++t) tokens[t] = inner + (a + t) * inner_size;
      dot_rows(rows, first, last, inner_size, tokens, count, rows + last * inner_size, sums, kHiddenBlock);
      for (int64_t t = 0; t < count; ++t) {
        T* place = slots + sorted.order[a + t] * hidden_size;
        for (int64_t d = first; d < last; d += kLanes) {
          const int n = static_cast<int>(std::min<int64_t>(kLanes, last - d));
          store(place + d, load(sums + t * kHiddenBlock + d - first, n), n);
        }
      }
    }
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

  void run(int64_t num_tokens) const {
    const int64_t used = static_cast<int64_t>(sorted.experts.size());
    const int64_t inner_blocks = (inner_size + kInnerBlock - 1) / kInnerBlock;
    const int64_t hidden_blocks = (hidden_size + kHiddenBlock - 1) / kHiddenBlock;
    ItemQueue gate_up_items(used * inner_blocks), down_items(used * hidden_blocks);
    ItemQueue combine_items(out == nullptr ? 0 : num_tokens);
    const int threads = team_size(nanoseconds_of_dots(num_tokens, num_slots * 3 * hidden_size * inner_size));
#pragma omp parallel num_threads(threads)
    {
      gate_up_items.drain([&](int64_t i) { gate_up(i / inner_blocks, i % inner_blocks * kInnerBlock); });
#pragma omp barrier
      down_items.drain([&](int64_t i) { down(i / hidden_blocks, i % hidden_blocks * kHiddenBlock); });
#pragma omp barrier
      combine_items.drain([&](int64_t token) { combine(token); });
    }
  }
};

at::Tensor fused_experts(const at::Tensor& hidden, const at::Tensor& ids, const std::optional<at::Tensor>& weights,
                         const at::Tensor& w13, const at::Tensor& w2) {
  TORCH_CHECK(hidden.dim() == 2 && ids.dim() == 2 && w13.dim() == 3 && w2.dim() == 3, "wrong number of dimensions");
  const int64_t num_tokens = hidden.size(0), hidden_size = hidden.size(1), inner_size = w2.size(2);
  TORCH_CHECK(ids.size(0) == num_tokens && ids.scalar_type() == at::kLong, "ids must be [T, K] int64");
  TORCH_CHECK(w13.size(0) == w2.size(0) && w13.size(1) == 2 * inner_size && w13.size(2) == hidden_size &&
                  w2.size(1) == hidden_size,
              "w13 must be [P, 2I, D] and w2 [P, D, I]");
  TORCH_CHECK(w13.is_contiguous() && w2.is_contiguous(), "expert weights must be contiguous");
  TORCH_CHECK(!weights || weights->sizes() == ids.sizes(), "weights must be [T, K]");
  check_same_dtype(hidden, {w13, w2, weights ? *weights : hidden});
  const at::Tensor rows = hidden.contiguous(), picks = ids.contiguous();
  const at::Tensor factors = weights ? weights->contiguous() : at::Tensor();
  const at::Tensor inner = at::empty({ids.numel(), inner_size}, hidden.options());
  const at::Tensor slots = at::empty({num_tokens, ids.size(1), hidden_size}, hidden.options());
  const at::Tensor out = weights ? at::empty({num_tokens, hidden_size}, hidden.options()) : slots;
  SortedAssignments sorted = sort_by_expert(picks.const_data_ptr<int64_t>(), ids.numel(), w13.size(0));
  with_dtype(hidden, [&](auto zero) {
    using T = decltype(zero);
    const Experts<T> experts{
        .hidden = rows.const_data_ptr<T>(),
        .w13 = w13.const_data_ptr<T>(),
        .w2 = w2.const_data_ptr<T>(),
        .weights = weights ? factors.const_data_ptr<T>() : nullptr,
        .inner = inner.mutable_data_ptr<T>(),
        .slots = slots.mutable_data_ptr<T>(),
        .out = weights ? out.mutable_data_ptr<T>() : nullptr,
        .num_slots = ids.size(1),
        .hidden_size = hidden_size,
        .inner_size = inner_size,
        .sorted = std::move(sorted),
    };
    experts.run(num_tokens);
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  m.def("fused_experts(Tensor hidden, Tensor ids, Tensor? weights, Tensor w13, Tensor w2) -> Tensor");
}

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("fused_experts", &lockstep::fused_experts); }
