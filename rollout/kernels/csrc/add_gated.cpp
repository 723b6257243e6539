// Sums of rows, the second row of each times the sigmoid of its gate: a fused multiply-add, rounded once.
//
// Shapes: T tokens, D hidden.
#include <optional>

#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "checks.h"
#include "parallel.h"

namespace lockstep {
namespace {

constexpr int64_t kTokenSpan = 8;

template <class T>
void add_row(const T* row, const T* added, const T* gate, int64_t size, T* out) {
  const F32x16 factor = gate == nullptr ? splat(1.0f) : round_to<T>(sigmoid(splat(static_cast<float>(*gate))));
  for (int64_t d = 0; d < size; d += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, size - d));
    store(out + d, fma(load(added + d, n), factor, load(row + d, n)), n);
  }
}

// hidden [T, D], added [T, D], gate [T, 1] of any stride between rows -> [T, D].
at::Tensor add_gated(const at::Tensor& hidden, const at::Tensor& added, const std::optional<at::Tensor>& gate) {
  TORCH_CHECK(hidden.dim() == 2 && hidden.sizes() == added.sizes(), "both terms must be [T, D]");
  TORCH_CHECK(!gate || (gate->dim() == 2 && gate->size(0) == hidden.size(0) && gate->size(1) == 1),
              "the gate must be [T, 1]");
  check_same_dtype(hidden, {added, gate ? *gate : hidden});
  const at::Tensor rows = hidden.contiguous(), more = added.contiguous();
  const int64_t num_tokens = rows.size(0), size = rows.size(1), stride = gate ? gate->stride(0) : 0;
  at::Tensor out = at::empty_like(rows);
  with_dtype(rows, [&](auto zero) {
    using T = decltype(zero);
    const T *x = rows.const_data_ptr<T>(), *y = more.const_data_ptr<T>();
    const T* gates = gate ? gate->const_data_ptr<T>() : nullptr;
    T* z = out.mutable_data_ptr<T>();
    for_spans(num_tokens, kTokenSpan, num_tokens * size / 4, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) {
        add_row(x + t * size, y + t * size, gates == nullptr ? nullptr : gates + t * stride, size, z + t * size);
      }
    });
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("add_gated", &lockstep::add_gated); }
