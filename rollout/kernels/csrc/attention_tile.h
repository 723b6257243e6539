// Attention of one tile: some consecutive positions of one sequence, all query heads that share one key/value head.
//
// Knows blocks, segments, causality and the running softmax.  Does not know tensors or threads.
//
// The arithmetic of a row (one query head at one position) is fixed by its sequence alone:
//   * keys are taken in blocks of kBlock at absolute positions, in ascending order, with an online softmax
//     (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023);
//   * every kSegment positions a new running softmax starts, and the segments are merged in ascending order
//     (the split of Flash-Decoding), whether they were computed side by side or one after the other;
//   * scores add up over hd, and numerators over keys, one unit at a time into one accumulator;
//   * a masked key has the probability 0, which leaves every accumulator as it is.
// So it does not matter which rows share a tile, how a sequence was cut into chunks, or which thread came by.
#pragma once

#include <algorithm>
#include <limits>

#include <c10/util/Exception.h>

#include "attention_units.h"

namespace lockstep::attention {

inline constexpr int kMaxHeadSize = 256;
inline constexpr int kCacheLine = 64;  // bytes
inline constexpr int kSegment = 512;
static_assert(kSegment % kBlock == 0);

// Rows, and vectors of each row, whose sums are held in registers together.
#if LOCKSTEP_AVX512
inline constexpr int kRowGroup = 4, kVectorGroup = 4;
#else
inline constexpr int kRowGroup = 2, kVectorGroup = 2;
#endif

// The running softmax of a tile's rows, in base 2.
struct RunningSoftmax {
  float* maxima;        // [rows] largest score so far, not scaled
  float* denominators;  // [rows][kLanes]
  float* numerators;    // [rows][columns]

  static int64_t floats(int64_t rows, int columns) { return rows * (1 + kLanes + columns); }

  // In `memory` of that many floats, aligned to a cache line if the number of rows is a multiple of 16.
  static RunningSoftmax in(float* memory, int64_t rows, int columns) {
    return {memory + rows * (kLanes + columns), memory + rows * columns, memory};
  }

  void reset(int first, int rows, int columns) const {
    std::fill(maxima + first, maxima + rows, -std::numeric_limits<float>::infinity());
    std::fill(denominators + first * kLanes, denominators + rows * kLanes, 0.0f);
    std::fill(numerators + first * columns, numerators + rows * columns, 0.0f);
  }
};

// 2^((old - now) * scale) where `now` is at least `old`.
LOCKSTEP_INLINE float correction(float old, float now, float scale) {
  return old == now ? 1.0f : first_lane(exp2(splat((old - now) * scale)));
}

// Rows [first, rows) of `total` also cover what `part` covers.
inline void merge(const RunningSoftmax& total, const RunningSoftmax& part, int first, int rows, int columns,
                  float scale) {
  for (int row = first; row < rows; ++row) {
    const float now = std::max(total.maxima[row], part.maxima[row]);
    const F32x16 old_factor = splat(correction(total.maxima[row], now, scale));
    const F32x16 new_factor = splat(correction(part.maxima[row], now, scale));
    const auto add = [&](float* sums, const float* more, int count) {
      for (int i = 0; i < count; i += kLanes) {
        store(sums + i, fma(load(more + i), new_factor, load(sums + i) * old_factor));
      }
    };
    add(total.denominators + row * kLanes, part.denominators + row * kLanes, kLanes);
    add(total.numerators + row * columns, part.numerators + row * columns, columns);
    total.maxima[row] = now;
  }
}

// Where a tile's keys and values lie and which of its rows see them.
template <class Scalar>
struct Tile {
  const Scalar* queries;  // first position, first query head of the group
  int64_t query_stride, query_head_stride;
  const Scalar* keys;  // slot 0, the tile's key/value head
  const Scalar* values;
  int64_t key_stride, value_stride;  // between slots
  const int64_t* slots;              // of the sequence's positions
  int64_t num_slots;
  int64_t first_position;
  int positions, group;  // rows = positions * group, position by position

  int rows() const { return positions * group; }
  int64_t length() const { return first_position + positions; }
  // The first row that sees the key at `position`.
  int first_row(int64_t position) const {
    return static_cast<int>(std::max<int64_t>(0, position - first_position)) * group;
  }
  int num_segments() const { return static_cast<int>((length() + kSegment - 1) / kSegment); }
};

// What one thread needs besides the tile.
struct Workspace {
  float *queries, *keys, *values;
  RunningSoftmax total, segment;

  static int64_t floats(int rows, int hd, int columns) {
    const int units = round_up(hd, 16);
    return rows * units + kBlock * (units + columns) + 2 * RunningSoftmax::floats(rows, columns);
  }

