// The path of queries, keys and values from projection to KV pool.
//
// Rounding as in plain torch: norms as in norm.h; both products of the rotation and their sum rounded one by one.  Pools
// in FP8 take the rounded keys and values over their scales, rounded once more.
//
// Shapes: T tokens, H query heads, Hkv key/value heads, hd head size, rd of it that is rotated, S slots of the KV pool.
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "fp8.h"
#include "norm.h"
#include "parallel.h"

namespace lockstep {
namespace {

constexpr int64_t kTokenSpan = 8;

template <class T>
struct HeadPath {
  const T *qkv, *weight, *angles;  // weight may be null; angles [T, 2, rd]: cos, and sin with its sign folded in
  T* q;
  T *k_pool, *v_pool;      // null where the pools are FP8
  Fp8 *k_pool_8, *v_pool_8;  // null elsewhere
  float k_scale, v_scale;    // of FP8
  const int64_t* slots;
  int64_t row_stride, num_heads, num_kv_heads, head_dim, rotary_dim;
  NormRule rule;

  // Elements i and i + rd/2 turn by the same angle; those from rd on stay.
  void norm_and_rotate(const T* head, const T* head_weight, const T* c, const T* s, T* place, float* normed) const {
    const int64_t half = rotary_dim / 2;
    if (head_weight != nullptr) {
      norm_row(head, head_weight, head_dim, rule,
               [&](int64_t d, int n, F32x16 x) { store(normed + d, round_to<T>(x), n); });
    } else {
      for (int64_t d = 0; d < head_dim; d += kLanes) {
        const int n = static_cast<int>(std::min<int64_t>(kLanes, head_dim - d));
        store(normed + d, load(head + d, n), n);
      }
    }
    for (int64_t from = 0; from < rotary_dim; from += half) {
      const int64_t other = half - from;
      for (int64_t i = 0; i < half; i += kLanes) {
        const int n = static_cast<int>(std::min<int64_t>(kLanes, half - i));
        const F32x16 turned = round_to<T>(load(normed + other + i, n) * load(s + from + i, n));
        const F32x16 kept = round_to<T>(load(normed + from + i, n) * load(c + from + i, n));
        store(place + from + i, turned + kept, n);
      }
    }
    for (int64_t d = rotary_dim; d < head_dim; d += kLanes) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, head_dim - d));
      store(place + d, load(normed + d, n), n);
    }
  }

  // `normed` and `key` have room for a head.
  void token(int64_t t, float* normed, T* key) const {
    const T* row = qkv + t * row_stride;
    const T *c = angles + 2 * t * rotary_dim, *s = c + rotary_dim;
    const T* value = row + (num_heads + num_kv_heads) * head_dim;
    const int64_t pool_offset = slots[t] * num_kv_heads * head_dim, values = num_kv_heads * head_dim;
    for (int64_t h = 0; h < num_heads + num_kv_heads; ++h) {
      const int64_t key_offset = pool_offset + (h - num_heads) * head_dim;
      const bool narrows = h >= num_heads && k_pool == nullptr;
      T* place = narrows ? key : h < num_heads ? q + (t * num_heads + h) * head_dim : k_pool + key_offset;
      norm_and_rotate(row + h * head_dim, weight == nullptr ? nullptr : weight + h * head_dim, c, s, place, normed);
      if (narrows) narrow(key, k_pool_8 + key_offset, head_dim, k_scale);
    }
    if (v_pool == nullptr) return narrow(value, v_pool_8 + pool_offset, values, v_scale);
    std::memcpy(v_pool + pool_offset, value, values * sizeof(T));
  }
};

template <class T>
T* data_if(at::Tensor& pool) {
  return pool.scalar_type() == c10::CppTypeToScalarType<T>::value ? pool.mutable_data_ptr<T>() : nullptr;
}

