// Rows of a plain table by number.
//
// torch's own gather is as fast while its code is in the caches; after a forward that emptied them it costs several
// times as much as this one, which runs where the other operators do.
#include <cstring>

#include <vector>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "parallel.h"

namespace lockstep {
namespace {

at::Tensor gather_rows(const at::Tensor& table, const at::Tensor& ids) {
  TORCH_CHECK(ids.dim() == 1 && ids.scalar_type() == at::kLong, "ids must be [N] int64");
  TORCH_CHECK(table.dim() >= 1 && table.is_contiguous(), "the table must be contiguous");
  const at::Tensor rows = ids.contiguous();
  const int64_t* row = rows.const_data_ptr<int64_t>();
  const int64_t count = rows.numel(), size = table.size(0);
  for (int64_t n = 0; n < count; ++n) {
    TORCH_CHECK_INDEX(row[n] >= 0 && row[n] < size, "row ", row[n], " of a table of ", size);
  }
  std::vector<int64_t> sizes = table.sizes().vec();
  sizes[0] = count;
  at::Tensor out = at::empty(sizes, table.options());
  const int64_t bytes = size == 0 ? 0 : table.nbytes() / size;
  const char* from = static_cast<const char*>(table.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for_spans(count, 16, count * bytes / 8, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) std::memcpy(to + n * bytes, from + row[n] * bytes, bytes);
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("gather_rows", &lockstep::gather_rows); }
