// Products with low-rank adapters by head, added to a result; each token has an adapter of its own, or none.
//
// An item is a tile of tokens and a head: it multiplies with A, to float32 in memory of its thread, and then with B.
// Before these come the tokens, of which those without an adapter are copied.
//
// Shapes: T tokens, H heads, D and V features and row of the input, O and W columns and row of the result, S slots of
// adapters, R greatest rank.
#include <algorithm>
#include <vector>

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "checks.h"
#include "lora.h"
#include "parallel.h"

namespace lockstep {
namespace {

// The sizes of a call; `a_heads` and `b_heads` are H, or 1 for a matrix that all heads share.
struct HeadLoraSizes {
  int64_t heads, depth, in_row, columns, out_row, rank, a_heads, b_heads;
};

HeadLoraSizes check_shapes(const at::Tensor& out, const at::Tensor& hidden, const at::Tensor& slots,
                           const at::Tensor& a, const at::Tensor& b, const at::Tensor& ranks, int64_t heads) {
  TORCH_CHECK(out.dim() >= 2 && hidden.dim() == 2 && a.dim() == 4 && b.dim() == 4 && heads > 0,
              "the shapes are not of adapters by head");
  const int64_t num_tokens = hidden.size(0);
  TORCH_CHECK(out.size(0) == num_tokens && slots.dim() == 1 && slots.size(0) == num_tokens, "rows must be tokens");
  int64_t out_size = 1;
  for (int64_t dim = 1; dim < out.dim(); ++dim) out_size *= out.size(dim);
  TORCH_CHECK(out_size % heads == 0 && hidden.size(1) % heads == 0, "rows do not divide into ", heads, " heads");
  const HeadLoraSizes sizes{heads, a.size(2), hidden.size(1) / heads, b.size(3), out_size / heads,
                            a.size(3), a.size(1), b.size(1)};
  TORCH_CHECK((sizes.a_heads == heads || sizes.a_heads == 1) && (sizes.b_heads == heads || sizes.b_heads == 1),
              "adapters must have matrices of ", heads, " heads, or one");
  TORCH_CHECK(sizes.depth <= sizes.in_row && a.is_contiguous(), "A must be [S, H, D, R], D within a head's row");
  TORCH_CHECK(b.size(0) == a.size(0) && b.size(2) == sizes.rank && sizes.columns <= sizes.out_row && b.is_contiguous(),
              "B must be [S, H, R, O], O within a head's row");
  TORCH_CHECK(ranks.numel() == a.size(0), "ranks must be [S]");
  TORCH_CHECK(slots.scalar_type() == at::kLong && ranks.scalar_type() == at::kLong, "slots and ranks must be int64");
  check_same_dtype(out, {hidden, a, b});
  return sizes;
}

// The result of a tile in one head: `base`, plus the products in its first columns.
template <class T>
void write_sums(const LoraTile& tile, int64_t head, int64_t rank, const HeadLoraSizes& sizes, const T* x, const T* a,
                const T* b, const T* base, T* result) {
  for (int row = 0; row < tile.count; ++row) {
    const int64_t at = (tile.tokens[row] * sizes.heads + head) * sizes.out_row;
    std::copy_n(base + at, sizes.out_row, result + at);
  }
  if (rank == 0) return;
  thread_local std::vector<float> shrunk;
  shrunk.resize(kLoraRows * sizes.rank);
  const T* rows[kLoraRows];
  const float* inner[kLoraRows];
  for (int row = 0; row < tile.count; ++row) {
    rows[row] = x + (tile.tokens[row] * sizes.heads + head) * sizes.in_row;
    inner[row] = &shrunk[row * sizes.rank];
  }
  const T* of_a = a + (tile.slot * sizes.a_heads + std::min(head, sizes.a_heads - 1)) * sizes.depth * sizes.rank;
  const T* of_b = b + (tile.slot * sizes.b_heads + std::min(head, sizes.b_heads - 1)) * sizes.rank * sizes.columns;
  F32x16 sums[kLoraRows];
  for (int64_t first = 0; first < rank; first += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, rank - first));
    products(tile.count, rows, of_a + first, sizes.rank, sizes.depth, n, sums);
    for (int row = 0; row < tile.count; ++row) store(&shrunk[row * sizes.rank + first], sums[row], n);
  }
  for (int64_t column = 0; column < sizes.columns; column += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, sizes.columns - column));
    products(tile.count, inner, of_b + column, sizes.columns, rank, n, sums);
    for (int row = 0; row < tile.count; ++row) {
      const int64_t at = (tile.tokens[row] * sizes.heads + head) * sizes.out_row + column;
      store(result + at, load(base + at, n) + sums[row], n);
    }
  }
}

// out [T, H, W], hidden [T, H V], slots [T], a [S, H, D, R], b [S, H, R, O], ranks [S] -> as `out`.
at::Tensor add_head_lora(const at::Tensor& out, const at::Tensor& hidden, const at::Tensor& slots, const at::Tensor& a,
                         const at::Tensor& b, const at::Tensor& ranks, int64_t num_heads) {
  const HeadLoraSizes sizes = check_shapes(out, hidden, slots, a, b, ranks, num_heads);
  const at::Tensor base = out.contiguous(), input = hidden.contiguous(), all_ranks = ranks.contiguous();
  const at::Tensor of_tokens = slots.contiguous();
  const auto tiles = tiles_of(of_tokens.const_data_ptr<int64_t>(), input.size(0), a.size(0));
  const int64_t* rank_of = all_ranks.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < all_ranks.numel(); ++i) {
    TORCH_CHECK(0 <= rank_of[i] && rank_of[i] <= sizes.rank, "a rank is over that of the storage: ", rank_of[i]);
  }
  at::Tensor result = at::empty_like(base);
  with_dtype(input, [&](auto zero) {
    using T = decltype(zero);
    constexpr int64_t kProductsANanosecond = 16;
    const int64_t num_tokens = input.size(0), items = num_tokens + std::ssize(tiles) * num_heads;
    const int64_t work = items * kLoraRows * sizes.rank * (sizes.depth + sizes.columns) / kProductsANanosecond;
    for_spans(items, 1, work, [&](int64_t first, int64_t last) {
      for (int64_t item = first; item < last; ++item) {
        if (item < num_tokens) {
          const int64_t size = of_tokens.const_data_ptr<int64_t>()[item] < 0 ? num_heads * sizes.out_row : 0;
          std::copy_n(base.const_data_ptr<T>() + item * size, size, result.mutable_data_ptr<T>() + item * size);
          continue;
        }
        const LoraTile& tile = tiles[(item - num_tokens) / num_heads];
        write_sums<T>(tile, (item - num_tokens) % num_heads, rank_of[tile.slot], sizes, input.const_data_ptr<T>(),
                      a.const_data_ptr<T>(), b.const_data_ptr<T>(), base.const_data_ptr<T>(),
                      result.mutable_data_ptr<T>());
      }
    });
  });
  return result;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("add_head_lora", &lockstep::add_head_lora); }
