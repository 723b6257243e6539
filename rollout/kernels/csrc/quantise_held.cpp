// Between values and the elements and scales of FP8 blocks and INT4 groups (`weight_sync/fp8_blocks.py` and
// `weight_sync/int4_groups.py`, which define the operators and do without this kernel): the same bits.
//
// Shapes: N rows, K their elements, n and k blocks of 128 of them, g groups of a row.
#include <atomic>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "held_values.h"
#include "parallel.h"

namespace lockstep {
namespace {

template <class T>
bool quantise_int4_rows(const T* from, int8_t* to, bf16* scales, int64_t num_rows, int64_t depth, int64_t group) {
  const int64_t groups = (depth + group - 1) / group;
  std::atomic<bool> finite{true};
  for_spans(num_rows, kLanes, num_rows * depth, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * groups; at < end * groups; ++at) {
      const int64_t k = at % groups * group, count = std::min(group, depth - k), first = at / groups * depth + k;
      if (!quantise_int4_group(from + first, count, to + first, scales[at])) {
        finite.store(false, std::memory_order_relaxed);
      }
    }
  });
  return finite.load();
}

template <class T>
bool quantise_fp8_blocks(const T* from, Fp8* to, float* scales, int64_t num_rows, int64_t depth) {
  const int64_t columns = (depth + kScaleBlock - 1) / kScaleBlock;
  std::atomic<bool> finite{true};
  for_spans(num_rows, kScaleBlock, num_rows * depth, [&](int64_t begin, int64_t end) {
    for (int64_t block = 0; block < columns; ++block) {
      const int64_t k = block * kScaleBlock, count = std::min(kScaleBlock, depth - k), first = begin * depth + k;
      float& scale = scales[begin / kScaleBlock * columns + block];
      if (!quantise_fp8_block(from + first, depth, end - begin, count, to + first, scale)) {
        finite.store(false, std::memory_order_relaxed);
      }
    }
  });
  return finite.load();
}

void check_values(const at::Tensor& values, const at::Tensor& weight, at::ScalarType dtype, const at::Tensor& scale) {
  TORCH_CHECK(values.dim() == 2 && values.is_floating_point(), "the values must be floating-point numbers [N, K]");
  TORCH_CHECK(weight.sizes() == values.sizes() && weight.is_contiguous() && weight.scalar_type() == dtype,
              "the weight must be contiguous ", dtype, " of the values' shape");
  TORCH_CHECK(scale.dim() == 2 && scale.is_contiguous(), "the scales must be a contiguous matrix");
}

void check_int4_scales(const at::Tensor& values, const at::Tensor& scale, int64_t group) {
  TORCH_CHECK(group > 0 && scale.size(0) == values.size(0) && scale.size(1) == (values.size(1) + group - 1) / group &&
                  scale.scalar_type() == at::kBFloat16,
              "the scales must be [N, g] bfloat16");
}

void check_fp8_scales(const at::Tensor& values, const at::Tensor& scale) {
  TORCH_CHECK(scale.size(0) == (values.size(0) + kScaleBlock - 1) / kScaleBlock &&
                  scale.size(1) == (values.size(1) + kScaleBlock - 1) / kScaleBlock && scale.scalar_type() == at::kFloat,
              "the scales must be [n, k] float32");
}

bool quantise_int4(const at::Tensor& values, at::Tensor& weight, at::Tensor& scale, int64_t group) {
  check_values(values, weight, at::kChar, scale);
  const int64_t rows = values.size(0), depth = values.size(1);
  check_int4_scales(values, scale, group);
  auto* to = weight.mutable_data_ptr<int8_t>();
  auto* scales = scale.mutable_data_ptr<bf16>();
  const at::Tensor from = (values.scalar_type() == at::kBFloat16 ? values : values.to(at::kFloat)).contiguous();
  if (from.scalar_type() == at::kBFloat16) {
    return quantise_int4_rows(from.const_data_ptr<bf16>(), to, scales, rows, depth, group);
  }
  return quantise_int4_rows(from.const_data_ptr<float>(), to, scales, rows, depth, group);
}

