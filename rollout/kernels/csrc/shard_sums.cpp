// Sums of the blocks of many equally long runs of words, each where it lies (`weight_sync/block_sums.py`, which defines
// the operator and does without this kernel).
//
// Shapes: S shards, J words of each, K blocks that each touches, B multipliers of a block.
#include <algorithm>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "parallel.h"
#include "word_sums.h"

namespace lockstep {
namespace {

// The blocks that a shard touches: the first one may begin before it, and the last one end after it.
struct Blocks {
  int64_t size, first, block;

  int64_t count() const { return (first + size + block - 1) / block; }
  int64_t begin(int64_t k) const { return std::max<int64_t>(0, k * block - first); }
  int64_t end(int64_t k) const { return std::min(size, (k + 1) * block - first); }
};

template <class W, int64_t kRuns>
void sum_shards(const uint8_t* const* shards, const Blocks& blocks, const uint64_t* table, uint64_t* to) {
  for (int64_t k = 0; k < blocks.count(); ++k) {
    const int64_t begin = blocks.begin(k);
    const uint8_t* runs[kRuns];
    uint64_t sums[kRuns];
    bool masked[kRuns];
    for (int64_t n = 0; n < kRuns; ++n) runs[n] = shards[n] + begin * sizeof(W);
    sum_runs<W>(runs, table + (blocks.first + begin) % blocks.block, blocks.end(k) - begin, 0, sums, masked);
    for (int64_t n = 0; n < kRuns; ++n) to[n * blocks.count() + k] = sums[n];
  }
}

template <class W>
void sum_all(const std::vector<const uint8_t*>& shards, const Blocks& blocks, const uint64_t* table, uint64_t* to) {
  const auto count = static_cast<int64_t>(shards.size());
  for_spans(count, kTogether, count * blocks.size / 8, [&](int64_t begin, int64_t end) {
    if (end - begin == kTogether) {
      sum_shards<W, kTogether>(&shards[begin], blocks, table, to + begin * blocks.count());
      return;
    }
    for (int64_t n = begin; n < end; ++n) sum_shards<W, 1>(&shards[n], blocks, table, to + n * blocks.count());
  });
}

// `shards`: S tensors of J elements of one width, contiguous, whose first element meets multiplier `first` of
// `multipliers`, int64 [B].  int64 [S, K].
at::Tensor shard_sums(at::TensorList shards, const at::Tensor& multipliers, int64_t first) {
  TORCH_CHECK(multipliers.dim() == 1 && multipliers.is_contiguous() && multipliers.scalar_type() == at::kLong,
              "multipliers must be int64 [B]");
  TORCH_CHECK(0 <= first && first < multipliers.size(0), "the first multiplier must be one of them");
  TORCH_CHECK(!shards.empty(), "there must be a shard");
  const int64_t size = shards[0].numel(), width = shards[0].element_size();
  std::vector<const uint8_t*> places;
  places.reserve(shards.size());
  for (const at::Tensor& shard : shards) {
    TORCH_CHECK(shard.is_cpu() && shard.is_contiguous() && shard.numel() == size && shard.element_size() == width,
                "shards must be equally long, of one width, contiguous and on the CPU");
    places.push_back(static_cast<const uint8_t*>(shard.const_data_ptr()));
  }
  const Blocks blocks{size, first, multipliers.size(0)};
  at::Tensor out = at::empty({static_cast<int64_t>(shards.size()), blocks.count()}, multipliers.options());
  const auto* table = reinterpret_cast<const uint64_t*>(multipliers.const_data_ptr<int64_t>());
  auto* to = reinterpret_cast<uint64_t*>(out.mutable_data_ptr<int64_t>());
  switch (width) {
    case 1: sum_all<uint8_t>(places, blocks, table, to); break;
    case 2: sum_all<uint16_t>(places, blocks, table, to); break;
    case 4: sum_all<uint32_t>(places, blocks, table, to); break;
    case 8: sum_all<uint64_t>(places, blocks, table, to); break;
    default: TORCH_CHECK(false, "elements have 1, 2, 4 or 8 bytes");
  }
  return out;
}

}  // namespace
}  // namespace lockstep

// The operator that `weight_sync` defines, on a CPU.
TORCH_LIBRARY_IMPL(weight_sync, CPU, m) { m.impl("shard_sums", &lockstep::shard_sums); }
