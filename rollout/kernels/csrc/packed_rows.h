// Single logical rows of packed weights.
//
// Shapes: N rows, K their elements.
#pragma once

#include <algorithm>

#include "checks.h"
#include "packed.h"
#include "strided_copy.h"

namespace lockstep {

// The place of one logical row: its first group; the next groups follow `kRowStride` elements apart.
template <class T>
inline constexpr int64_t kRowStride = kPanelRows * kGroup<T>;

template <class T>
inline T* row_place(T* packed, int64_t depth, int64_t row, int64_t step, int64_t offset) {
  const int64_t half = row / kLanes * step + offset, lane = half % kPanelVectors * kLanes + row % kLanes;
  return packed + half / kPanelVectors * panel_numel<T>(depth) + lane * kGroup<T>;
}

inline int64_t check_packed(const at::Tensor& packed, int64_t depth, int64_t last_row, int64_t step, int64_t offset) {
  TORCH_CHECK(packed.is_contiguous() && packed.dim() >= 1, "packed weights must be contiguous");
  TORCH_CHECK(step >= 1 && 0 <= offset && offset < step, "offset must be in 0..step - 1");
  return with_dtype(packed, [&](auto zero) {
    using T = decltype(zero);
    const int64_t half = last_row < 0 ? -1 : last_row / kLanes * step + offset;
    const int64_t panels = half < 0 ? 0 : half / kPanelVectors + 1;
    TORCH_CHECK(panels * panel_numel<T>(depth) <= packed.numel(), "rows lie outside the packed weights");
    return panels;
  });
}

// Sixteen rows of sixteen groups <-> sixteen groups of sixteen rows; strides in elements.
template <class T, class Store>
inline void turn(const T* from, int64_t from_stride, T* to, int64_t to_stride, Store&& store_vector) {
  F32x16 square[kLanes];
  for (int i = 0; i < kLanes; ++i) square[i] = load(reinterpret_cast<const float*>(from + i * from_stride));
  transpose(square);
  for (int i = 0; i < kLanes; ++i) store_vector(reinterpret_cast<float*>(to + i * to_stride), square[i]);
}

// How many elements of each row `turn` can take: all but the last few, where `count` rows of `depth` elements, `stride`
// apart, fill the half-panel that packed row `first` begins, and groups lie as floats do.
template <class T>
inline int64_t turned(const T* rows, int64_t stride, int64_t depth, int64_t first, int64_t count) {
  constexpr int64_t kSide = kLanes * kGroup<T>;
  const bool aligned = stride % kGroup<T> == 0 && reinterpret_cast<uintptr_t>(rows) % sizeof(float) == 0;
  return aligned && count == kLanes && first % kLanes == 0 ? depth / kSide * kSide : 0;
}

// Past the caches where that is possible: many megabytes are packed before any of them is read, and a line that is
// written whole need not be fetched first.
inline void stream(float* to, const F32x16& vector) {
#if LOCKSTEP_AVX512
  if (reinterpret_cast<uintptr_t>(to) % sizeof(__m512) == 0) return _mm512_stream_ps(to, vector.v);
#elif LOCKSTEP_AVX2
  if (reinterpret_cast<uintptr_t>(to) % (sizeof(__m256) * kParts) == 0) {  // a line, in its two halves
    _mm256_stream_ps(to, vector.v[0]);
    return _mm256_stream_ps(to + kPart, vector.v[1]);
  }
#endif
  store(to, vector);
}

// Where the rows of one matrix lie in packed weights: `step` and `offset` as in pack.cpp.
template <class T>
struct PackedRows {
  T* packed;
  int64_t depth, step, offset;

  // Puts `count` rows, at most sixteen, `stride` elements apart, into packed rows from `first` on; of each `size`
  // elements, the first of which is element `begin` of the packed row.  `streamed` comes before another thread may read.
  void put(const T* rows, int64_t stride, int64_t first, int64_t count, int64_t begin, int64_t size) const {
    T* places[kLanes];
    for (int64_t n = 0; n < count; ++n) places[n] = row_place(packed, depth, first + n, step, offset);
    const auto at = [](int64_t k) { return k / kGroup<T> * kRowStride<T> + k % kGroup<T>; };
    int64_t k = 0;
    if (begin % kGroup<T> == 0) {
      k = turned(rows, stride, size, first, count);
      for (int64_t i = 0; i < k; i += kLanes * kGroup<T>) {
        turn(rows + i, stride, places[0] + at(begin + i), kRowStride<T>, stream);
      }
    }
    while (k < size) {
      const int64_t part = std::min(kGroup<T> - (begin + k) % kGroup<T>, size - k), place = at(begin + k);
      for (int64_t n = 0; n < count; ++n) std::copy_n(rows + n * stride + k, part, places[n] + place);
      k += part;
    }
  }
};

// Elements `from_k` .. depth - 1 of a packed row.
template <class T>
inline void unpack_row(const T* place, int64_t from_k, int64_t depth, T* row) {
  place += from_k / kGroup<T> * kRowStride<T>;
  for (int64_t k = from_k; k < depth; k += kGroup<T>, place += kRowStride<T>) {
    std::copy_n(place, std::min(kGroup<T>, depth - k), row + k);
  }
}

}  // namespace lockstep
