// Exclusive or and sums over many parts of memory in one call (`weight_sync/exchanges.py`, which defines the operators
// and does without this kernel).
#include <cstdint>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "parallel.h"

namespace lockstep {
namespace {

constexpr int64_t kSpan = 64;  // parts that a thread takes at a time
constexpr int64_t kBytesANanosecond = 8;

// A part of memory in words of 64 bits, or in bytes.
struct Part {
  void* data;
  int64_t numel;
  bool is_words;
};

std::vector<Part> parts_of(at::TensorList tensors, int64_t& bytes) {
  std::vector<Part> parts;
  parts.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    const bool is_words = tensor.scalar_type() == at::kLong;
    TORCH_CHECK(tensor.dim() == 1 && tensor.is_contiguous() && tensor.is_cpu() &&
                    (is_words || tensor.scalar_type() == at::kByte),
                "a part must be int64 or uint8 [n], contiguous");
    parts.push_back({const_cast<void*>(tensor.const_data_ptr()), tensor.numel(), is_words});
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return parts;
}

template <class W>
void fold_part(const Part& into, const Part& other) {
  auto* to = static_cast<W*>(into.data);
  const auto* from = static_cast<const W*>(other.data);
  for (int64_t i = 0; i < into.numel; ++i) to[i] ^= from[i];
}

template <class W>
uint64_t sum_of(const Part& part) {
  const auto* words = static_cast<const W*>(part.data);
  uint64_t sum = 0;
  for (int64_t i = 0; i < part.numel; ++i) sum += words[i];
  return sum;
}

void fold(at::TensorList into, at::TensorList other) {
  int64_t bytes = 0;
  const std::vector<Part> ones = parts_of(into, bytes), others = parts_of(other, bytes);
  TORCH_CHECK(ones.size() == others.size(), "the parts to fold differ in number");
  for (size_t i = 0; i < ones.size(); ++i) {
    TORCH_CHECK(ones[i].numel == others[i].numel && ones[i].is_words == others[i].is_words,
                "the parts to fold differ in size or dtype");
  }
  for_spans(ones.size(), kSpan, bytes / kBytesANanosecond, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      ones[i].is_words ? fold_part<uint64_t>(ones[i], others[i]) : fold_part<uint8_t>(ones[i], others[i]);
    }
  });
}

at::Tensor word_sums(at::TensorList tensors) {
  int64_t bytes = 0;
  const std::vector<Part> parts = parts_of(tensors, bytes);
  at::Tensor sums = at::empty({static_cast<int64_t>(parts.size())}, at::kLong);
  auto* to = reinterpret_cast<uint64_t*>(sums.mutable_data_ptr<int64_t>());
  for_spans(parts.size(), kSpan, bytes / kBytesANanosecond, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      to[i] = parts[i].is_words ? sum_of<uint64_t>(parts[i]) : sum_of<uint8_t>(parts[i]);
    }
  });
  return sums;
}

}  // namespace
}  // namespace lockstep

// The operators that `weight_sync` defines, on a CPU.
TORCH_LIBRARY_IMPL(weight_sync, CPU, m) {
  m.impl("fold", &lockstep::fold);
  m.impl("word_sums", &lockstep::word_sums);
}
