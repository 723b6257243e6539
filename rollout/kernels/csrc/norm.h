// RMS norm of one row, and the residual sum before it, for the operators that begin with them.
//
// Sums of squares in float32.  Without an offset of the weight, the normed value is rounded to the storage dtype, then
// multiplied with the weight in that dtype; with one, by offset + weight in float32, and rounded once: as in plain
// torch.
#pragma once

#include <algorithm>
#include <optional>

#include "checks.h"

namespace lockstep {

template <class T>
inline float inverse_rms(const T* row, int64_t size, double eps) {
  F32x16 squares = splat(0.0f);
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) squares = fma(load(row + d), load(row + d), squares);
  if (d < size) {
    const F32x16 rest = load(row + d, static_cast<int>(size - d));
    squares = fma(rest, rest, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + static_cast<float>(eps));
}

struct NormRule {
  double eps;
  std::optional<double> weight_offset;
};

// put(d, n, vector): elements d .. d + n - 1 of the normed and weighted row.
template <class T, class F>
inline void norm_row(const T* row, const T* weight, int64_t size, const NormRule& rule, F&& put) {
  const F32x16 scale = splat(inverse_rms(row, size, rule.eps));
  const auto each = [&](auto&& weighted) {
    for (int64_t d = 0; d < size; d += kLanes) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, size - d));
      put(d, n, weighted(load(row + d, n) * scale, load(weight + d, n)));
    }
  };
  if (!rule.weight_offset) return each([](F32x16 x, F32x16 w) { return round_to<T>(x) * w; });
  const F32x16 offset = splat(static_cast<float>(*rule.weight_offset));
  each([&](F32x16 x, F32x16 w) { return x * (offset + w); });
}

template <class T>
inline void add_row(T* residual, const T* hidden, int64_t size) {
  for (int64_t d = 0; d < size; d += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, size - d));
    store(residual + d, load(residual + d, n) + load(hidden + d, n), n);
  }
}

inline void check_norm(const at::Tensor& residual, const std::optional<at::Tensor>& hidden, const at::Tensor& weight) {
  TORCH_CHECK(residual.dim() == 2 && residual.is_contiguous(), "the residual must be [T, D] and contiguous");
  TORCH_CHECK(weight.dim() == 1 && weight.size(0) == residual.size(1) && weight.is_contiguous(),
              "the norm's weight must be [D] and contiguous");
  TORCH_CHECK(!hidden || (hidden->sizes() == residual.sizes() && hidden->is_contiguous()),
              "the hidden states must be contiguous and of the shape of the residual");
  check_same_dtype(residual, {weight, hidden ? *hidden : residual});
}

// residual += hidden, where there is one, then the norm of it, row by row.
template <class T>
class NormRows {
 public:
  NormRows(at::Tensor& residual, const std::optional<at::Tensor>& hidden, const at::Tensor& weight,
           const NormRule& rule)
      : hidden_(hidden ? hidden->const_data_ptr<T>() : nullptr),
        residual_(residual.mutable_data_ptr<T>()),
        weight_(weight.const_data_ptr<T>()),
        size_(residual.size(1)),
        rule_(rule) {}

  void token(int64_t t, T* place) const {
    T* row = residual_ + t * size_;
    if (hidden_ != nullptr) add_row(row, hidden_ + t * size_, size_);
    norm_row(row, weight_, size_, rule_, [&](int64_t d, int n, F32x16 x) { store(place + d, x, n); });
  }

 private:
  const T* hidden_;
  T* residual_;
  const T* weight_;
  int64_t size_;
  NormRule rule_;
};

}  // namespace lockstep
