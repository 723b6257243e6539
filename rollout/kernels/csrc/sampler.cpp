// sample_rows: one token a row from logits, with log-probabilities; score_rows: log-probabilities of given tokens.
//
// Tensors are checked here, and rows divided over threads.  A row's numbers depend on that row only.
//
// Shapes: N rows, V vocabulary, n most log-probabilities of best tokens that a row asks for, C chosen tokens, M kept ones.
#include <tuple>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "checks.h"
#include "parallel.h"
#include "sampler_edits.h"

namespace lockstep::sampler {
namespace {

using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

constexpr int64_t kSettings = sizeof(RowSettings) / sizeof(int64_t);
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
// A span of rows has at least so many logits, so that buffers are worth making.
constexpr int64_t kSpanLogits = 16384;

void check_logits(const at::Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous(), "logits must be [N, V] and contiguous");
  TORCH_CHECK(0 < logits.size(1) && logits.size(1) <= INT32_MAX, "no vocabulary of ", logits.size(1), " tokens");
}

const int64_t* check_vector(const at::Tensor& x, const char* name, int64_t size) {
  TORCH_CHECK(x.dim() == 1 && x.scalar_type() == at::kLong && x.is_contiguous(), name, " must be a vector of int64");
  TORCH_CHECK(size < 0 || x.size(0) == size, name, " must have ", size, " entries, not ", x.size(0));
  return x.const_data_ptr<int64_t>();
}

// Every id in the span of the list is one of the vocabulary.
void check_ids(const int64_t* ids, int64_t count, Span span, int64_t vocab, const char* name) {
  TORCH_CHECK(0 <= span.begin && span.begin <= span.end && span.end <= count, name, ": a span outside the list");
  int64_t least = 0, most = 0;
  for (int64_t i = span.begin; i < span.end; ++i) {
    least = std::min(least, ids[i]);
    most = std::max(most, ids[i]);
  }
  TORCH_CHECK(least >= 0 && most < vocab, name, ": ids must be in 0..", vocab - 1);
}

// One thread's buffers.
struct Workplace {
  Editor editor;
  Row row;
  Distribution distribution;
  Selection selection;

  // The best `count` tokens in `width` places; places that are left say -1 and NaN.
  void write_best(int64_t count, int64_t width, int64_t* ids, float* logprobs) {
    std::fill(ids, ids + width, -1);
    std::fill(logprobs, logprobs + width, kNaN);
    count = std::min(count, row.size());
    if (!row.is_distribution()) {
      for (int64_t i = 0; i < count; ++i) ids[i] = i;
    } else if (count > 0) {
      const std::vector<Token>& best = selection.best(row, count);
      for (int64_t i = 0; i < count; ++i) {
        ids[i] = best[i].id;
        logprobs[i] = distribution.logprob(best[i].logit);
      }
    }
  }

  float logprob(int64_t id) const { return row.is_distribution() ? distribution.logprob(row[id]) : kNaN; }

  // `kept`, where it is not null, gets the tokens that could have been drawn.
  int64_t token(const RowSettings& settings, int64_t position, Kept* kept) {
    if (settings.is_greedy || !row.is_distribution()) {
      const int64_t best = row.best();
      if (kept != nullptr && settings.allowed >= 0 && row.is_distribution()) {
        selection.draw(row, distribution, {row.size(), 1.0, 0.0}, 0.0, kept);
      } else if (kept != nullptr) {
        kept->set(best, row.is_distribution() ? 0.0f : kNaN);
      }
      return best;
    }
    const double noise = uniform(settings.seed, static_cast<uint64_t>(position));
    if (kept == nullptr && !settings.filters(row.size())) return distribution.draw(row, noise);
    return selection.draw(row, distribution, settings.filter(row.size()), noise, kept);
  }
};

// What rows kept, one row after the other: how many each [N], their ids and log-probabilities [M].
std::tuple<at::Tensor, at::Tensor, at::Tensor> joined(const std::vector<Kept>& kept, int64_t num_rows) {
  at::Tensor counts = at::zeros({num_rows}, at::kLong);
  int64_t total = 0, *count = counts.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < kept.size(); ++i) total += count[i] = static_cast<int64_t>(kept[i].ids.size());
  at::Tensor ids = at::empty({total}, at::kInt), logprobs = at::empty({total}, at::kFloat);
  int32_t* id = ids.mutable_data_ptr<int32_t>();
  float* logprob = logprobs.mutable_data_ptr<float>();
  for (const Kept& row : kept) {
    id = std::copy(row.ids.begin(), row.ids.end(), id);
    logprob = std::copy(row.logprobs.begin(), row.logprobs.end(), logprob);
  }
  return {counts, ids, logprobs};
}

