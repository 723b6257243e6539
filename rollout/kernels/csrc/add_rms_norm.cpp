// RMS norm of rows, with the residual sum before it.  Rounding as in norm.h.
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "checks.h"
#include "norm.h"
#include "parallel.h"

namespace lockstep {
namespace {

constexpr int64_t kTokenSpan = 8;

// residual += hidden, where there is one; the norm of it.
at::Tensor add_rms_norm(at::Tensor& residual, const std::optional<at::Tensor>& hidden, const at::Tensor& weight,
                        double eps, std::optional<double> weight_offset) {
  check_norm(residual, hidden, weight);
  at::Tensor out = at::empty_like(residual);
  with_dtype(residual, [&](auto zero) {
    using T = decltype(zero);
    const NormRows<T> norm(residual, hidden, weight, {eps, weight_offset});
    T* place = out.mutable_data_ptr<T>();
    for_spans(residual.size(0), kTokenSpan, residual.numel() / 4, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) norm.token(t, place + t * residual.size(1));
    });
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("add_rms_norm", &lockstep::add_rms_norm); }
