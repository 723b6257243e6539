// W_v of latent attention, applied to what attention returns.
//
// Shapes: T tokens, H heads, R latent, v value size.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "latent_heads.h"

namespace lockstep {
namespace {

at::Tensor latent_values(const at::Tensor& latents, const at::Tensor& weight, int64_t num_heads, int64_t value_size) {
  TORCH_CHECK(latents.dim() == 2 && latents.is_contiguous() && num_heads > 0 && latents.size(1) % num_heads == 0,
              "latents must be [T, H R] and contiguous");
  TORCH_CHECK(value_size > 0, "the value size must be positive");
  check_same_dtype(latents, {weight});
  const int64_t num_tokens = latents.size(0), rank = latents.size(1) / num_heads;
  at::Tensor out = at::empty({num_tokens, num_heads * value_size}, latents.options());
  with_dtype(latents, [&](auto zero) {
    using T = decltype(zero);
    const int64_t numel = matrix_numel<T>(value_size, rank);
    check_heads(weight, num_heads, numel);
    const HeadRows<const T> in{latents.const_data_ptr<T>(), num_heads * rank, rank};
    const HeadRows<T> values{out.mutable_data_ptr<T>(), num_heads * value_size, value_size};
    const T* first = weight.const_data_ptr<T>() + weight.size(1) - numel;
    multiply_heads<T>(num_tokens, num_heads, rank, value_size, first, weight.size(1), in, values);
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("latent_values", &lockstep::latent_values); }
