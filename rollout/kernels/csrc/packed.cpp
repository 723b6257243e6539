// The register tile of packed.h, once for every number of tokens, and that of matrix tiles.
#include "held_decode.h"
#include "packed_held.h"

#include <vector>

namespace lockstep {
namespace {

// sums[token][vector] += products of one group: those of M tokens with the two vectors of rows that a run holds at `g`.
#if LOCKSTEP_PAIRS
struct PairProducts {
  static __m512i weights(const bf16* p) { return _mm512_loadu_si512(p); }
  static __m512i weights(const EvenOdd& values) { return pair_bits(values); }

  template <int M, class Run>
  [[gnu::always_inline]] static void add(F32x16 (&sums)[M][kPanelVectors], const Run& run, int64_t g,
                                         const uint32_t* tokens) {
    __m512i w[kPanelVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) w[v] = weights(run.weights(g, v));
#pragma GCC unroll 12
    for (int t = 0; t < M; ++t) {
      const __m512bh x = (__m512bh)_mm512_set1_epi32(static_cast<int>(tokens[t]));
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v) sums[t][v] = {_mm512_dpbf16_ps(sums[t][v].v, (__m512bh)w[v], x)};
    }
  }
};
#endif

// Of a token's element.
inline float number(const uint32_t* word) {
  float x;
  std::memcpy(&x, word, sizeof x);
  return x;
}

#if LOCKSTEP_AVX2
alignas(32) constexpr uint32_t kHighHalves[8] = {0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u,
                                                 0xffff0000u, 0xffff0000u, 0xffff0000u, 0xffff0000u};

// Of pairs of bf16 the second ones, as floats; the mask stays in memory.
inline Part odd_of(Part pairs) {
  asm("vandps %1, %0, %0" : "+x"(pairs) : "m"(kHighHalves));
  return pairs;
}

// Sixteen registers are filled by the sums of three tokens, a number of each, and one part of the weights.
template <class T>
struct FloatProducts {
  template <int kElement, int M, class Run>
  [[gnu::always_inline]] static void add_element(F32x16 (&sums)[M][kPanelVectors], const Run& run, int64_t g,
                                                 const uint32_t* tokens) {
    Part x[M];
#pragma GCC unroll 3
    for (int t = 0; t < M; ++t) x[t] = part_splat(number(tokens + kElement * M + t));
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) {
#pragma GCC unroll 2
      for (int i = 0; i < kParts; ++i) {
        const Part w = run.template part<kElement>(g, v, i);
#pragma GCC unroll 3
        for (int t = 0; t < M; ++t) sums[t][v].v[i] = part_add_product(sums[t][v].v[i], w, x[t]);
      }
    }
  }

  template <int M, class Run>
  [[gnu::always_inline]] static void add(F32x16 (&sums)[M][kPanelVectors], const Run& run, int64_t g,
                                         const uint32_t* tokens) {
    add_element<0>(sums, run, g, tokens);
    if constexpr (kGroup<T> == 2) add_element<1>(sums, run, g, tokens);
  }
};
#else
template <class T>
struct FloatProducts {
  using Weights = F32x16[kGroup<T>];  // by element of the group
  static void read(const float* p, Weights& w) { w[0] = load(p); }
  static void read(const bf16* p, Weights& w) { read(load_even_odd(p), w); }
  static void read(const EvenOdd& values, Weights& w) {
    w[0] = values.even;
    w[1] = values.odd;
  }

  template <int M, class Run>
  [[gnu::always_inline]] static void add(F32x16 (&sums)[M][kPanelVectors], const Run& run, int64_t g,
                                         const uint32_t* tokens) {
    Weights w[kPanelVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) read(run.weights(g, v), w[v]);
#pragma GCC unroll 2
    for (int i = 0; i < kGroup<T>; ++i) {
#pragma GCC unroll 12
      for (int t = 0; t < M; ++t) {
        const F32x16 x = splat(number(tokens + i * M + t));
#pragma GCC unroll 2
        for (int v = 0; v < kPanelVectors; ++v) sums[t][v] = fma(w[v][i], x, sums[t][v]);
      }
    }
  }
};
#endif

#if LOCKSTEP_PAIRS
template <class T>
using Products = std::conditional_t<kPaired<T>, PairProducts, FloatProducts<T>>;
#else
template <class T>
using Products = FloatProducts<T>;
#endif

