// Parts of tensors on their way by tables (span_tables.h): what is summed, cast, rounded and written of them.
#pragma once

#include <vector>

#include "casts.h"
#include "span_tables.h"
#include "word_sums.h"

namespace lockstep {

inline constexpr int64_t kSpanBytes = 128 << 10;
inline constexpr int64_t kShortRowBytes = 256;  // shorter rows are put together before they are summed
inline constexpr int64_t kStreamedBytes = 4 << 20;  // of a bucket that is written past the caches

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
struct SpanBox {
  int64_t tensor, first_row, rows, first_column, columns;
};

// Tensors from `span.tensor` to `last` as a whole, or the span alone.
struct Item {
  SpanBox span;
  int64_t last;
};

inline uint64_t mix_odd(uint64_t k) {
  uint64_t z = (k + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (z ^ (z >> 31)) | 1;
}

// Memory of a thread that stays for the next span.
template <int kWhich>
inline uint8_t* scratch(int64_t bytes) {
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

inline void to_floats(int64_t dtype, const uint8_t* from, float* to, int64_t count) {
  switch (dtype) {
    case kFloat64: return doubles_to_floats(from, to, count);
    case kFloat32: std::memcpy(to, from, count * sizeof(float)); return;
    case kBFloat16: return bf16_to_floats(from, to, count);
    default: return half_to_floats(from, to, count);
  }
}

inline void from_floats(int64_t dtype, const float* from, uint8_t* to, int64_t count) {
  switch (dtype) {
    case kFloat64: return floats_to_doubles(from, to, count);
    case kFloat32: std::memcpy(to, from, count * sizeof(float)); return;
    case kBFloat16: return floats_to_bf16(from, to, count);
    default: return floats_to_half(from, to, count);
  }
}

// Elements that lie together.
inline void cast_run(int64_t sent, const uint8_t* from, int64_t held, uint8_t* to, int64_t count) {
  float values[kCastLanes];
  for (int64_t i = 0; i < count; i += kCastLanes) {
    const int64_t some = std::min(kCastLanes, count - i);
    to_floats(sent, from + i * kSpanDtypes[sent].width, values, some);
    from_floats(held, values, to + i * kSpanDtypes[held].width, some);
  }
}

// The part with its rows end to end.
inline Matrix put_together(const Matrix& part, int64_t width) {
  uint8_t* to = scratch<0>(part.numel() * width);
  const Strides strides{part.sizes.columns, 1};
  copy_matrix(width, part.data, part.strides, to, strides, part.sizes);
  return {to, part.sizes, strides};
}

inline Matrix cast(const Matrix& part, int64_t sent, int64_t held) {
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
inline Matrix rounded_to_w8(const Matrix& part, bool& infinite) {
  auto* to = reinterpret_cast<bf16*>(scratch<2>(part.numel() * sizeof(bf16)));
  const auto* from = reinterpret_cast<const bf16*>(part.data);
  for (int64_t r = 0; r < part.sizes.rows; ++r) {
    infinite |= w8_round(from + r * part.strides.row, part.sizes.columns, to + r * part.sizes.columns);
  }
  return {reinterpret_cast<uint8_t*>(to), part.sizes, {part.sizes.columns, 1}};
}

// Rows of a part into rows of the packed matrix at `to` from `row` on, from their element `begin` on.
template <class T>
inline void pack(const Matrix& part, const PackedRows<T>& place, int64_t row, int64_t begin) {
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
inline void pack(const Box& box, const SpanMove& move, uint8_t* to) {
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

inline void pack_w8(const Box& box, const SpanMove& move, uint8_t* to) {
  const auto* from = reinterpret_cast<const bf16*>(box.part.data);
  for (int64_t r = 0; r < box.part.sizes.rows; ++r) {
    const W8Row row(reinterpret_cast<int8_t*>(to), move.columns, move.a + box.down + r, move.b, move.c);
    row.quantise(from + r * box.part.strides.row, move.columns);
  }
}

// Writes what a span of a tensor has of a move.  `part`: the values of the span as they are held.
inline void write_part(const SpanBox& span, const Matrix& part, const SpanTensor& tensor, const SpanMove& move,
                       const std::vector<uint8_t*>& storages, bool streams) {
  const int64_t top = std::max(span.first_row, move.first_row);
  const int64_t left = std::max(span.first_column, move.first_column);
  const Sizes sizes{std::min(span.first_row + span.rows, move.first_row + move.rows) - top,
                    std::min(span.first_column + span.columns, move.first_column + move.columns) - left};
  if (sizes.rows <= 0 || sizes.columns <= 0) return;
  const int64_t width = tensor.held_width();
  const int64_t at = (top - span.first_row) * part.strides.row + (left - span.first_column) * part.strides.column;
  const Box box{{part.data + at * width, sizes, part.strides}, top - move.first_row, left - move.first_column};
  uint8_t* to = storages[move.storage] + move.offset;
  if (move.kind == kBox) {
    to += (box.down * move.a + box.right * move.b) * width;
    copy_matrix(width, box.part.data, part.strides, to, {move.a, move.b}, sizes, streams);
  } else if (move.kind == kPackedW8) {
    pack_w8(box, move, to);
  } else if (tensor.held == kBFloat16) {
    pack<bf16>(box, move, to);
  } else {
    pack<float>(box, move, to);
  }
}

}  // namespace lockstep
