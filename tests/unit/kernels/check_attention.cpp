// Checks attention_tile.h against plain double arithmetic and against itself; exit status = number of failed checks.
//
// Compiled for processors other than this one's own, so without torch's operators around it.
#include <cmath>
#include <cstdio>
#include <vector>

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
  int hd, vd, kv_heads, group, length, window;
  std::vector<Scalar> queries, keys, values, sinks;
  std::vector<int64_t> slots;

  Example(int hd, int vd, int kv_heads, int group, int length, int window, bool has_sinks)
      : hd(hd), vd(vd), kv_heads(kv_heads), group(group), length(length), window(window) {
    // One slot more than positions: NaN, which nobody may read.
    keys.assign((length + 1) * key_slot(), static_cast<Scalar>(NAN));
    values.assign((length + 1) * value_slot(), static_cast<Scalar>(NAN));
    for (int64_t i = 0; i < length; ++i) slots.push_back(length - i);
    for (int64_t i = 0; i < length * key_slot(); ++i) keys[key_slot() + i] = static_cast<Scalar>(sample(i));
    for (int64_t i = 0; i < length * value_slot(); ++i) {
      values[value_slot() + i] = static_cast<Scalar>(sample(i + 99991));
    }
    for (int64_t i = 0; i < length * query_row(); ++i) queries.push_back(static_cast<Scalar>(sample(i + 777)));
    // Below and above what scores come to.
    for (int64_t i = 0; has_sinks && i < kv_heads * group; ++i) sinks.push_back(static_cast<Scalar>(5 * sample(i + 5)));
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(hd)); }
  int64_t key_slot() const { return int64_t{kv_heads} * hd; }
  int64_t value_slot() const { return int64_t{kv_heads} * vd; }
  int64_t query_row() const { return key_slot() * group; }
  int64_t row() const { return value_slot() * group; }
  HeadSizes sizes() const { return {hd, vd}; }

  // [positions][query heads][vd]: what is written, and the numerators that it is made of, before they are rounded.
  struct Result {
    std::vector<Scalar> out;
    std::vector<float> numerators;
  };

  // Positions first .. first + positions - 1, so many key/value heads in each tile.
  Result attend(int first, int positions, int heads) const {
    const int rows = heads * positions * group, memory_rows = std::max(rows, heads * kInPlaceRows);
    struct alignas(64) Line {
      float x[16];
    };
    std::vector<Line> memory(Workspace::floats(memory_rows, sizes()) / 16 + 1);
    for (Line& line : memory) std::fill_n(line.x, 16, NAN);  // what nobody wrote, nobody may use
    const Workspace space(memory[0].x, memory_rows, sizes());
    Result result{std::vector<Scalar>(positions * row()), std::vector<float>(positions * row())};
    // What lies before the first query's window is another sequence's by now.
    std::vector<int64_t> kept = slots;
    for (int i = 0; i <= first - window; ++i) kept[i] = 0;
    for (int head = 0; head < kv_heads; head += heads) {
      const int64_t group_of = int64_t{head} * group;
      const Tile<Scalar> tile{queries.data() + first * query_row() + group_of * hd, query_row(), hd,
                              keys.data() + int64_t{head} * hd, values.data() + int64_t{head} * vd,
                              key_slot(), value_slot(), hd, vd,
                              kept.data(), length + 1, first, positions, group, heads, window,
                              sinks.empty() ? nullptr : sinks.data() + group_of};
      const TileAttention<Units<Scalar>> attention(tile, space, sizes(), scale(), 1.0f);
      attention.pack_queries();
      attention.attend_all(attention.total());
      attention.write(attention.total(), result.out.data() + group_of * vd, row());
      for (int i = 0; i < rows; ++i) {
        const int query_head = (head + i / (positions * group)) * group + i % group, position = i / group % positions;
        for (int d = 0; d < vd; ++d) {
          const float numerator = attention.total().numerators[i * sizes().value_columns() + d];
          result.numerators[position * row() + query_head * vd + d] = numerator + 0.0f;  // of zeros either
        }
      }
    }
    return result;
  }

  std::vector<double> exact(int position, int head) const {
    const Scalar* query = queries.data() + position * query_row() + head * hd;
    const auto at = [&](const std::vector<Scalar>& pool, int size, int j, int d) {
      return double(float(pool[(slots[j] * kv_heads + head / group) * size + d]));
    };
    std::vector<double> scores, out(vd);
    const int from = std::max(0, position + 1 - window);
    const double sink = sinks.empty() ? -INFINITY : double(float(sinks[head]));
    double largest = sink;
    for (int j = from; j <= position; ++j) {
      double score = 0;
      for (int d = 0; d < hd; ++d) score += double(float(query[d])) * at(keys, hd, j, d);
      scores.push_back(score * scale());
      largest = std::max(largest, scores.back());
    }
    double total = std::exp(sink - largest);
    for (int j = from; j <= position; ++j) {
      const double weight = std::exp(scores[j - from] - largest);
      total += weight;
      for (int d = 0; d < vd; ++d) out[d] += weight * at(values, vd, j, d);
    }
    for (double& x : out) x /= total;
    return out;
  }
};

