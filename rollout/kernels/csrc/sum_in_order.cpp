// Sums of the parts of several ranks, one part after the other: in float32, or as they are for float64 and int64.
//
// Shapes: N parts.
#include <ATen/ops/empty.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include "checks.h"
#include "parallel.h"

namespace lockstep {
namespace {

constexpr int64_t kSpan = 4096;

// Elements `first` to `last` of the sum of `count` parts of `size` elements.
template <class T>
void sum_span(const T* parts, int64_t count, int64_t size, int64_t first, int64_t last, T* out) {
  for (int64_t i = first; i < last; i += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, last - i));
    F32x16 total = load(parts + i, n);
    for (int64_t part = 1; part < count; ++part) total = total + load(parts + part * size + i, n);
    store(out + i, total, n);
  }
}

// The same for dtypes without vectors of their own.
template <class T, class Wide>
void sum_span_plain(const T* parts, int64_t count, int64_t size, int64_t first, int64_t last, T* out) {
  for (int64_t i = first; i < last; ++i) {
    Wide total = static_cast<Wide>(parts[i]);
    for (int64_t part = 1; part < count; ++part) total += static_cast<Wide>(parts[part * size + i]);
    out[i] = static_cast<T>(total);
  }
}

// parts [N, ...] -> [...].
at::Tensor sum_in_order(const at::Tensor& parts) {
  TORCH_CHECK(parts.dim() >= 1 && parts.size(0) >= 1, "there must be a part");
  const at::Tensor rows = parts.contiguous();
  const int64_t count = rows.size(0), size = rows.numel() / count;
  at::Tensor out = at::empty(rows.sizes().slice(1), rows.options());
  const auto run = [&](auto zero, auto sum) {
    using T = decltype(zero);
    const T* from = rows.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for_spans(size, kSpan, count * size / 8, [&](int64_t first, int64_t last) {
      sum(from, count, size, first, last, to);
    });
  };
  if (rows.scalar_type() == at::kDouble) {
    run(double(), sum_span_plain<double, double>);
  } else if (rows.scalar_type() == at::kLong) {
    run(int64_t(), sum_span_plain<int64_t, int64_t>);
  } else if (rows.scalar_type() == at::kHalf) {
    run(c10::Half(), sum_span_plain<c10::Half, float>);
  } else {
    with_dtype(rows, [&](auto zero) { run(zero, sum_span<decltype(zero)>); });
  }
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("sum_in_order", &lockstep::sum_in_order); }
