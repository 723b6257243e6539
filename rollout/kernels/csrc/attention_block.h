// The keys and values of one block of positions, and the products with them.
//
//   PackedBlock    rearranged once, for many rows
//   InPlaceBlock   where they lie in the pools, rearranged on the way, for few rows
//
// Both take the same steps in the same order, so that results have the same bits.
#pragma once

#include <algorithm>

#include "attention_matrix.h"

namespace lockstep::attention {

// Positions of a block.  Blocks start at multiples of it in the sequence.
inline constexpr int kBlock = 128;
// Rows of units that are rearranged together.
inline constexpr int kTileKeys = kLanes;
// Positions that products take together.
template <class Scalar>
inline constexpr int kStepKeys = LOCKSTEP_TILES && std::is_same_v<Scalar, bf16> ? 2 * kLanes : kTileKeys;

// Elements of a head's keys, which are those of its queries, and of its values.
struct HeadSizes {
  int key, value;

  int key_columns() const { return round_up(key, kLanes); }
  int value_columns() const { return round_up(value, kLanes); }
};

inline int64_t block_floats(HeadSizes sizes) { return kBlock * (sizes.key_columns() + sizes.value_columns()); }

// Where the keys and values of a block lie, for the first head; the last again and again up to a multiple of kStepKeys.
template <class Scalar>
struct Places {
  int count = 0;
  const Scalar *keys[kBlock], *values[kBlock];
};

// One head of them.
template <class Scalar>
struct HeadPlaces {
  const Places<Scalar>* places;
  int64_t key_offset, value_offset;

  // Asks for keys and values [begin, begin + kTileKeys): rows lie anywhere in the pool.  The second level of the cache
  // has to do: rows of one head are a power of two apart, and would drive each other out of the first.
  LOCKSTEP_INLINE void prefetch(int begin, HeadSizes sizes) const {
    constexpr int kLine = 64 / static_cast<int>(sizeof(Scalar));
    const int end = std::min(begin + kTileKeys, places->count);
    for (int i = begin; i < end; ++i) {
      const Scalar *key = places->keys[i] + key_offset, *value = places->values[i] + value_offset;
      for (int d = 0; d < sizes.key; d += kLine) __builtin_prefetch(key + d, 0, 2);
      for (int d = 0; d < sizes.value; d += kLine) __builtin_prefetch(value + d, 0, 2);
    }
  }
};

// sums[r][n] += row r's unit * units[n], one step.
template <class U, int R, int N>
LOCKSTEP_INLINE void step_all(const float* rows, int row_stride, const F32x16 (&units)[N], F32x16 (&sums)[R][N]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][n] = U::step(sums[r][n], units[n], rows[r * row_stride]);
  }
}

// `steps` steps.
template <class U, int R, int N>
LOCKSTEP_INLINE void multiply(const float* rows, int row_stride, int step_stride, const float* units, int unit_stride,
                              int steps, F32x16 (&sums)[R][N]) {
  for (int i = 0; i < steps; ++i, units += unit_stride, rows += step_stride) {
#if LOCKSTEP_AVX2
    if constexpr (R * N > 4) {
      // With so many sums registers are left for one part of the units at a time.
      Part row[R];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) row[r] = part_splat(rows[r * row_stride]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
#pragma GCC unroll 2
        for (int p = 0; p < kParts; ++p) {
          const Part x = part_load(units + n * kLanes + p * kPart);
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) sums[r][n].v[p] = part_add_product(sums[r][n].v[p], x, row[r]);
        }
      }
      continue;
    }
#endif
    F32x16 x[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) x[n] = load(units + n * kLanes);
    step_all<U>(rows, row_stride, x, sums);
  }
}

