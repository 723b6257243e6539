// Between logical rows and packed weights with scales (packed_held.h): bytes and scales as they are published.
//
// A matrix begins at packed row `first_row`, with fp8 a multiple of sixteen.  Blocks of sixteen rows alternate as in
// pack.cpp.
//
// Shapes: N rows, K their elements, n and k blocks of 128 of them, s steps of 32 elements.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "checks.h"
#include "held_rows.h"
#include "parallel.h"

namespace lockstep {
namespace {

template <class Step>
void check_held(const at::Tensor& packed, at::ScalarType dtype, int64_t depth, int64_t first_row, int64_t num_rows,
                int64_t step, int64_t offset) {
  TORCH_CHECK(packed.is_contiguous() && packed.scalar_type() == dtype, "packed weights must be contiguous ", dtype);
  TORCH_CHECK(step >= 1 && 0 <= offset && offset < step && num_rows >= 0, "offset must be in 0..step - 1");
  const bool shares_scale = dtype == at::kFloat8_e4m3fn && first_row % kLanes != 0;
  TORCH_CHECK(first_row >= 0 && !shares_scale, "the first row must not share a scale with the row before");
  const int64_t panels = num_rows == 0 ? 0 : HeldRow(first_row + num_rows - 1, step, offset).panel + 1;
  TORCH_CHECK(panels * held_panel_bytes<Step>(depth) <= packed.numel(), "rows lie outside the packed weights");
}

template <class Step>
at::Tensor empty_held(at::ScalarType dtype, at::IntArrayRef lead, int64_t rows, int64_t depth) {
  std::vector<int64_t> shape(lead.begin(), lead.end());
  shape.insert(shape.end(), {panels_of(rows), held_panel_bytes<Step>(depth)});
  return at::zeros(shape, at::TensorOptions().dtype(at::kByte)).view(dtype);
}

at::Tensor empty_packed_fp8(at::IntArrayRef lead, int64_t rows, int64_t depth) {
  return empty_held<Fp8Step>(at::kFloat8_e4m3fn, lead, rows, depth);
}

at::Tensor empty_packed_int4(at::IntArrayRef lead, int64_t rows, int64_t depth) {
  return empty_held<Int4Step>(at::kByte, lead, rows, depth);
}

void pack_rows_fp8(at::Tensor& packed, const at::Tensor& weight, const at::Tensor& scale, int64_t first_row,
                   int64_t step, int64_t offset) {
  TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == at::kFloat8_e4m3fn, "the weight must be [N, K] float8_e4m3fn");
  const int64_t num_rows = weight.size(0), depth = weight.size(1), blocks = blocks_of(depth);
  TORCH_CHECK(scale.dim() == 2 && scale.size(0) == blocks_of(num_rows) && scale.size(1) == blocks &&
                  scale.scalar_type() == at::kFloat,
              "the scales must be [n, k] float32");
  check_held<Fp8Step>(packed, at::kFloat8_e4m3fn, depth, first_row, num_rows, step, offset);
  const at::Tensor elements = weight.contiguous(), scales = scale.contiguous();
  const auto* from = static_cast<const uint8_t*>(elements.const_data_ptr());
  const float* scale_of = scales.const_data_ptr<float>();
  auto* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  const HeldRows rows{to, depth, step, offset};
  for_spans(num_rows, kLanes, num_rows * depth, [&](int64_t begin, int64_t end) {
    pack_fp8(from + begin * depth, depth, rows, first_row + begin, end - begin,
             [&](int64_t n, int64_t k) { return scale_of[(begin + n) / kScaleBlock * blocks + k / kScaleBlock]; });
  });
}

std::tuple<at::Tensor, at::Tensor> unpack_rows_fp8(const at::Tensor& packed, int64_t depth, int64_t first_row,
                                                   int64_t num_rows, int64_t step, int64_t offset) {
  check_held<Fp8Step>(packed, at::kFloat8_e4m3fn, depth, first_row, num_rows, step, offset);
  const int64_t blocks = blocks_of(depth);
  at::Tensor weight = at::empty({num_rows, depth}, packed.options());
  at::Tensor scale = at::empty({blocks_of(num_rows), blocks}, packed.options().dtype(at::kFloat));
  const auto* from = static_cast<const uint8_t*>(packed.const_data_ptr());
  auto* to = static_cast<uint8_t*>(weight.mutable_data_ptr());
  float* scale_of = scale.mutable_data_ptr<float>();
  for_spans(num_rows, kScaleBlock, num_rows * depth, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const HeldRow row(first_row + n, step, offset);
      const uint8_t* panel = panel_of<Fp8Step>(from, row, depth);
      for (int64_t k = 0; k < depth; ++k) {
        to[n * depth + k] = panel[fp8_place(row, k)];
      }
      if (n % kScaleBlock != 0) continue;
      for (int64_t k = 0; k < depth; k += kScaleBlock) {
        const uint8_t* one = panel + k / kHeldStep * Fp8Step::kBytes + kFp8StepNumel + row.vector * sizeof(float);
        std::memcpy(scale_of + n / kScaleBlock * blocks + k / kScaleBlock, one, sizeof(float));
      }
    }
  });
  return {weight, scale};
}

