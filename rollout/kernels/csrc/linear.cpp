// Linear layers without bias on packed weights, with the norm before them where there is one.
//
// Shapes: T tokens, D input features, O output features.
#include <optional>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "matmul.h"
#include "norm.h"

namespace lockstep {
namespace {

at::Tensor linear(const at::Tensor& hidden, const at::Tensor& weight, int64_t out_size) {
  check_weight(hidden, weight, out_size);
  const int64_t num_tokens = hidden.size(0), depth = hidden.size(1);
  const at::Tensor input = hidden.contiguous();
  at::Tensor out = at::empty({num_tokens, out_size}, hidden.options());
  with_dtype(hidden, [&](auto zero) {
    using T = decltype(zero);
    const T* x = input.const_data_ptr<T>();
    T* y = out.mutable_data_ptr<T>();
    packed_matmul<T>(
        num_tokens, depth, out_size, weight.const_data_ptr<T>(),
        [&](int64_t token, int row, int rows, uint32_t* tile) {
          pack_token(x + token * depth, depth, rows, row, tile);
        },
        [&](int64_t token, int64_t column, int n, F32x16 sums) { store(y + token * out_size + column, sums, n); },
        [](int64_t, int64_t) {});
  });
  return out;
}

at::Tensor norm_linear(at::Tensor& residual, const std::optional<at::Tensor>& hidden, const at::Tensor& norm_weight,
                       double eps, const at::Tensor& weight, int64_t out_size) {
  check_weight(residual, weight, out_size);
  check_norm(residual, hidden, norm_weight);
  const int64_t num_tokens = residual.size(0), depth = residual.size(1);
  at::Tensor out = at::empty({num_tokens, out_size}, residual.options());
  with_dtype(residual, [&](auto zero) {
    using T = decltype(zero);
    const NormRows<T> norm(residual, hidden, norm_weight, eps);
    T* y = out.mutable_data_ptr<T>();
    packed_matmul<T>(
        num_tokens, depth, out_size, weight.const_data_ptr<T>(),
        [&](int64_t token, int row, int rows, uint32_t* tile) {
          thread_local std::vector<T> normed;
          normed.resize(depth);
          norm.token(token, normed.data());
          pack_token(normed.data(), depth, rows, row, tile);
        },
        [&](int64_t token, int64_t column, int n, F32x16 sums) { store(y + token * out_size + column, sums, n); },
        [](int64_t, int64_t) {});
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  m.def("linear(Tensor hidden, Tensor weight, int out_size) -> Tensor");
  m.def(
      "norm_linear(Tensor(a!) residual, Tensor? hidden, Tensor norm_weight, float eps, Tensor weight, int out_size) -> "
      "Tensor");
}

TORCH_LIBRARY_IMPL(lockstep, CPU, m) {
  m.impl("linear", &lockstep::linear);
  m.impl("norm_linear", &lockstep::norm_linear);
}
