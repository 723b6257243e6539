// The two tables of `weight_sync::take_spans` (`weight_sync/spans.py` describes them), and their checks.
//
// Whatever a table holds, nothing outside of the source and the storages is read or written after `check_tables`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "packed_rows.h"
#include "packed_w8.h"

namespace lockstep {

// Of `weight_sync.tensor_meta.DTYPES`, in its order, and last bfloat16 that is held in 8 bits.
struct SpanDtype {
  int64_t width;
  uint64_t mask;  // bits that only infinities and NaN have all of; 0: there are none
};
inline constexpr SpanDtype kSpanDtypes[] = {
    {8, 0x7ff0000000000000u}, {4, 0x7f800000u}, {2, 0x7f80u}, {2, 0x7c00u}, {1, 0x7fu}, {1, 0x7cu},
    {8, 0}, {4, 0}, {2, 0}, {1, 0}, {1, 0}, {1, 0}, {2, 0x7f80u},
};
inline constexpr int64_t kFloat64 = 0, kFloat32 = 1, kBFloat16 = 2, kFloat16 = 3;  // these are cast to one another
inline constexpr int64_t kInt8Blocks = 12;

// A row of the table of tensors.  The box of `num_rows` and `num_columns` is what the source has of it.
struct SpanTensor {
  int64_t offset, sent, held, rows, columns, row_stride, column_stride;
  int64_t first_row, num_rows, first_column, num_columns;

  int64_t numel() const { return num_rows * num_columns; }
  int64_t sent_width() const { return kSpanDtypes[sent].width; }
  int64_t held_width() const { return kSpanDtypes[held].width; }
  Strides strides() const { return {row_stride, column_stride}; }
};

enum MoveKind : int64_t {
  kBox = 0,
  kPacked = 1,
  kPackedW8 = 2,
  kPackedTransposed = 3,
  kPackedFp8 = 4,
  kPackedInt4 = 5,
};

// A row of the table of moves.
struct SpanMove {
  int64_t tensor, kind, storage, offset, first_row, rows, first_column, columns, a, b, c;
};

static_assert(sizeof(SpanTensor) == 11 * sizeof(int64_t) && sizeof(SpanMove) == 11 * sizeof(int64_t));

// Every number of a table is below this, so that no product of two of them and a width leaves 128 bits.  More than the
// bytes of any storage.
inline constexpr int64_t kMostOfTable = int64_t{1} << 48;
using Wide = __int128;

inline Wide end_of(int64_t offset, int64_t width, Sizes sizes, Strides strides) {
  if (sizes.rows == 0 || sizes.columns == 0) return 0;
  const Wide last = Wide{sizes.rows - 1} * strides.row + Wide{sizes.columns - 1} * strides.column;
  return offset + (last + 1) * width;
}

// The end of packed rows from `first` on, in a matrix that begins at `offset`.
inline Wide packed_end(const SpanMove& move, int64_t rows, int64_t panel_bytes) {
  if (rows == 0) return 0;
  const Wide half = (Wide{move.a} + rows - 1) / kLanes * move.b + move.c;
  return half < kMostOfTable ? move.offset + (half / kPanelVectors + 1) * panel_bytes : Wide{kMostOfTable};
}

inline Wide packed_end(const SpanMove& move, const SpanTensor& tensor) {
  if (move.kind == kPackedW8) return packed_end(move, move.rows, w8_panel_bytes(move.columns));
  const auto [rows, depth] = move.kind == kPacked ? Sizes{move.rows, move.columns} : Sizes{move.columns, move.rows};
  const bool is_bf16 = tensor.held == kBFloat16;
  const int64_t numel = is_bf16 ? panel_numel<bf16>(depth) : panel_numel<float>(depth);
  return packed_end(move, rows, numel * tensor.held_width());
}

inline void check_numbers(const int64_t* table, int64_t rows, int64_t columns, const char* name) {
  for (int64_t i = 0; i < rows * columns; ++i) {
    TORCH_CHECK(0 <= table[i] && table[i] < kMostOfTable, name, " ", i / columns, " has the number ", table[i]);
  }
}

inline void check_tensor(const SpanTensor& tensor, int64_t index, int64_t source_bytes) {
  TORCH_CHECK(tensor.sent < kInt8Blocks && tensor.held <= kInt8Blocks, "tensor ", index, " has an unknown dtype");
  const bool is_cast = tensor.sent <= kFloat16 && (tensor.held <= kFloat16 || tensor.held == kInt8Blocks);
  TORCH_CHECK(tensor.sent == tensor.held || is_cast, "tensor ", index, " would be cast from dtype ", tensor.sent,
              " to ", tensor.held);
  TORCH_CHECK(Wide{tensor.rows} * tensor.columns < kMostOfTable, "tensor ", index, " is too large");
  TORCH_CHECK(tensor.first_row + tensor.num_rows <= tensor.rows &&
                  tensor.first_column + tensor.num_columns <= tensor.columns,
              "tensor ", index, " has a box outside of it");
  TORCH_CHECK(tensor.held != kInt8Blocks || tensor.num_columns == tensor.columns, "tensor ", index,
              " has a box that cuts blocks of 8 bits");
  const Sizes sizes{tensor.num_rows, tensor.num_columns};
  TORCH_CHECK(end_of(tensor.offset, tensor.sent_width(), sizes, tensor.strides()) <= source_bytes, "tensor ", index,
              " lies outside of the source");
}

inline void check_packed_move(const SpanMove& move, const SpanTensor& tensor, int64_t index, int64_t storage_bytes) {
  const bool is_packed_dtype = move.kind == kPackedW8 ? tensor.held == kInt8Blocks
                                                      : tensor.held == kBFloat16 || tensor.held == kFloat32;
  TORCH_CHECK(is_packed_dtype, "move ", index, " packs dtype ", tensor.held);
  TORCH_CHECK(move.b >= 1 && move.c < move.b, "move ", index, " has an offset that is not below its step");
  TORCH_CHECK(packed_end(move, tensor) <= storage_bytes, "move ", index, " lies outside of its storage");
}

inline void check_move(const SpanMove& move, int64_t index, const SpanTensor* tensors, int64_t num_tensors,
                       at::TensorList storages) {
  TORCH_CHECK(move.tensor < num_tensors, "move ", index, " has no tensor");
  TORCH_CHECK(move.storage < static_cast<int64_t>(storages.size()), "move ", index, " has no storage");
  TORCH_CHECK(move.kind <= kPackedTransposed, "move ", index, " has an unknown kind");
  const SpanTensor& tensor = tensors[move.tensor];
  TORCH_CHECK(move.first_row + move.rows <= tensor.rows && move.first_column + move.columns <= tensor.columns, "move ",
              index, " lies outside of its tensor");
  const at::Tensor& storage = storages[move.storage];
  const int64_t width = move.kind == kPackedW8 ? 1 : tensor.held_width();
  const auto address = reinterpret_cast<uintptr_t>(storage.const_data_ptr()) + static_cast<uintptr_t>(move.offset);
  TORCH_CHECK(address % width == 0, "move ", index, " has a destination between two elements");
  if (move.kind != kBox) return check_packed_move(move, tensor, index, storage.numel());
  const Wide end = end_of(move.offset, width, {move.rows, move.columns}, {move.a, move.b});
  TORCH_CHECK(end <= storage.numel(), "move ", index, " lies outside of its storage");
}

inline void check_bytes(const at::Tensor& bytes, const char* name) {
  TORCH_CHECK(bytes.dim() == 1 && bytes.is_contiguous() && bytes.scalar_type() == at::kByte && bytes.is_cpu(), name,
              " must be uint8 [bytes], contiguous");
}

inline void check_table(const at::Tensor& table, int64_t columns, const char* name) {
  TORCH_CHECK(table.dim() == 2 && table.size(1) == columns && table.is_contiguous() && table.is_cpu() &&
                  table.scalar_type() == at::kLong,
              name, " must be int64 [rows, ", columns, "], contiguous");
}

// The moves of each tensor, by number.
class MovesOf {
 public:
  MovesOf() = default;
  MovesOf(const SpanMove* moves, int64_t num_moves, int64_t num_tensors) : first_(num_tensors + 1), order_(num_moves) {
    for (int64_t m = 0; m < num_moves; ++m) ++first_[moves[m].tensor + 1];
    for (int64_t t = 0; t < num_tensors; ++t) first_[t + 1] += first_[t];
    std::vector<int64_t> next(first_.begin(), first_.end() - 1);
    for (int64_t m = 0; m < num_moves; ++m) order_[next[moves[m].tensor]++] = m;
  }

