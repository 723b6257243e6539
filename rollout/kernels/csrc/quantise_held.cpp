// Between values and the elements and scales of FP8 blocks and INT4 groups (`weight_sync/fp8_blocks.py` and
// `weight_sync/int4_groups.py`, which define the operators and do without this kernel): the same bits.
//
// Shapes: N rows, K their elements, n and k blocks of 128 of them, g groups of a row.
#include <atomic>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "casts.h"
#include "fp8.h"
#include "packed_held.h"
#include "parallel.h"

namespace lockstep {
namespace {

constexpr float kLargestFp8 = 448.0f;

// The largest magnitude of numbers, and whether all of them are finite.
class Largest {
 public:
  template <class T>
  void take(const T* from, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      const F32x16 x = load(from + i, static_cast<int>(std::min<int64_t>(kLanes, count - i)));
      largest_ = max(largest_, max(x, splat(0.0f) - x));
      zeros_ = zeros_ + (x - x);  // NaN for what is not finite, and NaN from then on
    }
  }

  float value() const {
    float lanes[kLanes], found = 0.0f;
    store(lanes, largest_);
    for (const float x : lanes) found = std::max(found, x);
    return found;
  }

  bool is_finite() const {
    float lanes[kLanes], sum = 0.0f;
    store(lanes, zeros_);
    for (const float x : lanes) sum += x;
    return sum == 0.0f;
  }

 private:
  F32x16 largest_ = splat(0.0f), zeros_ = splat(0.0f);
};

// Quotients of `count` numbers, at most kScaleBlock, over `scale`, sixteen at a time; lanes behind the last have any.
template <class T>
void divide(const T* from, float scale, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store(to + i, load(from + i, static_cast<int>(std::min<int64_t>(kLanes, count - i))) / splat(scale));
  }
}

// Integers of 4 bits of `count` quotients.
void store_integers(float* from, int8_t* to, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    store(from + i, min(splat(7.0f), max(splat(-8.0f), round_to_integer(load(from + i)))));
  }
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int8_t>(static_cast<int32_t>(from[i]));
}

template <class T>
bool quantise_int4_rows(const T* from, int8_t* to, bf16* scales, int64_t num_rows, int64_t depth, int64_t group) {
  const int64_t groups = (depth + group - 1) / group;
  std::atomic<bool> finite{true};
  for_spans(num_rows, kLanes, num_rows * depth, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin * groups; at < end * groups; ++at) {
      const int64_t k = at % groups * group, count = std::min(group, depth - k), first = at / groups * depth + k;
      Largest largest;
      largest.take(from + first, count);
      if (!largest.is_finite()) finite.store(false, std::memory_order_relaxed);
      const bf16 found(largest.value() / 7.5f), scale = static_cast<float>(found) > 0.0f ? found : bf16(1.0f);
      scales[at] = scale;
      for (int64_t i = 0; i < count; i += kScaleBlock) {
        const int64_t some = std::min(kScaleBlock, count - i);
        float quotients[kScaleBlock];
        divide(from + first + i, static_cast<float>(scale), some, quotients);
        store_integers(quotients, to + first + i, some);
      }
    }
  });
  return finite.load();
}

// Codes of at most kScaleBlock quotients, as `fp8_bits_of_float` has them, which compilers do not turn into vectors: it
// adds floats where it may not have to.  A scale below the normal numbers is rough: a quotient may be beyond the largest
// number, which is stored then.
void store_codes(const float* from, Fp8* to, int64_t count) {
  constexpr int32_t kLargest = std::bit_cast<int32_t>(kLargestFp8), kNormal = 121 << 23;
  constexpr float kRounds = 0x1p14f;  // whose last bit is that of the smallest number
  float sums[kScaleBlock];
  for (int64_t i = 0; i < count; i += kLanes) {
    const F32x16 x = load(from + i);
    store(sums + i, max(x, splat(0.0f) - x) + splat(kRounds));
  }
  for (int64_t i = 0; i < count; ++i) {
    const int32_t given = std::bit_cast<int32_t>(from[i]), bits = std::min(given & 0x7fffffff, kLargest);
    const int32_t normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
    const int32_t denormal = std::bit_cast<int32_t>(sums[i]) - std::bit_cast<int32_t>(kRounds);
    to[i].x = static_cast<uint8_t>((bits < kNormal ? denormal : normal) | (given >> 24 & 0x80));
  }
}

