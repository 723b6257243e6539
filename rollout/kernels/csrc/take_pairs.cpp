// Takes the quantised weights of a bucket to where they live, by two tables (`weight_sync/take_pairs.py` describes them):
// the sums of all parts, values, elements and scales, in one pass, with the bits of `fp8_blocks.py`, `int4_groups.py` and
// `int8_blocks.py`.
//
// A weight is cut into bands of rows.  A band is read, summed, computed and written while it is in the second-level cache.
//
//   as sent      values | FP8 | INT4
//   values       cast | elements * scales, in the dtype of the model
//   as held      values | quantised again: FP8, INT4, 8 bits | FP8 and INT4 as they came
//
// Shapes: R rows of a band, C columns, N blocks or groups of a row.
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "held_rows.h"
#include "held_values.h"
#include "parallel.h"
#include "span_parts.h"

namespace lockstep {
namespace {

enum PairForm : int64_t { kValues = 0, kFp8Blocks = 1, kInt4Groups = 2, kEightBits = 3 };
enum Wrong : uint8_t { kInfinite = 1, kWrongScale = 2, kWrongShape = 4, kLargeScale = 8 };
constexpr int64_t kInt64 = 6, kInt32 = 7, kFp8Dtype = 4;  // of kSpanDtypes
constexpr int64_t kSums = 4;                              // parts at most, and the values held
constexpr int64_t kOfWord = 8;                            // integers of 4 bits
constexpr float kScalesBelow = 0x1p120f;

// A row of the table.  `sent`: the dtype of values, of scales of FP8, of a shape of INT4.
struct PairTensor {
  int64_t offset, form, sent, scales, shape, group, rows, columns, values, held, held_group;

  bool is_kept() const { return form != kValues && form == held; }
  // Where values are computed from elements and scales of its own.
  bool is_quantised() const { return held != kValues && !is_kept(); }
  int64_t row_bytes() const {
    if (form == kInt4Groups) return columns / 2;
    return form == kFp8Blocks ? columns : columns * kSpanDtypes[sent].width;
  }
  int64_t value_width() const { return kSpanDtypes[values].width; }
  // The tensor of values as write_part takes it.
  SpanTensor as_held() const {
    return {0, values, held == kEightBits ? kInt8Blocks : values, rows, columns, columns, 1, 0, rows, 0, columns};
  }
};
static_assert(sizeof(PairTensor) == 11 * sizeof(int64_t));

int64_t groups_of(int64_t columns, int64_t group) { return (columns + group - 1) / group; }
bool is_group(int64_t group) { return group == kHeldStep || group == kScaleBlock; }

void check_pair(const PairTensor& pair, int64_t index, int64_t source_bytes) {
  TORCH_CHECK(pair.form <= kInt4Groups && pair.held <= kEightBits, "pair ", index, " has an unknown form");
  TORCH_CHECK(pair.values <= kFloat16, "pair ", index, " has values of dtype ", pair.values);
  const bool is_right = pair.form == kInt4Groups  ? pair.sent == kInt64 || pair.sent == kInt32
                        : pair.form == kFp8Blocks ? pair.sent >= kFloat32 && pair.sent <= kFloat16
                                                  : pair.sent <= kFloat16;
  TORCH_CHECK(is_right, "pair ", index, " has parts of dtype ", pair.sent);
  TORCH_CHECK(pair.held != kEightBits || pair.values == kBFloat16, "pair ", index, " has 8 bits of dtype ", pair.values);
  TORCH_CHECK(Wide{pair.rows} * pair.columns < kMostOfTable, "pair ", index, " is too large");
  const bool has_groups = pair.form != kInt4Groups || (is_group(pair.group) && pair.columns % pair.group == 0);
  const bool holds_groups = pair.held != kInt4Groups || is_group(pair.held_group);
  const bool fit = !pair.is_kept() || pair.form != kInt4Groups || pair.group % pair.held_group == 0;
  TORCH_CHECK(has_groups && holds_groups && fit, "pair ", index, " has groups of ", pair.group, " and ", pair.held_group);
  const int64_t width = kSpanDtypes[pair.sent].width;
  Wide ends[] = {Wide{pair.offset} + Wide{pair.rows} * pair.row_bytes(), 0, 0};
  if (pair.form == kFp8Blocks) ends[1] = Wide{pair.scales} + Wide{blocks_of(pair.rows)} * blocks_of(pair.columns) * width;
  if (pair.form == kInt4Groups) {
    ends[1] = Wide{pair.scales} + Wide{pair.rows} * (pair.columns / pair.group) * Wide{sizeof(bf16)};
    ends[2] = Wide{pair.shape} + 2 * width;
  }
  for (const Wide end : ends) TORCH_CHECK(end <= source_bytes, "pair ", index, " lies outside of the source");
}

void check_pair_move(const SpanMove& move, int64_t index, const PairTensor& pair, at::TensorList storages) {
  TORCH_CHECK(move.storage < static_cast<int64_t>(storages.size()), "move ", index, " has no storage");
  const bool is_fp8 = move.kind == kPackedFp8;
  TORCH_CHECK(pair.held == (is_fp8 ? kFp8Blocks : kInt4Groups), "move ", index, " packs form ", pair.held);
  TORCH_CHECK(move.first_row + move.rows <= pair.rows && move.first_column + move.columns <= pair.columns, "move ",
              index, " lies outside of its tensor");
  TORCH_CHECK(move.b >= 1 && move.c < move.b, "move ", index, " has an offset that is not below its step");
  const int64_t block = is_fp8 ? kScaleBlock : pair.held_group;
  const bool cuts = move.first_column % block != 0 || (is_fp8 && (move.first_row % block != 0 || move.a % kLanes != 0));
  TORCH_CHECK(!cuts, "move ", index, " begins inside a block");
  const int64_t panel = is_fp8 ? held_panel_bytes<Fp8Step>(move.columns) : held_panel_bytes<Int4Step>(move.columns);
  TORCH_CHECK(packed_end(move, move.rows, panel) <= storages[move.storage].numel(), "move ", index,
              " lies outside of its storage");
}

// The tables of one call, checked.
struct PairTables {
  const PairTensor* pairs;
  int64_t num_pairs;
  const SpanMove* moves;
  std::vector<SpanTensor> held;
  MovesOf moves_of;

