// Products with low-rank adapters, added to the rows of a result; each token has an adapter of its own, or none.
//
//   copy     (tokens)                          rows without an adapter
//   shrink   (tile of tokens, part)            hidden times A, to float32
//   expand   (tile of tokens, span of columns) times B, added to the result
//
// A tile has tokens of one adapter.  Every sum runs over features, then over ranks, one after the other, for each token
// by itself: which tokens share a tile does not change the bits.
//
// Shapes: T tokens, D input features, O output features, S slots of adapters, P parts, R greatest rank.
#include <algorithm>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "checks.h"
#include "lora.h"
#include "parallel.h"

namespace lockstep {
namespace {

constexpr int64_t kColumnSpan = 256;   // columns of an item of `expand`
constexpr int64_t kCopiedTokens = 16;  // tokens of an item of `copy`

// A span of columns within one part.
struct ColumnSpan {
  int64_t part, first, last;
};

std::vector<ColumnSpan> spans_of(at::IntArrayRef columns) {
  std::vector<ColumnSpan> spans;
  for (size_t part = 0; part + 1 < columns.size(); ++part) {
    for (int64_t first = columns[part]; first < columns[part + 1]; first += kColumnSpan) {
      spans.push_back({static_cast<int64_t>(part), first, std::min(columns[part + 1], first + kColumnSpan)});
    }
  }
  return spans;
}

void check_shapes(const at::Tensor& out, const at::Tensor& hidden, const at::Tensor& slots, const at::Tensor& a,
                  const at::Tensor& b, const at::Tensor& ranks, at::IntArrayRef columns) {
  TORCH_CHECK(out.dim() == 2 && hidden.dim() == 2 && a.dim() == 4 && b.dim() == 3, "the shapes are not of adapters");
  const int64_t num_tokens = hidden.size(0), parts = a.size(1);
  TORCH_CHECK(out.size(0) == num_tokens && slots.dim() == 1 && slots.size(0) == num_tokens, "rows must be tokens");
  TORCH_CHECK(a.size(2) == hidden.size(1) && a.is_contiguous(), "A must be [S, P, D, R]");
  TORCH_CHECK(b.size(0) == a.size(0) && b.size(1) == a.size(3) && b.size(2) == out.size(1) && b.is_contiguous(),
              "B must be [S, R, O]");
  TORCH_CHECK(ranks.dim() == 2 && ranks.size(0) == a.size(0) && ranks.size(1) == parts, "ranks must be [S, P]");
  TORCH_CHECK(slots.scalar_type() == at::kLong && ranks.scalar_type() == at::kLong, "slots and ranks must be int64");
  TORCH_CHECK(std::ssize(columns) == parts + 1 && columns.front() == 0 && columns.back() == out.size(1) &&
                  std::is_sorted(columns.begin(), columns.end()),
              "the parts must cover the columns");
  check_same_dtype(out, {hidden, a, b});
}

// The sizes of a call.
struct LoraSizes {
  int64_t parts, depth, rank, columns;
};

// The rows of the tokens of an item that have no adapter.  torch's own copy would wake threads of torch, which take the
// processor from the operators' threads.
template <class T>
void copy(int64_t item, const int64_t* slots, int64_t num_tokens, int64_t columns, const T* base, T* result) {
  const int64_t last = std::min(num_tokens, (item + 1) * kCopiedTokens);
  for (int64_t token = item * kCopiedTokens; token < last; ++token) {
    if (slots[token] < 0) std::copy_n(base + token * columns, columns, result + token * columns);
  }
}

// The products of a tile with A of one part, to `shrunk` [T, P, R].
template <class T>
void shrink(const LoraTile& tile, int64_t part, int64_t rank, const LoraSizes& sizes, const T* x, const T* a,
            float* shrunk) {
  const T* rows[kLoraRows];
  for (int row = 0; row < tile.count; ++row) rows[row] = x + tile.tokens[row] * sizes.depth;
  const T* matrix = a + (tile.slot * sizes.parts + part) * sizes.depth * sizes.rank;
  F32x16 sums[kLoraRows];
  for (int64_t first = 0; first < rank; first += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, rank - first));
    products(tile.count, rows, matrix + first, sizes.rank, sizes.depth, n, sums);
    for (int row = 0; row < tile.count; ++row) {
      store(shrunk + (tile.tokens[row] * sizes.parts + part) * sizes.rank + first, sums[row], n);
    }
  }
}