template <class F>
void for_rows(const at::Tensor& logits, F&& body) {
  const int64_t rows = logits.size(0), vocab = logits.size(1);
  for_spans(rows, std::max<int64_t>(1, kSpanLogits / vocab), rows * vocab / 4, [&](int64_t first, int64_t last) {
    Workplace workplace;
    for (int64_t row = first; row < last; ++row) body(workplace, row);
  });
}

Results sample_rows(const at::Tensor& logits, const at::Tensor& positions, const at::Tensor& settings,
                    const at::Tensor& chosen_ids, const at::Tensor& bias_ids, const at::Tensor& bias_values,
                    const at::Tensor& end_ids, const at::Tensor& histories, const at::Tensor& allowed, int64_t width) {
  check_logits(logits);
  const int64_t num_rows = logits.size(0), vocab = logits.size(1), num_chosen = chosen_ids.numel();
  TORCH_CHECK(settings.dim() == 2 && settings.scalar_type() == at::kLong && settings.is_contiguous() &&
                  settings.size(0) == num_rows && settings.size(1) == kSettings,
              "settings must be int64 [N, ", kSettings, "]");
  TORCH_CHECK(width >= 0, "top_n must be at least 0");
  TORCH_CHECK(allowed.dim() == 2 && allowed.scalar_type() == at::kInt && allowed.is_contiguous() &&
                  allowed.size(1) == (vocab + 31) / 32,
              "allowed must be int32 [G, ", (vocab + 31) / 32, "]");
  TORCH_CHECK(bias_values.scalar_type() == at::kFloat && bias_values.is_contiguous() &&
                  bias_values.numel() == bias_ids.numel(),
              "bias_values must be float32, as many as bias_ids");
  const int64_t* position = check_vector(positions, "positions", num_rows);
  const Lists lists{check_vector(chosen_ids, "chosen_ids", -1), check_vector(bias_ids, "bias_ids", -1),
                    check_vector(end_ids, "end_ids", -1), check_vector(histories, "histories", -1),
                    bias_values.const_data_ptr<float>(), allowed.const_data_ptr<int32_t>()};
  const RowSettings* rows = reinterpret_cast<const RowSettings*>(settings.const_data_ptr<int64_t>());
  bool any_mask = false;
  for (int64_t i = 0; i < num_rows; ++i) {
    any_mask |= rows[i].wants_mask != 0;
    check_ids(lists.chosen, num_chosen, rows[i].chosen, vocab, "chosen_ids");
    check_ids(lists.bias, bias_ids.numel(), rows[i].bias, vocab, "bias_ids");
    check_ids(lists.ends, end_ids.numel(), rows[i].ends, vocab, "end_ids");
    check_ids(lists.histories, histories.numel(), rows[i].prompt, vocab, "histories");
    check_ids(lists.histories, histories.numel(), rows[i].output, vocab, "histories");
    TORCH_CHECK(-1 <= rows[i].allowed && rows[i].allowed < allowed.size(0), "a row outside the allowed tokens");
    TORCH_CHECK(0 <= rows[i].top_logprobs && rows[i].top_logprobs <= width, "a row asks for more than top_n");
  }
  std::vector<Kept> kept(any_mask ? num_rows : 0);
  at::Tensor token_ids = at::empty({num_rows}, positions.options());
  at::Tensor logprobs = at::empty({num_rows}, logits.options().dtype(at::kFloat));
  at::Tensor top_ids = at::empty({num_rows, width}, positions.options());
  at::Tensor top_logprobs = at::empty({num_rows, width}, logprobs.options());
  at::Tensor chosen_logprobs = at::empty({num_chosen}, logprobs.options());
  int64_t *tokens = token_ids.mutable_data_ptr<int64_t>(), *best = top_ids.mutable_data_ptr<int64_t>();
  float *values = logprobs.mutable_data_ptr<float>(), *best_values = top_logprobs.mutable_data_ptr<float>();
  float* chosen_values = chosen_logprobs.mutable_data_ptr<float>();
  with_dtype(logits, [&](auto zero) {
    using T = decltype(zero);
    const T* x = logits.const_data_ptr<T>();
    for_rows(logits, [&](Workplace& place, int64_t i) {
      const RowSettings& row = rows[i];
      place.row.set(place.editor.edit(x + i * vocab, vocab, row, position[i], lists), vocab);
      const bool wants = row.wants_logprob || row.top_logprobs > 0 || !row.chosen.empty();
      const bool draws = !row.is_greedy || (row.wants_mask && row.allowed >= 0);
      if ((wants || draws) && place.row.is_distribution()) {
        place.distribution.set(place.row, draws && (row.filters(vocab) || row.wants_mask));
      }
      tokens[i] = place.token(row, position[i], row.wants_mask ? &kept[i] : nullptr);
      values[i] = row.wants_logprob ? place.logprob(tokens[i]) : kNaN;
      place.write_best(row.top_logprobs, width, best + i * width, best_values + i * width);
      for (int64_t j = row.chosen.begin; j < row.chosen.end; ++j) chosen_values[j] = place.logprob(lists.chosen[j]);
    });
  });
  auto [kept_counts, kept_ids, kept_logprobs] = joined(kept, num_rows);
  return {token_ids, logprobs, top_ids, top_logprobs, chosen_logprobs, kept_counts, kept_ids, kept_logprobs};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> score_rows(const at::Tensor& logits,
                                                                      const at::Tensor& target_ids, double temperature,
                                                                      const at::Tensor& chosen_ids, int64_t width) {
  check_logits(logits);
  const int64_t num_rows = logits.size(0), vocab = logits.size(1), num_chosen = chosen_ids.numel();
  TORCH_CHECK(width >= 0, "top_n must be at least 0");
  const int64_t* targets = check_vector(target_ids, "target_ids", num_rows);
  const int64_t* chosen = check_vector(chosen_ids, "chosen_ids", -1);
  check_ids(targets, num_rows, {0, num_rows}, vocab, "target_ids");
  check_ids(chosen, num_chosen, {0, num_chosen}, vocab, "chosen_ids");
  at::Tensor logprobs = at::empty({num_rows}, logits.options().dtype(at::kFloat));
  at::Tensor top_ids = at::empty({num_rows, width}, target_ids.options());
  at::Tensor top_logprobs = at::empty({num_rows, width}, logprobs.options());
  at::Tensor chosen_logprobs = at::empty({num_rows, num_chosen}, logprobs.options());
  float *values = logprobs.mutable_data_ptr<float>(), *best_values = top_logprobs.mutable_data_ptr<float>();
  float* chosen_values = chosen_logprobs.mutable_data_ptr<float>();
  int64_t* best = top_ids.mutable_data_ptr<int64_t>();
  RowSettings settings{};
  settings.temperature = temperature;
  settings.allowed = -1;
  with_dtype(logits, [&](auto zero) {
    using T = decltype(zero);
    const T* x = logits.const_data_ptr<T>();
    for_rows(logits, [&](Workplace& place, int64_t i) {
      place.row.set(place.editor.edit(x + i * vocab, vocab, settings, 0, Lists{}), vocab);
      if (place.row.is_distribution()) place.distribution.set(place.row, false);
      values[i] = place.logprob(targets[i]);
      place.write_best(width, width, best + i * width, best_values + i * width);
      for (int64_t j = 0; j < num_chosen; ++j) chosen_values[i * num_chosen + j] = place.logprob(chosen[j]);
    });
  });
  return {logprobs, top_ids, top_logprobs, chosen_logprobs};
}

}  // namespace
}  // namespace lockstep::sampler

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  m.def(
      "sample_rows(Tensor logits, Tensor positions, Tensor settings, Tensor chosen_ids, Tensor bias_ids, "
      "Tensor bias_values, Tensor end_ids, Tensor histories, Tensor allowed, int top_n) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "score_rows(Tensor logits, Tensor target_ids, float temperature, Tensor chosen_ids, int top_n) "
      "-> (Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(lockstep, CPU, m) {
  m.impl("sample_rows", &lockstep::sampler::sample_rows);
  m.impl("score_rows", &lockstep::sampler::score_rows);
}
