// Linear layers on packed weights, with the norm before them and the bias after them where there is one.
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

// Adds the bias to the float32 sums, before they are rounded, and stores them.
template <class T>
struct PutRow {
  T* out;
  const T* bias;
  int64_t out_size;

  PutRow(at::Tensor& result, const std::optional<at::Tensor>& added)
      : out(result.mutable_data_ptr<T>()),
        bias(added ? added->const_data_ptr<T>() : nullptr),
        out_size(result.size(1)) {}

  void operator()(int64_t token, int64_t column, int n, F32x16 sums) const {
    if (bias != nullptr) sums = sums + load(bias + column, n);
    store(out + token * out_size + column, sums, n);
  }
};

at::Tensor linear(const at::Tensor& hidden, const at::Tensor& weight, int64_t out_size,
                  const std::optional<at::Tensor>& bias) {
  check_weight(hidden, weight, out_size);
  check_bias(hidden, bias, out_size);
  const int64_t num_tokens = hidden.size(0), depth = hidden.size(1);
  const at::Tensor input = hidden.contiguous();
  at::Tensor out = at::empty({num_tokens, out_size}, hidden.options());
  with_dtype(hidden, [&](auto zero) {
    using T = decltype(zero);
    const T* x = input.const_data_ptr<T>();
    packed_matmul<T>(
        num_tokens, depth, out_size, weight.const_data_ptr<T>(),
        [&](int64_t token, int) { return x + token * depth; }, PutRow<T>(out, bias), [](int64_t, int64_t) {});
  });
  return out;
}

at::Tensor norm_linear(at::Tensor& residual, const std::optional<at::Tensor>& hidden, const at::Tensor& norm_weight,
                       double eps, const at::Tensor& weight, int64_t out_size, const std::optional<at::Tensor>& bias,
                       std::optional<double> weight_offset) {
  check_weight(residual, weight, out_size);
  check_bias(residual, bias, out_size);
  check_norm(residual, hidden, norm_weight);
  const int64_t num_tokens = residual.size(0), depth = residual.size(1);
  at::Tensor out = at::empty({num_tokens, out_size}, residual.options());
  with_dtype(residual, [&](auto zero) {
    using T = decltype(zero);
    const NormRows<T> norm(residual, hidden, norm_weight, {eps, weight_offset});
    packed_matmul<T>(
        num_tokens, depth, out_size, weight.const_data_ptr<T>(),
        [&](int64_t token, int row) {
          thread_local std::vector<T> normed;
          normed.resize(kTileTokens<T> * depth);
          norm.token(token, &normed[row * depth]);
          return &normed[row * depth];
        },
        PutRow<T>(out, bias), [](int64_t, int64_t) {});
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) {
  m.impl("linear", &lockstep::linear);
  m.impl("norm_linear", &lockstep::norm_linear);
}
