// Attention of one tile: some consecutive positions of one sequence, the query heads of some key/value heads.
//
// The arithmetic of a row (one query head at one position) is fixed by its sequence alone:
//   * keys are taken in blocks of kBlock at absolute positions, in ascending order, with a running softmax;
//   * every kSegment positions a new running softmax starts, and the segments are merged in ascending order
//     (the split of Flash-Decoding), whether they were computed side by side or one after the other;
//   * within a block see attention_panel.h;
//   * what is left out, blocks and segments before its window, would add nothing: not a bit of the sums changes;
//   * a sink is added to the denominator at the end.
// So it does not matter which rows share a tile, how a sequence was cut into chunks, or which thread came by.
//
// Keys and values in FP8 are widened a block and head at a time, which is exact.  The arithmetic is that of the queries'
// dtype: results are those of pools that hold the widened numbers.  The scale of the keys is a factor of the scores', that
// of the values a factor of the result in float.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include <c10/util/Exception.h>

#include "attention_panel.h"
#include "fp8.h"

namespace lockstep::attention {

inline constexpr int kSegment = 512;
inline constexpr float kLog2E = 1.44269504f;
static_assert(kSegment % kBlock == 0 && kBlock % kTileKeys == 0);

// Where a tile's queries, keys and values lie and which of its rows see which.
template <class Scalar>
struct Tile {
  const Scalar* queries;  // first position, first query head
  int64_t query_stride, query_head_stride;
  const Scalar *keys, *values;                 // slot 0, first key/value head
  int64_t key_stride, value_stride;            // between slots
  int64_t key_head_stride, value_head_stride;  // between heads
  const int64_t* slots;                        // of the sequence's positions
  int64_t num_slots;
  int64_t first_position;
  int positions, group, heads;  // rows: key/value head by head, of each position by position
  int64_t window = std::numeric_limits<int64_t>::max() / 2;  // keys that a row sees at most, its own last
  const Scalar* sinks = nullptr;                         // of the query heads, where there are any
  const Fp8 *keys_8 = nullptr, *values_8 = nullptr;      // in place of `keys` and `values`, where the pools are FP8

  int head_rows() const { return positions * group; }
  int rows() const { return heads * head_rows(); }
  int64_t length() const { return first_position + positions; }
  // The first row of a head that sees the key at `position`.
  int first_row(int64_t position) const {
    return static_cast<int>(std::max<int64_t>(0, position - first_position)) * group;
  }
  // The first key that a row sees.
  int64_t first_key() const { return std::max<int64_t>(0, first_position + 1 - window); }
  int first_segment() const { return static_cast<int>(first_key() / kSegment); }
  int num_segments() const { return static_cast<int>((length() + kSegment - 1) / kSegment); }
};

// What one thread needs besides the tile.
struct Workspace {
  float *queries, *block, *widened;
  RunningSoftmax total, segment;

  // `widens`: keys and values are FP8.
  static int64_t floats(int rows, HeadSizes sizes, bool widens = false) {
    // A matrix tile reads sixteen queries where there are fewer.
    return (rows + kPanelRows - 1) * sizes.key_columns() + (widens ? 2 : 1) * block_floats(sizes) +
           2 * RunningSoftmax::floats(rows, sizes.value_columns());
  }

  Workspace(float* memory, int rows, HeadSizes sizes) {
    const int columns = sizes.value_columns();
    block = memory;
    queries = block + block_floats(sizes);
    float* rest = queries + (rows + kPanelRows - 1) * sizes.key_columns();
    total = RunningSoftmax::in(rest, rows, columns);
    segment = RunningSoftmax::in(rest + RunningSoftmax::floats(rows, columns), rows, columns);
    widened = rest + 2 * RunningSoftmax::floats(rows, columns);
  }
};

template <class U>
class TileAttention {
 public:
  using Scalar = typename U::Scalar;

  TileAttention(const Tile<Scalar>& tile, const Workspace& space, HeadSizes sizes, float scale, float value_scale)
      : tile_(tile),
        space_(space),
        sizes_(sizes),
        units_(sizes.key / U::kPerUnit),
        query_stride_(round_up(units_, kLanes)),
        columns_(sizes.value_columns()),
        scale_(scale * kLog2E),
        value_scale_(value_scale) {}

  void pack_queries() const {
    if (is_in_place()) return transpose_queries();
    float* target = space_.queries;
    for_each_row([&](int position, int head) {
      const Scalar* query = query_at(position, head);
      for (int unit = 0; unit < units_; unit += kLanes) {
        store(target + unit, U::template row_units<false>(query + unit * U::kPerUnit, first_of(units_ - unit)));
      }
      target += query_stride_;
    });
  }