// One of so many parts of what lies between two places.
inline void prefetch_lines(const void* first, const void* last, int64_t part, int64_t parts) {
  constexpr int64_t kLine = 64;
  const char* bytes = static_cast<const char*>(first);
  const int64_t lines = (static_cast<const char*>(last) - bytes) / kLine;
  for (int64_t i = lines * part / parts; i < lines * (part + 1) / parts; ++i) __builtin_prefetch(bytes + i * kLine, 0, 2);
}

// Where a register tile finds a panel.  `run(g)` holds `kRun` groups from a multiple of it on: their vectors, and for AVX2
// the parts of an element; matrix tiles read from memory, `kTileRows` groups at a time.  `kStreams`: the panel is not in
// the cache.  `prefetch_block(g)` asks for a part of the block from group `g` on; after a panel it is the next one's.
template <class T, bool kStreams = true>
struct PlainSource {
  using Element = T;
  static constexpr int64_t kRun = INT64_MAX;
  const T* panel;

  struct Run {
    const T* first;

    const T* weights(int64_t g, int v) const { return first + (g * kPanelRows + v * kLanes) * kGroup<T>; }

#if LOCKSTEP_AVX2
    template <int kElement>
    Part part(int64_t g, int v, int i) const {
      const T* at = weights(g, v) + i * kPart * kGroup<T>;
      if constexpr (kGroup<T> == 1) {
        return part_load(at);
      } else {
        return kElement == 0 ? part_load_even(at) : odd_of(part_load_pairs(at));
      }
    }
#endif

    void prefetch(int64_t g) const {
      if constexpr (!kStreams) return;
      constexpr int64_t kAhead = 24 * kPanelRows * kGroup<T>;  // elements; the panels of a matrix are one stream
#pragma GCC unroll 2
      for (int v = 0; v < kPanelVectors; ++v) __builtin_prefetch(weights(g, v) + kAhead, 0, kStreamLocality);
    }
  };

  Run run(int64_t g) const { return {panel + g * kPanelRows * kGroup<T>}; }
  void prefetch_block(int64_t g, int64_t part, int64_t parts) const {
    const T* first = panel + g * kPanelRows * kGroup<T>;
    prefetch_lines(first, first + kBlockGroups * kPanelRows * kGroup<T>, part, parts);
  }

  const T* tile(int64_t g) const {
    constexpr int64_t kNumel = kTileRows * kPanelRows * kGroup<T>, kAhead = 2 * kNumel, kLine = 64 / sizeof(T);
    const T* groups = panel + g * kPanelRows * kGroup<T>;
    for (int64_t i = 0; i < kNumel; i += kLine) __builtin_prefetch(groups + kAhead + i, 0, kStreamLocality);
    return groups;
  }
};

template <class Step>
struct HeldSource {
  using Element = bf16;
  static constexpr int64_t kRun = kHeldStep / kGroup<bf16>;
  static_assert(kRun == kTileRows && kBlockGroups % kRun == 0);
  const HeldPanel<Step>& panel;
  explicit HeldSource(const HeldPanel<Step>& from) : panel(from) {}
  alignas(64) bf16 values[kHeldStep * kPanelRows];

  struct Run {
    Step step;

    EvenOdd weights(int64_t g, int v) const { return step.pairs(g, v); }

#if LOCKSTEP_AVX2
    template <int kElement>
    Part part(int64_t g, int v, int i) const {
      return step.part(2 * g + kElement, v, i);
    }
#endif

    void prefetch(int64_t g) const { step.prefetch(g); }
  };

  Run run(int64_t g) const { return {panel.step(g / kRun)}; }
  void prefetch_block(int64_t g, int64_t part, int64_t parts) const {
    const int8_t* first = panel.steps + g / kRun * Step::kBytes;
    prefetch_lines(first, first + kBlockGroups / kRun * Step::kBytes, part, parts);
  }

  const bf16* tile(int64_t g) {
    store_values(panel.step(g / kRun), values);
    return values;
  }
};

