// Checks sampler_*.h against plain double arithmetic and full sorts; exit status 1 if a check failed.
#include <cstdio>
#include <random>
#include <set>
#include <vector>

#include "sampler_edits.h"

using namespace lockstep;
using namespace lockstep::sampler;

namespace {

int failures = 0;

void expect(bool holds, const char* what, int64_t size, double value) {
  if (holds) return;
  if (++failures < 40) std::printf("%s (%s, V = %d): %.9g\n", what, kIsa, static_cast<int>(size), value);
}

// Logits in eighths, so that there are ties, some of them masked.
std::vector<float> some_logits(int64_t size, double spread, std::mt19937& random) {
  std::normal_distribution<double> normal;
  std::vector<float> logits(size);
  for (float& x : logits) x = static_cast<float>(std::round(normal(random) * spread * 8) / 8);
  for (int64_t i = 0; i + 1 < size; i += 7) logits[i] = -kInfinity;
  return logits;
}

struct Exact {
  std::vector<double> weights;
  std::vector<int64_t> order;
  double total = 0;

  explicit Exact(const std::vector<float>& logits) {
    const float largest = *std::max_element(logits.begin(), logits.end());
    for (size_t i = 0; i < logits.size(); ++i) {
      weights.push_back(std::exp(static_cast<double>(logits[i]) - largest));
      total += weights[i];
      order.push_back(static_cast<int64_t>(i));
    }
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
  }

