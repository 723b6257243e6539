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
  int hd, kv_heads, group, length;
  std::vector<Scalar> queries, keys, values;
  std::vector<int64_t> slots;

  Example(int hd, int kv_heads, int group, int length) : hd(hd), kv_heads(kv_heads), group(group), length(length) {
    // One slot more than positions: NaN, which nobody may read.
    const int64_t slot = slot_stride();
    keys.assign((length + 1) * slot, static_cast<Scalar>(NAN));
    values = keys;
    for (int64_t i = 0; i < length; ++i) slots.push_back(length - i);
    for (int64_t i = 0; i < length * slot; ++i) {
      keys[slot + i] = static_cast<Scalar>(sample(i));
      values[slot + i] = static_cast<Scalar>(sample(i + 99991));
    }
    for (int64_t i = 0; i < length * row(); ++i) queries.push_back(static_cast<Scalar>(sample(i + 777)));
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(hd)); }
  int64_t slot_stride() const { return int64_t{kv_heads} * hd; }
  int64_t row() const { return slot_stride() * group; }

  // Positions first .. first + positions - 1, so many key/value heads in each tile: [positions][query heads][hd].
  std::vector<Scalar> attend(int first, int positions, int heads) const {
    const int rows = heads * positions * group, memory_rows = std::max(rows, heads * kInPlaceRows);
    struct alignas(64) Line {
      float x[16];
    };
    std::vector<Line> memory(Workspace::floats(memory_rows, hd) / 16 + 1);
    const Workspace space(memory[0].x, memory_rows, hd);
    std::vector<Scalar> out(positions * row());
    for (int head = 0; head < kv_heads; head += heads) {
      const int64_t offset = int64_t{head} * hd, query_offset = offset * group;
      const Tile<Scalar> tile{queries.data() + first * row() + query_offset, row(), hd,
                              keys.data() + offset, values.data() + offset, slot_stride(), slot_stride(), hd, hd,
                              slots.data(), length + 1, first, positions, group, heads};
      const TileAttention<Units<Scalar>> attention(tile, space, hd, scale());
      attention.pack_queries();
      attention.attend_all(attention.total());
      attention.write(attention.total(), out.data() + query_offset, row());
    }
    return out;
  }

  std::vector<double> exact(int position, int head) const {
    const Scalar* query = queries.data() + position * row() + head * hd;
    const auto at = [&](const std::vector<Scalar>& pool, int j, int d) {
      return double(float(pool[slots[j] * slot_stride() + head / group * hd + d]));
    };
    std::vector<double> weights, out(hd);
    double largest = -INFINITY, total = 0;
    for (int j = 0; j <= position; ++j) {
      double score = 0;
      for (int d = 0; d < hd; ++d) score += double(float(query[d])) * at(keys, j, d);
      weights.push_back(score * scale());
      largest = std::max(largest, weights.back());
    }
    for (int j = 0; j <= position; ++j) {
      weights[j] = std::exp(weights[j] - largest);
      total += weights[j];
      for (int d = 0; d < hd; ++d) out[d] += weights[j] * at(values, j, d);
    }
    for (double& x : out) x /= total;
    return out;
  }
};

template <class Scalar>
void check(const char* dtype, int hd, int group, double tolerance) {
  const Example<Scalar> example(hd, 2, group, 577);
  const int64_t row = example.row();
  const std::vector<Scalar> whole = example.attend(0, example.length, 1);
  double worst = 0;
  for (int position : {0, 1, 62, 63, 64, 127, 128, 300, 511, 512, 576}) {
    for (int head = 0; head < example.kv_heads * group; ++head) {
      const std::vector<double> exact = example.exact(position, head);
      for (int d = 0; d < hd; ++d) {
        worst = std::max(worst, std::abs(double(float(whole[position * row + head * hd + d])) - exact[d]));
      }
    }
  }
  expect(worst < tolerance, "far from the exact result", dtype, hd, worst);
  const auto expect_same = [&](int first, int count, const char* what) {
    for (int heads : {1, 2}) {
      const std::vector<Scalar> part = example.attend(first, count, heads);
      const bool same = std::memcmp(part.data(), whole.data() + first * row, sizeof(Scalar) * count * row) == 0;
      expect(same, what, dtype, hd, first);
    }
  };
  for (int positions : {1, 7, 64}) {
    for (int first = 0; first < example.length; first += positions == 1 ? 41 : positions) {
      expect_same(first, std::min(positions, example.length - first), "other bits in a chunk");
    }
  }
  // Few positions, of which only the last see the next block.
  for (int edge : {kBlock, 2 * kBlock, kSegment}) {
    for (int positions : {2, 3, 4, 5}) {
      for (int before = 1; before < positions; ++before) {
        expect_same(edge - before, positions, "other bits on both sides of an edge");
      }
    }
  }
}

}  // namespace

int main() {
  std::printf("%s: ", kIsa);
  for (int hd : {8, 40, 64}) {
    for (int group : {1, 2, 3, 4}) {
      check<float>("float32", hd, group, 4e-6);
      check<c10::Half>("float16", hd, group, 2e-3);
      check<bf16>("bfloat16", hd, group, 2e-2);
    }
  }
  std::printf("%d failed\n", failures);
  return failures > 255 ? 255 : failures;
}