// sums[token][vector] += panel . tokens over groups `begin` to `end` - 1, which begin with `tokens`.
template <int M, class Source>
[[gnu::always_inline]] inline void add_block(const uint32_t* tokens, const Source& source, int64_t begin, int64_t end,
                                             F32x16 (*sums)[kPanelVectors]) {
  using Element = typename Source::Element;
  F32x16 block[M][kPanelVectors];
#pragma GCC unroll 12
  for (int t = 0; t < M; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) block[t][v] = splat(0.0f);
  }
  for (int64_t first = begin; first < end; first += std::min(Source::kRun, end - first)) {
    const auto run = source.run(first);
    const int64_t count = std::min(Source::kRun, end - first);
    for (int64_t g = 0; g < count; ++g, tokens += M * kGroupWords<Element>) {
      run.prefetch(g);
      Products<Element>::add(block, run, g, tokens);
    }
  }
#pragma GCC unroll 12
  for (int t = 0; t < M; ++t) {
#pragma GCC unroll 2
    for (int v = 0; v < kPanelVectors; ++v) sums[t][v] = sums[t][v] + block[t][v];
  }
}

// `add_block` for a number of tokens that is not a constant.
template <class Source, int M = 1>
void add_block_of(int rows, const uint32_t* tokens, const Source& source, int64_t begin, int64_t end,
                  F32x16 (*sums)[kPanelVectors]) {
  if constexpr (M < kVectorTokens) {
    if (rows > M) return add_block_of<Source, M + 1>(rows, tokens, source, begin, end, sums);
  }
  add_block<M>(tokens, source, begin, end, sums);
}

inline EvenOdd values_of(const bf16* p) { return load_even_odd(p); }
inline EvenOdd values_of(const EvenOdd& values) { return values; }

// Groups `begin` to `end` - 1, as a panel of bf16 or, each element apart, of float32.
template <class Source, class T>
void copy_groups(const Source& source, int64_t begin, int64_t end, T* out) {
  for (int64_t first = begin; first < end; first += std::min(Source::kRun, end - first)) {
    const auto run = source.run(first);
    const int64_t count = std::min(Source::kRun, end - first);
    for (int64_t g = 0; g < count; ++g, out += 2 * kPanelRows) {
      run.prefetch(g);
      for (int v = 0; v < kPanelVectors; ++v) {
        const EvenOdd values = values_of(run.weights(g, v));
        if constexpr (std::is_same_v<T, bf16>) {
          store_pairs(out + v * 2 * kLanes, values);
        } else {
          store(out + v * kLanes, values.even);
          store(out + kPanelRows + v * kLanes, values.odd);
        }
      }
    }
  }
}

// So many tiles are worth a copy of a block of weights in the form that products take.  Values with scales of their own
// cost more than their products.
template <class Source>
inline constexpr int64_t kTilesForCopy = 4;

#if LOCKSTEP_AVX2
// Whether a block is decoded to bf16 once for all tiles.
template <class Source>
inline constexpr bool kDecoded = false;
template <>
inline constexpr bool kDecoded<HeldSource<Fp8Step>> = true;
template <>
inline constexpr bool kDecoded<HeldSource<Int4Step>> = true;

// Groups `begin` to `end` - 1, which begin with a step, as a panel of bf16; whole steps are written.
template <class Step>
void decode_groups(const HeldSource<Step>& source, int64_t begin, int64_t end, bf16* out) {
  constexpr int64_t kRun = HeldSource<Step>::kRun, kNumel = kPanelRows * kGroup<bf16>;
  Decoder<Step> decoder;
  for (int64_t first = begin; first < end; first += kRun, out += kRun * kNumel) {
    const int8_t* step = source.panel.steps + first / kRun * Step::kBytes;
    if (!decoder.begin(step)) {
      copy_groups(source, first, first + kRun, out);
      continue;
    }
    for (int64_t g = 0; g < kRun; ++g) {
      source.panel.step(first / kRun).prefetch(g);
      decoder.group(step, g, out + g * kNumel);
    }
  }
}
#else
template <class Source>
inline constexpr bool kDecoded = false;
template <>
inline constexpr int64_t kTilesForCopy<HeldSource<Fp8Step>> = 2;
template <>
inline constexpr int64_t kTilesForCopy<HeldSource<Int4Step>> = 2;
#endif