  Workspace(float* memory, int rows, int hd, int columns) {
    const int units = round_up(hd, 16);
    keys = memory;
    values = keys + kBlock * units;
    queries = values + kBlock * columns;
    float* rest = queries + rows * units;
    total = RunningSoftmax::in(rest, rows, columns);
    segment = RunningSoftmax::in(rest + RunningSoftmax::floats(rows, columns), rows, columns);
  }
};

template <class U>
class TileAttention {
 public:
  using Scalar = typename U::Scalar;

  TileAttention(const Tile<Scalar>& tile, const Workspace& space, int hd, float scale)
      : tile_(tile),
        space_(space),
        hd_(hd),
        units_(hd / U::kPerUnit),
        query_stride_(round_up(units_, kLanes)),
        columns_(round_up(hd, kLanes)),
        scale_(scale * 1.44269504f) {}

  void pack_queries() const {
    for (int row = 0; row < tile_.rows(); ++row) {
      const Scalar* query =
          tile_.queries + row / tile_.group * tile_.query_stride + row % tile_.group * tile_.query_head_stride;
      U::pack_query(query, hd_, space_.queries + row * query_stride_);
    }
  }

  // One segment into `state`, whose rows from the first that sees it are overwritten.  Returns that row.
  int attend_segment(int segment, const RunningSoftmax& state) const {
    const int64_t begin = static_cast<int64_t>(segment) * kSegment;
    const int64_t end = std::min<int64_t>(begin + kSegment, tile_.length());
    const int first = tile_.first_row(begin);
    state.reset(first, tile_.rows(), columns_);
    for (int64_t block = begin; block < end; block += kBlock) attend_block(block, state);
    return first;
  }

  void attend_all(const RunningSoftmax& state) const {
    attend_segment(0, state);
    for (int segment = 1; segment < tile_.num_segments(); ++segment) {
      const int first = attend_segment(segment, space_.segment);
      merge_into(state, space_.segment, first);
    }
  }

  const RunningSoftmax& total() const { return space_.total; }

  int first_row_of_segment(int segment) const { return tile_.first_row(static_cast<int64_t>(segment) * kSegment); }

  void merge_into(const RunningSoftmax& total, const RunningSoftmax& part, int first) const {
    merge(total, part, first, tile_.rows(), columns_, scale_);
  }

  // The rows' results, laid out as `out` [positions][position_stride] with `group` heads of hd each.
  void write(const RunningSoftmax& state, Scalar* out, int64_t position_stride) const {
    for (int row = 0; row < tile_.rows(); ++row) {
      Scalar* target = out + row / tile_.group * position_stride + row % tile_.group * hd_;
      const F32x16 denominator = splat(sum(load(state.denominators + row * kLanes)));
      for (int d = 0; d < hd_; d += kLanes) {
        // Adding zero makes -0 and 0 one: which of them a masked key leaves behind depends on its value.
        const F32x16 result = load(state.numerators + row * columns_ + d) / denominator + zeros();
        store_some(target + d, result, hd_ - d);
      }
    }
  }

 private:
  void attend_block(int64_t begin, const RunningSoftmax& state) const {
    pack_block(begin);
    const int rows = tile_.rows();
    for (int row = tile_.first_row(begin); row < rows; row += kRowGroup) {
      switch (std::min(kRowGroup, rows - row)) {
        case 1: attend_rows<1>(row, begin, state); break;
        case 2: attend_rows<2>(row, begin, state); break;
        case 3: attend_rows<3>(row, begin, state); break;
        default: attend_rows<kRowGroup>(row, begin, state);
      }
    }
  }

  void pack_block(int64_t begin) const {
    static constexpr Scalar kZeros[kMaxHeadSize] = {};
    const int count = static_cast<int>(std::min<int64_t>(kBlock, tile_.length() - begin));
    const Scalar* keys[kBlock];
    const Scalar* values[kBlock];
    for (int i = 0; i < count; ++i) {
      const int64_t slot = tile_.slots[begin + i];
      TORCH_CHECK_INDEX(slot >= 0 && slot < tile_.num_slots, "KV slot ", slot, " is not one of ", tile_.num_slots);
      keys[i] = tile_.keys + slot * tile_.key_stride;
      values[i] = tile_.values + slot * tile_.value_stride;
      // Rows lie anywhere in the pool: all are asked for before the first is used.
      for (int d = 0; d < hd_; d += kCacheLine / static_cast<int>(sizeof(Scalar))) {
        __builtin_prefetch(keys[i] + d);
        __builtin_prefetch(values[i] + d);
      }
    }
    for (int i = count; i < round_up(count, kPackedKeys); ++i) keys[i] = values[i] = kZeros;
    for (int i = 0; i < count; i += kPackedKeys) U::pack_keys(keys + i, hd_, space_.keys + i);
    for (int i = 0; i < count; i += kPackedKeys) {
      U::pack_values(values + i, hd_, space_.values + i / U::kPerUnit * columns_);
    }
  }

