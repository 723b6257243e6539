// From router logits to expert choices: softmax over all experts, then the best K of each token.
//
// Shapes: T tokens, E logical experts, K top-k.
#include <tuple>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "parallel.h"

namespace lockstep {
namespace {

constexpr int64_t kTokenSpan = 8;

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

std::tuple<at::Tensor, at::Tensor> topk_softmax(const at::Tensor& logits, int64_t k, bool normalise) {
  TORCH_CHECK(logits.dim() == 2, "logits must be [T, E]");
  const int64_t num_tokens = logits.size(0), size = logits.size(1);
  TORCH_CHECK(0 < k && k <= size, "k must be in 1..", size, ", got ", k);
  const at::Tensor rows = logits.contiguous();
  at::Tensor weights = at::empty({num_tokens, k}, logits.options());
  at::Tensor ids = at::empty({num_tokens, k}, logits.options().dtype(at::kLong));
  with_dtype(logits, [&](auto zero) {
    using T = decltype(zero);
    const T* x = rows.const_data_ptr<T>();
    T* w = weights.mutable_data_ptr<T>();
    int64_t* i = ids.mutable_data_ptr<int64_t>();
    for_spans(num_tokens, kTokenSpan, 4 * num_tokens * size, [&](int64_t first, int64_t last) {
      std::vector<float> buffer(size);
      for (int64_t t = first; t < last; ++t) {
        route_token(x + t * size, size, k, normalise, w + t * k, i + t * k, buffer.data());
      }
    });
  });
  return {weights, ids};
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  m.def("topk_softmax(Tensor logits, int k, bool normalise) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("topk_softmax", &lockstep::topk_softmax); }
