// Some rows of one head against one block: scores, probabilities, numerators.
//
//   * scores add up over a key, and numerators over keys, one unit at a time into one accumulator;
//   * a masked key has the probability 0, which leaves every accumulator as it is.
#pragma once

#include "attention_block.h"
#include "attention_softmax.h"

namespace lockstep::attention {

// Rows of a panel.  What is reduced for each row and then needed in every lane is computed for all of them at once.
inline constexpr int kPanelRows = kLanes;

template <class U, class Block>
class Panel {
 public:
  // `rows` rows of queries as the block takes them; row r sees the keys hidden[r] .. visible[r] - 1 of the block, both
  // ascending; where there is no `hidden`, from the first on.
  Panel(const Block& block, int columns, const float* queries, int query_stride, int rows, const int* hidden,
        const int* visible, float scale)
      : block_(block),
        columns_(columns),
        queries_(queries),
        query_stride_(query_stride),
        rows_(rows),
        hidden_(hidden),
        visible_(visible),
        vectors_((visible[rows - 1] + kLanes - 1) / kLanes),
        scale_(scale) {}

  // Row r adds to row first_row + r of `state`.
  void add_to(const RunningSoftmax& state, int first_row) {
    if constexpr (kByTiles<U>) {
      score_by_tiles();
    } else {
      Block::for_groups(rows_, vectors_, [&]<int R, int N>(int row, int vector) { score<R, N>(row, vector); });
    }
    correct(state.maxima + first_row);
    float* denominators = state.denominators + first_row * kLanes;
    for (int r = 0; r < rows_; ++r) weigh(r, denominators + r * kLanes);
    float* numerators = state.numerators + first_row * columns_;
    if constexpr (kByTiles<U>) {
      average_by_tiles(numerators);
    } else {
      Block::for_groups(rows_, columns_ / kLanes, [&]<int R, int N>(int row, int vector) {
        average<R, N>(row, vector * kLanes, numerators);
      });
    }
  }

 private:
  template <int R, int N>
  LOCKSTEP_INLINE void score(int row, int vector) {
    F32x16 sums[R][N];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] = zeros();
    }
    block_.multiply_keys(queries_, row, query_stride_, vector, sums);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) note(row + r, vector, sums[r]);
  }

  void score_by_tiles() {
    block_.multiply_keys(rows_, queries_, query_stride_, vectors_, scores_);
    for (int row = 0; row < rows_; ++row) {
      for (int vector = 0; vector < vectors_; vector += 4) {
        with_count<4>(vectors_ - vector, [&]<int N>() {
          F32x16 sums[N];
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) sums[n] = load(scores_ + row * kBlock + (vector + n) * kLanes);
          note(row, vector, sums);
        });
      }
    }
  }

  // Scores of a row, without what it does not see.
  template <int N>
  LOCKSTEP_INLINE void note(int row, int vector, F32x16 (&sums)[N]) {
    if (visible_[row] < (vector + N) * kLanes) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[n] = keep_first(sums[n], visible_[row] - (vector + n) * kLanes, kMinusInfinity);
    }
    if (hidden_ != nullptr && hidden_[row] > vector * kLanes) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[n] = drop_first(sums[n], hidden_[row] - (vector + n) * kLanes, kMinusInfinity);
    }
    F32x16 top = vector == 0 ? sums[0] : load(tops_ + row * kLanes);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      top = max(top, sums[n]);
      store(scores_ + row * kBlock + (vector + n) * kLanes, sums[n]);
    }
    store(tops_ + row * kLanes, top);
  }

  // What the rows' scores are relative to from now on.  With a NaN among them it matters no more: the row is NaN.
  LOCKSTEP_INLINE void correct(float* maxima) {
    alignas(64) float tops[kPanelRows] = {};
    for (int r = 0; r < rows_; ++r) tops[r] = largest_lane(load(tops_ + r * kLanes));
    const F32x16 old = load_some(maxima, first_of(rows_));
    const F32x16 now = max(old, load(tops));
    store(factors_, correction(old, now, splat(scale_)));
    store(references_, reference_of(now));
    store_some(maxima, now, first_of(rows_));
  }

  // Scores of one row -> its probabilities as units.
  LOCKSTEP_INLINE void weigh(int row, float* denominators) {
    const float* scores = scores_ + row * kBlock;
    const F32x16 reference = splat(references_[row]), scale = splat(scale_);
    F32x16 total = load(denominators) * splat(factors_[row]);
    for (int v = 0; v < vectors_; v += U::kPerUnit) {
      F32x16 x[U::kPerUnit];
#pragma GCC unroll 2
      for (int n = 0; n < U::kPerUnit; ++n) {
        const F32x16 score = v + n < vectors_ ? load(scores + (v + n) * kLanes) : splat(kMinusInfinity);
        x[n] = exp2<U::kExponential>((score - reference) * scale);
      }
      total = U::pack_probabilities(x, probabilities_ + row * kBlock + v / U::kPerUnit * kLanes, total);
    }
    store(denominators, total);
  }

  template <int R, int N>
  LOCKSTEP_INLINE void average(int row, int column, float* numerators) {
    float* target = numerators + row * columns_ + column;
    F32x16 sums[R][N];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[r][n] = load(target + r * columns_ + n * kLanes) * splat(factors_[row + r]);
    }
    block_.multiply_values(probabilities_ + row * kBlock, kBlock, visible_[rows_ - 1], column, sums);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) store(target + r * columns_ + n * kLanes, sums[r][n]);
    }
  }

  // Scores are not needed any more: numerators take their place, so many columns at a time.
  void average_by_tiles(float* numerators) {
    for (int column = 0; column < columns_; column += kBlock) {
      const int count = std::min(kBlock, columns_ - column);
      for (int row = 0; row < rows_; ++row) {
        const F32x16 factor = splat(factors_[row]);
        const float* from = numerators + row * columns_ + column;
        for (int i = 0; i < count; i += kLanes) store(scores_ + row * kBlock + i, load(from + i) * factor);
      }
      block_.add_values(rows_, probabilities_, visible_[rows_ - 1], column, count / kLanes, scores_);
      for (int row = 0; row < rows_; ++row) {
        std::copy_n(scores_ + row * kBlock, count, numerators + row * columns_ + column);
      }
    }
  }

  const Block& block_;
  const int columns_;
  const float* queries_;
  const int query_stride_, rows_;
  const int *hidden_, *visible_;
  const int vectors_;
  const float scale_;
  alignas(64) float scores_[kPanelRows * kBlock];
  alignas(64) float probabilities_[kPanelRows * kBlock];
  alignas(64) float tops_[kPanelRows * kLanes];
  alignas(64) float factors_[kPanelRows], references_[kPanelRows];
};

}  // namespace lockstep::attention
