// What every operator asks of its tensors, and the choice between the two storage dtypes.
#pragma once

#include <ATen/core/Tensor.h>

#include "simd.h"

namespace lockstep {

inline void check_same_dtype(const at::Tensor& first, std::initializer_list<at::Tensor> others) {
  for (const at::Tensor& other : others) {
    TORCH_CHECK(other.scalar_type() == first.scalar_type(), "all floating-point arguments must have one dtype");
  }
}

// Calls `body` with a value of the storage type.
template <class F>
inline auto with_dtype(const at::Tensor& tensor, F&& body) {
  if (tensor.scalar_type() == at::kBFloat16) return body(bf16());
  TORCH_CHECK(tensor.scalar_type() == at::kFloat, "the CPU operators take bfloat16 and float32, not ", tensor.dtype());
  return body(float());
}

}  // namespace lockstep