at::Tensor qk_norm_rope_store(const at::Tensor& qkv, const std::optional<at::Tensor>& weight, const at::Tensor& angles,
                              at::Tensor& k_pool, at::Tensor& v_pool, const at::Tensor& slots, double eps,
                              std::optional<double> weight_offset, double k_scale, double v_scale) {
  TORCH_CHECK(qkv.dim() == 2 && angles.dim() == 3 && k_pool.dim() == 3 && k_pool.sizes() == v_pool.sizes(),
              "projections must be [T, (H + 2 Hkv) hd], angles [T, 2, rd] and both pools [S, Hkv, hd]");
  const int64_t num_tokens = slots.numel(), num_kv_heads = k_pool.size(1), head_dim = k_pool.size(2);
  const int64_t num_heads = qkv.size(1) / head_dim - 2 * num_kv_heads, rotary_dim = angles.size(2);
  const int64_t row_size = (num_heads + 2 * num_kv_heads) * head_dim;
  TORCH_CHECK(rotary_dim % 2 == 0 && rotary_dim <= head_dim && num_heads > 0 && qkv.size(1) == row_size,
              "head sizes do not fit");
  TORCH_CHECK(!weight || (weight->dim() == 2 && weight->size(0) == num_heads + num_kv_heads &&
                          weight->size(1) == head_dim && weight->is_contiguous()),
              "the weight must be [H + Hkv, hd]");
  TORCH_CHECK(qkv.size(0) == num_tokens && angles.size(0) == num_tokens && angles.size(1) == 2 &&
                  slots.scalar_type() == at::kLong,
              "projections, angles and slots [T] int64 must be of the same tokens");
  TORCH_CHECK(k_pool.is_contiguous() && v_pool.is_contiguous() && qkv.stride(1) == 1 && angles.is_contiguous() &&
                  slots.is_contiguous(),
              "all arguments must be contiguous, but for what lies between rows of the projections");
  check_same_dtype(qkv, {weight ? *weight : qkv, angles});
  check_same_dtype(k_pool.scalar_type() == at::kFloat8_e4m3fn ? k_pool : qkv, {k_pool, v_pool});
  TORCH_CHECK(k_pool.scalar_type() == at::kFloat8_e4m3fn ? k_scale > 0 && v_scale > 0 : k_scale == 1 && v_scale == 1,
              "keys and values in FP8 have positive scales, others have none");
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < num_tokens; ++t) {
    TORCH_CHECK(slot[t] >= 0 && slot[t] < k_pool.size(0), "slot ", slot[t], " is outside the pool");
  }
  at::Tensor q = at::empty({num_tokens, num_heads, head_dim}, qkv.options());
  with_dtype(qkv, [&](auto zero) {
    using T = decltype(zero);
    const HeadPath<T> path{
        .qkv = qkv.const_data_ptr<T>(),
        .weight = weight ? weight->const_data_ptr<T>() : nullptr,
        .angles = angles.const_data_ptr<T>(),
        .q = q.mutable_data_ptr<T>(),
        .k_pool = data_if<T>(k_pool),
        .v_pool = data_if<T>(v_pool),
        .k_pool_8 = data_if<Fp8>(k_pool),
        .v_pool_8 = data_if<Fp8>(v_pool),
        .k_scale = static_cast<float>(k_scale),
        .v_scale = static_cast<float>(v_scale),
        .slots = slot,
        .row_stride = qkv.stride(0),
        .num_heads = num_heads,
        .num_kv_heads = num_kv_heads,
        .head_dim = head_dim,
        .rotary_dim = rotary_dim,
        .rule = {eps, weight_offset},
    };
    for_spans(num_tokens, kTokenSpan, num_tokens * row_size / 2, [&](int64_t first, int64_t last) {
      std::vector<float> normed(head_dim);
      std::vector<T> key(head_dim);
      for (int64_t t = first; t < last; ++t) path.token(t, normed.data(), key.data());
    });
  });
  return q;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("qk_norm_rope_store", &lockstep::qk_norm_rope_store); }
