// Copies of matrices of elements of 1, 2, 4 or 8 bytes between any two pairs of strides, at any address.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "transpose.h"

namespace lockstep {

// Strides in elements.
struct Strides {
  int64_t row, column;
};

struct Sizes {
  int64_t rows, columns;
};

// Element by element, in tiles whose lines stay in the first-level cache.
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

// Sixteen rows of 64 bytes each that lie together, from columns `in.column` elements apart.
template <class W, int64_t kRow>
inline void turn_tile(const uint8_t* from, Strides in, uint8_t* to, int64_t out_row) {
  constexpr int64_t kPacked = sizeof(uint32_t) / sizeof(W);  // neighbours in a row that share a lane
  const int64_t row = kRow > 0 ? kRow : in.row;
  F32x16 square[kLanes];
  for (int g = 0; g < kLanes; ++g) {
    uint32_t lanes[kLanes] = {};
    for (int64_t n = 0; n < kPacked; ++n) {
      const uint8_t* column = from + (g * kPacked + n) * in.column * sizeof(W);
      for (int64_t i = 0; i < kLanes; ++i) {
        W element;
        std::memcpy(&element, column + i * row * sizeof(W), sizeof(W));
        lanes[i] |= static_cast<uint32_t>(element) << (8 * sizeof(W) * n % 32);
      }
    }
    float bits[kLanes];
    std::memcpy(bits, lanes, sizeof bits);
    square[g] = load(static_cast<const float*>(bits));
  }
  transpose(square);
  for (int i = 0; i < kLanes; ++i) {
    float bits[kLanes];
    store(bits, square[i]);
    std::memcpy(to + i * out_row * sizeof(W), bits, sizeof bits);
  }
}

// A matrix whose columns lie together, or nearly, to one whose rows do.
template <class W>
inline void turn_matrix(const uint8_t* from, Strides in, uint8_t* to, int64_t out_row, Sizes sizes) {
  constexpr int64_t kColumns = 64 / sizeof(W);
  const int64_t rows = sizes.rows / kLanes * kLanes, columns = sizes.columns / kColumns * kColumns;
  for (int64_t c = 0; c < columns; c += kColumns) {
    for (int64_t r = 0; r < rows; r += kLanes) {
      const uint8_t* source = from + (r * in.row + c * in.column) * sizeof(W);
      uint8_t* place = to + (r * out_row + c) * sizeof(W);
      if (in.row == 1) {
        turn_tile<W, 1>(source, in, place, out_row);
      } else {
        turn_tile<W, 0>(source, in, place, out_row);
      }
    }
  }
  const auto rest = [&](int64_t r, int64_t c, Sizes part) {
    copy_tiles<W>(from + (r * in.row + c * in.column) * sizeof(W), in, to + (r * out_row + c) * sizeof(W),
                  {out_row, 1}, part);
  };
  rest(rows, 0, {sizes.rows - rows, sizes.columns});
  rest(0, columns, {rows, sizes.columns - columns});
}

template <class W>
inline void copy_elements(const uint8_t* from, Strides in, uint8_t* to, Strides out, Sizes sizes) {
  if constexpr (sizeof(W) <= sizeof(uint32_t)) {
    if (out.column == 1 && in.row < in.column) return turn_matrix<W>(from, in, to, out.row, sizes);
    if (out.row == 1 && in.column < in.row) {
      return turn_matrix<W>(from, {in.column, in.row}, to, out.column, {sizes.columns, sizes.rows});
    }
  }
  copy_tiles<W>(from, in, to, out, sizes);
}

// Bytes that lie together.  `streams`: past the caches where that is possible, and `streamed` comes before another
// thread may read.
inline void copy_run(const uint8_t* from, uint8_t* to, int64_t bytes, bool streams) {
#if LOCKSTEP_AVX512
  constexpr int64_t kVector = sizeof(__m512i);
  if (streams && bytes >= 16 * kVector) {
    const int64_t head = -reinterpret_cast<intptr_t>(to) & (kVector - 1);
    std::memcpy(to, from, head);
    int64_t i = head;
    for (; i + kVector <= bytes; i += kVector) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
    }
    std::memcpy(to + i, from + i, bytes - i);
    return;
  }
#elif LOCKSTEP_AVX2
  constexpr int64_t kVector = sizeof(__m256i);
  if (streams && bytes >= 16 * kVector) {
    const int64_t head = -reinterpret_cast<intptr_t>(to) & (kVector - 1);
    std::memcpy(to, from, head);
    int64_t i = head;
    for (; i + kVector <= bytes; i += kVector) {
      const __m256i vector = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), vector);
    }
    std::memcpy(to + i, from + i, bytes - i);
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

inline void streamed() {
#if LOCKSTEP_AVX512 || LOCKSTEP_AVX2
  _mm_sfence();
#endif
}

inline void copy_matrix(int64_t width, const uint8_t* from, Strides in, uint8_t* to, Strides out, Sizes sizes,
                        bool streams = false) {
  if (sizes.columns == 1) {  // one row instead
    sizes = {1, sizes.rows};
    in = {0, in.row};
    out = {0, out.row};
  }
  if (sizes.columns == 1 || (in.column == 1 && out.column == 1)) {
    const bool in_one = sizes.rows == 1 || (in.row == sizes.columns && out.row == sizes.columns);
    if (in_one) sizes = {1, sizes.rows * sizes.columns};
    for (int64_t r = 0; r < sizes.rows; ++r) {
      copy_run(from + r * in.row * width, to + r * out.row * width, sizes.columns * width, streams);
    }
    return;
  }
  switch (width) {
    case 1: return copy_elements<uint8_t>(from, in, to, out, sizes);
    case 2: return copy_elements<uint16_t>(from, in, to, out, sizes);
    case 4: return copy_elements<uint32_t>(from, in, to, out, sizes);
    default: return copy_elements<uint64_t>(from, in, to, out, sizes);
  }
}

}  // namespace lockstep
