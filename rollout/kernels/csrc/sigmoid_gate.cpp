// Groups of neighbours times the sigmoid of their gate, which is rounded to the storage dtype as in torch.
//
// Shapes: T tokens, N features in G groups.
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "checks.h"
#include "parallel.h"

namespace lockstep {
namespace {

constexpr int64_t kTokenSpan = 8;

// Groups of `size` neighbours of a row, each times the sigmoid of its gate.
template <class T>
void gate_row(const T* row, const T* gates, int64_t num_gates, int64_t size, T* out) {
  if (size == 1) {
    for (int64_t i = 0; i < num_gates; i += kLanes) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, num_gates - i));
      store(out + i, load(row + i, n) * round_to<T>(sigmoid(load(gates + i, n))), n);
    }
    return;
  }
  for (int64_t g = 0; g < num_gates; ++g, row += size, out += size) {
    const F32x16 gate = round_to<T>(sigmoid(splat(static_cast<float>(gates[g]))));
    for (int64_t i = 0; i < size; i += kLanes) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, size - i));
      store(out + i, load(row + i, n) * gate, n);
    }
  }
}

// hidden [T, N], gate [T, G] of any stride between rows -> [T, N].
at::Tensor sigmoid_gate(const at::Tensor& hidden, const at::Tensor& gate) {
  TORCH_CHECK(hidden.dim() == 2 && gate.dim() == 2 && hidden.size(0) == gate.size(0) && gate.size(1) > 0 &&
                  hidden.size(1) % gate.size(1) == 0 && (gate.stride(1) == 1 || gate.size(1) == 1),
              "hidden must be [T, N], the gates [T, G] with G a divisor of N");
  check_same_dtype(hidden, {gate});
  const at::Tensor rows = hidden.contiguous();
  const int64_t num_tokens = rows.size(0), size = rows.size(1), num_gates = gate.size(1), stride = gate.stride(0);
  at::Tensor out = at::empty_like(rows);
  with_dtype(rows, [&](auto zero) {
    using T = decltype(zero);
    const T *x = rows.const_data_ptr<T>(), *gates = gate.const_data_ptr<T>();
    T* y = out.mutable_data_ptr<T>();
    for_spans(num_tokens, kTokenSpan, num_tokens * size / 2, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) {
        gate_row(x + t * size, gates + t * stride, num_gates, size / num_gates, y + t * size);
      }
    });
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("sigmoid_gate", &lockstep::sigmoid_gate); }
