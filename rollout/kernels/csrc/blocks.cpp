// Operators one after the other in one call: a step of a small model spends more time between operators than in them.
//
// Composite: whoever traces or times operators sees the parts.
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
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

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  m.def(
      "attention_block(Tensor(a!) residual, Tensor? hidden, Tensor norm_weight, float eps, Tensor qkv_weight, "
      "int qkv_size, Tensor qk_weight, Tensor angles, Tensor(b!) k_pool, Tensor(c!) v_pool, Tensor slots, "
      "Tensor req_to_token, Tensor rows, Tensor query_lens, Tensor kv_lens, float scale, Tensor out_weight, "
      "int out_size) -> Tensor",
      &lockstep::attention_block);
}
