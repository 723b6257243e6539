// Sums of words times 64-bit multipliers, block by block, mod 2^64: what the fingerprint of a tensor is made of
// (`weight_sync/block_sums.py`, which defines the operator and does without this kernel).  On the way it is noticed in which blocks a
// word has all bits of a mask: with the exponent's, a value that is not finite.
//
// Shapes: N blocks, J words of a block.
#include <algorithm>
#include <tuple>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "parallel.h"
#include "word_sums.h"

namespace lockstep {
namespace {

template <class W>
void sum_blocks(const at::Tensor& words, const at::Tensor& multipliers, uint64_t mask, at::Tensor& out,
                at::Tensor& out_masked) {
  const auto* from = static_cast<const uint8_t*>(words.const_data_ptr());
  const auto* table = reinterpret_cast<const uint64_t*>(multipliers.const_data_ptr<int64_t>());
  auto* to = reinterpret_cast<uint64_t*>(out.mutable_data_ptr<int64_t>());
  auto* masked = out_masked.mutable_data_ptr<bool>();
  const int64_t blocks = words.size(0), size = words.size(1), bytes = size * sizeof(W);
  for_spans(blocks, kTogether, blocks * size / 8, [&](int64_t begin, int64_t end) {
    if (end - begin == kTogether) {
      const uint8_t* runs[kTogether];
      uint64_t sums[kTogether];
      bool found[kTogether];
      for (int64_t n = 0; n < kTogether; ++n) runs[n] = from + (begin + n) * bytes;
      sum_runs<W>(runs, table, size, mask, sums, found);
      std::copy_n(sums, kTogether, to + begin);
      std::copy_n(found, kTogether, masked + begin);
      return;
    }
    for (int64_t n = begin; n < end; ++n) {
      const uint8_t* runs[] = {from + n * bytes};
      uint64_t sums[1];
      bool found[1];
      sum_runs<W>(runs, table, size, mask, sums, found);
      to[n] = sums[0];
      masked[n] = found[0];
    }
  });
}

// `words`: [N, J] of an unsigned integer dtype or int64; `multipliers`: int64 [J].  int64 [N], and bool [N]: whether a
// word of the block has all bits of `mask`.
std::tuple<at::Tensor, at::Tensor> block_sums(const at::Tensor& words, const at::Tensor& multipliers, int64_t mask) {
  TORCH_CHECK(words.dim() == 2 && words.is_contiguous(), "words must be [N, J] and contiguous");
  TORCH_CHECK(multipliers.dim() == 1 && multipliers.is_contiguous() && multipliers.scalar_type() == at::kLong &&
                  multipliers.size(0) == words.size(1),
              "multipliers must be int64 [J]");
  at::Tensor out = at::empty({words.size(0)}, multipliers.options());
  at::Tensor masked = at::empty({words.size(0)}, multipliers.options().dtype(at::kBool));
  const auto bits = static_cast<uint64_t>(mask);
  switch (words.scalar_type()) {
    case at::kByte: sum_blocks<uint8_t>(words, multipliers, bits, out, masked); break;
    case at::kUInt16: sum_blocks<uint16_t>(words, multipliers, bits, out, masked); break;
    case at::kUInt32: sum_blocks<uint32_t>(words, multipliers, bits, out, masked); break;
    case at::kLong: sum_blocks<uint64_t>(words, multipliers, bits, out, masked); break;
    default: TORCH_CHECK(false, "words are unsigned integers or int64");
  }
  return {out, masked};
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_FRAGMENT(lockstep, m) { m.def("block_sums(Tensor words, Tensor multipliers, int mask) -> (Tensor, Tensor)"); }

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("block_sums", &lockstep::block_sums); }

// The operator that `weight_sync` defines, on a CPU.
TORCH_LIBRARY_IMPL(weight_sync, CPU, m) { m.impl("block_sums", &lockstep::block_sums); }
