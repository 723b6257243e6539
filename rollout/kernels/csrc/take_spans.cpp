// Takes the tensors of a bucket to where they live, by two tables: sums, finite checks, casts and copies in one pass
// (`weight_sync/take_spans.py`, which defines the operator and does without this kernel).
//
// Work is cut by bytes: a large tensor into spans of rows or of columns, and small ones go together.  A span is read,
// summed, cast and written while it is in the second-level cache.  Sums wrap, so spans add theirs in any order.
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "parallel.h"
#include "span_parts.h"

namespace lockstep {
namespace {

constexpr int64_t kTallRows = 64;  // of a span whose rows do not lie together: what is read of a column fills lines

class Taking {
 public:
  Taking(const at::Tensor& source, const SpanTables& tables, std::vector<uint8_t*> storages, const Summing* summing,
         bool writes, uint64_t* sums, bool* infinite)
      : source_(source.const_data_ptr<uint8_t>()),
        tables_(tables),
        storages_(std::move(storages)),
        summing_(summing),
        writes_(writes),
        streams_(source.numel() >= kStreamedBytes),
        sums_(sums),
        infinite_(infinite) {}

  // Cuts the work into items; returns its bytes.
  int64_t plan(std::vector<Item>& items) const {
    int64_t bytes = 0, together = 0;
    for (int64_t t = 0; t < tables_.num_tensors; ++t) {
      const SpanTensor& tensor = tables_.tensors[t];
      const int64_t own = tensor.numel() * std::max(tensor.sent_width(), tensor.held_width());
      bytes += own;
      if (own > 2 * kSpanBytes) {
        cut(t, items);
        together = 0;
      } else if (together > 0 && together + own <= kSpanBytes) {
        items.back().last = t;
        together += own;
      } else {
        items.push_back({whole(t), t});
        together = std::max<int64_t>(own, 1);
      }
    }
    return bytes;
  }

  void take(const Item& item) const {
    take(item.span);
    for (int64_t t = item.span.tensor + 1; t <= item.last; ++t) {
      take(whole(t));
    }
    streamed();
  }

 private:
  // All that the source has of a tensor.
  SpanBox whole(int64_t t) const {
    const SpanTensor& tensor = tables_.tensors[t];
    return {t, tensor.first_row, tensor.num_rows, tensor.first_column, tensor.num_columns};
  }

  // Packed rows are whole, and go in blocks of sixteen.
  void cut(int64_t t, std::vector<Item>& items) const {
    const SpanTensor& tensor = tables_.tensors[t];
    const int64_t elements = kSpanBytes / std::max(tensor.sent_width(), tensor.held_width());
    const bool packs = tables_.packs(t);
    const SpanBox all = whole(t);
    int64_t columns = all.columns;
    if (!packs) columns = std::min(columns, tensor.column_stride == 1 ? elements : elements / kTallRows);
    int64_t rows = std::max<int64_t>(elements / columns, 1);
    if (rows >= kLanes || packs) rows = std::max<int64_t>(rows / kLanes, 1) * kLanes;
    for (int64_t r = 0; r < all.rows; r += rows) {
      for (int64_t c = 0; c < all.columns; c += columns) {
        const Sizes sizes{std::min(rows, all.rows - r), std::min(columns, all.columns - c)};
        items.push_back({{t, all.first_row + r, sizes.rows, all.first_column + c, sizes.columns}, t});
      }
    }
  }

  void take(const SpanBox& span) const {
    if (span.rows == 0 || span.columns == 0) return;
    const SpanTensor& tensor = tables_.tensors[span.tensor];
    const int64_t width = tensor.sent_width();
    const int64_t down = span.first_row - tensor.first_row, right = span.first_column - tensor.first_column;
    const int64_t at = down * tensor.row_stride + right * tensor.column_stride;
    Matrix part{source_ + tensor.offset + at * width, {span.rows, span.columns}, tensor.strides()};
    if (!lies_well(part, width, tables_.packs(span.tensor))) part = put_together(part, width);
    const bool is_cast = tensor.sent != tensor.held;
    if (summing_ != nullptr) note(span, part, tensor.sent, 0, is_cast ? 0 : 1);
    if (is_cast) part = held(span, part, tensor);
    if (!writes_) return;
    for (const int64_t move : tables_.moves_of[span.tensor]) {
      write_part(span, part, tensor, tables_.moves[move], storages_, streams_);
    }
  }