// By vectors.  Tiles pass over a block of K one after the other, so that it stays in the first level of the cache.
template <class Source>
void multiply_vectors(const TokenTile* tiles, int64_t count, const uint32_t* packed, const Source& source,
                      int64_t groups, F32x16 (*sums)[kPanelVectors]) {
  using Element = typename Source::Element;
  using Kept = TokenElement<Element>;
  constexpr int64_t kWords = kGroupWords<Element>;
  for (int64_t row = 0; row < tiles[count - 1].end() - tiles[0].begin; ++row) {
    for (int v = 0; v < kPanelVectors; ++v) sums[row][v] = splat(0.0f);
  }
  for (int64_t begin = 0; begin < groups; begin += kBlockGroups) {
    const int64_t end = std::min(begin + kBlockGroups, groups);
    const auto add_tile = [&](int64_t i, const auto& from, int64_t first, int64_t last) {
      const int64_t rows = tiles[i].rows, row = tiles[i].begin - tiles[0].begin;
      const uint32_t* tokens = packed + (row * groups + rows * begin) * kWords;
      add_block_of(tiles[i].rows, tokens, from, first, last, sums + row);
    };
    const auto add_tiles_from = [&](const auto& from, int64_t first, int64_t last) {
      using From = std::decay_t<decltype(from)>;
      constexpr bool kIsKept = std::is_same_v<From, PlainSource<Kept>> || std::is_same_v<From, PlainSource<Kept, false>>;
      if constexpr (!kIsKept) {
        if (count >= kTilesForCopy<Source>) {
          alignas(64) Kept block[kBlockGroups * kPanelRows * kGroup<Element>];
          copy_groups(from, first, last, block);
          for (int64_t i = 0; i < count; ++i) {
            source.prefetch_block(end, i, count);
            add_tile(i, PlainSource<Kept, false>{block}, 0, (end - begin) * kWords);
          }
          return;
        }
      }
      for (int64_t i = 0; i < count; ++i) add_tile(i, from, first, last);
    };
    if constexpr (kDecoded<Source>) {
#if LOCKSTEP_AVX2
      alignas(64) bf16 values[kBlockGroups * kPanelRows * kGroup<bf16>];
      decode_groups(source, begin, end, values);
      add_tiles_from(PlainSource<bf16, false>{values}, 0, end - begin);
#endif
    } else {
      add_tiles_from(source, begin, end);
    }
  }
}

// Tiles: 0 to 3 hold the sums, [half of the tokens][half of the panel]; 4 and 5 tokens; 6 and 7 weights.
template <class Unit, bool kBothHalves, class Source>
void multiply_matrix_tiles(int rows, const uint32_t* tokens, Source& source, int64_t groups,
                           F32x16 (*sums)[kPanelVectors]) {
  constexpr int64_t kPanelStride = kPanelRows * sizeof(uint32_t), kTokenStride = kTileRows * sizeof(uint32_t);
  Unit unit(std::min(rows, kTileRows));
  unit.template zero<0>();
  unit.template zero<1>();
  if constexpr (kBothHalves) {
    unit.template zero<2>();
    unit.template zero<3>();
  }
  for (int64_t g = 0; g < groups; g += kTileRows, tokens += rows * kTileRows) {
    const bf16* panel = source.tile(g);
    unit.template load<6>(panel, kPanelStride);
    unit.template load<7>(panel + kLanes * kGroup<bf16>, kPanelStride);
    unit.template load<4>(tokens, kTokenStride);
    unit.template multiply<0, 4, 6>();
    unit.template multiply<1, 4, 7>();
    if constexpr (kBothHalves) {
      unit.template load<5>(tokens + kTileRows * kTileRows, kTokenStride);
      unit.template multiply<2, 5, 6>();
      unit.template multiply<3, 5, 7>();
    }
  }
  constexpr int64_t kSumsStride = sizeof(F32x16[kPanelVectors]);
  unit.template store<0>(&sums[0][0], kSumsStride);
  unit.template store<1>(&sums[0][1], kSumsStride);
  if constexpr (kBothHalves) {
    unit.template store<2>(&sums[kTileRows][0], kSumsStride);
    unit.template store<3>(&sums[kTileRows][1], kSumsStride);
  }
}

template <class Unit, class Source>
void multiply_matrix_tiles(int rows, const uint32_t* tokens, Source& source, int64_t groups,
                           F32x16 (*sums)[kPanelVectors]) {
  if (rows > kTileRows) return multiply_matrix_tiles<Unit, true>(rows, tokens, source, groups, sums);
  multiply_matrix_tiles<Unit, false>(rows, tokens, source, groups, sums);
}

