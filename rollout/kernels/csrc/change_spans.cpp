// Reads tensors from where they live into one run of bytes, end to end, and changes them by a delta
// (`weight_sync/delta/change_spans.py`, which defines the operator; `planes.py` describes the planes).
//
// The tables are those of `take_spans`, of whole dense tensors; moves are read.  Planes come from outside: nothing beyond
// a tensor's own part of them is read, and nothing beyond the tensor is written.
#include <vector>

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "parallel.h"
#include "span_tables.h"

namespace lockstep {
namespace {

constexpr int64_t kEscape = 255;  // as a gap: that many further; as a magnitude: it is in the wide plane
constexpr int64_t kPlanes = 5;

// A row of the table of sizes: the last five are bytes of planes.
struct DeltaSizes {
  int64_t num_changes, is_dense, gaps, directions, strides, magnitudes, wide;
};
static_assert(sizeof(DeltaSizes) == (2 + kPlanes) * sizeof(int64_t));

// A tensor's parts of the planes.
struct DeltaPlanes {
  const uint8_t *gaps, *directions, *strides, *magnitudes, *wide;
};

// Ascending positions, written as gaps.
class Positions {
 public:
  Positions(const uint8_t* gaps, int64_t size) : at_(gaps), end_(gaps + size) {}

  // The next one; -1: there is none.
  int64_t next() {
    while (at_ != end_) {
      const int64_t gap = *at_++;
      position_ += gap;
      if (gap != kEscape) return position_++;
    }
    return -1;
  }

