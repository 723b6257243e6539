// Checks delta_rule.h against plain double arithmetic, and that chunks change no bit; exit status 1 if a check failed.
#include <cstdio>
#include <random>
#include <vector>

#include "delta_rule.h"

using namespace lockstep;
using namespace lockstep::delta;

namespace {

int failures = 0;

void expect(bool holds, const char* what, const Sizes& sizes, double value) {
  if (holds) return;
  if (++failures < 40) {
    std::printf("%s (%s, dk = %d, dv = %d): %.9g\n", what, kIsa, static_cast<int>(sizes.key_dim),
                static_cast<int>(sizes.value_dim), value);
  }
}

struct Example {
  Sizes sizes;
  int64_t length;
  std::vector<float> projected, conv_weight, a_log, dt_bias, norm_weight;

  Example(const Sizes& sizes, int64_t length) : sizes(sizes), length(length) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto some = [&](int64_t size, float mean, float spread) {
      std::vector<float> values(size);
      for (float& x : values) x = mean + spread * normal(random);
      return values;
    };
    projected = some(length * sizes.columns(), 0, 1);
    conv_weight = some(sizes.taps * sizes.channels(), 0, 1);
    a_log = some(sizes.num_heads, -4, 1);
    dt_bias = some(sizes.num_heads, 0, 0.5f);
    norm_weight = some(sizes.value_dim, 1, 0.1f);
  }

  // What is read and the last state, of one sequence in chunks.
  std::vector<float> run(int64_t chunk) const {
    std::vector<float> out(length * sizes.num_heads * sizes.value_dim), state(sizes.num_heads * sizes.state(), NAN);
    std::vector<float> conv((sizes.taps - 1) * sizes.channels(), NAN), mixed(chunk * sizes.channels());
    for (int64_t first = 0; first < length; first += chunk) {
      const int64_t count = std::min(chunk, length - first);
      const DeltaRule<float> rule{
          .sizes = sizes,
          .projected = projected.data() + first * sizes.columns(),
          .conv_weight = conv_weight.data(),
          .a_log = a_log.data(),
          .dt_bias = dt_bias.data(),
          .norm_weight = norm_weight.data(),
          .conv_pool = conv.data(),
          .mixed = mixed.data(),
          .out = out.data() + first * sizes.num_heads * sizes.value_dim,
          .state_pool = state.data(),
          .num_tokens = count,
          .eps = 1e-6,
      };
      const Sequence sequence{0, count, first == 0 ? -1 : 0, {{count, 0}}};
      for (int64_t t = 0; t < count; ++t) rule.convolve(sequence, t);
      for (int64_t h = sizes.num_heads - 1; h >= 0; --h) rule.head(sequence, h, Buffers::of(sizes));
    }
    out.insert(out.end(), state.begin(), state.end());
    return out;
  }

  static double silu(double x) { return x / (1 + std::exp(-x)); }

  std::vector<double> convolved(int64_t t) const {
    std::vector<double> row(sizes.channels());
    for (int64_t c = 0; c < sizes.channels(); ++c) {
      double total = 0;
      for (int64_t tap = std::max<int64_t>(0, sizes.taps - 1 - t); tap < sizes.taps; ++tap) {
        const double input = projected[(t - (sizes.taps - 1) + tap) * sizes.columns() + c];
        total += input * conv_weight[tap * sizes.channels() + c];
      }
      row[c] = silu(total);
    }
    return row;
  }

  std::vector<double> exact() const {
    const int64_t dk = sizes.key_dim, dv = sizes.value_dim, heads = sizes.num_heads;
    std::vector<double> out, states(heads * sizes.state(), 0);
    for (int64_t t = 0; t < length; ++t) {
      const std::vector<double> row = convolved(t);
      const float* beside = projected.data() + t * sizes.columns() + sizes.channels();
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t key_head = h / (heads / sizes.num_key_heads);
        const double *q = &row[key_head * dk], *k = q + sizes.num_key_heads * dk, *v = &row[sizes.first_value() + h * dv];
        double qq = 1e-6, kk = 1e-6, squares = 0;
        for (int64_t i = 0; i < dk; ++i) qq += q[i] * q[i], kk += k[i] * k[i];
        const double beta = 1 / (1 + std::exp(-static_cast<double>(beside[heads * dv + h])));
        const double step = std::log1p(std::exp(static_cast<double>(beside[heads * dv + heads + h]) + dt_bias[h]));
        const double decay = std::exp(-std::exp(static_cast<double>(a_log[h])) * step);
        std::vector<double> read(dv, 0);
        for (int64_t j = 0; j < dv; ++j) {
          double* s = &states[h * sizes.state() + j];
          double known = 0;
          for (int64_t i = 0; i < dk; ++i) known += (s[i * dv] *= decay) * k[i] / std::sqrt(kk);
          for (int64_t i = 0; i < dk; ++i) {
            s[i * dv] += k[i] / std::sqrt(kk) * (v[j] - known) * beta;
            read[j] += s[i * dv] * q[i] / std::sqrt(qq * static_cast<double>(dk));
          }
          squares += read[j] * read[j];
        }
        for (int64_t j = 0; j < dv; ++j) {
          const double normed = read[j] / std::sqrt(squares / static_cast<double>(dv) + 1e-6) * norm_weight[j];
          out.push_back(normed * silu(beside[h * dv + j]));
        }
      }
    }
    out.insert(out.end(), states.begin(), states.end());
    return out;
  }
};

void check(const Sizes& sizes) {
  const Example example(sizes, 70);
  const std::vector<float> whole = example.run(example.length);
  const std::vector<double> exact = example.exact();
  double error = 0, size = 0;
  for (size_t i = 0; i < whole.size(); ++i) {
    error += (whole[i] - exact[i]) * (whole[i] - exact[i]);
    size += exact[i] * exact[i];
  }
  expect(std::sqrt(error / size) < 4e-6, "far from the exact result", sizes, std::sqrt(error / size));
  for (int64_t chunk : {1, 2, 15, 16, 33}) {
    const std::vector<float> parts = example.run(chunk);
    const bool same = std::memcmp(parts.data(), whole.data(), whole.size() * sizeof(float)) == 0;
    expect(same, "other bits in chunks", sizes, static_cast<double>(chunk));
  }
}

}  // namespace

int main() {
  std::printf("%s: ", kIsa);
  for (int64_t key_dim : {1, 8, 18, 128}) {
    for (int64_t value_dim : {1, 16, 40, 128}) {
      for (int64_t taps : {1, 2, 4}) check({2, 6, key_dim, value_dim, taps});
    }
  }
  std::printf("%d failed\n", failures);
  return failures > 255 ? 255 : failures;
}