template <class Scalar>
void check(const char* dtype, int hd, int vd, int group, double tolerance, int window = 1 << 20, bool sinks = false) {
  const Example<Scalar> example(hd, vd, 2, group, 577, window, sinks);
  const int64_t row = example.row();
  const auto whole = example.attend(0, example.length, 1);
  double worst = 0;
  for (int position : {0, 1, 62, 63, 64, 127, 128, 300, 511, 512, 576}) {
    for (int head = 0; head < example.kv_heads * group; ++head) {
      const std::vector<double> exact = example.exact(position, head);
      for (int d = 0; d < vd; ++d) {
        const double off = std::abs(double(float(whole.out[position * row + head * vd + d])) - exact[d]);
        worst = off <= worst ? worst : off;  // also what is not a number
      }
    }
  }
  expect(worst < tolerance && !std::isnan(worst), "far from the exact result", dtype, hd, worst);
  const auto expect_same = [&](int first, int count, const char* what) {
    for (int heads : {1, 2}) {
      const auto part = example.attend(first, count, heads);
      const auto same = [&](const auto& some, const auto& all) {
        return std::memcmp(some.data(), all.data() + first * row, sizeof(some[0]) * some.size()) == 0;
      };
      expect(same(part.out, whole.out) && same(part.numerators, whole.numerators), what, dtype, hd, first);
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
#if defined(__AMX_TILE__)
  syscall(SYS_arch_prctl, 0x1023, 18);  // Linux lets a process use tile registers that asks for it
#endif
  const PanelScope scope;
  std::printf("%s: ", kIsa);
  for (int hd : {8, 40, 64}) {
    for (int group : {1, 2, 3, 4}) {
      check<float>("float32", hd, hd, group, 4e-6);
      check<c10::Half>("float16", hd, hd, group, 2e-3);
      check<bf16>("bfloat16", hd, hd, group, 2e-2);
    }
  }
  // Windows within a block, over several, over a segment; sinks; values of another size.
  for (int window : {5, 150, 520}) {
    check<float>("float32, window", 40, 40, 3, 4e-6, window, true);
    check<bf16>("bfloat16, window", 40, 40, 3, 2e-2, window, true);
  }
  check<float>("float32, window", 40, 40, 1, 4e-6, 128);
  check<bf16>("bfloat16, window", 16, 16, 8, 2e-2, 1);
  check<float>("float32, sinks", 16, 16, 2, 4e-6, 1 << 20, true);
  check<bf16>("bfloat16, sinks", 16, 16, 8, 2e-2, 1 << 20, true);
  check<float>("float32, wide values", 16, 56, 2, 4e-6);
  check<float>("float32, narrow values", 72, 40, 8, 4e-6);
  check<bf16>("bfloat16, narrow values", 72, 64, 3, 2e-2);
  check<bf16>("bfloat16, latent", 96, 64, 16, 2e-2);
  std::printf("%d failed\n", failures);
  return failures > 255 ? 255 : failures;
}
