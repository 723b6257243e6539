// Checks attention_tile.h against plain double arithmetic and against itself; exit status = number of failed checks.
//
// Compiled for processors other than this one's own, so without torch's operators around it.
#include <cmath>
#include <cstdio>
#include <vector>

#include "attention_tile.h"

using namespace lockstep;
using namespace lockstep::attention;

namespace {

int failures = 0;

void expect(bool holds, const char* what, const char* dtype, int hd, double value) {
  if (holds) return;
  ++failures;
  std::printf("%s: %s, head size %d (%s): %.9g\n", what, dtype, hd, kIsa, value);
}

float sample(int64_t i) { return static_cast<float>(std::sin(i * 12.9898) * 2.0); }

template <class Scalar>
struct Example {
  int hd, group, length;
  std::vector<Scalar> queries, keys, values;
  std::vector<int64_t> slots;

  Example(int hd, int group, int length) : hd(hd), group(group), length(length) {
    // One slot more than positions: NaN, which nobody may read.
    keys.assign((length + 1) * hd, static_cast<Scalar>(NAN));
    values = keys;
    for (int64_t i = 0; i < length; ++i) slots.push_back(length - i);
    for (int64_t i = 0; i < length * hd; ++i) {
      keys[hd + i] = static_cast<Scalar>(sample(i));
      values[hd + i] = static_cast<Scalar>(sample(i + 99991));
    }
    for (int64_t i = 0; i < length * group * hd; ++i) queries.push_back(static_cast<Scalar>(sample(i + 777)));
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(hd)); }

  // Positions first .. first + positions - 1 as one tile: [positions][group][hd].
  std::vector<Scalar> attend(int first, int positions) const {
    const int rows = positions * group, columns = round_up(hd, kLanes);
    const Tile<Scalar> tile{queries.data() + int64_t{first} * group * hd, group * hd, hd,
                            keys.data(), values.data(), hd, hd, slots.data(), length + 1, first, positions, group};
    struct alignas(64) Line {
      float x[16];
    };
    std::vector<Line> memory(Workspace::floats(rows, hd, columns) / 16 + 1);
    const TileAttention<Units<Scalar>> attention(tile, Workspace(memory[0].x, rows, hd, columns), hd, scale());
    attention.pack_queries();
    attention.attend_all(attention.total());
    std::vector<Scalar> out(rows * hd);
    attention.write(attention.total(), out.data(), group * hd);
    return out;
  }

  std::vector<double> exact(int position, int head) const {
    const Scalar* query = queries.data() + (int64_t{position} * group + head) * hd;
    std::vector<double> weights, out(hd);
    double largest = -INFINITY, total = 0;
    for (int j = 0; j <= position; ++j) {
      double score = 0;
      for (int d = 0; d < hd; ++d) score += double(float(query[d])) * double(float(keys[slots[j] * hd + d]));
      weights.push_back(score * scale());
      largest = std::max(largest, weights.back());
    }
    for (int j = 0; j <= position; ++j) {
      weights[j] = std::exp(weights[j] - largest);
      total += weights[j];
      for (int d = 0; d < hd; ++d) out[d] += weights[j] * double(float(values[slots[j] * hd + d]));
    }
    for (double& x : out) x /= total;
    return out;
  }
};

template <class Scalar>
void check(const char* dtype, int hd, double tolerance) {
  const Example<Scalar> example(hd, 3, 577);
  const int row = example.group * hd;
  const std::vector<Scalar> whole = example.attend(0, example.length);
  double worst = 0;
  for (int position : {0, 1, 62, 63, 64, 300, 511, 512, 576}) {
    for (int head = 0; head < example.group; ++head) {
      const std::vector<double> exact = example.exact(position, head);
      for (int d = 0; d < hd; ++d) {
        worst = std::max(worst, std::abs(double(float(whole[position * row + head * hd + d])) - exact[d]));
      }
    }
  }
  expect(worst < tolerance, "far from the exact result", dtype, hd, worst);
  for (int positions : {1, 7, 64}) {
    for (int first = 0; first < example.length; first += positions == 1 ? 41 : positions) {
      const int count = std::min(positions, example.length - first);
      const std::vector<Scalar> part = example.attend(first, count);
      const bool same = std::memcmp(part.data(), whole.data() + first * row, sizeof(Scalar) * count * row) == 0;
      expect(same, "other bits in a chunk", dtype, hd, first);
    }
  }
}

}  // namespace

int main() {
  std::printf("%s: ", kIsa);
  for (int hd : {8, 40, 64}) {
    check<float>("float32", hd, 4e-6);
    check<c10::Half>("float16", hd, 2e-3);
    check<bf16>("bfloat16", hd, 2e-2);
  }
  std::printf("%d failed\n", failures);
  return failures > 255 ? 255 : failures;
}