// kLanes units of each of kTileKeys rows -> out, one vector for each unit, one lane for each row.
template <class U, bool kWhole>
LOCKSTEP_INLINE void transpose_units(const typename U::Scalar* const* rows, int64_t offset, SomeLanes units, float* out,
                                     int stride) {
#if LOCKSTEP_AVX2
  if constexpr (kWhole && U::kPerUnit == 1 && std::is_same_v<typename U::Scalar, bf16>) {
    // Two elements at a time: half as much is moved.
    for (int first = 0; first < kTileKeys; first += kPart) {
      Part pairs[kPart];
#pragma GCC unroll 8
      for (int i = 0; i < kPart; ++i) pairs[i] = part_load_pairs(rows[first + i] + offset);
      transpose(pairs);
#pragma GCC unroll 8
      for (int i = 0; i < kPart; ++i) {
        part_store(out + 2 * i * stride + first, part_even(pairs[i]));
        part_store(out + (2 * i + 1) * stride + first, part_odd(pairs[i]));
      }
    }
    return;
  }
#endif
  F32x16 tile[kTileKeys];
#pragma GCC unroll 16
  for (int i = 0; i < kTileKeys; ++i) tile[i] = U::template row_units<kWhole>(rows[i] + offset, units);
  transpose(tile);
#pragma GCC unroll 16
  for (int i = 0; i < kTileKeys; ++i) store(out + i * stride, tile[i]);
}

// Queries are [row][stride] here, so many rows of units of a key.
template <class U>
class PackedBlock {
 public:
  using Scalar = typename U::Scalar;

  // In `memory` of `block_floats(sizes)` floats, aligned to a cache line:
  //   keys    [unit of a key][kBlock]              one lane for each key
  //   values  [unit of kBlock][padded value size]  one lane for each column of the output
  PackedBlock(float* memory, HeadSizes sizes)
      : sizes_(sizes),
        columns_(sizes.value_columns()),
        keys_(memory),
        values_(memory + kBlock * sizes.key_columns()) {}

  void pack(const HeadPlaces<Scalar>& from, const HeadPlaces<Scalar>& next) const {
    constexpr int kElements = kLanes * U::kPerUnit;
    const bool whole = sizes_.key % kElements == 0 && sizes_.value % kElements == 0;
    for (int begin = 0; begin < round_up(from.places->count, kStepKeys<Scalar>); begin += kTileKeys) {
      const Scalar* const* keys = from.places->keys + begin;
      const Scalar* const* values = from.places->values + begin;
      for (int d = 0; d < sizes_.key; d += kElements) {
        float* target = keys_ + d / U::kPerUnit * kBlock + begin;
        (whole ? pack_keys<true> : pack_keys<false>)(keys, from.key_offset + d, sizes_.key - d, target);
      }
      for (int column = 0; column < sizes_.value; column += kLanes) {
        float* target = values_ + begin / U::kPerUnit * columns_ + column;
        const int64_t offset = from.value_offset + column;
        (whole ? pack_values<true> : pack_values<false>)(values, offset, sizes_.value - column, columns_, target);
      }
      next.prefetch(begin, sizes_);
    }
  }

  // Calls `body<rows, vectors>(first row, first vector)` with what is summed in registers together.
  template <class Body>
  static LOCKSTEP_INLINE void for_groups(int rows, int vectors, Body body) {
    for (int vector = 0; vector < vectors; vector += kVectors) {
      with_count<kVectors>(vectors - vector, [&]<int N>() {
        for (int row = 0; row < rows; row += kRows) {
          with_count<kRows>(rows - row, [&]<int R>() { body.template operator()<R, N>(row, vector); });
        }
      });
    }
  }

  template <int R, int N>
  LOCKSTEP_INLINE void multiply_keys(const float* queries, int row, int stride, int vector,
                                     F32x16 (&sums)[R][N]) const {
    multiply<U>(queries + row * stride, stride, 1, keys_ + vector * kLanes, kBlock, sizes_.key / U::kPerUnit, sums);
  }

  template <int R, int N>
  LOCKSTEP_INLINE void multiply_values(const float* probabilities, int stride, int count, int column,
                                       F32x16 (&sums)[R][N]) const {
    const int steps = (count + U::kPerUnit - 1) / U::kPerUnit;
    multiply<U>(probabilities, stride, 1, values_ + column, columns_, steps, sums);
  }

  // By tiles.  Scores [16][kBlock] of so many vectors of keys.
  void multiply_keys(int rows, const float* queries, int stride, int vectors, float* scores) const {
    const int steps = round_up(sizes_.key / U::kPerUnit, kLanes) / kLanes;
    multiply_by_tiles<false>(rows, queries, stride, keys_, kBlock, steps, vectors, scores, kBlock);
  }

  // Adds to numerators [16][kBlock] of the columns from `column` on.
  void add_values(int rows, const float* probabilities, int count, int column, int vectors, float* numerators) const {
    const int steps = round_up(count, kStepKeys<Scalar>) / kStepKeys<Scalar>;
    multiply_by_tiles<true>(rows, probabilities, kBlock, values_ + column, columns_, steps, vectors, numerators, kBlock);
  }