template <class T>
bool quantise_fp8_blocks(const T* from, Fp8* to, float* scales, int64_t num_rows, int64_t depth) {
  const int64_t columns = (depth + kScaleBlock - 1) / kScaleBlock;
  std::atomic<bool> finite{true};
  for_spans(num_rows, kScaleBlock, num_rows * depth, [&](int64_t begin, int64_t end) {
    for (int64_t block = 0; block < columns; ++block) {
      const int64_t k = block * kScaleBlock, count = std::min(kScaleBlock, depth - k);
      Largest largest;
      for (int64_t n = begin; n < end; ++n) largest.take(from + n * depth + k, count);
      if (!largest.is_finite()) finite.store(false, std::memory_order_relaxed);
      const float found = largest.value() / kLargestFp8, scale = found > 0.0f ? found : 1.0f;
      scales[begin / kScaleBlock * columns + block] = scale;
      for (int64_t n = begin; n < end; ++n) {
        float quotients[kScaleBlock];
        divide(from + n * depth + k, scale, count, quotients);
        store_codes(quotients, to + n * depth + k, count);
      }
    }
  });
  return finite.load();
}

void check_values(const at::Tensor& values, const at::Tensor& weight, at::ScalarType dtype, const at::Tensor& scale) {
  TORCH_CHECK(values.dim() == 2 && values.is_floating_point(), "the values must be floating-point numbers [N, K]");
  TORCH_CHECK(weight.sizes() == values.sizes() && weight.is_contiguous() && weight.scalar_type() == dtype,
              "the weight must be contiguous ", dtype, " of the values' shape");
  TORCH_CHECK(scale.dim() == 2 && scale.is_contiguous(), "the scales must be a contiguous matrix");
}

void check_int4_scales(const at::Tensor& values, const at::Tensor& scale, int64_t group) {
  TORCH_CHECK(group > 0 && scale.size(0) == values.size(0) && scale.size(1) == (values.size(1) + group - 1) / group &&
                  scale.scalar_type() == at::kBFloat16,
              "the scales must be [N, g] bfloat16");
}

void check_fp8_scales(const at::Tensor& values, const at::Tensor& scale) {
  TORCH_CHECK(scale.size(0) == (values.size(0) + kScaleBlock - 1) / kScaleBlock &&
                  scale.size(1) == (values.size(1) + kScaleBlock - 1) / kScaleBlock && scale.scalar_type() == at::kFloat,
              "the scales must be [n, k] float32");
}

bool quantise_int4(const at::Tensor& values, at::Tensor& weight, at::Tensor& scale, int64_t group) {
  check_values(values, weight, at::kChar, scale);
  const int64_t rows = values.size(0), depth = values.size(1);
  check_int4_scales(values, scale, group);
  auto* to = weight.mutable_data_ptr<int8_t>();
  auto* scales = scale.mutable_data_ptr<bf16>();
  const at::Tensor from = (values.scalar_type() == at::kBFloat16 ? values : values.to(at::kFloat)).contiguous();
  if (from.scalar_type() == at::kBFloat16) {
    return quantise_int4_rows(from.const_data_ptr<bf16>(), to, scales, rows, depth, group);
  }
  return quantise_int4_rows(from.const_data_ptr<float>(), to, scales, rows, depth, group);
}

bool quantise_fp8(const at::Tensor& values, at::Tensor& weight, at::Tensor& scale) {
  check_values(values, weight, at::kFloat8_e4m3fn, scale);
  const int64_t rows = values.size(0), depth = values.size(1);
  check_fp8_scales(values, scale);
  auto* to = weight.mutable_data_ptr<Fp8>();
  auto* scales = scale.mutable_data_ptr<float>();
  const at::Tensor from = (values.scalar_type() == at::kBFloat16 ? values : values.to(at::kFloat)).contiguous();
  if (from.scalar_type() == at::kBFloat16) {
    return quantise_fp8_blocks(from.const_data_ptr<bf16>(), to, scales, rows, depth);
  }
  return quantise_fp8_blocks(from.const_data_ptr<float>(), to, scales, rows, depth);
}

// Numbers of FP8, NaN among them.
void to_floats(const Fp8* from, float* to, int64_t count) {
  uint8_t not_a_number = 0;
  for (int64_t i = 0; i < count; ++i) not_a_number |= (from[i].x & 0x7f) == 0x7f;
  const int64_t whole = not_a_number != 0 ? 0 : count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    store(to + i, load_fp8_over_256(reinterpret_cast<const uint8_t*>(from + i)) * splat(kFp8OverHalf));
  }
  widen(from + whole, to + whole, count - whole);
}