// The result of a tile in a span of columns: `base` plus `shrunk` times B.
template <class T>
void expand(const LoraTile& tile, const ColumnSpan& span, int64_t rank, const LoraSizes& sizes, const float* shrunk,
            const T* b, const T* base, T* result) {
  const float* rows[kLoraRows];
  for (int row = 0; row < tile.count; ++row) {
    rows[row] = shrunk + (tile.tokens[row] * sizes.parts + span.part) * sizes.rank;
  }
  const T* matrix = b + tile.slot * sizes.rank * sizes.columns;
  F32x16 sums[kLoraRows];
  for (int64_t column = span.first; column < span.last; column += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, span.last - column));
    products(tile.count, rows, matrix + column, sizes.columns, rank, n, sums);
    for (int row = 0; row < tile.count; ++row) {
      const int64_t at = tile.tokens[row] * sizes.columns + column;
      store(result + at, load(base + at, n) + sums[row], n);
    }
  }
}

// out [T, O], hidden [T, D], slots [T], a [S, P, D, R], b [S, R, O], ranks [S, P] -> [T, O].
at::Tensor add_lora(const at::Tensor& out, const at::Tensor& hidden, const at::Tensor& slots, const at::Tensor& a,
                    const at::Tensor& b, const at::Tensor& ranks, at::IntArrayRef columns) {
  check_shapes(out, hidden, slots, a, b, ranks, columns);
  const at::Tensor base = out.contiguous(), input = hidden.contiguous(), all_ranks = ranks.contiguous();
  const at::Tensor of_tokens = slots.contiguous();
  const LoraSizes sizes{a.size(1), input.size(1), a.size(3), base.size(1)};
  const auto tiles = tiles_of(of_tokens.const_data_ptr<int64_t>(), input.size(0), a.size(0));
  const auto spans = spans_of(columns);
  const int64_t* rank_of = all_ranks.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < all_ranks.numel(); ++i) {
    TORCH_CHECK(0 <= rank_of[i] && rank_of[i] <= sizes.rank, "a rank is over that of the storage: ", rank_of[i]);
  }
  at::Tensor result = at::empty_like(base);
  const at::Tensor buffer = at::empty({input.size(0) * sizes.parts * sizes.rank}, input.options().dtype(at::kFloat));
  const int64_t num_tokens = input.size(0), copies = (num_tokens + kCopiedTokens - 1) / kCopiedTokens;
  const int64_t num_tiles = std::ssize(tiles), num_spans = std::ssize(spans);
  ItemQueue first_items(copies + num_tiles * sizes.parts), expansions(num_tiles * num_spans);
  with_dtype(input, [&](auto zero) {
    using T = decltype(zero);
    float* shrunk = buffer.mutable_data_ptr<float>();
    const auto copy_or_shrink = [&](int64_t item) {
      if (item < copies) {
        return copy<T>(item, of_tokens.const_data_ptr<int64_t>(), num_tokens, sizes.columns, base.const_data_ptr<T>(),
                       result.mutable_data_ptr<T>());
      }
      item -= copies;
      const LoraTile& tile = tiles[item / sizes.parts];
      const int64_t part = item % sizes.parts;
      shrink<T>(tile, part, rank_of[tile.slot * sizes.parts + part], sizes, input.const_data_ptr<T>(),
                a.const_data_ptr<T>(), shrunk);
    };
    const auto of_b = [&](int64_t item) {
      const LoraTile& tile = tiles[item / num_spans];
      const ColumnSpan& span = spans[item % num_spans];
      expand<T>(tile, span, rank_of[tile.slot * sizes.parts + span.part], sizes, shrunk, b.const_data_ptr<T>(),
                base.const_data_ptr<T>(), result.mutable_data_ptr<T>());
    };
    constexpr int64_t kProductsANanosecond = 16, kCopiesANanosecond = 4;
    const int64_t products = num_tiles * kLoraRows * sizes.rank * (sizes.parts * sizes.depth + sizes.columns);
    const int64_t work = products / kProductsANanosecond + num_tokens * sizes.columns / kCopiesANanosecond;
    run_phases(team_size(work), Phase{first_items, copy_or_shrink}, Phase{expansions, of_b});
  });
  return result;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("add_lora", &lockstep::add_lora); }