  // The values that are held of a part, noted.
  Matrix held(const SpanBox& span, const Matrix& sent, const SpanTensor& tensor) const {
    bool infinite = false;
    Matrix part = cast(sent, tensor.sent, tensor.held == kInt8Blocks ? kBFloat16 : tensor.held);
    if (tensor.held == kInt8Blocks) part = rounded_to_w8(part, infinite);
    if (summing_ != nullptr) note(span, part, tensor.held, 1, 1, infinite);
    return part;
  }

  // Whether its rows can be summed, cast and packed where they are.
  static bool lies_well(const Matrix& part, int64_t width, bool packs) {
    if (!part.has_whole_rows() || reinterpret_cast<uintptr_t>(part.data) % width != 0) return false;
    const auto group = static_cast<int64_t>(sizeof(uint32_t));
    if (packs && (reinterpret_cast<uintptr_t>(part.data) | part.strides.row * width) % group != 0) return false;
    return part.is_one_run() || part.sizes.columns * width >= kShortRowBytes;
  }

  // Adds the sum of a span to the results in columns `first` to `last`.
  void note(const SpanBox& span, const Matrix& part, int64_t dtype, int64_t first, int64_t last,
            bool infinite = false) const {
    const int64_t columns = tables_.tensors[span.tensor].columns;
    Found found = summing_->of(part, dtype, span.first_row, span.first_column, columns);
    found.infinite |= infinite;
    for (int64_t column = first; column <= last; ++column) {
      __atomic_fetch_add(sums_ + 2 * span.tensor + column, found.sum, __ATOMIC_RELAXED);
      if (found.infinite) __atomic_store_n(infinite_ + 2 * span.tensor + column, true, __ATOMIC_RELAXED);
    }
  }

  const uint8_t* source_;
  const SpanTables& tables_;
  const std::vector<uint8_t*> storages_;
  const Summing* summing_;
  const bool writes_;
  const bool streams_;
  uint64_t* sums_;
  bool* infinite_;
};

std::tuple<at::Tensor, at::Tensor> take_spans(const at::Tensor& source, const at::Tensor& tensors,
                                              const at::Tensor& moves, at::TensorList storages,
                                              const at::Tensor& multipliers, bool checks, bool writes) {
  TORCH_CHECK(multipliers.dim() == 1 && multipliers.is_contiguous() && multipliers.scalar_type() == at::kLong &&
                  multipliers.numel() > 0,
              "multipliers must be int64 [J]");
  const SpanTables tables(source, tensors, moves, storages);
  at::Tensor sums = at::zeros({tables.num_tensors, 2}, tensors.options());
  at::Tensor infinite = at::zeros({tables.num_tensors, 2}, tensors.options().dtype(at::kBool));
  std::vector<uint8_t*> places;
  for (const at::Tensor& storage : storages) places.push_back(static_cast<uint8_t*>(storage.mutable_data_ptr()));
  std::optional<Summing> summing;
  if (checks) summing.emplace(multipliers);
  const Taking taking(source, tables, std::move(places), checks ? &*summing : nullptr, writes,
                      reinterpret_cast<uint64_t*>(sums.mutable_data_ptr<int64_t>()), infinite.mutable_data_ptr<bool>());
  if (!checks && !writes) return {sums, infinite};
  std::vector<Item> items;
  const int64_t bytes = taking.plan(items);
  for_spans(items.size(), 1, bytes / 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) taking.take(items[i]);
  });
  return {sums, infinite};
}

}  // namespace
}  // namespace lockstep

// The operator that `weight_sync` defines, on a CPU.
TORCH_LIBRARY_IMPL(weight_sync, CPU, m) { m.impl("take_spans", &lockstep::take_spans); }