bool quantise_fp8(const at::Tensor& values, at::Tensor& weight, at::Tensor& scale) {
  check_values(values, weight, at::kFloat8_e4m3fn, scale);
  const int64_t rows = values.size(0), depth = values.size(1);
  check_fp8_scales(values, scale);
  auto* to = weight.mutable_data_ptr<Fp8>();
  auto* scales = scale.mutable_data_ptr<float>();
  const at::Tensor from = (values.scalar_type() == at::kBFloat16 ? values : values.to(at::kFloat)).contiguous();
  if (from.scalar_type() == at::kBFloat16) {
    return quantise_fp8_blocks(from.const_data_ptr<bf16>(), to, scales, rows, depth);
  }
  return quantise_fp8_blocks(from.const_data_ptr<float>(), to, scales, rows, depth);
}

template <class T>
void dequantise_fp8_blocks(const Fp8* from, const float* scales, T* to, int64_t num_rows, int64_t depth) {
  const int64_t columns = (depth + kScaleBlock - 1) / kScaleBlock;
  for_spans(num_rows, kLanes, num_rows * depth, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      fp8_values(from + n * depth, scales + n / kScaleBlock * columns, depth,
                 [&](int64_t k, const float* values, int64_t count) { store_all(values, to + n * depth + k, count); });
    }
  });
}

template <class T>
void dequantise_int4_rows(const int8_t* from, const bf16* scales, T* to, int64_t num_rows, int64_t depth, int64_t group) {
  const int64_t groups = (depth + group - 1) / group;
  for_spans(num_rows, kLanes, num_rows * depth, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      int4_values(from + n * depth, scales + n * groups, depth, group,
                  [&](int64_t k, const float* values, int64_t count) { store_all(values, to + n * depth + k, count); });
    }
  });
}

// Calls `body(T*)` with room for values of bf16 or float32; values of another dtype are made of the latter.
template <class F>
void into_values(at::Tensor& values, F&& body) {
  if (values.scalar_type() == at::kBFloat16) {
    body(values.mutable_data_ptr<bf16>());
  } else if (values.scalar_type() == at::kFloat) {
    body(values.mutable_data_ptr<float>());
  } else {
    const at::Tensor wide = at::empty(values.sizes(), values.options().dtype(at::kFloat));
    body(wide.mutable_data_ptr<float>());
    values.copy_(wide);
  }
}

void dequantise_fp8(const at::Tensor& weight, const at::Tensor& scale, at::Tensor& values) {
  const at::Tensor elements = weight.contiguous(), scales = scale.to(at::kFloat).contiguous();
  check_values(values, elements, at::kFloat8_e4m3fn, scales);
  check_fp8_scales(values, scales);
  TORCH_CHECK(values.is_contiguous(), "the values must be contiguous");
  into_values(values, [&](auto* to) {
    dequantise_fp8_blocks(elements.const_data_ptr<Fp8>(), scales.const_data_ptr<float>(), to, values.size(0),
                          values.size(1));
  });
}

void dequantise_int4(const at::Tensor& weight, const at::Tensor& scale, at::Tensor& values, int64_t group) {
  const at::Tensor elements = weight.contiguous(), scales = scale.contiguous();
  check_values(values, elements, at::kChar, scales);
  check_int4_scales(values, scales, group);
  TORCH_CHECK(values.is_contiguous(), "the values must be contiguous");
  into_values(values, [&](auto* to) {
    dequantise_int4_rows(elements.const_data_ptr<int8_t>(), scales.const_data_ptr<bf16>(), to, values.size(0),
                         values.size(1), group);
  });
}

}  // namespace
}  // namespace lockstep

// The operators that `weight_sync` defines, on a CPU.
TORCH_LIBRARY_IMPL(weight_sync, CPU, m) {
  m.impl("quantise_int4", &lockstep::quantise_int4);
  m.impl("quantise_fp8", &lockstep::quantise_fp8);
  m.impl("dequantise_int4", &lockstep::dequantise_int4);
  m.impl("dequantise_fp8", &lockstep::dequantise_fp8);
}