  // One segment into `state`, whose rows from the first of each head that sees it are overwritten.
  void attend_segment(int segment, const RunningSoftmax& state) const {
    const int64_t begin = static_cast<int64_t>(segment) * kSegment;
    const int64_t end = std::min<int64_t>(begin + kSegment, tile_.length());
    const int64_t first_block = std::max(begin, tile_.first_key() / kBlock * kBlock);
    for (int head = 0; head < tile_.heads; ++head) {
      state.reset(head * tile_.head_rows() + tile_.first_row(begin), (head + 1) * tile_.head_rows(), columns_);
    }
    tile_.keys_8 == nullptr ? attend_blocks(tile_.keys, tile_.values, first_block, end, state)
                            : attend_blocks(tile_.keys_8, tile_.values_8, first_block, end, state);
  }

  void attend_all(const RunningSoftmax& state) const {
    attend_segment(tile_.first_segment(), state);
    for (int segment = tile_.first_segment() + 1; segment < tile_.num_segments(); ++segment) {
      attend_segment(segment, space_.segment);
      merge_into(state, space_.segment, segment);
    }
  }

  const RunningSoftmax& total() const { return space_.total; }
  int first_segment() const { return tile_.first_segment(); }

  // `part` is of `segment`.
  void merge_into(const RunningSoftmax& total, const RunningSoftmax& part, int segment) const {
    const int first = tile_.first_row(static_cast<int64_t>(segment) * kSegment);
    for (int head = 0; head < tile_.heads; ++head) {
      merge(total, part, head * tile_.head_rows() + first, (head + 1) * tile_.head_rows(), columns_, scale_);
    }
  }

  // The rows' results, laid out as `out` [positions][position_stride] with heads of a value each.
  void write(const RunningSoftmax& state, Scalar* out, int64_t position_stride) const {
    const float *numerators = state.numerators, *denominators = state.denominators, *maxima = state.maxima;
    for_each_row([&](int position, int head) {
      Scalar* target = out + position * position_stride + head * sizes_.value;
      float total = sum(load(denominators)), factor = 1.0f;
      if (tile_.sinks != nullptr) add_sink(static_cast<float>(tile_.sinks[head]), *maxima, total, factor);
      const F32x16 denominator = splat(total), numerator = splat(factor), unit = splat(value_scale_);
      for (int d = 0; d < sizes_.value; d += kLanes) {
        // Adding zero makes -0 and 0 one: which of them a masked key leaves behind depends on its value.
        const F32x16 average = load(numerators + d) * numerator / denominator * unit + zeros();
        store_some(target + d, average, first_of(sizes_.value - d));
      }
      numerators += columns_;
      denominators += kLanes;
      ++maxima;
    });
  }

 private:
  // One more logit: `total` is relative to the largest score, or to the sink if that is larger; then the numerators have
  // to be multiplied by `factor`.
  void add_sink(float sink, float largest_score, float& total, float& factor) const {
    const float distance = sink * kLog2E - largest_score * scale_;
    const float power = sum(keep_first(exp2<kExact>(splat(-std::abs(distance))), 1, 0.0f));
    if (distance <= 0.0f) {
      total += power;
    } else {
      total = total * power + 1.0f;
      factor = power;
    }
  }

  bool is_in_place() const { return !kByTiles<U> && tile_.head_rows() <= kInPlaceRows; }

  const Scalar* query_at(int position, int head) const {
    return tile_.queries + position * tile_.query_stride + head * tile_.query_head_stride;
  }

  // As InPlaceBlock takes them.
  void transpose_queries() const {
    const int rows = tile_.head_rows();
    for (int head = 0; head < tile_.heads; ++head) {
      float* target = space_.queries + head * kInPlaceRows * query_stride_;
      for (int unit = 0; unit < units_; unit += kLanes) {
        F32x16 tile[kLanes];
        for (int r = 0; r < kLanes; ++r) tile[r] = zeros();
        for (int r = 0; r < rows; ++r) {
          const Scalar* query = query_at(r / tile_.group, head * tile_.group + r % tile_.group) + unit * U::kPerUnit;
          tile[r] = U::template row_units<false>(query, first_of(units_ - unit));
        }
        transpose(tile);
        for (int i = 0; i < kLanes; ++i) {
          store_some(target + (unit + i) * kInPlaceRows, tile[i], first_of(kInPlaceRows));
        }
      }
    }
  }

  // Calls `body` with the position within the tile and the query head of each row.
  template <class Body>
  void for_each_row(const Body& body) const {
    for (int head = 0; head < tile_.heads; ++head) {
      for (int position = 0; position < tile_.positions; ++position) {
        for (int i = 0; i < tile_.group; ++i) body(position, head * tile_.group + i);
      }
    }
  }

