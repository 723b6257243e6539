// Products of rows and a packed weight, with a bias where there is one.
//
// Shapes: T tokens, D input features, O output features.
#include <optional>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "matmul.h"

namespace lockstep {
namespace {

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
    with_panels<T>(weight, [&](auto panels) {
      packed_matmul<T>(
          num_tokens, depth, out_size, panels, [&](int64_t token, int) { return x + token * depth; },
          PutRow<T>(out, bias), [](int64_t, int64_t) {});
    });
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("linear", &lockstep::linear); }
