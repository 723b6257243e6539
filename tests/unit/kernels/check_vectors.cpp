// Checks simd.h and packed.h against plain double arithmetic; exit status = number of failed checks.
#include <cstdio>
#include <vector>

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "packed.cpp"

using namespace lockstep;

namespace {

int failures = 0;

void expect(bool holds, const char* what, double value) {
  if (holds) return;
  ++failures;
  std::printf("%s (%s): %.9g\n", what, kIsa, value);
}

float sample(int i) { return static_cast<float>(std::sin(i * 12.9898) * 3.0); }

// Of many sizes, so that the order of a sum shows.
float spread(int i) { return std::ldexp(sample(i), i * 7 % 17 - 8); }

float widened(float x, float) { return x; }
float widened(float x, bf16) { return static_cast<float>(static_cast<bf16>(x)); }

// A weight [rows, depth] in the layout of packed.h, element by element.
template <class T>
std::vector<T> packed(const std::vector<T>& weight, int rows, int depth) {
  std::vector<T> out(panels_of(rows) * panel_numel<T>(depth), T(0));
  for (int r = 0; r < rows; ++r) {
    for (int k = 0; k < depth; ++k) {
      const int64_t group = r / kPanelRows * groups_of<T>(depth) + k / kGroup<T>;
      out[(group * kPanelRows + r % kPanelRows) * kGroup<T> + k % kGroup<T>] = weight[r * depth + k];
    }
  }
  return out;
}

template <class T>
std::vector<float> products(const std::vector<T>& panels, const T* tokens, int count, int rows, int depth) {
  std::vector<TokenTile> tiles;
  add_tiles<T>(0, count, tiles);
  std::vector<float> out(count * rows, -1.0f);
  std::vector<uint32_t> packed(tokens_numel<T>(count, depth), 0x7fc07fc0u);  // NaN where nothing is put
  for (const TokenTile& tile : tiles) {
    const T* places[kTileTokens<T>];
    for (int t = 0; t < tile.rows; ++t) places[t] = tokens + (tile.begin + t) * depth;
    pack_tile(places, tile.rows, depth, &packed[tile.begin * token_words<T>(depth)]);
  }
  const PanelScope scope;
  for (int64_t panel = 0; panel < panels_of(rows); ++panel) {
    F32x16 sums[kMostRows][kPanelVectors];
    multiply_panel(tiles.data(), std::ssize(tiles), packed.data(), panels.data() + panel * panel_numel<T>(depth), depth,
                   sums);
    for (int t = 0; t < count; ++t) {
      for (int v = 0; v < kPanelVectors; ++v) {
        const int64_t first = panel * kPanelRows + v * kLanes, n = std::min<int64_t>(kLanes, rows - first);
        if (n > 0) store(out.data() + t * rows + first, sums[t][v], static_cast<int>(n));
      }
    }
  }
  return out;
}

template <class T>
void check_products(const char* what, double tolerance) {
  for (int depth : {1, 2, 15, 16, 31, 33, 64, 101, 300}) {
    for (int rows : {1, 16, 17, 32, 40, 70}) {
      std::vector<T> weight(rows * depth);
      for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<T>(spread(static_cast<int>(i)));
      const std::vector<T> panels = packed(weight, rows, depth);
      for (int tokens : {1, 2, 5, 6, 7, 12, 13, 16, 17, 29, 32, 50}) {
        std::vector<T> x(tokens * depth);
        for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<T>(spread(static_cast<int>(i) + 7777));
        const std::vector<float> out = products(panels, x.data(), tokens, rows, depth);
        for (int t = 0; t < tokens; ++t) {
          const std::vector<float> alone = products(panels, x.data() + t * depth, 1, rows, depth);
          for (int r = 0; r < rows; ++r) {
            double exact = 0, size = 0;
            for (int k = 0; k < depth; ++k) {
              const double product = static_cast<double>(static_cast<float>(weight[r * depth + k])) *
                                     static_cast<float>(x[t * depth + k]);
              exact += product;
              size += std::fabs(product);
            }
            expect(std::fabs(out[t * rows + r] - exact) <= tolerance * size, what, out[t * rows + r] - exact);
            expect(out[t * rows + r] == alone[r], "a product depends on its tile", out[t * rows + r] - alone[r]);
          }
        }
      }
    }
  }
}

#if defined(__FMA__)
using TileGroups = uint32_t[16][16];

// Elements of C += A . B that differ from the processor's own scalar arithmetic, in the mode that Intel's description
// names: rounding to nearest even, denormal results and inputs as zeros.
int wrong_elements(int rows, const TileGroups& a, const TileGroups& b, const TileGroups& c) {
  TileGroups out;
  EmulatedTiles unit(rows);
  unit.load<0>(c, 64);
  unit.load<1>(a, 64);
  unit.load<2>(b, 64);
  unit.multiply<0, 1, 2>();
  unit.store<0>(out, 64);
  const unsigned mode = _mm_getcsr();
  _mm_setcsr((mode & ~0x6000u) | 0x8040u);
  const auto scalar = [](uint32_t bits) { return _mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(bits))); };
  int wrong = 0;
  for (int m = 0; m < rows; ++m) {
    for (int n = 0; n < 16; ++n) {
      __m128 even = _mm_setzero_ps(), odd = _mm_setzero_ps();
      for (int k = 0; k < 16; ++k) {
        even = _mm_fmadd_ss(scalar(a[m][k] << 16), scalar(b[k][n] << 16), even);
        odd = _mm_fmadd_ss(scalar(a[m][k] & 0xffff0000u), scalar(b[k][n] & 0xffff0000u), odd);
      }
      const __m128 sum = _mm_add_ss(scalar(c[m][n]), _mm_add_ss(even, odd));
      wrong += static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_castps_si128(sum))) != out[m][n];
    }
  }
  _mm_setcsr(mode);
  return wrong;
}

