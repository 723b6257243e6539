// From hidden states to expert choices: the norm before the block, the router's logits, the scores of all experts, and
// the best K of each token, or those that the caller gives.
//
// Shapes: T tokens, D hidden, E logical experts, K top-k, G groups of experts.
#include <limits>
#include <tuple>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "matmul.h"
#include "norm.h"

namespace lockstep {
namespace {

// The K largest, best first; of equal ones the lowest index first.  A NaN is never chosen over a number that follows
// it, and the K ids are distinct whatever the values are.
void best(const float* values, int64_t size, int64_t k, int64_t* ids) {
  for (int64_t i = 0; i < size; ++i) {
    int64_t place = std::min(i, k);
    while (place > 0 && values[i] > values[ids[place - 1]]) --place;
    if (place == k) continue;
    for (int64_t j = std::min(i, k - 1); j > place; --j) ids[j] = ids[j - 1];
    ids[place] = i;
  }
}

struct Scoring {
  int64_t num_experts, top_k, num_groups, top_groups;
  bool normalise;
  double scaling;
};

// One token at a time; holds what is needed beside the logits.
class Router {
 public:
  explicit Router(const Scoring& scoring)
      : s_(scoring), scores_(scoring.num_experts), choices_(scoring.num_experts), groups_(scoring.num_groups),
        picks_(std::max(scoring.top_groups, int64_t{2})) {}

  // Probabilities are a softmax over all experts; `forced` [K] takes the place of the best K.
  template <class T>
  void softmax(const T* logits, const int64_t* forced, T* weights, int64_t* ids) {
    for_vectors([&](int64_t e, int n) { store(scores_.data() + e, load(logits + e, n), n); });
    best(scores_.data(), s_.num_experts, s_.top_k, ids);
    const F32x16 largest = splat(scores_[ids[0]]);
    if (forced != nullptr) std::copy_n(forced, s_.top_k, ids);
    F32x16 sums = splat(0.0f);
    for_vectors([&](int64_t e, int n) {
      store(scores_.data() + e, exp(load(scores_.data() + e, n) - largest), n);
      sums = sums + load(scores_.data() + e, n);
    });
    const float total = sum(sums);
    for (int64_t j = 0; j < s_.top_k; ++j) scores_[ids[j]] = scores_[ids[j]] / total;
    weigh(0.0f, ids, weights);
  }

  // GPT-OSS: the best K logits, or those of `forced`, and a softmax over them alone.
  template <class T>
  void softmax_of_chosen(const T* logits, const int64_t* forced, T* weights, int64_t* ids) {
    for_vectors([&](int64_t e, int n) { store(scores_.data() + e, load(logits + e, n), n); });
    if (forced != nullptr) {
      std::copy_n(forced, s_.top_k, ids);
    } else {
      best(scores_.data(), s_.num_experts, s_.top_k, ids);
    }
    float largest = scores_[ids[0]];
    for (int64_t j = 1; j < s_.top_k; ++j) largest = std::max(largest, scores_[ids[j]]);
    for_vectors([&](int64_t e, int n) { store(scores_.data() + e, exp(load(scores_.data() + e, n) - splat(largest)), n); });
    weigh(0.0f, ids, weights);
  }

  // DeepSeek-V3: scores are sigmoids, choices are made of score + `bias` among the best groups, weights of scores.
  template <class T>
  void sigmoid(const float* logits, const float* bias, const int64_t* forced, T* weights, int64_t* ids) {
    for_vectors([&](int64_t e, int n) { store(choices_.data() + e, exp(splat(0.0f) - load(logits + e, n)), n); });
    for (int64_t e = 0; e < s_.num_experts; ++e) {
      scores_[e] = 1.0f / (1.0f + choices_[e]);
      choices_[e] = bias == nullptr ? scores_[e] : scores_[e] + bias[e];
    }
    if (forced != nullptr) {
      std::copy_n(forced, s_.top_k, ids);
    } else {
      if (s_.num_groups > 1) keep_best_groups();
      best(choices_.data(), s_.num_experts, s_.top_k, ids);
    }
    weigh(1e-20f, ids, weights);
  }

 private:
  template <class F>
  void for_vectors(F&& body) const {
    for (int64_t e = 0; e < s_.num_experts; e += kLanes) {
      body(e, static_cast<int>(std::min<int64_t>(kLanes, s_.num_experts - e)));
    }
  }

  // A group counts as much as its two best choices together.
  void keep_best_groups() {
    const int64_t size = s_.num_experts / s_.num_groups;
    for (int64_t g = 0; g < s_.num_groups; ++g) {
      const float* choices = choices_.data() + g * size;
      best(choices, size, std::min<int64_t>(2, size), picks_.data());
      groups_[g] = choices[picks_[0]] + (size > 1 ? choices[picks_[1]] : 0.0f);
    }
    best(groups_.data(), s_.num_groups, s_.top_groups, picks_.data());
    for (int64_t g = 0; g < s_.num_groups; ++g) {
      if (std::find(picks_.begin(), picks_.begin() + s_.top_groups, g) != picks_.begin() + s_.top_groups) continue;
      std::fill_n(choices_.begin() + g * size, size, -std::numeric_limits<float>::infinity());
    }
  }

  template <class T>
  void weigh(float least, const int64_t* ids, T* weights) const {
    float chosen = least;
    for (int64_t j = 0; j < s_.top_k; ++j) chosen += scores_[ids[j]];
    for (int64_t j = 0; j < s_.top_k; ++j) {
      const float weight = s_.normalise ? scores_[ids[j]] / chosen : scores_[ids[j]];
      weights[j] = static_cast<T>(weight * static_cast<float>(s_.scaling));
    }
  }