template <class Source>
void multiply_from(const TokenTile* tiles, int64_t count, const uint32_t* packed, Source& source, int64_t depth,
                   F32x16 (*sums)[kPanelVectors]) {
  using Element = typename Source::Element;
  const int64_t groups = groups_of<Element>(depth);
  if constexpr (kTiled<Element>) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = tiles[i].begin - tiles[0].begin;
      multiply_matrix_tiles<PanelTiles>(tiles[i].rows, packed + row * groups, source, groups, sums + row);
    }
  } else {
    multiply_vectors(tiles, count, packed, source, groups, sums);
  }
}

}  // namespace

template <class T>
void multiply_panel(const TokenTile* tiles, int64_t count, const uint32_t* packed, const T* panel, int64_t depth,
                    F32x16 (*sums)[kPanelVectors]) {
  PlainSource<T> source{panel};
  multiply_from(tiles, count, packed, source, depth, sums);
}

template <class Step>
void multiply_panel(const TokenTile* tiles, int64_t count, const uint32_t* packed, const HeldPanel<Step>& panel,
                    int64_t depth, F32x16 (*sums)[kPanelVectors]) {
  HeldSource<Step> source(panel);
  if (kTiled<bf16> && count > 1) {
    thread_local std::vector<bf16> values;
    const int64_t groups = groups_of<bf16>(depth);
    values.resize(groups * kPanelRows * kGroup<bf16>);
    copy_groups(source, 0, groups, values.data());
    return multiply_panel(tiles, count, packed, values.data(), depth, sums);
  }
  multiply_from(tiles, count, packed, source, depth, sums);
}

bool tiles_agree() {
#if LOCKSTEP_TILES
  constexpr int kRows = 29;
  constexpr int64_t kGroups = 5 * kTileRows;
  std::vector<uint32_t> tokens(tokens_numel<bf16>(kRows, 2 * kGroups)), panel(kGroups * kPanelRows);
  // Random bits but the highest of the exponent: numbers of all sizes below two, denormal ones among them.
  uint32_t state = 1;
  for (auto* groups : {&tokens, &panel}) {
    for (uint32_t& group : *groups) {
      state = state * 1664525u + 1013904223u;
      group = ((state >> 8) * 0x9e3779b1u) & 0xbfffbfffu;
    }
  }
  F32x16 sums[2][kTileTokens<bf16>][kPanelVectors] = {};
  PlainSource<bf16> weights{reinterpret_cast<const bf16*>(panel.data())};
  {
    const PanelScope scope;
    multiply_matrix_tiles<PanelTiles>(kRows, tokens.data(), weights, kGroups, sums[0]);
    multiply_matrix_tiles<PanelTiles>(3, tokens.data(), weights, kGroups, sums[1]);
  }
  F32x16 expected[2][kTileTokens<bf16>][kPanelVectors] = {};
  multiply_matrix_tiles<EmulatedTiles>(kRows, tokens.data(), weights, kGroups, expected[0]);
  multiply_matrix_tiles<EmulatedTiles>(3, tokens.data(), weights, kGroups, expected[1]);
  return std::memcmp(sums[0], expected[0], kRows * sizeof sums[0][0]) == 0 &&
         std::memcmp(sums[1], expected[1], 3 * sizeof sums[1][0]) == 0;
#else
  return true;
#endif
}

template void multiply_panel(const TokenTile*, int64_t, const uint32_t*, const bf16*, int64_t, F32x16 (*)[kPanelVectors]);
template void multiply_panel(const TokenTile*, int64_t, const uint32_t*, const float*, int64_t, F32x16 (*)[kPanelVectors]);
template void multiply_panel(const TokenTile*, int64_t, const uint32_t*, const HeldPanel<W8Step>&, int64_t,
                             F32x16 (*)[kPanelVectors]);
template void multiply_panel(const TokenTile*, int64_t, const uint32_t*, const HeldPanel<Fp8Step>&, int64_t,
                             F32x16 (*)[kPanelVectors]);
template void multiply_panel(const TokenTile*, int64_t, const uint32_t*, const HeldPanel<Int4Step>&, int64_t,
                             F32x16 (*)[kPanelVectors]);

}  // namespace lockstep