  PairTables(const at::Tensor& source, const at::Tensor& pair_table, const at::Tensor& move_table,
             at::TensorList storages) {
    check_bytes(source, "the source");
    for (const at::Tensor& storage : storages) check_bytes(storage, "a storage");
    check_table(pair_table, 11, "pairs");
    check_table(move_table, 11, "moves");
    num_pairs = pair_table.size(0);
    const int64_t num_moves = move_table.size(0);
    const auto* pair_numbers = pair_table.const_data_ptr<int64_t>();
    const auto* move_numbers = move_table.const_data_ptr<int64_t>();
    check_numbers(pair_numbers, num_pairs, 11, "pair");
    check_numbers(move_numbers, num_moves, 11, "move");
    pairs = reinterpret_cast<const PairTensor*>(pair_numbers);
    moves = reinterpret_cast<const SpanMove*>(move_numbers);
    held.reserve(num_pairs);
    for (int64_t q = 0; q < num_pairs; ++q) {
      check_pair(pairs[q], q, source.numel());
      held.push_back(pairs[q].as_held());
    }
    for (int64_t m = 0; m < num_moves; ++m) {
      TORCH_CHECK(moves[m].tensor < num_pairs, "move ", m, " has no tensor");
      const bool is_pair = moves[m].kind == kPackedFp8 || moves[m].kind == kPackedInt4;
      if (is_pair) check_pair_move(moves[m], m, pairs[moves[m].tensor], storages);
      if (!is_pair) check_move(moves[m], m, held.data(), num_pairs, storages);
    }
    moves_of = MovesOf(moves, num_moves, num_pairs);
  }
};

// Elements and scales of a band, as they are held: codes [R, C] with float32 [R / 128, N], or integers [R, C] with
// bf16 [R, N].
struct Elements {
  const uint8_t* elements = nullptr;
  const float* block_scales = nullptr;
  const bf16* group_scales = nullptr;
  int64_t group = 0;
};

class TakingPairs {
 public:
  TakingPairs(const at::Tensor& source, const PairTables& tables, std::vector<uint8_t*> storages,
              const Summing* summing, bool writes, uint64_t* sums, uint8_t* wrong)
      : source_(source.const_data_ptr<uint8_t>()),
        tables_(tables),
        storages_(std::move(storages)),
        summing_(summing),
        writes_(writes),
        streams_(source.numel() >= kStreamedBytes),
        sums_(sums),
        wrong_(wrong) {}

