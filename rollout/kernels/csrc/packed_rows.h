// Single logical rows of packed weights.
//
// Shapes: N rows, K their elements.
#pragma once

#include <algorithm>

#include "checks.h"
#include "packed.h"

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

// Elements `from_k` .. depth - 1 of a packed row.
template <class T>
inline void unpack_row(const T* place, int64_t from_k, int64_t depth, T* row) {
  place += from_k / kGroup<T> * kRowStride<T>;
  for (int64_t k = from_k; k < depth; k += kGroup<T>, place += kRowStride<T>) {
    std::copy_n(place, std::min(kGroup<T>, depth - k), row + k);
  }
}

}  // namespace lockstep
