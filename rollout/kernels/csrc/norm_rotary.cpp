// RMS norm with the residual sum before it, and the path of queries, keys and values from projection to KV pool.
//
// Rounding as in layers/norm_rotary.py: sums of squares in float32, the normed value rounded to the storage dtype, then
// multiplied with the weight in that dtype; both products of the rotation and their sum rounded one by one.
//
// Shapes: T tokens, D hidden, H query heads, Hkv key/value heads, hd head size, S slots of the KV pool.
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "checks.h"
#include "parallel.h"

namespace lockstep {
namespace {

constexpr int64_t kTokenSpan = 8;

template <class T>
float inverse_rms(const T* row, int64_t size, double eps) {
  F32x16 squares = splat(0.0f);
  int64_t d = 0;
  for (; d + kLanes <= size; d += kLanes) squares = fma(load(row + d), load(row + d), squares);
  if (d < size) {
    const F32x16 rest = load(row + d, static_cast<int>(size - d));
    squares = fma(rest, rest, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + static_cast<float>(eps));
}

// put(d, n, vector): elements d .. d + n - 1 of the normed and weighted row.
template <class T, class F>
void norm_row(const T* row, const T* weight, int64_t size, double eps, F&& put) {
  const F32x16 scale = splat(inverse_rms(row, size, eps));
  for (int64_t d = 0; d < size; d += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, size - d));
    put(d, n, round_to<T>(load(row + d, n) * scale) * load(weight + d, n));
  }
}

template <class T>
void add_row(T* residual, const T* hidden, int64_t size) {
  for (int64_t d = 0; d < size; d += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, size - d));
    store(residual + d, load(residual + d, n) + load(hidden + d, n), n);
  }
}

// `hidden` null: norm only.
void norm_rows(const at::Tensor* hidden, at::Tensor& rows, const at::Tensor& weight, double eps, at::Tensor& out) {
  const int64_t size = rows.size(1);
  TORCH_CHECK(rows.dim() == 2 && weight.dim() == 1 && weight.size(0) == size, "rows must be [T, D] and weight [D]");
  TORCH_CHECK(weight.is_contiguous(), "the weight must be contiguous");
  check_same_dtype(rows, {weight});
  with_dtype(rows, [&](auto zero) {
    using T = decltype(zero);
    const T* added = hidden == nullptr ? nullptr : hidden->const_data_ptr<T>();
    T* row = added == nullptr ? const_cast<T*>(rows.const_data_ptr<T>()) : rows.mutable_data_ptr<T>();
    const T* w = weight.const_data_ptr<T>();
    T* place = out.mutable_data_ptr<T>();
    for_spans(rows.size(0), kTokenSpan, rows.numel() / 4, [&](int64_t first, int64_t last) {
      for (int64_t t = first * size; t < last * size; t += size) {
        if (added != nullptr) add_row(row + t, added + t, size);
        norm_row(row + t, w, size, eps, [&](int64_t d, int n, F32x16 x) { store(place + t + d, x, n); });
      }
    });
  });
}

at::Tensor rms_norm(const at::Tensor& hidden, const at::Tensor& weight, double eps) {
  at::Tensor rows = hidden.contiguous(), out = at::empty_like(rows);
  norm_rows(nullptr, rows, weight, eps, out);
  return out;
}

at::Tensor add_rms_norm(const at::Tensor& hidden, at::Tensor& residual, const at::Tensor& weight, double eps) {
  TORCH_CHECK(residual.is_contiguous() && residual.sizes() == hidden.sizes(),
              "the residual must be contiguous and of the shape of the hidden states");
  check_same_dtype(residual, {hidden});
  const at::Tensor added = hidden.contiguous();
  at::Tensor out = at::empty_like(added);
  norm_rows(&added, residual, weight, eps, out);
  return out;
}

template <class T>
struct HeadPath {
  const T *qkv, *weight, *cos, *signed_sin;
  T *q, *k_pool, *v_pool;
  const int64_t* slots;
  int64_t num_heads, num_kv_heads, head_dim;
  double eps;

  // Elements i and i + hd/2 turn by the same angle.
  void norm_and_rotate(const T* head, const T* head_weight, const T* c, const T* s, T* place, float* normed) const {
    const int64_t half = head_dim / 2;
    norm_row(head, head_weight, head_dim, eps, [&](int64_t d, int n, F32x16 x) { store(normed + d, round_to<T>(x), n); });
    for (int64_t from = 0; from < head_dim; from += half) {
      const int64_t other = half - from;
      for (int64_t i = 0; i < half; i += kLanes) {
        const int n = static_cast<int>(std::min<int64_t>(kLanes, half - i));
        const F32x16 turned = round_to<T>(load(normed + other + i, n) * load(s + from + i, n));
        const F32x16 kept = round_to<T>(load(normed + from + i, n) * load(c + from + i, n));
        store(place + from + i, turned + kept, n);
      }
    }
  }