  // Cuts the work into items; returns about how many nanoseconds it takes one thread.
  int64_t plan(std::vector<Item>& items) const {
    int64_t elements = 0, together = 0;
    for (int64_t q = 0; q < tables_.num_pairs; ++q) {
      const PairTensor& pair = tables_.pairs[q];
      const int64_t own = pair.rows * pair.columns * pair.value_width();
      elements += pair.rows * pair.columns;
      if (own > 2 * kSpanBytes) {
        cut(q, items);
        together = 0;
      } else if (together > 0 && together + own <= kSpanBytes) {
        items.back().last = q;
        together += own;
      } else {
        items.push_back({band(q, 0, pair.rows), q});
        together = std::max<int64_t>(own, 1);
      }
    }
    return elements;
  }

  void take(const Item& item) const {
    take(item.span);
    for (int64_t q = item.span.tensor + 1; q <= item.last; ++q) take(band(q, 0, tables_.pairs[q].rows));
    streamed();
  }

 private:
  SpanBox band(int64_t q, int64_t first_row, int64_t rows) const {
    return {q, first_row, rows, 0, tables_.pairs[q].columns};
  }

  // Bands begin with whole blocks where blocks are made, and with whole vectors of packed rows.
  void cut(int64_t q, std::vector<Item>& items) const {
    const PairTensor& pair = tables_.pairs[q];
    const int64_t unit = pair.is_quantised() && pair.held == kFp8Blocks ? kScaleBlock : kLanes;
    const int64_t fitting = kSpanBytes / std::max<int64_t>(pair.columns * pair.value_width(), 1);
    const int64_t rows = std::max<int64_t>(fitting / unit, 1) * unit;
    for (int64_t r = 0; r < pair.rows; r += rows) items.push_back({band(q, r, std::min(rows, pair.rows - r)), q});
  }

  void take(const SpanBox& span) const {
    const PairTensor& pair = tables_.pairs[span.tensor];
    if (span.first_row == 0) check_parts(span.tensor, pair);
    if (span.rows == 0 || span.columns == 0) return;
    const uint8_t* from = source_ + pair.offset + span.first_row * pair.row_bytes();
    Elements found;
    Matrix values = values_of(span, pair, from, found);
    bool infinite = false;
    if (pair.held == kEightBits) values = rounded_to_w8(values, infinite);
    if (pair.is_quantised() && pair.held != kEightBits) {
      found = quantised(pair, values, infinite);
      values = decoded(pair, found, span.rows, pair.values);
    }
    if (summing_ != nullptr) {
      note(span, values, pair.values, kSums - 1);
      if (infinite) mark(span.tensor, kInfinite);
    }
    if (!writes_) return;
    for (const int64_t move : tables_.moves_of[span.tensor]) write(span, pair, values, found, tables_.moves[move]);
  }

