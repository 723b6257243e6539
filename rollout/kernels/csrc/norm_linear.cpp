// The norm before a linear layer, and the layer: rows are normed as they are packed for the product.
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
    with_panels<T>(weight, [&](auto panels) {
      packed_matmul<T>(
          num_tokens, depth, out_size, panels,
          [&](int64_t token, int row) {
            thread_local std::vector<T> normed;
            normed.resize(kTileTokens<T> * depth);
            norm.token(token, &normed[row * depth]);
            return &normed[row * depth];
          },
          PutRow<T>(out, bias), [](int64_t, int64_t) {});
    });
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("norm_linear", &lockstep::norm_linear); }