void pack_rows_int4(at::Tensor& packed, const at::Tensor& weight, const at::Tensor& scale, int64_t first_row,
                    int64_t step, int64_t offset) {
  TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == at::kChar, "the weight must be [N, K] int8");
  const int64_t num_rows = weight.size(0), depth = weight.size(1), steps = held_steps_of(depth);
  TORCH_CHECK(scale.dim() == 2 && scale.size(0) == num_rows && scale.size(1) == steps &&
                  scale.scalar_type() == at::kBFloat16,
              "the scales must be [N, s] bfloat16");
  check_held<Int4Step>(packed, at::kByte, depth, first_row, num_rows, step, offset);
  const at::Tensor elements = weight.contiguous(), scales = scale.contiguous();
  const int8_t* from = elements.const_data_ptr<int8_t>();
  const bf16* scale_of = scales.const_data_ptr<bf16>();
  auto* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  const HeldRows rows{to, depth, step, offset};
  for_spans(num_rows, kLanes, num_rows * depth, [&](int64_t begin, int64_t end) {
    pack_int4(from + begin * depth, depth, rows, first_row + begin, end - begin,
              [&](int64_t n, int64_t k) { return scale_of[(begin + n) * steps + k / kHeldStep]; });
  });
}

std::tuple<at::Tensor, at::Tensor> unpack_rows_int4(const at::Tensor& packed, int64_t depth, int64_t first_row,
                                                    int64_t num_rows, int64_t step, int64_t offset) {
  check_held<Int4Step>(packed, at::kByte, depth, first_row, num_rows, step, offset);
  const int64_t steps = held_steps_of(depth);
  at::Tensor weight = at::empty({num_rows, depth}, packed.options().dtype(at::kChar));
  at::Tensor scale = at::empty({num_rows, steps}, packed.options().dtype(at::kBFloat16));
  const auto* from = static_cast<const uint8_t*>(packed.const_data_ptr());
  int8_t* to = weight.mutable_data_ptr<int8_t>();
  bf16* scale_of = scale.mutable_data_ptr<bf16>();
  for_spans(num_rows, kLanes, num_rows * depth, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const HeldRow row(first_row + n, step, offset);
      const uint8_t* panel = panel_of<Int4Step>(from, row, depth);
      for (int64_t k = 0; k < depth; ++k) {
        const auto both = static_cast<int8_t>(panel[int4_place(row, k)]);
        to[n * depth + k] = static_cast<int8_t>(k % 2 == 0 ? static_cast<int8_t>(both * 16) >> 4 : both >> 4);
      }
      for (int64_t s = 0; s < steps; ++s) {
        std::memcpy(scale_of + n * steps + s, panel + int4_scale_place(row, s * kHeldStep), sizeof(bf16));
      }
    }
  });
  return {weight, scale};
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  m.def("empty_packed_fp8(int[] lead, int rows, int depth) -> Tensor", &lockstep::empty_packed_fp8);
  m.def("pack_rows_fp8(Tensor(a!) packed, Tensor weight, Tensor scale, int first_row, int step, int offset) -> ()");
  m.def("unpack_rows_fp8(Tensor packed, int depth, int first_row, int rows, int step, int offset) -> (Tensor, Tensor)");
  m.def("empty_packed_int4(int[] lead, int rows, int depth) -> Tensor", &lockstep::empty_packed_int4);
  m.def("pack_rows_int4(Tensor(a!) packed, Tensor weight, Tensor scale, int first_row, int step, int offset) -> ()");
  m.def("unpack_rows_int4(Tensor packed, int depth, int first_row, int rows, int step, int offset) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(lockstep, CPU, m) {
  m.impl("pack_rows_fp8", &lockstep::pack_rows_fp8);
  m.impl("unpack_rows_fp8", &lockstep::unpack_rows_fp8);
  m.impl("pack_rows_int4", &lockstep::pack_rows_int4);
  m.impl("unpack_rows_int4", &lockstep::unpack_rows_int4);
}