uint32_t bf16_bits(float x) { return static_cast<bf16>(x).x; }

void check_emulation() {
  uint32_t state = 1;
  const auto random = [&] {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) * 0x9e3779b1u;
  };
  TileGroups a, b, c;
  for (int round = 0; round < 600; ++round) {
    // Numbers below two, or such that products lie about the smallest normal number; some that are denormal.
    const bool tiny = round % 2 == 1;
    const auto group = [&] {
      if (!tiny) return random() & 0xbfffbfffu;
      return (random() & 0x807f807fu) | (0x20002000u + (random() & 0x00800080u));
    };
    for (int i = 0; i < 256; ++i) {
      a[i / 16][i % 16] = group();
      b[i / 16][i % 16] = i % 7 == 0 ? random() & 0x807f807fu : group();
      c[i / 16][i % 16] = tiny ? random() & 0x80ffffffu : random() & 0xbfffffffu;
    }
    const int wrong = wrong_elements(1 + round % 16, a, b, c);
    expect(wrong == 0, "emulated tiles, elements that differ", wrong);
  }
  // The smallest normal number less some: what rounds to it, is flushed, or both.
  std::memset(a, 0, sizeof a);
  std::memset(b, 0, sizeof b);
  std::memset(c, 0, sizeof c);
  for (int i = 0; i < 16; ++i) {
    a[i][0] = bf16_bits(0x1p-63f);
    b[0][i] = bf16_bits(0x1p-63f);
    a[i][1] = bf16_bits(-0x1p-76f * (0.25f + 0.25f * i));
    b[1][i] = bf16_bits(0x1p-75f);
  }
  expect(wrong_elements(16, a, b, c) == 0, "emulated tiles, about the smallest normal number", 0);
}
#else
void check_emulation() {}
#endif

void check_even_odd() {
  bf16 in[2 * kLanes];
  float even[kLanes], odd[kLanes];
  for (int i = 0; i < 2 * kLanes; ++i) in[i] = static_cast<bf16>(sample(i));
  const EvenOdd parts = load_even_odd(in);
  store(even, parts.even);
  store(odd, parts.odd);
  for (int i = 0; i < kLanes; ++i) {
    expect(even[i] == static_cast<float>(in[2 * i]) && odd[i] == static_cast<float>(in[2 * i + 1]), "even, odd", i);
  }
}

template <class T>
void check_moves() {
  for (int n = 0; n <= kLanes; ++n) {
    T in[kLanes], out[kLanes];
    for (int i = 0; i < kLanes; ++i) in[i] = out[i] = static_cast<T>(sample(i));
    store(out, n == kLanes ? load(in) + load(in) : load(in, n) + load(in, n), n);
    for (int i = 0; i < kLanes; ++i) {
      expect(static_cast<float>(out[i]) == widened(static_cast<float>(in[i]) * (i < n ? 2 : 1), T()), "load, store", i);
    }
    float loaded[kLanes];
    store(loaded, n == kLanes ? load(in) : load(in, n));
    for (int i = n; i < kLanes; ++i) expect(loaded[i] == 0, "zeros behind what is loaded", i);
  }
}