  // Values of a band as they came, in the dtype of the model; its elements are `found` where they are held.
  Matrix values_of(const SpanBox& span, const PairTensor& pair, const uint8_t* from, Elements& found) const {
    if (pair.form == kValues) {
      Matrix part{from, {span.rows, span.columns}, {span.columns, 1}};
      const int64_t width = kSpanDtypes[pair.sent].width;
      if (reinterpret_cast<uintptr_t>(from) % width != 0) part = put_together(part, width);
      if (summing_ != nullptr) note(span, part, pair.sent, 0);
      return cast(part, pair.sent, pair.values);
    }
    if (pair.form == kFp8Blocks) {
      const int64_t blocks = blocks_of(pair.columns), first = span.first_row / kScaleBlock;
      const int64_t count = ((span.first_row + span.rows - 1) / kScaleBlock - first + 1) * blocks;
      auto* scales = reinterpret_cast<float*>(scratch<4>(count * sizeof(float)));
      const int64_t width = kSpanDtypes[pair.sent].width;
      to_floats(pair.sent, source_ + pair.scales + first * blocks * width, scales, count);
      found = {from, scales, nullptr, 0};
      if (summing_ != nullptr) {
        note(span, {from, {span.rows, span.columns}, {span.columns, 1}}, kFp8Dtype, 0, false);
      }
      return decoded(pair, found, span.rows, pair.values, span.first_row % kScaleBlock);
    }
    const int64_t groups = pair.columns / pair.group, words = span.columns / kOfWord;
    auto* scales = reinterpret_cast<bf16*>(scratch<4>(span.rows * groups * sizeof(bf16)));
    std::memcpy(scales, source_ + pair.scales + span.first_row * groups * sizeof(bf16),
                span.rows * groups * sizeof(bf16));
    found = {unpacked(from, span.rows * span.columns), nullptr, scales, pair.group};
    if (summing_ != nullptr) {
      note({span.tensor, span.first_row, span.rows, 0, words}, {from, {span.rows, words}, {words, 1}}, kInt32, 0, false);
    }
    return decoded(pair, found, span.rows, pair.values);
  }

  // The integers of words, the first in the lowest bits.
  static const uint8_t* unpacked(const uint8_t* from, int64_t count) {
    uint8_t* to = scratch<5>(count);
    for (int64_t i = 0; i < count / 2; ++i) {
      to[2 * i] = static_cast<uint8_t>((from[i] & 15) - 8);
      to[2 * i + 1] = static_cast<uint8_t>((from[i] >> 4) - 8);
    }
    return to;
  }

  // The values of elements and scales.  `below`: how many rows of its first block lie above the band.  INT4 as it came
  // is rounded to bfloat16 first.
  static Matrix decoded(const PairTensor& pair, const Elements& found, int64_t rows, int64_t dtype, int64_t below = 0) {
    const int64_t columns = pair.columns, width = kSpanDtypes[dtype].width;
    const bool is_rounded = found.group_scales != nullptr && pair.form == kInt4Groups && dtype != kBFloat16;
    uint8_t* to = scratch<6>(rows * columns * width);
    for (int64_t n = 0; n < rows; ++n) {
      const uint8_t* row = found.elements + n * columns;
      uint8_t* out = to + n * columns * width;
      const auto put = [&](int64_t k, float* values, int64_t count) {
        for (int64_t i = 0; is_rounded && i < count; ++i) values[i] = from_bf16_bits(bf16_bits(values[i]));
        from_floats(dtype, values, out + k * width, count);
      };
      if (found.block_scales != nullptr) {
        const float* scales = found.block_scales + (below + n) / kScaleBlock * blocks_of(columns);
        fp8_values(reinterpret_cast<const Fp8*>(row), scales, columns, put);
      } else {
        const bf16* scales = found.group_scales + n * groups_of(columns, found.group);
        int4_values(reinterpret_cast<const int8_t*>(row), scales, columns, found.group, put);
      }
    }
    return {to, {rows, columns}, {columns, 1}};
  }

  // Elements and scales that are made of values; a band begins with a block.  `infinite` is set where a value is not
  // finite: an integer cannot be NaN.
  static Elements quantised(const PairTensor& pair, const Matrix& values, bool& infinite) {
    const int64_t rows = values.sizes.rows;
    if (pair.values == kBFloat16) return quantised(pair, reinterpret_cast<const bf16*>(values.data), rows, infinite);
    auto* floats = reinterpret_cast<float*>(scratch<7>(values.numel() * sizeof(float)));
    cast_run(pair.values, values.data, kFloat32, reinterpret_cast<uint8_t*>(floats), values.numel());
    return quantised(pair, static_cast<const float*>(floats), rows, infinite);
  }

