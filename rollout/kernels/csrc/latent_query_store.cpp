// What latent attention does before attention: W_k applied to queries, the rotation of pairs, the norm of latents and
// their way to the KV pool.
//
// Shapes: T tokens, H heads, N elements of a query that meet the latent, rd rotated ones, R latent, S slots of the KV
// pool.
#include <algorithm>
#include <optional>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "latent_heads.h"
#include "norm.h"
#include "parallel.h"

namespace lockstep {
namespace {

constexpr int64_t kTokenSpan = 8;

// Elements 2 i and 2 i + 1 turned; both products and their sum are rounded one by one.
template <class T>
void rotate_pairs(const T* from, const T* angles, int64_t rotary_dim, T* place) {
  const T *c = angles, *s = angles + rotary_dim;
  for (int64_t d = 0; d < rotary_dim; d += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, rotary_dim - d));
    T swapped[kLanes];
    for (int i = 0; i < n; ++i) swapped[i] = from[d + (i ^ 1)];
    const F32x16 turned = round_to<T>(load(static_cast<const T*>(swapped), n) * load(s + d, n));
    store(place + d, turned + round_to<T>(load(from + d, n) * load(c + d, n)), n);
  }
}

int64_t check_query_store(const at::Tensor& query, const at::Tensor& latent, const at::Tensor& norm_weight,
                          const std::optional<at::Tensor>& weight, int64_t num_heads,
                          const at::Tensor& angles, const at::Tensor& pool, const at::Tensor& slots) {
  TORCH_CHECK(query.dim() == 2 && latent.dim() == 2 && norm_weight.dim() == 1 && angles.dim() == 3 && pool.dim() == 3,
              "queries must be [T, H (N + rd)], latents [T, R + rd], angles [T, 2, rd], the pool [S, 1, R + rd]");
  const int64_t num_tokens = slots.numel(), rank = norm_weight.size(0), rotary_dim = angles.size(2);
  TORCH_CHECK(num_heads > 0 && query.size(1) % num_heads == 0 && query.size(1) / num_heads > rotary_dim,
              "the queries' size does not fit ", num_heads, " heads");
  TORCH_CHECK(rotary_dim % 2 == 0 && latent.size(1) == rank + rotary_dim && pool.size(1) == 1 &&
                  pool.size(2) == rank + rotary_dim,
              "latents and the pool must have ", rank + rotary_dim, " elements a token");
  TORCH_CHECK(query.size(0) == num_tokens && latent.size(0) == num_tokens && angles.size(0) == num_tokens &&
                  angles.size(1) == 2 && slots.scalar_type() == at::kLong,
              "queries, latents, angles and slots [T] int64 must be of the same tokens");
  TORCH_CHECK(query.is_contiguous() && latent.is_contiguous() && norm_weight.is_contiguous() &&
                  angles.is_contiguous() && pool.is_contiguous() && slots.is_contiguous(),
              "all arguments must be contiguous");
  check_same_dtype(query, {latent, norm_weight, angles, pool});
  if (weight) check_same_dtype(query, {*weight});
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < num_tokens; ++t) {
    TORCH_CHECK(slot[t] >= 0 && slot[t] < pool.size(0), "slot ", slot[t], " is outside the pool");
  }
  return query.size(1) / num_heads - rotary_dim;
}

at::Tensor latent_query_store(const at::Tensor& query, const at::Tensor& latent, const at::Tensor& norm_weight,
                              double eps, const std::optional<at::Tensor>& weight, int64_t num_heads,
                              const at::Tensor& angles, at::Tensor& pool, const at::Tensor& slots) {
  const int64_t depth = check_query_store(query, latent, norm_weight, weight, num_heads, angles, pool, slots);
  const int64_t num_tokens = slots.numel(), rank = norm_weight.size(0), rotary_dim = angles.size(2);
  const int64_t in_size = depth + rotary_dim, key_size = rank + rotary_dim;
  const int64_t first_size = weight ? rank : depth, out_size = first_size + rotary_dim;  // without W_k as they are
  at::Tensor out = at::empty({num_tokens, num_heads, out_size}, query.options());
  with_dtype(query, [&](auto zero) {
    using T = decltype(zero);
    if (weight) check_heads(*weight, num_heads, matrix_numel<T>(rank, depth));
    const HeadRows<const T> in{query.const_data_ptr<T>(), num_heads * in_size, in_size};
    const HeadRows<T> keys{out.mutable_data_ptr<T>(), num_heads * out_size, out_size};
    const T *latents = latent.const_data_ptr<T>(), *norm = norm_weight.const_data_ptr<T>();
    const T* turns = angles.const_data_ptr<T>();
    T* kept = pool.mutable_data_ptr<T>();
    const int64_t* slot = slots.const_data_ptr<int64_t>();
    const NormRule rule{eps, std::nullopt};
    for_spans(num_tokens, kTokenSpan, num_tokens * (rank + num_heads * rotary_dim) / 2, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) {
        const T *row = latents + t * key_size, *turn = turns + 2 * t * rotary_dim;
        T* place = kept + slot[t] * key_size;
        norm_row(row, norm, rank, rule, [&](int64_t d, int n, F32x16 x) { store(place + d, x, n); });
        rotate_pairs(row + rank, turn, rotary_dim, place + rank);
        for (int64_t h = 0; h < num_heads; ++h) {
          if (!weight) std::copy_n(in.row(t, h), depth, keys.row(t, h));
          rotate_pairs(in.row(t, h) + depth, turn, rotary_dim, keys.row(t, h) + first_size);
        }
      }
    });
    if (weight) {
      multiply_heads<T>(num_tokens, num_heads, depth, rank, weight->const_data_ptr<T>(), weight->size(1), in, keys);
    }
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("latent_query_store", &lockstep::latent_query_store); }
