// Products of a panel of rows with a packed block, by matrix tiles (tiles.h).
//
//   C [16 rows][16 of N]  (+)=  A [16 rows][16 units] . B [16 units][16 of N]
//
// For scores A are queries and B keys, for numerators A are probabilities and B values, both as units of two elements.
#pragma once

#include <utility>

#include "attention_units.h"
#include "tiles.h"

namespace lockstep::attention {

// c[r][n] = (kAdd ? c[r][n] : 0) + the sum over units of a[r][unit] . b[unit][n], for 16 rows, of which `rows` matter,
// `vectors` times 16 columns and `steps` times 16 units.  Strides in floats.  What the other rows of `a` hold is read, and
// those of `c` are written.
template <bool kAdd>
inline void multiply_by_tiles(int rows, const float* a, int a_stride, const float* b, int b_stride, int steps,
                              int vectors, float* c, int c_stride) {
  constexpr int kMost = 4;  // tiles 0 to 3 are of C, 4 of A, 5 to 7 of B
  for (int first = 0; first < vectors; first += kMost) {
    with_count<kMost>(vectors - first, [&]<int N>() {
      PanelTiles unit(rows);
      [&]<int... n>(std::integer_sequence<int, n...>) {
        float* target = c + first * kLanes;
        if constexpr (kAdd) {
          (unit.template load<n>(target + n * kLanes, c_stride * sizeof(float)), ...);
        } else {
          (unit.template zero<n>(), ...);
        }
        for (int step = 0; step < steps; ++step) {
          const float* units = b + step * kLanes * b_stride + first * kLanes;
          unit.template load<4>(a + step * kLanes, a_stride * sizeof(float));
          ((unit.template load<5 + n % 3>(units + n * kLanes, b_stride * sizeof(float)),
            unit.template multiply<n, 4, 5 + n % 3>()),
           ...);
        }
        (unit.template store<n>(target + n * kLanes, c_stride * sizeof(float)), ...);
      }(std::make_integer_sequence<int, N>());
    });
  }
}

}  // namespace lockstep::attention