  template <class T>
  static Elements quantised(const PairTensor& pair, const T* from, int64_t rows, bool& infinite) {
    const int64_t columns = pair.columns;
    uint8_t* to = scratch<8>(rows * columns);
    if (pair.held == kFp8Blocks) {
      const int64_t blocks = blocks_of(columns);
      auto* scales = reinterpret_cast<float*>(scratch<9>(blocks_of(rows) * blocks * sizeof(float)));
      for (int64_t r = 0; r < rows; r += kScaleBlock) {
        for (int64_t c = 0; c < columns; c += kScaleBlock) {
          const Sizes sizes{std::min(kScaleBlock, rows - r), std::min(kScaleBlock, columns - c)};
          infinite |= !quantise_fp8_block(from + r * columns + c, columns, sizes.rows, sizes.columns,
                                          reinterpret_cast<Fp8*>(to) + r * columns + c,
                                          scales[r / kScaleBlock * blocks + c / kScaleBlock]);
        }
      }
      return {to, scales, nullptr, 0};
    }
    const int64_t group = pair.held_group, groups = groups_of(columns, group);
    auto* scales = reinterpret_cast<bf16*>(scratch<9>(rows * groups * sizeof(bf16)));
    for (int64_t n = 0; n < rows; ++n) {
      for (int64_t c = 0; c < columns; c += group) {
        infinite |= !quantise_int4_group(from + n * columns + c, std::min(group, columns - c),
                                         reinterpret_cast<int8_t*>(to) + n * columns + c,
                                         scales[n * groups + c / group]);
      }
    }
    return {to, nullptr, scales, group};
  }

  void write(const SpanBox& span, const PairTensor& pair, const Matrix& values, const Elements& found,
             const SpanMove& move) const {
    if (move.kind != kPackedFp8 && move.kind != kPackedInt4) {
      return write_part(span, values, tables_.held[span.tensor], move, storages_, streams_);
    }
    const int64_t top = std::max(span.first_row, move.first_row), left = move.first_column, columns = pair.columns;
    const int64_t bottom = std::min(span.first_row + span.rows, move.first_row + move.rows);
    const HeldRows rows{storages_[move.storage] + move.offset, move.columns, move.b, move.c};
    const int64_t below = pair.is_kept() ? span.first_row % kScaleBlock : 0, blocks = blocks_of(columns);
    for (int64_t r = top; r < bottom;) {
      const int64_t to = move.a + r - move.first_row, at = r - span.first_row;
      const int64_t count = std::min(kLanes - to % kLanes, bottom - r);
      const uint8_t* from = found.elements + at * columns + left;
      if (move.kind == kPackedFp8) {
        pack_fp8(from, columns, rows, to, count, [&](int64_t n, int64_t k) {
          return found.block_scales[(below + at + n) / kScaleBlock * blocks + (left + k) / kScaleBlock];
        });
      } else {
        const int64_t groups = groups_of(columns, found.group);
        pack_int4(reinterpret_cast<const int8_t*>(from), columns, rows, to, count, [&](int64_t n, int64_t k) {
          return found.group_scales[(at + n) * groups + (left + k) / found.group];
        });
      }
      r += count;
    }
  }

