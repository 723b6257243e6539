// Operators one after the other in one call: a step of a small model spends more time between operators than in them.
//
// Composite: whoever traces or times operators sees the parts.
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

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

// Layers one after the other: what the last one adds to the residual stream, and the logical experts chosen in each.
//
// `weights` holds kMatrices tensors a layer, in the order in which they are used below.
std::tuple<at::Tensor, std::vector<at::Tensor>> decoder_layers(
    at::Tensor& residual, const std::optional<at::Tensor>& hidden, at::TensorList weights,
    const c10::List<std::optional<at::Tensor>>& tables, const at::Tensor& angles, at::TensorList k_pools,
    at::TensorList v_pools, const at::Tensor& slots, const at::Tensor& req_to_token, const at::Tensor& rows,
    const at::Tensor& query_lens, const at::Tensor& kv_lens, double eps, double scale, int64_t qkv_size,
    int64_t hidden_size, int64_t num_experts, int64_t top_k, bool normalise, int64_t inner_size) {
  constexpr size_t kMatrices = 8;
  const size_t layers = tables.size();
  TORCH_CHECK(layers > 0 && weights.size() == kMatrices * layers, "weights must be ", kMatrices, " tensors a layer");
  TORCH_CHECK(k_pools.size() == layers && v_pools.size() == layers, "pools must be of the same layers as the weights");
  std::optional<at::Tensor> added = hidden;
  std::vector<at::Tensor> chosen;
  chosen.reserve(layers);
  for (size_t layer = 0; layer < layers; ++layer) {
    const at::Tensor* w = &weights[kMatrices * layer];
    at::Tensor k_pool = k_pools[layer], v_pool = v_pools[layer];
    const at::Tensor attended =
        attention_block(residual, added, w[0], eps, w[1], qkv_size, w[2], angles, k_pool, v_pool, slots, req_to_token,
                        rows, query_lens, kv_lens, scale, w[3], hidden_size);
    auto [out, ids] = sparse_block(residual, attended, w[4], eps, w[5], num_experts, top_k, normalise, tables[layer],
                                   w[6], w[7], inner_size);
    added = std::move(out);
    chosen.push_back(std::move(ids));
  }
  return {*added, std::move(chosen)};
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
      "decoder_layers(Tensor(a!) residual, Tensor? hidden, Tensor[] weights, Tensor?[] tables, Tensor angles, "
      "Tensor(b!)[] k_pools, Tensor(c!)[] v_pools, Tensor slots, Tensor req_to_token, Tensor rows, "
      "Tensor query_lens, Tensor kv_lens, float eps, float scale, int qkv_size, int hidden_size, int num_experts, "
      "int top_k, bool normalise, int inner_size) -> (Tensor, Tensor[])",
      &lockstep::decoder_layers);
}
