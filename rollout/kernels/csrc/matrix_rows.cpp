// Rows of a packed weight by number.
//
// Shapes: N rows, K their elements.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "packed_rows.h"
#include "parallel.h"

namespace lockstep {
namespace {

at::Tensor matrix_rows(const at::Tensor& packed, const at::Tensor& ids, int64_t depth) {
  TORCH_CHECK(ids.dim() == 1 && ids.scalar_type() == at::kLong, "ids must be [N] int64");
  const at::Tensor rows = ids.contiguous();
  const int64_t* row = rows.const_data_ptr<int64_t>();
  int64_t largest = -1;
  for (int64_t n = 0; n < rows.numel(); ++n) {
    TORCH_CHECK(row[n] >= 0, "row ", row[n], " is negative");
    largest = std::max(largest, row[n]);
  }
  check_packed(packed, depth, largest, 1, 0);
  at::Tensor out = at::empty({rows.numel(), depth}, packed.options());
  with_dtype(packed, [&](auto zero) {
    using T = decltype(zero);
    const T* from = packed.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for_spans(rows.numel(), kLanes, rows.numel() * depth / 2, [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) unpack_row(row_place(from, depth, row[n], 1, 0), 0, depth, to + n * depth);
    });
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("matrix_rows", &lockstep::matrix_rows); }
