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
#include "simd.h"

namespace lockstep {
namespace {

constexpr int64_t kTogether = 8;  // blocks that share what is read of the multipliers

#if LOCKSTEP_AVX512
// Eight words as 64-bit integers.
inline __m512i widened(const uint8_t* p) {
  return _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline __m512i widened(const uint16_t* p) {
  return _mm512_cvtepu16_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline __m512i widened(const uint32_t* p) {
  return _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m512i widened(const uint64_t* p) { return _mm512_loadu_si512(p); }

// Whether one of the words of a vector has all bits of `bits`, which holds the mask in every word.
inline bool any_masked(const uint8_t*, __m512i words, __m512i bits) {
  return _mm512_cmpeq_epi8_mask(_mm512_and_si512(words, bits), bits) != 0;
}
inline bool any_masked(const uint16_t*, __m512i words, __m512i bits) {
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(words, bits), bits) != 0;
}
inline bool any_masked(const uint32_t*, __m512i words, __m512i bits) {
  return _mm512_cmpeq_epi32_mask(_mm512_and_si512(words, bits), bits) != 0;
}
inline bool any_masked(const uint64_t*, __m512i words, __m512i bits) {
  return _mm512_cmpeq_epi64_mask(_mm512_and_si512(words, bits), bits) != 0;
}

// The first words of kTogether blocks, as far as vectors reach; returns how many of each.
template <class W>
int64_t sum_vectors(const W* words, const uint64_t* multipliers, int64_t size, uint64_t mask, uint64_t* to,
                    bool* masked) {
  constexpr int64_t kWords = 8, kVector = sizeof(__m512i) / sizeof(W);
  W repeated[kVector];
  std::fill(repeated, repeated + kVector, static_cast<W>(mask));
  const __m512i bits = _mm512_loadu_si512(repeated);
  __m512i sums[kTogether];
  bool found[kTogether] = {};
  for (auto& sum : sums) sum = _mm512_setzero_si512();
  int64_t j = 0;
  for (; j + kVector <= size; j += kVector) {
    for (int64_t i = j; i < j + kVector; i += kWords) {
      const __m512i multiplier = _mm512_loadu_si512(multipliers + i);
#pragma GCC unroll 8
      for (int64_t n = 0; n < kTogether; ++n) {
        sums[n] = _mm512_add_epi64(sums[n], _mm512_mullo_epi64(multiplier, widened(words + n * size + i)));
      }
    }
#pragma GCC unroll 8
    for (int64_t n = 0; n < kTogether; ++n) {
      found[n] |= any_masked(words, _mm512_loadu_si512(words + n * size + j), bits);
    }
  }
  for (int64_t n = 0; n < kTogether; ++n) {
    to[n] = _mm512_reduce_add_epi64(sums[n]);
    masked[n] = found[n];
  }
  return j;
}
#endif

template <class W>
void sum_blocks(const at::Tensor& words, const at::Tensor& multipliers, uint64_t mask, at::Tensor& out,
                at::Tensor& out_masked) {
  const auto* from = static_cast<const W*>(words.const_data_ptr());
  const auto* table = reinterpret_cast<const uint64_t*>(multipliers.const_data_ptr<int64_t>());
  auto* to = reinterpret_cast<uint64_t*>(out.mutable_data_ptr<int64_t>());
  auto* masked = out_masked.mutable_data_ptr<bool>();
  const int64_t blocks = words.size(0), size = words.size(1);
  for_spans(blocks, kTogether, blocks * size / 8, [&](int64_t begin, int64_t end) {
    int64_t done = 0;
    std::fill(to + begin, to + end, 0);
    std::fill(masked + begin, masked + end, false);
#if LOCKSTEP_AVX512
    if (end - begin == kTogether) {
      done = sum_vectors(from + begin * size, table, size, mask, to + begin, masked + begin);
    }
#endif
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t j = done; j < size; ++j) {
        const uint64_t word = from[n * size + j];
        to[n] += table[j] * word;
        masked[n] |= (word & mask) == mask;
      }
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
