// From hidden states to expert choices: the norm before the block, the router's logits, softmax over all experts, then
// the best K of each token.
//
// Shapes: T tokens, D hidden, E logical experts, K top-k.
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

template <class T>
void route_token(const T* logits, int64_t size, int64_t k, bool normalise, T* weights, int64_t* ids, float* buffer) {
  for (int64_t e = 0; e < size; e += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, size - e));
    store(buffer + e, load(logits + e, n), n);
  }
  best(buffer, size, k, ids);
  const F32x16 largest = splat(buffer[ids[0]]);
  F32x16 sums = splat(0.0f);
  for (int64_t e = 0; e < size; e += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, size - e));
    store(buffer + e, exp(load(buffer + e, n) - largest), n);
    sums = sums + load(buffer + e, n);
  }
  const float total = sum(sums);
  float chosen = 0.0f;
  for (int64_t j = 0; j < k; ++j) chosen += buffer[ids[j]] / total;
  for (int64_t j = 0; j < k; ++j) {
    const float probability = buffer[ids[j]] / total;
    weights[j] = static_cast<T>(normalise ? probability / chosen : probability);
  }
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> norm_route(at::Tensor& residual, const std::optional<at::Tensor>& hidden,
                                                          const at::Tensor& norm_weight, double eps,
                                                          const at::Tensor& weight, int64_t num_experts, int64_t k,
                                                          bool normalise) {
  check_norm(residual, hidden, norm_weight);
  check_weight(residual, weight, num_experts);
  TORCH_CHECK(0 < k && k <= num_experts, "k must be in 1..", num_experts, ", got ", k);
  const int64_t num_tokens = residual.size(0), depth = residual.size(1);
  at::Tensor normed = at::empty({num_tokens, depth}, residual.options());
  at::Tensor factors = at::empty({num_tokens, k}, residual.options());
  at::Tensor ids = at::empty({num_tokens, k}, residual.options().dtype(at::kLong));
  at::Tensor logits = at::empty({num_tokens, num_experts}, residual.options());
  with_dtype(residual, [&](auto zero) {
    using T = decltype(zero);
    const NormRows<T> norm(residual, hidden, norm_weight, eps);
    T *x = normed.mutable_data_ptr<T>(), *scores = logits.mutable_data_ptr<T>(), *w = factors.mutable_data_ptr<T>();
    int64_t* i = ids.mutable_data_ptr<int64_t>();
    packed_matmul<T>(
        num_tokens, depth, num_experts, weight.const_data_ptr<T>(),
        [&](int64_t token, int row, int rows, uint32_t* tile) {
          norm.token(token, x + token * depth);
          pack_token(x + token * depth, depth, rows, row, tile);
        },
        [&](int64_t token, int64_t column, int n, F32x16 sums) { store(scores + token * num_experts + column, sums, n); },
        [&](int64_t first, int64_t last) {
          std::vector<float> buffer(num_experts);
          for (int64_t t = first; t < last; ++t) {
            route_token(scores + t * num_experts, num_experts, k, normalise, w + t * k, i + t * k, buffer.data());
          }
        });
  });
  return {normed, factors, ids};
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  m.def(
      "norm_route(Tensor(a!) residual, Tensor? hidden, Tensor norm_weight, float eps, Tensor weight, int num_experts, "
      "int k, bool normalise) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("norm_route", &lockstep::norm_route); }
