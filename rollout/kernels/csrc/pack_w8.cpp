// Between logical rows of bf16 and packed 8-bit weights (packed_w8.h): quantising, and reading values back.
//
// Blocks of sixteen logical rows alternate as in pack.cpp.
//
// Shapes: N rows, K their elements.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "checks.h"
#include "packed_w8.h"
#include "parallel.h"

namespace lockstep {
namespace {

void check_w8(const at::Tensor& packed, int64_t depth, int64_t last_row, int64_t step, int64_t offset) {
  TORCH_CHECK(packed.is_contiguous() && packed.scalar_type() == at::kChar, "packed weights must be contiguous int8");
  TORCH_CHECK(step >= 1 && 0 <= offset && offset < step, "offset must be in 0..step - 1");
  const int64_t half = last_row < 0 ? -1 : last_row / kLanes * step + offset;
  const int64_t panels = half < 0 ? 0 : half / kPanelVectors + 1;
  TORCH_CHECK(panels * w8_panel_bytes(depth) <= packed.numel(), "rows lie outside the packed weights");
}

at::Tensor empty_packed_w8(at::IntArrayRef lead, int64_t rows, int64_t depth) {
  std::vector<int64_t> shape(lead.begin(), lead.end());
  shape.insert(shape.end(), {panels_of(rows), w8_panel_bytes(depth)});
  return at::zeros(shape, at::TensorOptions().dtype(at::kChar));
}

void pack_rows_w8(at::Tensor& packed, const at::Tensor& source, int64_t first_row, int64_t step, int64_t offset) {
  TORCH_CHECK(source.dim() == 2 && first_row >= 0 && source.scalar_type() == at::kBFloat16,
              "the source must be [N, K] bfloat16");
  const int64_t num_rows = source.size(0), depth = source.size(1);
  check_w8(packed, depth, first_row + num_rows - 1, step, offset);
  const at::Tensor rows = source.contiguous();
  const bf16* from = rows.const_data_ptr<bf16>();
  int8_t* to = packed.mutable_data_ptr<int8_t>();
  for_spans(num_rows, kLanes, num_rows * depth, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      W8Row(to, depth, first_row + n, step, offset).quantise(from + n * depth, depth);
    }
  });
}

at::Tensor unpack_rows_w8(const at::Tensor& packed, int64_t depth, int64_t first_row, int64_t num_rows, int64_t step,
                          int64_t offset) {
  TORCH_CHECK(first_row >= 0 && num_rows >= 0, "rows must not be negative");
  check_w8(packed, depth, first_row + num_rows - 1, step, offset);
  at::Tensor out = at::empty({num_rows, depth}, packed.options().dtype(at::kBFloat16));
  int8_t* from = const_cast<int8_t*>(packed.const_data_ptr<int8_t>());  // only read
  bf16* to = out.mutable_data_ptr<bf16>();
  for_spans(num_rows, kLanes, num_rows * depth, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const W8Row row(from, depth, first_row + n, step, offset);
      for (int64_t k = 0; k < depth; ++k) {
        to[n * depth + k] = static_cast<bf16>(static_cast<float>(row.integer(k)) * w8_power_of(row.exponent(k)));
      }
    }
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  m.def("empty_packed_w8(int[] lead, int rows, int depth) -> Tensor", &lockstep::empty_packed_w8);
  m.def("pack_rows_w8(Tensor(a!) packed, Tensor source, int first_row, int step, int offset) -> ()");
  m.def("unpack_rows_w8(Tensor packed, int depth, int first_row, int num_rows, int step, int offset) -> Tensor");
}

TORCH_LIBRARY_IMPL(lockstep, CPU, m) {
  m.impl("pack_rows_w8", &lockstep::pack_rows_w8);
  m.impl("unpack_rows_w8", &lockstep::unpack_rows_w8);
}
