// Matrix tiles: sixteen rows of 64 bytes each, multiplied as pairs of bf16 (Intel AMX, TDPBF16PS).
//
//   A [16 tokens][16 groups]     C [16 tokens][16 rows of the panel] += A . B     B [16 groups][16 rows of the panel]
//
// One instruction sums for each element of C, as Intel's description has it: the products of the groups' even elements
// in ascending order, those of their odd elements apart, each by a fused multiply-add from zero; the two sums are added,
// and then that to C.  Rounding is to nearest even; denormal inputs and results count as zero.
//
// `ProcessorTiles` issues the instructions; `EmulatedTiles` computes the same bits in plain C++.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace lockstep {

class EmulatedTiles {
 public:
  // Of each tile of tokens only `rows` rows are computed; the processor takes no longer for all.
  explicit EmulatedTiles(int rows) : rows_(rows) {}

  template <int kTile>
  void zero() {
    std::memset(tiles_[kTile], 0, sizeof tiles_[kTile]);
  }
  template <int kTile>
  void load(const void* from, int64_t stride) {
    for (int r = 0; r < 16; ++r) std::memcpy(tiles_[kTile][r], static_cast<const char*>(from) + r * stride, 64);
  }
  template <int kTile>
  void store(void* to, int64_t stride) const {
    for (int r = 0; r < 16; ++r) std::memcpy(static_cast<char*>(to) + r * stride, tiles_[kTile][r], 64);
  }
  template <int kC, int kA, int kB>
  void multiply() {
    Half even_b, odd_b;
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 16; ++n) {
        even_b[k][n] = even_of(tiles_[kB][k][n]);
        odd_b[k][n] = odd_of(tiles_[kB][k][n]);
      }
    }
    for (int m = 0; m < rows_; ++m) {
      float even[16] = {}, odd[16] = {}, sums[16];
      for (int k = 0; k < 16; ++k) {
        add_products(even_of(tiles_[kA][m][k]), even_b[k], even);
        add_products(odd_of(tiles_[kA][m][k]), odd_b[k], odd);
      }
      std::memcpy(sums, tiles_[kC][m], sizeof sums);
      for (int n = 0; n < 16; ++n) sums[n] = flushed(flushed(sums[n]) + flushed(even[n] + odd[n]));
      std::memcpy(tiles_[kC][m], sums, sizeof sums);
    }
  }

 private:
  using Half = float[16][16];

  static float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
  static float flushed(float x) { return std::fabs(x) < FLT_MIN ? std::copysign(0.0f, x) : x; }
  static float even_of(uint32_t group) { return flushed(from_bits(group << 16)); }
  static float odd_of(uint32_t group) { return flushed(from_bits(group & 0xffff0000u)); }

  static void add_products(float a, const float (&b)[16], float (&sums)[16]) {
    float next[16];
    bool edge = false;
    for (int n = 0; n < 16; ++n) {
      next[n] = std::fmaf(a, b[n], sums[n]);
      edge |= std::fabs(next[n]) == FLT_MIN;
    }
    for (int n = 0; edge && n < 16; ++n) {
      // What would round to a denormal with no bound on the exponent is flushed, though with one it rounds to FLT_MIN.
      const double exact = static_cast<double>(a) * b[n] + sums[n];  // no more than 53 bits there
      if (std::fabs(exact) < FLT_MIN * (1.0 - 0x1p-25)) next[n] = std::copysign(0.0f, next[n]);
    }
    for (int n = 0; n < 16; ++n) sums[n] = flushed(next[n]);
  }

  const int rows_;
  uint32_t tiles_[8][16][16];
};

#if LOCKSTEP_TILES && !defined(LOCKSTEP_EMULATED_TILES)

// All eight tiles are whole.  The compiler's own names for these leave out what they read and write.
class ProcessorTiles {
 public:
  explicit ProcessorTiles(int) {}

  template <int kTile>
  void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(from), "r"(stride) : "memory");
  }
  template <int kTile>
  void store(void* to, int64_t stride) const {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(to), "r"(stride) : "memory");
  }
  template <int kC, int kA, int kB>
  void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};

using PanelTiles = ProcessorTiles;

// A thread's tiles, configured.  Other libraries configure them as they like between two lives.
class PanelScope {
 public:
  PanelScope() {
    Config config;
    for (int tile = 0; tile < 8; ++tile) {
      config.bytes[tile] = 64;
      config.rows[tile] = 16;
    }
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  ~PanelScope() { asm volatile("tilerelease" ::: "memory"); }
  PanelScope(const PanelScope&) = delete;
  PanelScope& operator=(const PanelScope&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };
  static_assert(sizeof(Config) == 64);
};

#else

using PanelTiles = EmulatedTiles;

struct PanelScope {
  PanelScope() {}  // not trivial: a scope is a variable that only exists
};

#endif

}  // namespace lockstep