  std::span<const int64_t> operator[](int64_t tensor) const {
    return {order_.data() + first_[tensor], static_cast<size_t>(first_[tensor + 1] - first_[tensor])};
  }

 private:
  std::vector<int64_t> first_, order_;
};

// The tables of one call, checked.
struct SpanTables {
  const SpanTensor* tensors;
  int64_t num_tensors;
  const SpanMove* moves;
  MovesOf moves_of;

  SpanTables(const at::Tensor& source, const at::Tensor& tensor_table, const at::Tensor& move_table,
             at::TensorList storages) {
    check_bytes(source, "the source");
    for (const at::Tensor& storage : storages) check_bytes(storage, "a storage");
    check_table(tensor_table, 11, "tensors");
    check_table(move_table, 11, "moves");
    num_tensors = tensor_table.size(0);
    const int64_t num_moves = move_table.size(0);
    const auto* tensor_numbers = tensor_table.const_data_ptr<int64_t>();
    const auto* move_numbers = move_table.const_data_ptr<int64_t>();
    check_numbers(tensor_numbers, num_tensors, 11, "tensor");
    check_numbers(move_numbers, num_moves, 11, "move");
    tensors = reinterpret_cast<const SpanTensor*>(tensor_numbers);
    moves = reinterpret_cast<const SpanMove*>(move_numbers);
    for (int64_t t = 0; t < num_tensors; ++t) check_tensor(tensors[t], t, source.numel());
    for (int64_t m = 0; m < num_moves; ++m) check_move(moves[m], m, tensors, num_tensors, storages);
    moves_of = MovesOf(moves, num_moves, num_tensors);
  }

  bool packs(int64_t tensor) const {
    const auto own = moves_of[tensor];
    return std::any_of(own.begin(), own.end(), [&](int64_t move) { return moves[move].kind != kBox; });
  }
};

}  // namespace lockstep