// Stores products of elements and scales, rounded as torch's `.to` rounds.
void store_all(const float* from, bf16* to, int64_t count) {
  floats_to_bf16(from, reinterpret_cast<uint8_t*>(to), count);
}
void store_all(const float* from, float* to, int64_t count) { std::copy_n(from, count, to); }

template <class T>
void dequantise_fp8_blocks(const Fp8* from, const float* scales, T* to, int64_t num_rows, int64_t depth) {
  const int64_t columns = (depth + kScaleBlock - 1) / kScaleBlock;
  for_spans(num_rows, kLanes, num_rows * depth, [&](int64_t begin, int64_t end) {
    float products[kScaleBlock];
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t k = 0; k < depth; k += kScaleBlock) {
        const int64_t count = std::min(kScaleBlock, depth - k);
        const float scale = scales[n / kScaleBlock * columns + k / kScaleBlock];
        to_floats(from + n * depth + k, products, count);
        for (int64_t i = 0; i < count; ++i) products[i] *= scale;
        store_all(products, to + n * depth + k, count);
      }
    }
  });
}

template <class T>
void dequantise_int4_rows(const int8_t* from, const bf16* scales, T* to, int64_t num_rows, int64_t depth, int64_t group) {
  const int64_t groups = (depth + group - 1) / group;
  for_spans(num_rows, kLanes, num_rows * depth, [&](int64_t begin, int64_t end) {
    float products[kHeldStep];
    for (int64_t n = begin; n < end; ++n) {
      for (int64_t k = 0; k < depth;) {
        const int64_t count = std::min({kHeldStep, depth - k, group - k % group}), first = n * depth + k;
        const float scale = static_cast<float>(scales[n * groups + k / group]);
        for (int64_t i = 0; i < count; ++i) products[i] = static_cast<float>(from[first + i]) * scale;
        store_all(products, to + first, count);
        k += count;
      }
    }
  });
}

// Calls `body(T*)` with room for values of bf16 or float32; values of another dtype are made of the latter.
template <class F>
void into_values(at::Tensor& values, F&& body) {
  if (values.scalar_type() == at::kBFloat16) {
    body(values.mutable_data_ptr<bf16>());
  } else if (values.scalar_type() == at::kFloat) {
    body(values.mutable_data_ptr<float>());
  } else {
    const at::Tensor wide = at::empty(values.sizes(), values.options().dtype(at::kFloat));
    body(wide.mutable_data_ptr<float>());
    values.copy_(wide);
  }
}

void dequantise_fp8(const at::Tensor& weight, const at::Tensor& scale, at::Tensor& values) {
  const at::Tensor elements = weight.contiguous(), scales = scale.to(at::kFloat).contiguous();
  check_values(values, elements, at::kFloat8_e4m3fn, scales);
  check_fp8_scales(values, scales);
  TORCH_CHECK(values.is_contiguous(), "the values must be contiguous");
  into_values(values, [&](auto* to) {
    dequantise_fp8_blocks(elements.const_data_ptr<Fp8>(), scales.const_data_ptr<float>(), to, values.size(0),
                          values.size(1));
  });
}

void dequantise_int4(const at::Tensor& weight, const at::Tensor& scale, at::Tensor& values, int64_t group) {
  const at::Tensor elements = weight.contiguous(), scales = scale.contiguous();
  check_values(values, elements, at::kChar, scales);
  check_int4_scales(values, scales, group);
  TORCH_CHECK(values.is_contiguous(), "the values must be contiguous");
  into_values(values, [&](auto* to) {
    dequantise_int4_rows(elements.const_data_ptr<int8_t>(), scales.const_data_ptr<bf16>(), to, values.size(0),
                         values.size(1), group);
  });
}

}  // namespace
}  // namespace lockstep

// The operators that `weight_sync` defines, on a CPU.
TORCH_LIBRARY_IMPL(weight_sync, CPU, m) {
  m.impl("quantise_int4", &lockstep::quantise_int4);
  m.impl("quantise_fp8", &lockstep::quantise_fp8);
  m.impl("dequantise_int4", &lockstep::dequantise_int4);
  m.impl("dequantise_fp8", &lockstep::dequantise_fp8);
}