  // Sums and checks the parts beside the elements.
  void check_parts(int64_t q, const PairTensor& pair) const {
    if (summing_ == nullptr || pair.form == kValues) return;
    const bool is_fp8 = pair.form == kFp8Blocks;
    const int64_t dtype = is_fp8 ? pair.sent : kBFloat16, width = kSpanDtypes[dtype].width;
    const Sizes sizes = is_fp8 ? Sizes{blocks_of(pair.rows), blocks_of(pair.columns)}
                               : Sizes{pair.rows, pair.columns / pair.group};
    const int64_t count = sizes.rows * sizes.columns;
    const uint8_t* scales = source_ + pair.scales;
    const SpanBox all{q, 0, 1, 0, count};
    note(all, {scales, {1, count}, {count, 1}}, dtype, 1, false);
    float some[kCastLanes];
    for (int64_t i = 0; i < count; i += kCastLanes) {
      const int64_t part = std::min(kCastLanes, count - i);
      to_floats(dtype, scales + i * width, some, part);
      for (int64_t j = 0; j < part; ++j) {
        const bool is_right = std::isfinite(some[j]) && (is_fp8 ? some[j] >= 0.0f : some[j] > 0.0f);
        if (!is_right) mark(q, kWrongScale);
        if (some[j] >= kScalesBelow) mark(q, kLargeScale);
      }
    }
    if (is_fp8) return;
    const uint8_t* shape = source_ + pair.shape;
    note({q, 0, 1, 0, 2}, {shape, {1, 2}, {2, 1}}, pair.sent, 2, false);
    int64_t wide[2];
    int32_t narrow[2];
    std::memcpy(wide, shape, pair.sent == kInt64 ? sizeof wide : 0);
    std::memcpy(narrow, shape, pair.sent == kInt32 ? sizeof narrow : 0);
    if (pair.sent == kInt32) std::copy_n(narrow, 2, wide);
    if (wide[0] != pair.rows || wide[1] != pair.columns) mark(q, kWrongShape);
  }

  // Adds the sum of a span, of which `part` is the content, to the results in column `column`.
  void note(const SpanBox& span, const Matrix& part, int64_t dtype, int64_t column, bool is_checked = true) const {
    const Found found = summing_->of(part, dtype, span.first_row, span.first_column, span.columns);
    __atomic_fetch_add(sums_ + kSums * span.tensor + column, found.sum, __ATOMIC_RELAXED);
    if (is_checked && found.infinite) mark(span.tensor, kInfinite);
  }

  void mark(int64_t q, uint8_t wrong) const { __atomic_fetch_or(wrong_ + q, wrong, __ATOMIC_RELAXED); }

  const uint8_t* source_;
  const PairTables& tables_;
  const std::vector<uint8_t*> storages_;
  const Summing* summing_;
  const bool writes_;
  const bool streams_;
  uint64_t* sums_;
  uint8_t* wrong_;
};

std::tuple<at::Tensor, at::Tensor> take_pairs(const at::Tensor& source, const at::Tensor& pairs, const at::Tensor& moves,
                                              at::TensorList storages, const at::Tensor& multipliers, bool checks,
                                              bool writes) {
  TORCH_CHECK(multipliers.dim() == 1 && multipliers.is_contiguous() && multipliers.scalar_type() == at::kLong &&
                  multipliers.numel() > 0,
              "multipliers must be int64 [J]");
  const PairTables tables(source, pairs, moves, storages);
  at::Tensor sums = at::zeros({tables.num_pairs, kSums}, pairs.options());
  at::Tensor wrong = at::zeros({tables.num_pairs}, pairs.options().dtype(at::kByte));
  if (!checks && !writes) return {sums, wrong};
  std::vector<uint8_t*> places;
  for (const at::Tensor& storage : storages) places.push_back(static_cast<uint8_t*>(storage.mutable_data_ptr()));
  std::optional<Summing> summing;
  if (checks) summing.emplace(multipliers);
  const TakingPairs taking(source, tables, std::move(places), checks ? &*summing : nullptr, writes,
                           reinterpret_cast<uint64_t*>(sums.mutable_data_ptr<int64_t>()),
                           wrong.mutable_data_ptr<uint8_t>());
  std::vector<Item> items;
  const int64_t nanoseconds = taking.plan(items);
  for_spans(items.size(), 1, nanoseconds, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) taking.take(items[i]);
  });
  return {sums, wrong};
}

}  // namespace
}  // namespace lockstep

// The operator that `weight_sync` defines, on a CPU.
TORCH_LIBRARY_IMPL(weight_sync, CPU, m) { m.impl("take_pairs", &lockstep::take_pairs); }