  template <class Stored>
  void attend_blocks(const Stored* keys, const Stored* values, int64_t begin, int64_t end,
                     const RunningSoftmax& state) const {
    // Of this block and the next, which is asked for in time.
    Places<Stored> places[2];
    find(keys, values, begin, end, places[0]);
    // Nothing comes before the first block, in whose time it could be fetched: all its rows are asked for at once.
    for (int first = 0; first < places[0].count; first += kTileKeys) of_head(places[0], 0).prefetch(first, sizes_);
    for (int64_t block = begin, i = 0; block < end; block += kBlock, ++i) {
      const Places<Stored>&now = places[i % 2], &next = places[(i + 1) % 2];
      find(keys, values, block + kBlock, end, places[(i + 1) % 2]);
      for (int head = 0; head < tile_.heads; ++head) {
        const bool last = head + 1 == tile_.heads;
        const HeadPlaces<Stored> at = of_head(now, head), after = last ? of_head(next, 0) : of_head(now, head + 1);
        if constexpr (std::is_same_v<Stored, Scalar>) {
          attend_block(block, head, at, after, state);
        } else {
          Places<Scalar> widened, nothing;
          widen_places(at, after, widened);
          attend_block(block, head, {&widened, 0, 0}, {&nothing, 0, 0}, state);
        }
      }
    }
  }

  // Copies one head of a block into the workspace as Scalar, and asks for what comes after it.
  void widen_places(const HeadPlaces<Fp8>& at, const HeadPlaces<Fp8>& after, Places<Scalar>& out) const {
    Scalar* target = reinterpret_cast<Scalar*>(space_.widened);
    out.count = at.places->count;
    for (int i = 0; i < round_up(out.count, kStepKeys<Scalar>); ++i) {
      if (i % kTileKeys == 0) after.prefetch(i, sizes_);
      out.keys[i] = i < out.count ? target : out.keys[i - 1];
      out.values[i] = i < out.count ? target + sizes_.key : out.values[i - 1];
      if (i >= out.count) continue;
      widen(at.places->keys[i] + at.key_offset, target, sizes_.key);
      widen(at.places->values[i] + at.value_offset, target + sizes_.key, sizes_.value);
      target += sizes_.key + sizes_.value;
    }
  }

  template <class Stored>
  void find(const Stored* keys, const Stored* values, int64_t begin, int64_t end, Places<Stored>& places) const {
    places.count = static_cast<int>(std::clamp<int64_t>(end - begin, 0, kBlock));
    for (int i = 0; i < places.count; ++i) {
      // What no row sees may be anything by now: another key takes its place.
      const int64_t slot = tile_.slots[std::max(begin + i, tile_.first_key())];
      TORCH_CHECK_INDEX(slot >= 0 && slot < tile_.num_slots, "KV slot ", slot, " is not one of ", tile_.num_slots);
      places.keys[i] = keys + slot * tile_.key_stride;
      places.values[i] = values + slot * tile_.value_stride;
    }
    for (int i = places.count; i % kStepKeys<Scalar> != 0; ++i) {
      places.keys[i] = places.keys[i - 1];
      places.values[i] = places.values[i - 1];
    }
  }

  template <class Stored>
  HeadPlaces<Stored> of_head(const Places<Stored>& places, int head) const {
    return {&places, head * tile_.key_head_stride, head * tile_.value_head_stride};
  }

  void attend_block(int64_t begin, int head, const HeadPlaces<Scalar>& at, const HeadPlaces<Scalar>& next,
                    const RunningSoftmax& state) const {
    if constexpr (!kByTiles<U>) {
      if (is_in_place()) {
        constexpr int kElements = kLanes * U::kPerUnit;
        return with_constant(sizes_.key % kElements == 0 && sizes_.value % kElements == 0, [&]<bool kWhole>() {
          attend_rows<true>(InPlaceBlock<U, kWhole>(at, next, sizes_), begin, head, state);
        });
      }
    }
    const PackedBlock<U> block(space_.block, sizes_);
    block.pack(at, next);
    attend_rows<false>(block, begin, head, state);
  }

  template <bool kInPlace, class Block>
  void attend_rows(const Block& block, int64_t begin, int head, const RunningSoftmax& state) const {
    const int head_rows = tile_.head_rows();
    const bool windowed = tile_.window < tile_.length();
    for (int row = tile_.first_row(begin); row < head_rows; row += kPanelRows) {
      const int rows = std::min(kPanelRows, head_rows - row);
      const int first_row = head * head_rows + row;
      int hidden[kPanelRows], visible[kPanelRows];
      int64_t seen = tile_.first_position + row / tile_.group + 1 - begin;
      for (int r = 0, left = tile_.group - row % tile_.group; r < rows; ++r, --left) {
        if (left == 0) {
          left = tile_.group;
          ++seen;
        }
        visible[r] = static_cast<int>(std::min<int64_t>(kBlock, seen));
        if (windowed) hidden[r] = static_cast<int>(std::clamp<int64_t>(seen - tile_.window, 0, kBlock));
      }
      if (windowed && hidden[0] == kBlock) break;  // and of later rows all keys are hidden as well
      const float* queries =
          space_.queries + (kInPlace ? head * kInPlaceRows * query_stride_ + row : first_row * query_stride_);
      Panel<U, Block>(block, columns_, queries, query_stride_, rows, windowed ? hidden : nullptr, visible,
                      scale_).add_to(state, first_row);
    }
  }

  const Tile<Scalar> tile_;
  const Workspace space_;
  const HeadSizes sizes_;
  const int units_, query_stride_, columns_;
  const float scale_, value_scale_;
};

}  // namespace lockstep::attention