  Scoring s_;
  std::vector<float> scores_, choices_, groups_;
  std::vector<int64_t> picks_;
};

void check_routing(const at::Tensor& residual, const Scoring& s, const std::optional<at::Tensor>& bias,
                   const std::optional<at::Tensor>& forced) {
  TORCH_CHECK(0 < s.top_k && s.top_k <= s.num_experts, "top_k must be in 1..", s.num_experts, ", got ", s.top_k);
  TORCH_CHECK(s.num_groups > 0 && s.num_experts % s.num_groups == 0 && 0 < s.top_groups && s.top_groups <= s.num_groups &&
                  s.top_k <= s.num_experts / s.num_groups * s.top_groups,
              "groups must divide the experts, and the best ones have at least top_k");
  TORCH_CHECK(!bias || (bias->scalar_type() == at::kFloat && bias->dim() == 1 && bias->size(0) == s.num_experts &&
                        bias->is_contiguous()),
              "the correction bias must be float32 [E]");
  if (!forced) return;
  TORCH_CHECK(forced->scalar_type() == at::kLong && forced->dim() == 2 && forced->size(0) == residual.size(0) &&
                  forced->size(1) == s.top_k && forced->is_contiguous(),
              "forced ids must be int64 [T, K]");
  const int64_t* ids = forced->const_data_ptr<int64_t>();
  for (int64_t i = 0; i < forced->numel(); ++i) {
    TORCH_CHECK(ids[i] < s.num_experts, "forced id ", ids[i], " is not below ", s.num_experts);
  }
}

// Rows of `forced_ids` that begin with a negative id are chosen freely.
std::tuple<at::Tensor, at::Tensor, at::Tensor> norm_route(
    at::Tensor& residual, const std::optional<at::Tensor>& hidden, const at::Tensor& norm_weight, double eps,
    const at::Tensor& weight, int64_t num_experts, int64_t k, bool normalise, c10::string_view scoring, double scaling,
    int64_t num_groups, int64_t top_groups, const std::optional<at::Tensor>& correction_bias,
    const std::optional<at::Tensor>& forced_ids, std::optional<double> weight_offset,
    const std::optional<at::Tensor>& bias) {
  const Scoring rule{num_experts, k, num_groups, top_groups, normalise, scaling};
  const bool is_sigmoid = scoring == "sigmoid", of_chosen = scoring == "softmax_of_chosen";
  TORCH_CHECK(is_sigmoid || of_chosen || scoring == "softmax", "unknown scores: ", scoring);
  TORCH_CHECK(is_sigmoid ? !bias : !correction_bias && num_groups == 1,
              "only sigmoid scores have a correction bias and groups, only others have a bias");
  TORCH_CHECK(normalise || !of_chosen, "the softmax of the chosen experts is normalised");
  check_bias(residual, bias, num_experts);
  check_norm(residual, hidden, norm_weight);
  check_weight(residual, weight, num_experts);
  check_routing(residual, rule, correction_bias, forced_ids);
  const int64_t num_tokens = residual.size(0), depth = residual.size(1);
  at::Tensor normed = at::empty({num_tokens, depth}, residual.options());
  at::Tensor factors = at::empty({num_tokens, k}, residual.options());
  at::Tensor ids = at::empty({num_tokens, k}, residual.options().dtype(at::kLong));
  // A softmax is of logits in the model's dtype, a sigmoid of logits in float32, as trainers compute them.
  at::Tensor logits =
      at::empty({num_tokens, num_experts}, is_sigmoid ? residual.options().dtype(at::kFloat) : residual.options());
  const float* correction = correction_bias ? correction_bias->const_data_ptr<float>() : nullptr;
  const int64_t* given = forced_ids ? forced_ids->const_data_ptr<int64_t>() : nullptr;
  with_dtype(residual, [&](auto zero) {
    using T = decltype(zero);
    const NormRows<T> norm(residual, hidden, norm_weight, {eps, weight_offset});
    T *x = normed.mutable_data_ptr<T>(), *w = factors.mutable_data_ptr<T>();
    const T* added = bias ? bias->const_data_ptr<T>() : nullptr;
    T* rounded = is_sigmoid ? nullptr : logits.mutable_data_ptr<T>();
    float* exact = is_sigmoid ? logits.mutable_data_ptr<float>() : nullptr;
    int64_t* i = ids.mutable_data_ptr<int64_t>();
    packed_matmul<T>(
        num_tokens, depth, num_experts, PlainPanels<T>{weight.const_data_ptr<T>()},
        [&](int64_t token, int) {
          norm.token(token, x + token * depth);
          return x + token * depth;
        },
        [&](int64_t token, int64_t column, int n, F32x16 sums) {
          if (is_sigmoid) return store(exact + token * num_experts + column, sums, n);
          if (added != nullptr) sums = sums + load(added + column, n);
          store(rounded + token * num_experts + column, sums, n);
        },
        [&](int64_t first, int64_t last) {
          Router router(rule);
          for (int64_t t = first; t < last; ++t) {
            const int64_t* forced = given == nullptr || given[t * k] < 0 ? nullptr : given + t * k;
            if (is_sigmoid) {
              router.sigmoid(exact + t * num_experts, correction, forced, w + t * k, i + t * k);
            } else if (of_chosen) {
              router.softmax_of_chosen(rounded + t * num_experts, forced, w + t * k, i + t * k);
            } else {
              router.softmax(rounded + t * num_experts, forced, w + t * k, i + t * k);
            }
          }
        });
  });
  return {normed, factors, ids};
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("norm_route", &lockstep::norm_route); }
