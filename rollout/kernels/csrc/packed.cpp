// The register tile of packed.h, once for every number of tokens.
#include "packed.h"

namespace lockstep {
namespace {

// Where weights are fetched to, ahead of their use.  Past the caches is faster on AMD (sse4a is theirs alone); on an
// Intel Xeon it halves what a core reads, as such fetches wait in the few line buffers of the first level.
#if defined(__SSE4A__)
constexpr int kLocality = 0;
#else
constexpr int kLocality = 3;
#endif

// One group: `weights` is a vector of 16 rows, `token` the group of one token.
template <class T>
struct Groups {
  using Weights = F32x16;
  using Token = F32x16;
  static Weights weights(const float* p) { return load(p); }
  static Token token(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return splat(value);
  }
  static F32x16 add_product(F32x16 sums, Weights w, Token x) { return fma(w, x, sums); }
};

template <>
struct Groups<bf16> {
#if LOCKSTEP_AVX512_BF16
  using Weights = __m512i;
  using Token = __m512i;
  static Weights weights(const bf16* p) { return _mm512_loadu_si512(p); }
  static Token token(uint32_t bits) { return _mm512_set1_epi32(static_cast<int>(bits)); }
  static F32x16 add_product(F32x16 sums, Weights w, Token x) {
    return {_mm512_dpbf16_ps(sums.v, (__m512bh)w, (__m512bh)x)};
  }
#else
  using Weights = EvenOdd;
  struct Token {
    F32x16 even, odd;
  };
  static Weights weights(const bf16* p) { return load_even_odd(p); }
  static Token token(uint32_t bits) {
    const uint32_t halves[2] = {bits << 16, bits & 0xffff0000u};
    float values[2];
    std::memcpy(values, halves, sizeof values);
    return {splat(values[0]), splat(values[1])};
  }
  static F32x16 add_product(F32x16 sums, const Weights& w, const Token& x) {
    return fma(w.odd, x.odd, fma(w.even, x.even, sums));
  }
#endif
};

// sums[token][vector] += panel . tokens over `groups` groups.
template <int M, class T>
[[gnu::always_inline]] inline void multiply_block(const uint32_t* tokens, const T* panel, int64_t groups,
                                                  F32x16 (*sums)[kPanelVectors]) {
  using G = Groups<T>;
  constexpr int64_t kVector = kLanes * kGroup<T>;
  constexpr int64_t kAhead = 24 * kPanelRows * kGroup<T>;  // elements; the panels of a matrix are one stream
  F32x16 block[M][kPanelVectors];
#pragma GCC unroll 12
  for (int t = 0; t < M; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) block[t][v] = splat(0.0f);
  }
  for (int64_t g = 0; g < groups; ++g, panel += kPanelVectors * kVector, tokens += M) {
    typename G::Weights w[kPanelVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) {
      w[v] = G::weights(panel + v * kVector);
      __builtin_prefetch(panel + v * kVector + kAhead, 0, kLocality);
    }
#pragma GCC unroll 12
    for (int t = 0; t < M; ++t) {
      const typename G::Token x = G::token(tokens[t]);
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v) block[t][v] = G::add_product(block[t][v], w[v], x);
    }
  }
#pragma GCC unroll 12
  for (int t = 0; t < M; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) sums[t][v] = sums[t][v] + block[t][v];
  }
}

// sums[token][vector] = panel . tokens over all groups.
template <int M, class T>
[[gnu::always_inline]] inline void multiply_tile(const uint32_t* tokens, const T* panel, int64_t groups,
                                                 F32x16 (*sums)[kPanelVectors]) {
  for (int t = 0; t < M; ++t) {
    for (int v = 0; v < kPanelVectors; ++v) sums[t][v] = splat(0.0f);
  }
  for (int64_t g = 0; g < groups; g += kBlockGroups) {
    multiply_block<M, T>(tokens + g * M, panel + g * kPanelRows * kGroup<T>, std::min(kBlockGroups, groups - g), sums);
  }
}

template <class T, int M = 1>
void choose_tile(int rows, const uint32_t* tokens, const T* panel, int64_t groups, F32x16 (*sums)[kPanelVectors]) {
  if constexpr (M < kTileTokens) {
    if (rows > M) return choose_tile<T, M + 1>(rows, tokens, panel, groups, sums);
  }
  multiply_tile<M, T>(tokens, panel, groups, sums);
}

}  // namespace

template <class T>
void multiply_panel(int rows, const uint32_t* tokens, const T* panel, int64_t groups, F32x16 (*sums)[kPanelVectors]) {
  choose_tile<T>(rows, tokens, panel, groups, sums);
}

template void multiply_panel(int, const uint32_t*, const bf16*, int64_t, F32x16 (*)[kPanelVectors]);
template void multiply_panel(int, const uint32_t*, const float*, int64_t, F32x16 (*)[kPanelVectors]);

}  // namespace lockstep
