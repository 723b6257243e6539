// Linear layers without bias, with rows that do not depend on one another.
//
// Shapes: T tokens, D input features, O output features.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "dot.h"
#include "parallel.h"

namespace lockstep {
namespace {

constexpr int64_t kRowBlock = 32;    // weight rows of an item
constexpr int64_t kTokenChunk = 48;  // tokens whose rows stay in the cache while a block is applied to them

template <class T>
void linear_rows(const T* input, const T* weight, T* out, int64_t num_tokens, int64_t depth, int64_t out_size,
                 int64_t first, int64_t last) {
  float sums[kTokenChunk * kRowBlock];
  const T* tokens[kTokenChunk];
  for (int64_t begin = 0; begin < num_tokens; begin += kTokenChunk) {
    const int64_t count = std::min(kTokenChunk, num_tokens - begin);
    for (int64_t t = 0; t < count; ++t) tokens[t] = input + (begin + t) * depth;
    dot_rows(weight, first, last, depth, tokens, count, weight + last * depth, sums, kRowBlock);
    for (int64_t t = 0; t < count; ++t) {
      T* place = out + (begin + t) * out_size;
      for (int64_t o = first; o < last; o += kLanes) {
        const int n = static_cast<int>(std::min<int64_t>(kLanes, last - o));
        store(place + o, load(sums + t * kRowBlock + o - first, n), n);
      }
    }
  }
}

at::Tensor linear(const at::Tensor& hidden, const at::Tensor& weight) {
  TORCH_CHECK(hidden.dim() == 2 && weight.dim() == 2 && hidden.size(1) == weight.size(1),
              "hidden must be [T, D] and weight [O, D]");
  TORCH_CHECK(weight.is_contiguous(), "the weight must be contiguous");
  check_same_dtype(hidden, {weight});
  const at::Tensor input = hidden.contiguous();
  const int64_t num_tokens = hidden.size(0), depth = hidden.size(1), out_size = weight.size(0);
  at::Tensor out = at::empty({num_tokens, out_size}, hidden.options());
  if (num_tokens == 0) return out;
  with_dtype(hidden, [&](auto zero) {
    using T = decltype(zero);
    const T *x = input.const_data_ptr<T>(), *w = weight.const_data_ptr<T>();
    T* y = out.mutable_data_ptr<T>();
    for_spans(out_size, kRowBlock, nanoseconds_of_dots(num_tokens, weight.numel()), [&](int64_t first, int64_t last) {
      linear_rows(x, w, y, num_tokens, depth, out_size, first, last);
    });
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_FRAGMENT(lockstep, m) { m.def("linear(Tensor hidden, Tensor weight) -> Tensor"); }

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("linear", &lockstep::linear); }
