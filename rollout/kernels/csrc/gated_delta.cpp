// The gated delta rule over the sequences of a step (`delta_rule.h`): a thread takes a head of a sequence.
//
// Shapes: T tokens, N sequences, M snapshots, R rows of the pools, H value heads, dk and dv sizes of a head's keys and
// values, C channels of the convolution over w tokens.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "checks.h"
#include "delta_rule.h"
#include "parallel.h"

namespace lockstep {
namespace {

using namespace delta;

constexpr int64_t kTokenSpan = 8;
// The sequences of a step, checked.
std::vector<Sequence> sequences_of(int64_t num_tokens, int64_t num_rows, const at::Tensor& query_lens,
                                   const at::Tensor& rows, const at::Tensor& sources, const at::Tensor& snapshots) {
  const int64_t count = query_lens.numel();
  for (const at::Tensor& tensor : {query_lens, rows, sources, snapshots}) {
    TORCH_CHECK(tensor.scalar_type() == at::kLong && tensor.is_contiguous(), "operands must be int64 and contiguous");
  }
  TORCH_CHECK(rows.numel() == count && sources.numel() == count && snapshots.dim() == 2 && snapshots.size(1) == 3,
              "operands must be [N], [N], [N] and [M, 3]");
  std::vector<Sequence> found(count);
  int64_t first = 0;
  for (int64_t n = 0; n < count; ++n) {
    found[n] = {first, query_lens.const_data_ptr<int64_t>()[n], sources.const_data_ptr<int64_t>()[n], {}};
    TORCH_CHECK(found[n].length > 0 && found[n].source < num_rows, "sequence ", n, " has no tokens or no such source");
    first += found[n].length;
  }
  TORCH_CHECK(first == num_tokens, "the sequences have ", first, " tokens, the step has ", num_tokens);
  const auto copy = [&](int64_t n, int64_t done, int64_t row) {
    if (n < 0) return;  // a snapshot of no sequence
    TORCH_CHECK(n < count && 0 < done && done <= found[n].length && row < num_rows,
                "no such copy of a state: sequence ", n, ", after ", done, " tokens, to row ", row);
    found[n].copies.push_back({done, row});
  };
  for (int64_t m = 0; m < snapshots.size(0); ++m) {
    const int64_t* one = snapshots.const_data_ptr<int64_t>() + 3 * m;
    copy(one[0], one[1], one[2]);
  }
  for (int64_t n = 0; n < count; ++n) {
    copy(n, found[n].length, rows.const_data_ptr<int64_t>()[n]);
    std::stable_sort(found[n].copies.begin(), found[n].copies.end(),
                     [](const auto& one, const auto& other) { return one.done < other.done; });
  }
  return found;
}

at::Tensor gated_delta(const at::Tensor& projected, const at::Tensor& conv_weight, const at::Tensor& a_log,
                       const at::Tensor& dt_bias, const at::Tensor& norm_weight, double eps, at::Tensor& conv_pool,
                       at::Tensor& state_pool, const at::Tensor& query_lens, const at::Tensor& rows,
                       const at::Tensor& sources, const at::Tensor& snapshots) {
  TORCH_CHECK(projected.dim() == 2 && conv_weight.dim() == 2 && conv_pool.dim() == 3 && state_pool.dim() == 4,
              "projections must be [T, ..], the convolution's weight [w, C], the pools [R, w - 1, C] and [R, H, dk, dv]");
  const int64_t num_heads = state_pool.size(1), key_dim = state_pool.size(2), value_dim = state_pool.size(3);
  const int64_t channels = conv_pool.size(2), num_key_heads = (channels - num_heads * value_dim) / (2 * key_dim);
  const Sizes sizes{num_key_heads, num_heads, key_dim, value_dim, conv_weight.size(0)};
  TORCH_CHECK(num_key_heads > 0 && num_heads % num_key_heads == 0 && sizes.channels() == channels &&
                  projected.size(1) == sizes.columns() && sizes.taps <= kMaxTaps && conv_weight.size(1) == channels &&
                  conv_pool.size(1) == sizes.taps - 1 && conv_pool.size(0) == state_pool.size(0),
              "sizes of heads and channels do not fit");
  TORCH_CHECK(a_log.numel() == num_heads && dt_bias.numel() == num_heads && norm_weight.numel() == value_dim,
              "A_log and dt_bias must be [H], the norm's weight [dv]");
  for (const at::Tensor& tensor : {projected, conv_weight, a_log, dt_bias, norm_weight, conv_pool, state_pool}) {
    TORCH_CHECK(tensor.is_contiguous(), "all arguments must be contiguous");
  }
  check_same_dtype(projected, {conv_weight, a_log, dt_bias, norm_weight, conv_pool});
  TORCH_CHECK(state_pool.scalar_type() == at::kFloat, "states are float32");
  const int64_t num_tokens = projected.size(0);
  const auto sequences = sequences_of(num_tokens, state_pool.size(0), query_lens, rows, sources, snapshots);
  at::Tensor out = at::empty({num_tokens, num_heads * value_dim}, projected.options());
  at::Tensor mixed = at::empty({num_tokens, channels}, projected.options());
  with_dtype(projected, [&](auto zero) {
    using T = decltype(zero);
    const DeltaRule<T> rule{
        .sizes = sizes,
        .projected = projected.const_data_ptr<T>(),
        .conv_weight = conv_weight.const_data_ptr<T>(),
        .a_log = a_log.const_data_ptr<T>(),
        .dt_bias = dt_bias.const_data_ptr<T>(),
        .norm_weight = norm_weight.const_data_ptr<T>(),
        .conv_pool = conv_pool.mutable_data_ptr<T>(),
        .mixed = mixed.mutable_data_ptr<T>(),
        .out = out.mutable_data_ptr<T>(),
        .state_pool = state_pool.mutable_data_ptr<float>(),
        .num_tokens = num_tokens,
        .eps = eps,
    };
    std::vector<int64_t> owner(num_tokens);
    const int64_t count = static_cast<int64_t>(sequences.size());
    for (int64_t n = 0; n < count; ++n) {
      std::fill_n(owner.begin() + sequences[n].first, sequences[n].length, n);
    }
    ItemQueue spans((num_tokens + kTokenSpan - 1) / kTokenSpan), heads(count * num_heads);
    const auto convolve = [&](int64_t span) {
      const int64_t last = std::min(num_tokens, (span + 1) * kTokenSpan);
      for (int64_t t = span * kTokenSpan; t < last; ++t) rule.convolve(sequences[owner[t]], t);
    };
    const auto recur = [&](int64_t item) {
      rule.head(sequences[item / num_heads], item % num_heads, Buffers::of(sizes));
    };
    const int64_t nanoseconds = (num_tokens + 4 * count) * num_heads * key_dim * value_dim / 20;
    run_phases(team_size(nanoseconds), Phase{spans, convolve}, Phase{heads, recur});
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("gated_delta", &lockstep::gated_delta); }