  void token(int64_t t, float* normed) const {
    const T *row = qkv + t * (num_heads + 2 * num_kv_heads) * head_dim, *c = cos + t * head_dim;
    const T* s = signed_sin + t * head_dim;
    const int64_t pool_offset = slots[t] * num_kv_heads * head_dim;
    for (int64_t h = 0; h < num_heads + num_kv_heads; ++h) {
      T* place = h < num_heads ? q + (t * num_heads + h) * head_dim : k_pool + pool_offset + (h - num_heads) * head_dim;
      norm_and_rotate(row + h * head_dim, weight + h * head_dim, c, s, place, normed);
    }
    std::memcpy(v_pool + pool_offset, row + (num_heads + num_kv_heads) * head_dim, num_kv_heads * head_dim * sizeof(T));
  }
};

at::Tensor qk_norm_rope_store(const at::Tensor& qkv, const at::Tensor& weight, const at::Tensor& cos,
                              const at::Tensor& signed_sin, at::Tensor& k_pool, at::Tensor& v_pool,
                              const at::Tensor& slots, double eps) {
  TORCH_CHECK(weight.dim() == 2 && k_pool.dim() == 3 && k_pool.sizes() == v_pool.sizes(),
              "the weight must be [H + Hkv, hd] and both pools [S, Hkv, hd]");
  const int64_t num_tokens = slots.numel(), num_kv_heads = k_pool.size(1), head_dim = weight.size(1);
  const int64_t num_heads = weight.size(0) - num_kv_heads, row_size = (num_heads + 2 * num_kv_heads) * head_dim;
  TORCH_CHECK(head_dim % 2 == 0 && k_pool.size(2) == head_dim && num_heads > 0, "head sizes do not fit");
  TORCH_CHECK(qkv.numel() == num_tokens * row_size && cos.numel() == num_tokens * head_dim &&
                  signed_sin.numel() == num_tokens * head_dim && slots.scalar_type() == at::kLong,
              "projections, angles and slots [T] int64 must be of the same tokens");
  TORCH_CHECK(weight.is_contiguous() && k_pool.is_contiguous() && v_pool.is_contiguous() && qkv.is_contiguous() &&
                  cos.is_contiguous() && signed_sin.is_contiguous() && slots.is_contiguous(),
              "all arguments must be contiguous");
  check_same_dtype(qkv, {weight, cos, signed_sin, k_pool, v_pool});
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < num_tokens; ++t) {
    TORCH_CHECK(slot[t] >= 0 && slot[t] < k_pool.size(0), "slot ", slot[t], " is outside the pool");
  }
  at::Tensor q = at::empty({num_tokens, num_heads, head_dim}, qkv.options());
  with_dtype(qkv, [&](auto zero) {
    using T = decltype(zero);
    const HeadPath<T> path{
        .qkv = qkv.const_data_ptr<T>(),
        .weight = weight.const_data_ptr<T>(),
        .cos = cos.const_data_ptr<T>(),
        .signed_sin = signed_sin.const_data_ptr<T>(),
        .q = q.mutable_data_ptr<T>(),
        .k_pool = k_pool.mutable_data_ptr<T>(),
        .v_pool = v_pool.mutable_data_ptr<T>(),
        .slots = slot,
        .num_heads = num_heads,
        .num_kv_heads = num_kv_heads,
        .head_dim = head_dim,
        .eps = eps,
    };
    for_spans(num_tokens, kTokenSpan, num_tokens * row_size / 2, [&](int64_t first, int64_t last) {
      std::vector<float> normed(head_dim);
      for (int64_t t = first; t < last; ++t) path.token(t, normed.data());
    });
  });
  return q;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  m.def("rms_norm(Tensor hidden, Tensor weight, float eps) -> Tensor");
  m.def("add_rms_norm(Tensor hidden, Tensor(a!) residual, Tensor weight, float eps) -> Tensor");
  m.def(
      "qk_norm_rope_store(Tensor qkv, Tensor weight, Tensor cos, Tensor signed_sin, Tensor(a!) k_pool, "
      "Tensor(b!) v_pool, Tensor slots, float eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(lockstep, CPU, m) {
  m.impl("rms_norm", &lockstep::rms_norm);
  m.impl("add_rms_norm", &lockstep::add_rms_norm);
  m.impl("qk_norm_rope_store", &lockstep::qk_norm_rope_store);
}