  std::set<int64_t> kept(const Filter& filter) const {
    double whole = 0, mass = 0;
    std::set<int64_t> out;
    const int64_t count = std::min<int64_t>(filter.top_k, static_cast<int64_t>(order.size()));
    for (int64_t i = 0; i < count; ++i) whole += weights[order[i]];
    for (int64_t i = 0; i < count; ++i) {
      if (filter.top_p < 1.0 && mass >= filter.top_p * whole) break;
      if (weights[order[i]] >= filter.min_p) out.insert(order[i]);
      mass += weights[order[i]];
    }
    return out;
  }
};

// Whether `id` is where the cumulative weight of the kept tokens passes `noise` times their total.
bool fits(const Exact& exact, const std::set<int64_t>& kept, double noise, int64_t id) {
  if (!kept.contains(id) || exact.weights[id] == 0) return false;
  double whole = 0, before = 0;
  for (const int64_t token : kept) whole += exact.weights[token];
  for (const int64_t token : kept) before += token < id ? exact.weights[token] : 0.0;
  return before / whole - 2e-6 <= noise && noise <= (before + exact.weights[id]) / whole + 2e-6;
}

// The mask is what is kept, but for what has no weight in float; its log-probabilities add up to one.
void check_mask(const Row& row, const std::set<int64_t>& kept, const Kept& mask) {
  double total = 0.0;
  for (size_t i = 0; i < mask.ids.size(); ++i) {
    expect(kept.count(mask.ids[i]) == 1, "mask holds more", row.size(), mask.ids[i]);
    expect(i == 0 || mask.ids[i - 1] < mask.ids[i], "mask order", row.size(), mask.ids[i]);
    total += std::exp(static_cast<double>(mask.logprobs[i]));
  }
  expect(std::abs(total - 1.0) < 1e-5, "mask probabilities", row.size(), total);
  size_t drawable = 0;
  for (const int64_t id : kept) drawable += row[id] > row.largest() - 80.0f;
  expect(mask.ids.size() >= drawable, "mask holds less", row.size(), static_cast<double>(mask.ids.size()));
}

void check_row(const std::vector<float>& logits) {
  const int64_t size = static_cast<int64_t>(logits.size());
  const Exact exact(logits);
  Row row;
  row.set(logits.data(), size);
  Distribution distribution;
  distribution.set(row, true);
  Selection selection;
  expect(row.is_distribution(), "a distribution", size, 0);
  expect(row.best() == exact.order[0], "best", size, static_cast<double>(row.best()));
  expect(std::fabs(distribution.total() / exact.total - 1) < 5e-7, "total", size, distribution.total() - exact.total);
  const double logprob = static_cast<double>(logits[exact.order[0]]) - row.largest() - std::log(exact.total);
  expect(std::fabs(distribution.logprob(logits[exact.order[0]]) - logprob) < 2e-6, "logprob", size, logprob);
  for (const int64_t count : {int64_t{1}, int64_t{3}, int64_t{40}, size}) {
    if (count > size) continue;
    const std::vector<Token>& best = selection.best(row, count);
    expect(static_cast<int64_t>(best.size()) == count, "number of best", size, static_cast<double>(best.size()));
    for (int64_t i = 0; i < count; ++i) expect(best[i].id == exact.order[i], "order", size, best[i].id);
  }
  const Filter filters[] = {{size, 1, 0},       {1, 1, 0},          {3, 1, 0},         {300, 1, 0},
                            {size, 0.9137, 0},  {size, 0.0213, 0},  {size, 1, 0.0371}, {50, 0.437, 0},
                            {2000, 0.77, 0.013}, {size, 0.61, 0.71}, {7, 0.9999, 0}};
  for (Filter filter : filters) {
    filter.top_k = std::min(filter.top_k, size);
    const std::set<int64_t> kept = exact.kept(filter);
    for (double noise = 0; noise < 1; noise += 0.0617) {
      const int64_t id = selection.draw(row, distribution, filter, noise, nullptr);
      expect(fits(exact, kept, noise, id), "draw", size, noise);
    }
    Kept mask;
    const int64_t last = selection.draw(row, distribution, filter, 1.0 - 0x1p-53, &mask);
    expect(fits(exact, kept, 1.0, last), "last draw", size, static_cast<double>(last));
    check_mask(row, kept, mask);
  }
  for (double noise = 0; noise < 1; noise += 0.0617) {
    expect(fits(exact, exact.kept({size, 1, 0}), noise, distribution.draw(row, noise)), "plain draw", size, noise);
  }
}

void check_strange_rows() {
  for (const int64_t size : {1, 15, 17, 300}) {
    std::vector<float> logits(size, 1.0f);
    Row row;
    for (const float strange : {static_cast<float>(NAN), -static_cast<float>(NAN), kInfinity}) {
      logits[size - 1] = strange;
      row.set(logits.data(), size);
      expect(!row.is_distribution() && row.best() == size - 1, "NaN or infinity", size, strange);
    }
    std::fill(logits.begin(), logits.end(), -kInfinity);
    row.set(logits.data(), size);
    expect(!row.is_distribution() && row.best() == 0, "all masked", size, 0);
  }
}

template <class T>
void check_edits(int64_t size) {
  std::mt19937 random(static_cast<unsigned>(size));
  std::vector<T> logits;
  for (const float x : some_logits(size, 2, random)) logits.push_back(static_cast<T>(x));
  const int64_t ids[] = {size / 2, 0, size - 1, size / 2, size / 2};
  const float values[] = {0.5f, 0.25f, 1.0f};
  std::vector<int32_t> words((size + 31) / 32, -1);
  const int64_t forbidden = size > 4 ? 1 : -1;  // in no list
  if (forbidden >= 0) words[0] &= ~(int32_t{1} << forbidden);
  const Lists lists{ids, ids, ids, ids, values, words.data()};
  RowSettings row{};
  row.temperature = 0.5;
  row.frequency_penalty = 0.25;
  row.presence_penalty = 1;
  row.repetition_penalty = 2;
  row.min_new_tokens = 5;
  row.bias = {0, 3};
  row.ends = {2, 3};
  row.prompt = {1, 2};
  row.output = {2, 5};
  Editor editor;
  for (int64_t position = 4; position < 6; ++position) {
    const float* edited = editor.edit(logits.data(), size, row, position, lists);
    for (int64_t i = 0; i < size; ++i) {
      float x = static_cast<float>(logits[i]);
      for (int k = 0; k < 3; ++k) x += ids[k] == i ? values[k] : 0.0f;
      const int64_t uses = (i == ids[2]) + 2 * (i == size / 2);
      if (uses > 0 || i == 0) x = x > 0 ? x / 2 : x * 2;
      if (uses > 0) x -= 0.25f * static_cast<float>(uses) + 1;
      if ((i == ids[2] && position < 5) || i == forbidden) x = -kInfinity;
      expect(edited[i] == x / 0.5f, "edit", size, edited[i]);
    }
  }
  RowSettings plain{};
  plain.temperature = 1;
  plain.allowed = -1;
  const float* same = editor.edit(logits.data(), size, plain, 0, lists);
  for (int64_t i = 0; i < size; ++i) expect(same[i] == static_cast<float>(logits[i]), "no edit", size, same[i]);
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (const int64_t size : {1, 2, 15, 16, 17, 255, 256, 257, 1000, 4097}) {
    for (const double spread : {0.0, 0.2, 2.0, 9.0}) check_row(some_logits(size, spread, random));
    check_edits<float>(size);
    check_edits<bf16>(size);
  }
  // Distinct logits that are close to one another.
  std::vector<float> close(3000);
  for (size_t i = 0; i < close.size(); ++i) close[i] = 5.0f + static_cast<float>(i * 7919 % 3000) * 0x1p-20f;
  check_row(close);
  check_strange_rows();
  std::printf("%s: %d failures\n", kIsa, failures);
  return failures == 0 ? 0 : 1;
}