  bool ended() const { return at_ == end_; }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
  int64_t position_ = 0;
};

// Word `i` of `count` that lie byte by byte: first the lowest byte of each.
template <class W>
W split_word(const uint8_t* bytes, int64_t count, int64_t i) {
  W word = 0;
  for (size_t byte = 0; byte < sizeof(W); ++byte) {
    word |= static_cast<W>(static_cast<W>(bytes[byte * count + i]) << (8 * byte));
  }
  return word;
}

template <class W>
void add(uint8_t* words, int64_t at, W step) {
  W word;
  std::memcpy(&word, words + at * sizeof(W), sizeof(W));
  word = static_cast<W>(word + step);
  std::memcpy(words + at * sizeof(W), &word, sizeof(W));
}

// False: the planes contradict each other.
template <class W>
bool change_densely(uint8_t* words, int64_t numel, const DeltaSizes& sizes, const DeltaPlanes& planes) {
  int64_t changes = 0;
  for (int64_t i = 0; i < numel; ++i) {
    const W step = split_word<W>(planes.wide, numel, i);
    changes += step != 0;
    add<W>(words, i, step);
  }
  return changes == sizes.num_changes;
}

// False: the planes contradict each other, or leave the tensor.
template <class W>
bool change_sparsely(uint8_t* words, int64_t numel, const DeltaSizes& sizes, const DeltaPlanes& planes) {
  constexpr uint64_t kLeastWide = kEscape + 2, kMostWide = uint64_t{1} << (8 * sizeof(W) - 1);
  const int64_t num_wide = sizes.wide / sizeof(W);
  Positions positions(planes.gaps, sizes.gaps), strides(planes.strides, sizes.strides);
  int64_t larger = 0, wide = 0, next_larger = strides.next();
  for (int64_t n = 0; n < sizes.num_changes; ++n) {
    const int64_t at = positions.next();
    if (at < 0 || at >= numel) return false;
    uint64_t size = 1;
    if (n == next_larger) {
      if (larger == sizes.magnitudes) return false;
      size = planes.magnitudes[larger++] + uint64_t{2};
      if (size == kEscape + 2) {
        if (wide == num_wide) return false;
        size = split_word<W>(planes.wide, num_wide, wide++);
        if (size < kLeastWide || size > kMostWide) return false;
      }
      next_larger = strides.next();
    }
    const bool is_towards_zero = planes.directions[n / 8] >> (n % 8) & 1;
    add<W>(words, at, static_cast<W>(is_towards_zero ? uint64_t{0} - size : size));
  }
  const int64_t used_bits = sizes.num_changes % 8;
  const bool more_bits = used_bits > 0 && planes.directions[sizes.directions - 1] >> used_bits != 0;
  return positions.ended() && next_larger < 0 && larger == sizes.magnitudes && wide == num_wide && !more_bits;
}

bool change(uint8_t* words, int64_t width, int64_t numel, const DeltaSizes& sizes, const DeltaPlanes& planes) {
  const auto apply = [&](auto zero) {
    using W = decltype(zero);
    return sizes.is_dense ? change_densely<W>(words, numel, sizes, planes)
                          : change_sparsely<W>(words, numel, sizes, planes);
  };
  switch (width) {
    case 1: return apply(uint8_t{0});
    case 2: return apply(uint16_t{0});
    case 4: return apply(uint32_t{0});
    default: return apply(uint64_t{0});
  }
}

// `rows` rows of `depth` elements, `stride` apart, from packed rows from `first` on.
template <class T>
void unpack(const T* packed, const SpanMove& move, Sizes sizes, T* to, int64_t stride) {
  for (int64_t r = 0; r < sizes.rows;) {
    const int64_t first = move.a + r, count = std::min(kLanes - first % kLanes, sizes.rows - r);
    T* rows = to + r * stride;
    const int64_t in_squares = turned(rows, stride, sizes.columns, first, count);
    const T* place = row_place(packed, sizes.columns, first, move.b, move.c);
    for (int64_t k = 0; k < in_squares; k += kLanes * kGroup<T>) {
      turn(place + k / kGroup<T> * kRowStride<T>, kRowStride<T>, rows + k, stride,
           [](float* at, const F32x16& vector) { store(at, vector); });
    }
    for (int64_t n = 0; n < count; ++n) {
      const T* row = row_place(packed, sizes.columns, first + n, move.b, move.c);
      unpack_row(row, in_squares, sizes.columns, rows + n * stride);
    }
    r += count;
  }
}

// What a move would write of a tensor is read from its storage; `to`: the dense tensor.
template <class T>
void read_packed(const SpanMove& move, const uint8_t* from, T* to, int64_t columns) {
  to += move.first_row * columns + move.first_column;
  const auto* packed = reinterpret_cast<const T*>(from);
  if (move.kind == kPacked) return unpack(packed, move, {move.rows, move.columns}, to, columns);
  const Sizes turned_sizes{move.columns, move.rows};
  std::vector<T> scratch(move.rows * move.columns);
  T* rows = scratch.data();
  unpack(packed, move, turned_sizes, rows, move.rows);
  copy_matrix(sizeof(T), reinterpret_cast<const uint8_t*>(rows), {1, move.rows}, reinterpret_cast<uint8_t*>(to),
              {columns, 1}, {move.rows, move.columns});
}

void read(const SpanMove& move, const SpanTensor& tensor, const uint8_t* storage, uint8_t* to) {
  if (move.rows == 0 || move.columns == 0) return;
  const int64_t width = tensor.held_width();
  const uint8_t* from = storage + move.offset;
  if (move.kind == kBox) {
    to += (move.first_row * tensor.columns + move.first_column) * width;
    copy_matrix(width, from, {move.a, move.b}, to, {tensor.columns, 1}, {move.rows, move.columns});
  } else if (tensor.held == kBFloat16) {
    read_packed(move, from, reinterpret_cast<bf16*>(to), tensor.columns);
  } else {
    read_packed(move, from, reinterpret_cast<float*>(to), tensor.columns);
  }
}

void check_whole(const SpanTensor& tensor, int64_t index, const uint8_t* content) {
  const bool is_whole = tensor.first_row == 0 && tensor.num_rows == tensor.rows && tensor.first_column == 0 &&
                        tensor.num_columns == tensor.columns;
  TORCH_CHECK(is_whole && tensor.sent == tensor.held && tensor.row_stride == tensor.columns &&
                  tensor.column_stride == 1,
              "tensor ", index, " is not whole, dense and held as it is sent");
  TORCH_CHECK((reinterpret_cast<uintptr_t>(content) + tensor.offset) % tensor.held_width() == 0, "tensor ", index,
              " lies between two elements");
}

void check_sizes(const DeltaSizes& sizes, const SpanTensor& tensor, int64_t index) {
  const int64_t bytes = tensor.numel() * tensor.held_width();
  const bool dense = sizes.is_dense == 1 && sizes.wide == bytes &&
                     sizes.gaps + sizes.directions + sizes.strides + sizes.magnitudes == 0;
  const bool sparse = sizes.is_dense == 0 && sizes.directions == (sizes.num_changes + 7) / 8 &&
                      sizes.wide % tensor.held_width() == 0;
  TORCH_CHECK(dense || sparse, "the sizes of tensor ", index, " do not fit it");
}

// The planes of all tensors, each in the parts of the tensors.
std::vector<DeltaPlanes> cut_planes(const at::Tensor& table, at::TensorList planes) {
  TORCH_CHECK(planes.size() == kPlanes, "there must be five planes");
  const uint8_t* next[kPlanes];
  int64_t left[kPlanes];
  for (int64_t p = 0; p < kPlanes; ++p) {
    check_bytes(planes[p], "a plane");
    next[p] = planes[p].const_data_ptr<uint8_t>();
    left[p] = planes[p].numel();
  }
  std::vector<DeltaPlanes> found;
  found.reserve(table.size(0));
  const auto* row = table.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < table.size(0); ++t, row += 2 + kPlanes) {
    found.push_back({next[0], next[1], next[2], next[3], next[4]});
    for (int64_t p = 0; p < kPlanes; ++p) {
      TORCH_CHECK(row[2 + p] <= left[p], "tensor ", t, " has more bytes of a plane than there are");
      next[p] += row[2 + p];
      left[p] -= row[2 + p];
    }
  }
  for (int64_t p = 0; p < kPlanes; ++p) TORCH_CHECK(left[p] == 0, "a plane has more bytes than its tensors");
  return found;
}

at::Tensor change_spans(at::Tensor& content, const at::Tensor& tensors, const at::Tensor& moves,
                        at::TensorList storages, const at::Tensor& sizes, at::TensorList planes, bool changes) {
  const SpanTables tables(content, tensors, moves, storages);
  check_table(sizes, 2 + kPlanes, "sizes");
  TORCH_CHECK(sizes.size(0) == tables.num_tensors, "there must be sizes of each tensor");
  check_numbers(sizes.const_data_ptr<int64_t>(), tables.num_tensors, 2 + kPlanes, "the sizes of tensor");
  auto* to = content.mutable_data_ptr<uint8_t>();
  const auto* rows = reinterpret_cast<const DeltaSizes*>(sizes.const_data_ptr<int64_t>());
  for (int64_t t = 0; t < tables.num_tensors; ++t) {
    check_whole(tables.tensors[t], t, to);
    check_sizes(rows[t], tables.tensors[t], t);
  }
  for (int64_t m = 0; m < moves.size(0); ++m) {
    TORCH_CHECK(tables.moves[m].kind != kPackedW8, "move ", m, " is of 8 bits, of which there is no base");
  }
  const std::vector<DeltaPlanes> cut = cut_planes(sizes, planes);
  std::vector<const uint8_t*> places;
  for (const at::Tensor& storage : storages) places.push_back(static_cast<const uint8_t*>(storage.const_data_ptr()));
  at::Tensor wrong = at::zeros({tables.num_tensors}, tensors.options().dtype(at::kBool));
  bool* is_wrong = wrong.mutable_data_ptr<bool>();
  for_spans(tables.num_tensors, 1, content.numel() / 4, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const SpanTensor& tensor = tables.tensors[t];
      uint8_t* words = to + tensor.offset;
      for (const int64_t own : tables.moves_of[t]) {
        const SpanMove& move = tables.moves[own];
        read(move, tensor, places[move.storage], words);
      }
      if (changes) is_wrong[t] = !change(words, tensor.held_width(), tensor.numel(), rows[t], cut[t]);
    }
  });
  return wrong;
}

}  // namespace
}  // namespace lockstep

// The operator that `weight_sync` defines, on a CPU.
TORCH_LIBRARY_IMPL(weight_sync, CPU, m) { m.impl("change_spans", &lockstep::change_spans); }