 private:
#if LOCKSTEP_AVX512
  static constexpr int kRows = 4, kVectors = 4;
#else
  static constexpr int kRows = 3, kVectors = 2;
#endif

  // Calls of their own: in a loop the compiler would keep the sixteen addresses in vector registers.
  template <bool kWhole>
  static __attribute__((noinline)) void pack_keys(const Scalar* const* rows, int64_t offset, int left, float* out) {
    transpose_units<U, kWhole>(rows, offset, first_of(left / U::kPerUnit), out, kBlock);
  }

  template <bool kWhole>
  static __attribute__((noinline)) void pack_values(const Scalar* const* rows, int64_t offset, int left, int columns,
                                                    float* out) {
    const SomeLanes some = U::some_columns(left);
#pragma GCC unroll 16
    for (int i = 0; i < kTileKeys; i += U::kPerUnit) {
      store(out + i / U::kPerUnit * columns, U::template column_units<kWhole>(rows + i, offset, some));
    }
  }

  const HeadSizes sizes_;
  const int columns_;
  float *const keys_, *const values_;
};

// Up to so many rows of a head, packing would cost more than it saves.
inline constexpr int kInPlaceRows = 4;

// Queries are [unit of a key][kInPlaceRows] here, zeros after the last.  kWhole: both sizes are multiples of kLanes units.
template <class U, bool kWhole>
class InPlaceBlock {
 public:
  using Scalar = typename U::Scalar;

  InPlaceBlock(const HeadPlaces<Scalar>& at, const HeadPlaces<Scalar>& next, HeadSizes sizes)
      : at_(at), next_(next), sizes_(sizes) {}

  // As in PackedBlock, of at most kInPlaceRows rows: all at once, as each group rearranges keys and values anew.
  template <class Body>
  static LOCKSTEP_INLINE void for_groups(int rows, int vectors, Body body) {
    with_count<kInPlaceRows>(rows, [&]<int R>() {
      constexpr int kVectors = std::min(kMostVectors, kSums / R);
      for (int vector = 0; vector < vectors; vector += kVectors) {
        with_count<kVectors>(vectors - vector, [&]<int N>() { body.template operator()<R, N>(0, vector); });
      }
    });
  }

  template <int R, int N>
  LOCKSTEP_INLINE void multiply_keys(const float* queries, int row, int, int vector, F32x16 (&sums)[R][N]) const {
    constexpr int kElements = kLanes * U::kPerUnit;
    for (int d = 0; d < sizes_.key; d += kElements) {
      alignas(64) float keys[kLanes * N * kTileKeys];
      for (int n = 0; n < N; ++n) {
        const Scalar* const* rows = at_.places->keys + (vector + n) * kTileKeys;
        const SomeLanes some = first_of((sizes_.key - d) / U::kPerUnit);
        transpose_units<U, kWhole>(rows, at_.key_offset + d, some, keys + n * kLanes, N * kTileKeys);
        if (d == 0) next_.prefetch((vector + n) * kTileKeys, sizes_);
      }
      multiply<U>(queries + row + d / U::kPerUnit * kInPlaceRows, 1, kInPlaceRows, keys, N * kTileKeys, kLanes, sums);
    }
  }

  template <int R, int N>
  LOCKSTEP_INLINE void multiply_values(const float* probabilities, int stride, int count, int column,
                                       F32x16 (&sums)[R][N]) const {
    SomeLanes some[N];
    for (int n = 0; n < N; ++n) some[n] = U::some_columns(sizes_.value - column - n * kLanes);
    const Scalar* const* values = at_.places->values;
    const int64_t offset = at_.value_offset + column;
    for (int i = 0; i < count; i += U::kPerUnit) {
      F32x16 x[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) x[n] = U::template column_units<kWhole>(values + i, offset + n * kLanes, some[n]);
      step_all<U>(probabilities + i / U::kPerUnit, stride, x, sums);
    }
  }

 private:
#if LOCKSTEP_AVX512
  static constexpr int kSums = 16, kMostVectors = 4;
#else
  static constexpr int kSums = 4, kMostVectors = 2;
#endif

  const HeadPlaces<Scalar> at_, next_;
  const HeadSizes sizes_;
};

}  // namespace lockstep::attention