void check_largest_lane() {
  for (int place = 0; place < kLanes; ++place) {
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = i == place ? -1.0f : -2.0f - static_cast<float>(i);
    expect(largest_lane(load(lanes)) == -1.0f, "the largest lane", place);
  }
}

void check_functions() {
  for (int i = -9000; i <= 9000; ++i) {
    const float x = i * 0.0098f;
    float e[kLanes], s[kLanes];
    store(e, exp(splat(x)));
    store(s, silu(splat(x)));
    const double exact = std::exp(static_cast<double>(x)), logistic = x / (1 + std::exp(-static_cast<double>(x)));
    if (x > -87 && x < 88.7) expect(std::fabs(e[3] - exact) <= 2e-7 * exact, "exp", x);
    expect(std::fabs(s[5] - logistic) <= 4e-7 * std::fabs(logistic) + 1e-37, "silu", x);
  }
  float out[kLanes];
  const float inputs[kLanes] = {INFINITY, -INFINITY, NAN, 89.0f, -105.0f, 0.0f};
  store(out, exp(load(inputs)));
  expect(out[0] == INFINITY && out[1] == 0 && std::isnan(out[2]) && out[3] == INFINITY, "exp of infinity, NaN", out[2]);
  expect(out[4] == 0 && out[5] == 1, "exp of -105, 0", out[4]);
}

// All lanes differ: `first_bits` and those that follow in steps that reach every exponent.
void check_rounding_of(uint32_t first_bits) {
  uint32_t bits[kLanes];
  float in[kLanes], rounded[kLanes];
  bf16 stored[kLanes];
  for (int i = 0; i < kLanes; ++i) bits[i] = first_bits + static_cast<uint32_t>(i) * 0x11357fffu;
  std::memcpy(in, bits, sizeof in);
  store(rounded, round_bf16(load(in)));
  store(stored, load(in));
  for (int i = 0; i < kLanes; ++i) {
    const bf16 expected = static_cast<bf16>(in[i]);
    const float round = rounded[i], store = static_cast<float>(stored[i]);
    if (std::isnan(in[i])) {
      expect(std::isnan(round) && std::isnan(store), "bf16 of NaN", bits[i]);
    } else if (std::fpclassify(in[i]) != FP_SUBNORMAL) {  // which AVX-512's instruction takes for zero
      expect(round == static_cast<float>(expected), "bf16 rounding", in[i]);
      expect(stored[i].x == expected.x, "bf16 stored", in[i]);
    }
  }
}

void check_rounding() {
  // Halfway between two, of which one is even, and its neighbours; the largest number, infinity and the least NaN.
  for (uint32_t middle : {0x3f808000u, 0x3f818000u, 0x7f7f8000u, 0x7f800000u, 0xff7fffffu}) {
    for (uint32_t bits = middle - 1; bits <= middle + 1; ++bits) check_rounding_of(bits);
  }
  for (uint32_t i = 0; i < 4000; ++i) check_rounding_of(i * 0x9e3779b1u);
}

void check_sums() {
  float in[4][kLanes], out[4];
  F32x16 rows[4];
  for (int i = 0; i < 4 * kLanes; ++i) in[i / kLanes][i % kLanes] = spread(i);
  for (int row = 0; row < 4; ++row) rows[row] = load(in[row]);
  sum4(rows, out);
  for (int row = 0; row < 4; ++row) {
    float quarters[4];
    for (int q = 0; q < 4; ++q) {
      const float* x = in[row] + 4 * q;
      quarters[q] = (x[0] + x[2]) + (x[1] + x[3]);
    }
    const float expected = (quarters[0] + quarters[2]) + (quarters[1] + quarters[3]);
    expect(out[row] == expected && sum(rows[row]) == expected, "the order of a sum", row);
  }
}

