// Checks simd.h and dot.h against plain double arithmetic; exit status = number of failed checks.
#include <cstdio>
#include <vector>

#include "dot.h"

using namespace lockstep;

namespace {

int failures = 0;

void expect(bool holds, const char* what, double value) {
  if (holds) return;
  ++failures;
  std::printf("%s (%s): %.9g\n", what, kIsa, value);
}

float sample(int i) { return static_cast<float>(std::sin(i * 12.9898) * 3.0); }

float widened(float x, float) { return x; }
float widened(float x, bf16) { return static_cast<float>(static_cast<bf16>(x)); }

template <class T>
void check_dots(const char* what, double tolerance) {
  for (int depth : {1, 15, 16, 31, 32, 33, 64, 100}) {
    for (int rows : {1, 3, 4, 9}) {
      for (int tokens : {1, 2, 5, 6, 7, 13}) {
        std::vector<T> weight((rows + 8) * depth), x(tokens * depth);
        for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<T>(sample(static_cast<int>(i)));
        for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<T>(sample(static_cast<int>(i) + 7777));
        std::vector<const T*> pointers;
        for (int t = 0; t < tokens; ++t) pointers.push_back(x.data() + t * depth);
        std::vector<float> out(tokens * rows, -1.0f), alone(rows, -1.0f);
        dot_rows(weight.data(), 0, rows, depth, pointers.data(), tokens, weight.data(), out.data(), rows);
        for (int t = 0; t < tokens; ++t) {
          dot_rows(weight.data(), 0, rows, depth, pointers.data() + t, 1, weight.data(), alone.data(), rows);
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

template <class T>
void check_moves() {
  for (int n = 0; n <= kLanes; ++n) {
    T in[kLanes], out[kLanes];
    for (int i = 0; i < kLanes; ++i) in[i] = out[i] = static_cast<T>(sample(i));
    store(out, n == kLanes ? load(in) + load(in) : load(in, n) + load(in, n), n);
    for (int i = 0; i < kLanes; ++i) {
      expect(static_cast<float>(out[i]) == widened(static_cast<float>(in[i]) * (i < n ? 2 : 1), T()), "load, store", i);
    }
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

void check_rounding() {
  for (int i = 0; i < 4000; ++i) {
    const float x = sample(i) * std::pow(2.0f, static_cast<float>(i % 60 - 30));
    float out[kLanes];
    store(out, round_bf16(splat(x)));
    expect(out[7] == static_cast<float>(static_cast<bf16>(x)), "bf16 rounding", x);
  }
  float out[kLanes];
  store(out, round_bf16(splat(NAN)));
  expect(std::isnan(out[0]), "bf16 of NaN", out[0]);
}

}  // namespace

int main() {
  check_moves<float>();
  check_moves<bf16>();
  check_dots<float>("float dot", 1e-6);
  check_dots<bf16>("bf16 dot", 1e-6);
  check_functions();
  check_rounding();
  std::printf("%s: %d failures\n", kIsa, failures);
  return failures == 0 ? 0 : 1;
}
