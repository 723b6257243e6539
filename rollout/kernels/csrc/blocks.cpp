// Operators one after the other in one call: a step of a small model spends more time between operators than in them.
//
// Composite: whoever traces or times operators sees the parts.
#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/index.h>
#include <torch/library.h>

namespace lockstep {
namespace {

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// From the residual stream to what attention adds to it: norm, projections, rotation and KV write, attention, projection.
at::Tensor attention_block(at::Tensor& residual, const std::optional<at::Tensor>& hidden, const at::Tensor& norm_weight,
                           double eps, const at::Tensor& qkv_weight, int64_t qkv_size, const at::Tensor& qk_weight,
                           const at::Tensor& angles, at::Tensor& k_pool, at::Tensor& v_pool,
                           const at::Tensor& slots, const at::Tensor& req_to_token, const at::Tensor& rows,
                           const at::Tensor& query_lens, const at::Tensor& kv_lens, double scale,
                           const at::Tensor& out_weight, int64_t out_size) {
  static const auto norm_linear =
      find<at::Tensor(at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&, double, const at::Tensor&,
                      int64_t)>("lockstep::norm_linear");
  static const auto heads_to_pool =
      find<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, at::Tensor&, at::Tensor&,
                      const at::Tensor&, double)>("lockstep::qk_norm_rope_store");
  static const auto attend =
      find<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                      const at::Tensor&, const at::Tensor&, double)>("lockstep::paged_attention");
  static const auto linear = find<at::Tensor(const at::Tensor&, const at::Tensor&, int64_t)>("lockstep::linear");
  const at::Tensor qkv = norm_linear.call(residual, hidden, norm_weight, eps, qkv_weight, qkv_size);
  const at::Tensor q = heads_to_pool.call(qkv, qk_weight, angles, k_pool, v_pool, slots, eps);
  const at::Tensor out = attend.call(q, k_pool, v_pool, req_to_token, rows, query_lens, kv_lens, scale);
  return linear.call(out.view({out.size(0), -1}), out_weight, out_size);
}

// From the residual stream to what the sparse block adds to it, and the logical experts chosen.  `logical_to_physical`
// [E], where experts do not lie in their own order.
std::tuple<at::Tensor, at::Tensor> sparse_block(at::Tensor& residual, const std::optional<at::Tensor>& hidden,
                                                const at::Tensor& norm_weight, double eps, const at::Tensor& router,
                                                int64_t num_experts, int64_t top_k, bool normalise,
                                                const std::optional<at::Tensor>& logical_to_physical,
                                                const at::Tensor& w13, const at::Tensor& w2, int64_t inner_size) {
  static const auto route =
      find<std::tuple<at::Tensor, at::Tensor, at::Tensor>(at::Tensor&, const std::optional<at::Tensor>&,
                                                          const at::Tensor&, double, const at::Tensor&, int64_t,
                                                          int64_t, bool)>("lockstep::norm_route");
  static const auto apply =
      find<at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&,
                      const at::Tensor&, int64_t)>("lockstep::fused_experts");
  auto [normed, weights, ids] = route.call(residual, hidden, norm_weight, eps, router, num_experts, top_k, normalise);
  const at::Tensor slots = logical_to_physical ? at::index(*logical_to_physical, {ids}) : ids;
  return {apply.call(normed, slots, weights, w13, w2, inner_size), ids};
}

std::tuple<at::Tensor, at::Tensor> decoder_layer(
    at::Tensor& residual, const std::optional<at::Tensor>& hidden, const at::Tensor& norm_weight, double eps,
    const at::Tensor& qkv_weight, int64_t qkv_size, const at::Tensor& qk_weight, const at::Tensor& angles,
    at::Tensor& k_pool, at::Tensor& v_pool, const at::Tensor& slots, const at::Tensor& req_to_token,
    const at::Tensor& rows, const at::Tensor& query_lens, const at::Tensor& kv_lens, double scale,
    const at::Tensor& out_weight, int64_t out_size, const at::Tensor& sparse_norm_weight, double sparse_eps,
    const at::Tensor& router, int64_t num_experts, int64_t top_k, bool normalise,
    const std::optional<at::Tensor>& logical_to_physical, const at::Tensor& w13, const at::Tensor& w2,
    int64_t inner_size) {
  const at::Tensor attended =
      attention_block(residual, hidden, norm_weight, eps, qkv_weight, qkv_size, qk_weight, angles, k_pool, v_pool, slots,
                      req_to_token, rows, query_lens, kv_lens, scale, out_weight, out_size);
  return sparse_block(residual, attended, sparse_norm_weight, sparse_eps, router, num_experts, top_k, normalise,
                      logical_to_physical, w13, w2, inner_size);
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  m.def(
      "attention_block(Tensor(a!) residual, Tensor? hidden, Tensor norm_weight, float eps, Tensor qkv_weight, "
      "int qkv_size, Tensor qk_weight, Tensor angles, Tensor(b!) k_pool, Tensor(c!) v_pool, Tensor slots, "
      "Tensor req_to_token, Tensor rows, Tensor query_lens, Tensor kv_lens, float scale, Tensor out_weight, "
      "int out_size) -> Tensor",
      &lockstep::attention_block);
  m.def(
      "sparse_block(Tensor(a!) residual, Tensor? hidden, Tensor norm_weight, float eps, Tensor router, "
      "int num_experts, int top_k, bool normalise, Tensor? logical_to_physical, Tensor w13, Tensor w2, int inner_size) "
      "-> (Tensor, Tensor)",
      &lockstep::sparse_block);
  m.def(
      "decoder_layer(Tensor(a!) residual, Tensor? hidden, Tensor norm_weight, float eps, Tensor qkv_weight, "
      "int qkv_size, Tensor qk_weight, Tensor angles, Tensor(b!) k_pool, Tensor(c!) v_pool, Tensor slots, "
      "Tensor req_to_token, Tensor rows, Tensor query_lens, Tensor kv_lens, float scale, Tensor out_weight, "
      "int out_size, Tensor sparse_norm_weight, float sparse_eps, Tensor router, int num_experts, int top_k, "
      "bool normalise, Tensor? logical_to_physical, Tensor w13, Tensor w2, int inner_size) -> (Tensor, Tensor)",
      &lockstep::decoder_layer);
}
