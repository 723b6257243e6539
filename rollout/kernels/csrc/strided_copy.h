// Copies of matrices of elements of 1, 2, 4 or 8 bytes between any two pairs of strides, at any address.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

namespace lockstep {

// Strides in elements.
struct Strides {
  int64_t row, column;
};

struct Sizes {
  int64_t rows, columns;
};

// Tile by tile, so that lines that are read or written across stay in the first-level cache.
template <class W>
inline void copy_tiles(const uint8_t* from, Strides in, uint8_t* to, Strides out, Sizes sizes) {
  constexpr int64_t kSide = 64 / sizeof(W);
  for (int64_t r = 0; r < sizes.rows; r += kSide) {
    const int64_t rows = std::min(kSide, sizes.rows - r);
    for (int64_t c = 0; c < sizes.columns; c += kSide) {
      const int64_t columns = std::min(kSide, sizes.columns - c);
      for (int64_t i = r; i < r + rows; ++i) {
        const uint8_t* source = from + (i * in.row + c * in.column) * sizeof(W);
        uint8_t* place = to + (i * out.row + c * out.column) * sizeof(W);
        for (int64_t j = 0; j < columns; ++j) {
          std::memcpy(place + j * out.column * sizeof(W), source + j * in.column * sizeof(W), sizeof(W));
        }
      }
    }
  }
}

inline void copy_matrix(int64_t width, const uint8_t* from, Strides in, uint8_t* to, Strides out, Sizes sizes) {
  if (sizes.columns == 1) {  // one row instead
    sizes = {1, sizes.rows};
    in = {0, in.row};
    out = {0, out.row};
  }
  if (in.column == 1 && out.column == 1) {
    const bool in_one = sizes.rows == 1 || (in.row == sizes.columns && out.row == sizes.columns);
    if (in_one) sizes = {1, sizes.rows * sizes.columns};
    for (int64_t r = 0; r < sizes.rows; ++r) {
      std::memcpy(to + r * out.row * width, from + r * in.row * width, sizes.columns * width);
    }
    return;
  }
  switch (width) {
    case 1: return copy_tiles<uint8_t>(from, in, to, out, sizes);
    case 2: return copy_tiles<uint16_t>(from, in, to, out, sizes);
    case 4: return copy_tiles<uint32_t>(from, in, to, out, sizes);
    default: return copy_tiles<uint64_t>(from, in, to, out, sizes);
  }
}

}  // namespace lockstep
