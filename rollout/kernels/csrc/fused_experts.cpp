// SwiGLU experts on the rows that were routed to them, in one call, on packed weights: see `experts.h`.
#include <torch/library.h>

#include "experts.h"

namespace lockstep {
namespace {

at::Tensor fused_experts(const at::Tensor& hidden, const at::Tensor& ids, const std::optional<at::Tensor>& weights,
                         const at::Tensor& w13, const at::Tensor& w2, int64_t inner_size,
                         const std::optional<at::Tensor>& w13_bias, const std::optional<at::Tensor>& w2_bias,
                         std::optional<double> limit, double alpha) {
  const ExpertCall call{hidden, ids, weights, w13, w2, inner_size, w13_bias, w2_bias, limit, alpha};
  return run_experts(call, [](auto, int64_t, const auto&) { return NoAdapters(); });
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("fused_experts", &lockstep::fused_experts); }
