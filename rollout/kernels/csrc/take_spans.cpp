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

#include "casts.h"
#include "parallel.h"
#include "span_tables.h"
#include "word_sums.h"

namespace lockstep {
namespace {

constexpr int64_t kSpanBytes = 128 << 10;
constexpr int64_t kTallRows = 64;      // of a span whose rows do not lie together: what is read of a column fills lines
constexpr int64_t kShortRowBytes = 256;  // shorter rows are put together before they are summed
constexpr int64_t kStreamedBytes = 4 << 20;  // of a bucket that is written past the caches

// A part of a matrix in memory; strides in elements.
struct Matrix {
  const uint8_t* data;
  Sizes sizes;
  Strides strides;

  int64_t numel() const { return sizes.rows * sizes.columns; }
  bool has_whole_rows() const { return strides.column == 1 || sizes.columns == 1; }
  bool is_one_run() const { return has_whole_rows() && (strides.row == sizes.columns || sizes.rows == 1); }
};

// A box of a tensor.
struct Span {
  int64_t tensor, first_row, rows, first_column, columns;
};

// Tensors from `span.tensor` to `last` as a whole, or the span alone.
struct Item {
  Span span;
  int64_t last;
};

uint64_t mix_odd(uint64_t k) {
  uint64_t z = (k + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (z ^ (z >> 31)) | 1;
}

// Memory of a thread that stays for the next span.
template <int kWhich>
uint8_t* scratch(int64_t bytes) {
  thread_local std::vector<uint64_t> memory;
  const size_t words = (bytes + 7) / 8;
  if (memory.size() < words) memory.resize(words);
  return reinterpret_cast<uint8_t*>(memory.data());
}

// The sum of a part of a tensor, and whether all of it is finite.
struct Found {
  uint64_t sum = 0;
  bool infinite = false;
};

class Summing {
 public:
  explicit Summing(const at::Tensor& multipliers)
      : table_(reinterpret_cast<const uint64_t*>(multipliers.const_data_ptr<int64_t>())),
        block_(multipliers.numel()) {
    before_.reserve(block_ + 1);
    before_.push_back(0);
    for (int64_t j = 0; j < block_; ++j) before_.push_back(before_.back() + table_[j]);
  }

  // Of a part whose first element is (first_row, first_column) of a tensor with `columns` columns.
  Found of(const Matrix& part, int64_t dtype, int64_t first_row, int64_t first_column, int64_t columns) const {
    switch (kSpanDtypes[dtype].width) {
      case 1: return of_words<uint8_t>(part, dtype, first_row * columns + first_column, columns);
      case 2: return of_words<uint16_t>(part, dtype, first_row * columns + first_column, columns);
      case 4: return of_words<uint32_t>(part, dtype, first_row * columns + first_column, columns);
      default: return of_words<uint64_t>(part, dtype, first_row * columns + first_column, columns);
    }
  }

 private:
  template <class W>
  Found of_words(const Matrix& part, int64_t dtype, int64_t start, int64_t columns) const {
    Found found;
    const uint64_t mask = kSpanDtypes[dtype].mask;
    if (part.is_one_run() && (part.sizes.columns == columns || part.sizes.rows == 1)) {
      add_run<W>(part.data, start, part.sizes.rows * part.sizes.columns, mask, found);
    } else {
      for (int64_t r = 0; r < part.sizes.rows; ++r) {
        const uint8_t* row = part.data + r * part.strides.row * sizeof(W);
        add_run<W>(row, start + r * columns, part.sizes.columns, mask, found);
      }
    }
    found.infinite &= mask != 0;
    return found;
  }

  // `count` words that lie together, the first at flat index `start` of the tensor.
  template <class W>
  void add_run(const uint8_t* words, int64_t start, int64_t count, uint64_t mask, Found& found) const {
    while (count > 0) {
      const int64_t within = start % block_;
      int64_t taken = std::min(count, block_ - within);
      if (within == 0 && count >= kTogether * block_) {
        taken = kTogether * block_;
        add_blocks<W, kTogether>(words, start, 0, block_, mask, found);
      } else {
        add_blocks<W, 1>(words, start, within, taken, mask, found);
      }
      words += taken * sizeof(W);
      start += taken;
      count -= taken;
    }
  }

  // `size` words of each of `kRuns` blocks, from word `within` of the block on.
  template <class W, int64_t kRuns>
  void add_blocks(const uint8_t* words, int64_t start, int64_t within, int64_t size, uint64_t mask,
                  Found& found) const {
    const uint8_t* runs[kRuns];
    uint64_t sums[kRuns];
    bool masked[kRuns];
    for (int64_t n = 0; n < kRuns; ++n) runs[n] = words + n * block_ * sizeof(W);
    sum_runs<W>(runs, table_ + within, size, mask, sums, masked);
    const uint64_t ones = before_[within + size] - before_[within];
    for (int64_t n = 0; n < kRuns; ++n) {
      found.sum += mix_odd(2 * static_cast<uint64_t>(start / block_ + n)) * (sums[n] + ones);
      found.infinite |= masked[n];
    }
  }

  const uint64_t* table_;
  const int64_t block_;
  std::vector<uint64_t> before_;  // sums of the first multipliers
};

void to_floats(int64_t dtype, const uint8_t* from, float* to, int64_t count) {
  switch (dtype) {
    case kFloat64: return doubles_to_floats(from, to, count);
    case kFloat32: std::memcpy(to, from, count * sizeof(float)); return;
    case kBFloat16: return bf16_to_floats(from, to, count);
    default: return half_to_floats(from, to, count);
  }
}

void from_floats(int64_t dtype, const float* from, uint8_t* to, int64_t count) {
  switch (dtype) {
    case kFloat64: return floats_to_doubles(from, to, count);
    case kFloat32: std::memcpy(to, from, count * sizeof(float)); return;
    case kBFloat16: return floats_to_bf16(from, to, count);
    default: return floats_to_half(from, to, count);
  }
}

// Elements that lie together.
void cast_run(int64_t sent, const uint8_t* from, int64_t held, uint8_t* to, int64_t count) {
  float values[kCastLanes];
  for (int64_t i = 0; i < count; i += kCastLanes) {
    const int64_t some = std::min(kCastLanes, count - i);
    to_floats(sent, from + i * kSpanDtypes[sent].width, values, some);
    from_floats(held, values, to + i * kSpanDtypes[held].width, some);
  }
}

// The part with its rows end to end.
Matrix put_together(const Matrix& part, int64_t width) {
  uint8_t* to = scratch<0>(part.numel() * width);
  const Strides strides{part.sizes.columns, 1};
  copy_matrix(width, part.data, part.strides, to, strides, part.sizes);
  return {to, part.sizes, strides};
}

Matrix cast(const Matrix& part, int64_t sent, int64_t held) {
  if (sent == held) return part;
  const int64_t rows = part.is_one_run() ? 1 : part.sizes.rows, run = part.numel() / rows;
  const int64_t sent_width = kSpanDtypes[sent].width, held_width = kSpanDtypes[held].width;
  uint8_t* to = scratch<1>(part.numel() * held_width);
  for (int64_t r = 0; r < rows; ++r) {
    cast_run(sent, part.data + r * part.strides.row * sent_width, held, to + r * run * held_width, run);
  }
  return {to, part.sizes, {part.sizes.columns, 1}};
}

// The values of bf16 that are held in 8 bits; `infinite` is set where one is not finite.
Matrix rounded_to_w8(const Matrix& part, bool& infinite) {
  auto* to = reinterpret_cast<bf16*>(scratch<2>(part.numel() * sizeof(bf16)));
  const auto* from = reinterpret_cast<const bf16*>(part.data);
  for (int64_t r = 0; r < part.sizes.rows; ++r) {
    infinite |= w8_round(from + r * part.strides.row, part.sizes.columns, to + r * part.sizes.columns);
  }
  return {reinterpret_cast<uint8_t*>(to), part.sizes, {part.sizes.columns, 1}};
}

// Rows of a part into rows of the packed matrix at `to` from `row` on, from their element `begin` on.
template <class T>
void pack(const Matrix& part, const PackedRows<T>& place, int64_t row, int64_t begin) {
  for (int64_t r = 0; r < part.sizes.rows;) {
    const int64_t count = std::min(kLanes - (row + r) % kLanes, part.sizes.rows - r);
    const T* from = reinterpret_cast<const T*>(part.data) + r * part.strides.row;
    place.put(from, part.strides.row, row + r, count, begin, part.sizes.columns);
    r += count;
  }
}

// A box that begins `down` rows and `right` columns into its move.
struct Box {
  Matrix part;
  int64_t down, right;
};

template <class T>
void pack(const Box& box, const SpanMove& move, uint8_t* to) {
  auto* packed = reinterpret_cast<T*>(to);
  if (move.kind == kPacked) {
    return pack(box.part, PackedRows<T>{packed, move.columns, move.b, move.c}, move.a + box.down, box.right);
  }
  const Matrix& part = box.part;
  uint8_t* turned = scratch<3>(part.numel() * sizeof(T));
  const Sizes sizes{part.sizes.columns, part.sizes.rows};
  copy_matrix(sizeof(T), part.data, {part.strides.column, part.strides.row}, turned, {sizes.columns, 1}, sizes);
  const Matrix rows{turned, sizes, {sizes.columns, 1}};
  pack(rows, PackedRows<T>{packed, move.rows, move.b, move.c}, move.a + box.right, box.down);
}

void pack_w8(const Box& box, const SpanMove& move, uint8_t* to) {
  const auto* from = reinterpret_cast<const bf16*>(box.part.data);
  for (int64_t r = 0; r < box.part.sizes.rows; ++r) {
    const W8Row row(reinterpret_cast<int8_t*>(to), move.columns, move.a + box.down + r, move.b, move.c);
    row.quantise(from + r * box.part.strides.row, move.columns);
  }
}

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
  Span whole(int64_t t) const {
    const SpanTensor& tensor = tables_.tensors[t];
    return {t, tensor.first_row, tensor.num_rows, tensor.first_column, tensor.num_columns};
  }

  // Packed rows are whole, and go in blocks of sixteen.
  void cut(int64_t t, std::vector<Item>& items) const {
    const SpanTensor& tensor = tables_.tensors[t];
    const int64_t elements = kSpanBytes / std::max(tensor.sent_width(), tensor.held_width());
    const bool packs = tables_.packs(t);
    const Span all = whole(t);
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

  void take(const Span& span) const {
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
    for (int64_t i = tables_.first[span.tensor]; i < tables_.first[span.tensor + 1]; ++i) {
      write(span, part, tensor, tables_.moves[tables_.order[i]]);
    }
  }

  // The values that are held of a part, noted.
  Matrix held(const Span& span, const Matrix& sent, const SpanTensor& tensor) const {
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
  void note(const Span& span, const Matrix& part, int64_t dtype, int64_t first, int64_t last,
            bool infinite = false) const {
    const int64_t columns = tables_.tensors[span.tensor].columns;
    Found found = summing_->of(part, dtype, span.first_row, span.first_column, columns);
    found.infinite |= infinite;
    for (int64_t column = first; column <= last; ++column) {
      __atomic_fetch_add(sums_ + 2 * span.tensor + column, found.sum, __ATOMIC_RELAXED);
      if (found.infinite) __atomic_store_n(infinite_ + 2 * span.tensor + column, true, __ATOMIC_RELAXED);
    }
  }

  void write(const Span& span, const Matrix& part, const SpanTensor& tensor, const SpanMove& move) const {
    const int64_t top = std::max(span.first_row, move.first_row);
    const int64_t left = std::max(span.first_column, move.first_column);
    const Sizes sizes{std::min(span.first_row + span.rows, move.first_row + move.rows) - top,
                      std::min(span.first_column + span.columns, move.first_column + move.columns) - left};
    if (sizes.rows <= 0 || sizes.columns <= 0) return;
    const int64_t width = tensor.held_width();
    const int64_t at = (top - span.first_row) * part.strides.row + (left - span.first_column) * part.strides.column;
    const Box box{{part.data + at * width, sizes, part.strides}, top - move.first_row, left - move.first_column};
    uint8_t* to = storages_[move.storage] + move.offset;
    if (move.kind == kBox) {
      to += (box.down * move.a + box.right * move.b) * width;
      copy_matrix(width, box.part.data, part.strides, to, {move.a, move.b}, sizes, streams_);
    } else if (move.kind == kPackedW8) {
      pack_w8(box, move, to);
    } else if (tensor.held == kBFloat16) {
      pack<bf16>(box, move, to);
    } else {
      pack<float>(box, move, to);
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
