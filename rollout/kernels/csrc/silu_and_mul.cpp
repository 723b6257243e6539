// The activation of dense feed-forward blocks; that of experts is part of their operator.
//
// silu(gate) is rounded to the storage dtype as in torch, then its product with up.  No call to torch's own functions:
// the last elements of a thread's share are computed by other instructions than the rest there.
//
// Shapes: T tokens, I intermediate.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "parallel.h"

namespace lockstep {
namespace {

constexpr int64_t kTokenSpan = 8;

template <class T>
void activate_row(const T* gate, const T* up, int64_t size, T* out) {
  for (int64_t i = 0; i < size; i += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, size - i));
    store(out + i, round_to<T>(silu(load(gate + i, n))) * load(up + i, n), n);
  }
}

// gate_up [T, 2I], gate first -> silu(gate) * up [T, I].
at::Tensor silu_and_mul(const at::Tensor& gate_up) {
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "gate_up must be [T, 2I]");
  const at::Tensor rows = gate_up.contiguous();
  const int64_t num_tokens = rows.size(0), size = rows.size(1) / 2;
  at::Tensor out = at::empty({num_tokens, size}, rows.options());
  with_dtype(rows, [&](auto zero) {
    using T = decltype(zero);
    const T* x = rows.const_data_ptr<T>();
    T* y = out.mutable_data_ptr<T>();
    for_spans(num_tokens, kTokenSpan, num_tokens * size, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) {
        activate_row(x + 2 * t * size, x + (2 * t + 1) * size, size, y + t * size);
      }
    });
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("silu_and_mul", &lockstep::silu_and_mul); }