  int visible(int row, int64_t begin) const {
    return static_cast<int>(std::min<int64_t>(kBlock, tile_.first_position + row / tile_.group + 1 - begin));
  }

  template <int R>
  void attend_rows(int row, int64_t begin, const RunningSoftmax& state) const {
    alignas(64) float scores[R * kBlock];
    alignas(64) float probabilities[R * kBlock];
    float factors[R];
    const int most = visible(row + R - 1, begin);
    const int vectors = (most + kLanes - 1) / kLanes;
    for (int v = 0; v < vectors; v += kVectorGroup) {
      with_vectors(vectors - v, [&]<int N>() {
        F32x16 sums[R][N];
        for (int r = 0; r < R; ++r) {
          for (int n = 0; n < N; ++n) sums[r][n] = zeros();
        }
        const float* queries = space_.queries + row * query_stride_;
        multiply<R, N>(queries, query_stride_, space_.keys + v * kLanes, kBlock, units_, sums);
        for (int r = 0; r < R; ++r) {
          for (int n = 0; n < N; ++n) store(scores + r * kBlock + (v + n) * kLanes, sums[r][n]);
        }
      });
    }
    for (int r = 0; r < R; ++r) {
      factors[r] = softmax_row(row + r, scores + r * kBlock, vectors, visible(row + r, begin), state,
                               probabilities + r * kBlock);
    }
    const int steps = (most + U::kPerUnit - 1) / U::kPerUnit;
    for (int column = 0; column < columns_; column += kVectorGroup * kLanes) {
      with_vectors((columns_ - column) / kLanes, [&]<int N>() {
        float* target = state.numerators + row * columns_ + column;
        F32x16 sums[R][N];
        for (int r = 0; r < R; ++r) {
          for (int n = 0; n < N; ++n) sums[r][n] = load(target + r * columns_ + n * kLanes) * splat(factors[r]);
        }
        multiply<R, N>(probabilities, kBlock, space_.values + column, columns_, steps, sums);
        for (int r = 0; r < R; ++r) {
          for (int n = 0; n < N; ++n) store(target + r * columns_ + n * kLanes, sums[r][n]);
        }
      });
    }
  }

  // Scores of one row -> its probabilities as units, relative to the largest score so far.  Returns the factor that
  // what was summed before must be multiplied by.
  LOCKSTEP_INLINE float softmax_row(int row, const float* scores, int vectors, int visible, const RunningSoftmax& state,
                                    float* probabilities) const {
    constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
    F32x16 x[kBlock / kLanes];
    F32x16 top = splat(kMinusInfinity);
    for (int v = 0; v < vectors; ++v) {
      x[v] = load(scores + v * kLanes);
      if (visible < (v + 1) * kLanes) x[v] = keep_first(x[v], visible - v * kLanes, kMinusInfinity);
      top = max(top, x[v]);
    }
    const float old = state.maxima[row];
    const float now = std::max(old, largest(top));
    const float factor = correction(old, now, scale_);
    // Where every score is -inf so far, so that -inf - (-inf) does not arise.
    const float base = now == kMinusInfinity ? 0.0f : now;
    for (int v = 0; v < vectors; ++v) x[v] = exp2((x[v] - splat(base)) * splat(scale_));
    float* denominators = state.denominators + row * kLanes;
    store(denominators, U::pack_probabilities(x, vectors, probabilities, load(denominators) * splat(factor)));
    state.maxima[row] = now;
    return factor;
  }

  // sums[r][n] += sum over i of rows[r][i] * units[i][n], i ascending.
  template <int R, int N>
  static LOCKSTEP_INLINE void multiply(const float* rows, int row_stride, const float* units, int unit_stride,
                                       int steps, F32x16 (&sums)[R][N]) {
    for (int i = 0; i < steps; ++i, units += unit_stride) {
      F32x16 x[N];
      for (int n = 0; n < N; ++n) x[n] = load(units + n * kLanes);
      for (int r = 0; r < R; ++r) {
        for (int n = 0; n < N; ++n) sums[r][n] = U::step(sums[r][n], x[n], rows[r * row_stride + i]);
      }
    }
  }

  // Calls `body` with the number of vectors, at most kVectorGroup, as a constant.
  template <class Body>
  static LOCKSTEP_INLINE void with_vectors(int vectors, Body body) {
    switch (std::min(vectors, kVectorGroup)) {
      case 1: return body.template operator()<1>();
      case 2: return body.template operator()<2>();
      case 3: return body.template operator()<3>();
      default: return body.template operator()<kVectorGroup>();
    }
  }

  const Tile<Scalar> tile_;
  const Workspace space_;
  const int hd_, units_, query_stride_, columns_;
  const float scale_;
};

}  // namespace lockstep::attention