void check_numbers_of_w8() {
  for (int first = 0; first < 256; first += kLanes) {
    int8_t in[kLanes];
    float integers[kLanes], powers[kLanes];
    bf16 pairs[2 * kLanes];
    for (int i = 0; i < kLanes; ++i) in[i] = static_cast<int8_t>(first + i - 128);
    store(integers, load_integers(in));
    store(powers, load_powers(in));
    store_pairs(pairs, {load_integers(in), splat(0.5f)});
    for (int i = 0; i < kLanes; ++i) {
      const int exponent = static_cast<uint8_t>(in[i]);
      expect(integers[i] == in[i], "an integer", in[i]);
      expect(powers[i] == (exponent == 0 ? 0.0f : exponent == 255 ? INFINITY : std::ldexp(1.0f, exponent - 127)),
             "a power", exponent);
      expect(static_cast<float>(pairs[2 * i]) == in[i] && static_cast<float>(pairs[2 * i + 1]) == 0.5f, "pairs", in[i]);
    }
  }
}

// By definition: a sign, four bits of exponent with bias 7, three of fraction.
float number_of_fp8(int code) {
  const int exponent = code >> 3 & 15, fraction = code & 7;
  const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                   : std::ldexp(8.0f + static_cast<float>(fraction), exponent - 10);
  return (code & 0x80) != 0 ? -size : size;
}

// A step of fp8 and one of int4 that begin with these elements; all rows have the scale 1.1.
void check_steps_of(const uint8_t* in, const float* fp8, const float* low, const float* high) {
  alignas(64) int8_t bytes[Fp8Step::kBytes] = {};
  const float scales[kPanelVectors] = {1.1f, 1.1f};
  std::memcpy(bytes, in, kLanes);
  std::memcpy(bytes + kFp8StepNumel, scales, sizeof scales);
  float found[2][kLanes];
  store(found[0], Fp8Step(bytes).pairs(0, 0).even);
  for (int i = 0; i < kLanes; ++i) {
    expect(found[0][i] == static_cast<float>(static_cast<bf16>(fp8[i] * 1.1f)), "a value of fp8", in[i]);
  }
  alignas(64) int8_t halves[Int4Step::kBytes] = {};
  std::memcpy(halves, in, kLanes);
  bf16 each[kPanelRows];
  std::fill(each, each + kPanelRows, static_cast<bf16>(1.1f));
  std::memcpy(halves + kInt4StepNumel, each, sizeof each);
  const EvenOdd pairs = Int4Step(halves).pairs(0, 0);
  store(found[0], pairs.even);
  store(found[1], pairs.odd);
  const float scale = static_cast<float>(static_cast<bf16>(1.1f));
  for (int i = 0; i < kLanes; ++i) {
    expect(found[0][i] == static_cast<float>(static_cast<bf16>(low[i] * scale)), "an even value of int4", in[i]);
    expect(found[1][i] == static_cast<float>(static_cast<bf16>(high[i] * scale)), "an odd value of int4", in[i]);
  }
}

void check_numbers_of_held() {
  for (int first = 0; first < 256; first += kLanes) {
    uint8_t in[kLanes];
    float fp8[kLanes], low[kLanes], high[kLanes], found[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      in[i] = static_cast<uint8_t>(first + i);
      fp8[i] = number_of_fp8(first + i);
      low[i] = static_cast<float>((in[i] & 15) - ((in[i] & 8) != 0 ? 16 : 0));
      high[i] = static_cast<float>((in[i] >> 4) - ((in[i] & 0x80) != 0 ? 16 : 0));
    }
    store(found, load_fp8_over_256(in));
    for (int i = 0; i < kLanes; ++i) {
      expect(found[i] * 256.0f == fp8[i] && std::signbit(found[i]) == std::signbit(fp8[i]), "a number of fp8", in[i]);
    }
    store(found, load_low_int4(in));
    for (int i = 0; i < kLanes; ++i) expect(found[i] == low[i], "a low half", in[i]);
    store(found, load_high_int4(in));
    for (int i = 0; i < kLanes; ++i) expect(found[i] == high[i], "a high half", in[i]);
    check_steps_of(in, fp8, low, high);
  }
}

}  // namespace

int main() {
#if defined(__AMX_TILE__)
  syscall(SYS_arch_prctl, 0x1023, 18);  // Linux lets a process use tile registers that asks for it
#endif
  check_moves<float>();
  check_moves<bf16>();
  check_products<float>("float product", 1e-6);
  check_products<bf16>("bf16 product", 1e-6);
  check_emulation();
  expect(tiles_agree(), "the processor's tiles and their emulation differ", 0);
  check_even_odd();
  check_largest_lane();
  check_functions();
  check_rounding();
  check_sums();
  check_numbers_of_w8();
  check_numbers_of_held();
  std::printf("%s: %d failures\n", kIsa, failures);
  return failures == 0 ? 0 : 1;
}
