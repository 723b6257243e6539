// Between logical rows and packed weights with scales (packed_held.h): bytes and scales as they are published.
//
// A matrix begins at packed row `first_row`, with fp8 a multiple of sixteen.  Blocks of sixteen rows alternate as in
// pack.cpp.
//
// Shapes: N rows, K their elements, n and k blocks of 128 of them, s steps of 32 elements.
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "checks.h"
#include "packed_held.h"
#include "parallel.h"

namespace lockstep {
namespace {

// Sixteen rows of sixteen bytes are turned over at once.
constexpr int64_t kTurned = 16;

// to[j * to_row + i] = from[i * from_row + j]
void turn_over(const uint8_t* from, int64_t from_row, uint8_t* to, int64_t to_row) {
#if LOCKSTEP_AVX512 || LOCKSTEP_AVX2
  __m128i a[kTurned], b[kTurned];
#pragma GCC unroll 16
  for (int i = 0; i < kTurned; ++i) a[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * from_row));
  // Four times rows i and i + 8 are shuffled together, byte by byte: the perfect shuffle of the bits of an index.
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < kTurned / 2; ++i) {
      b[2 * i] = _mm_unpacklo_epi8(a[i], a[i + kTurned / 2]);
      b[2 * i + 1] = _mm_unpackhi_epi8(a[i], a[i + kTurned / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kTurned; ++i) a[i] = b[i];
  }
#pragma GCC unroll 16
  for (int j = 0; j < kTurned; ++j) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + j * to_row), a[j]);
#else
  for (int64_t i = 0; i < kTurned; ++i) {
    for (int64_t j = 0; j < kTurned; ++j) to[j * to_row + i] = from[i * from_row + j];
  }
#endif
}
static_assert(kLanes == kTurned, "rows of one vector are turned over at once");

int64_t blocks_of(int64_t size) { return (size + kScaleBlock - 1) / kScaleBlock; }

template <class Step>
void check_held(const at::Tensor& packed, at::ScalarType dtype, int64_t depth, int64_t first_row, int64_t num_rows,
                int64_t step, int64_t offset) {
  TORCH_CHECK(packed.is_contiguous() && packed.scalar_type() == dtype, "packed weights must be contiguous ", dtype);
  TORCH_CHECK(step >= 1 && 0 <= offset && offset < step && num_rows >= 0, "offset must be in 0..step - 1");
  const bool shares_scale = dtype == at::kFloat8_e4m3fn && first_row % kLanes != 0;
  TORCH_CHECK(first_row >= 0 && !shares_scale, "the first row must not share a scale with the row before");
  const int64_t panels = num_rows == 0 ? 0 : HeldRow(first_row + num_rows - 1, step, offset).panel + 1;
  TORCH_CHECK(panels * held_panel_bytes<Step>(depth) <= packed.numel(), "rows lie outside the packed weights");
}

template <class Step>
at::Tensor empty_held(at::ScalarType dtype, at::IntArrayRef lead, int64_t rows, int64_t depth) {
  std::vector<int64_t> shape(lead.begin(), lead.end());
  shape.insert(shape.end(), {panels_of(rows), held_panel_bytes<Step>(depth)});
  return at::zeros(shape, at::TensorOptions().dtype(at::kByte)).view(dtype);
}

at::Tensor empty_packed_fp8(at::IntArrayRef lead, int64_t rows, int64_t depth) {
  return empty_held<Fp8Step>(at::kFloat8_e4m3fn, lead, rows, depth);
}

at::Tensor empty_packed_int4(at::IntArrayRef lead, int64_t rows, int64_t depth) {
  return empty_held<Int4Step>(at::kByte, lead, rows, depth);
}

// The first byte of each step of a row's panel.
template <class Step, class Byte>
Byte* panel_of(Byte* packed, const HeldRow& row, int64_t depth) {
  return packed + row.panel * held_panel_bytes<Step>(depth);
}

// Of element k of a row, its byte.
int64_t fp8_place(const HeldRow& row, int64_t k) {
  return k / kHeldStep * Fp8Step::kBytes + k % kHeldStep * kPanelRows + row.column();
}

// Whether rows of a source go to all lanes of one vector of rows.
bool is_vector(int64_t begin, int64_t end, int64_t first_row) {
  return end - begin == kLanes && (first_row + begin) % kLanes == 0;
}

void pack_rows_fp8(at::Tensor& packed, const at::Tensor& weight, const at::Tensor& scale, int64_t first_row,
                   int64_t step, int64_t offset) {
  TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == at::kFloat8_e4m3fn, "the weight must be [N, K] float8_e4m3fn");
  const int64_t num_rows = weight.size(0), depth = weight.size(1), blocks = blocks_of(depth);
  TORCH_CHECK(scale.dim() == 2 && scale.size(0) == blocks_of(num_rows) && scale.size(1) == blocks &&
                  scale.scalar_type() == at::kFloat,
              "the scales must be [n, k] float32");
  check_held<Fp8Step>(packed, at::kFloat8_e4m3fn, depth, first_row, num_rows, step, offset);
  const at::Tensor elements = weight.contiguous(), scales = scale.contiguous();
  const auto* from = static_cast<const uint8_t*>(elements.const_data_ptr());
  const float* scale_of = scales.const_data_ptr<float>();
  auto* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  for_spans(num_rows, kLanes, num_rows * depth, [&](int64_t begin, int64_t end) {
    int64_t turned = 0;  // elements of each row that are written sixteen rows at a time
    if (is_vector(begin, end, first_row)) {
      const HeldRow row(first_row + begin, step, offset);
      uint8_t* panel = panel_of<Fp8Step>(to, row, depth);
      for (; turned + kTurned <= depth; turned += kTurned) {
        turn_over(from + begin * depth + turned, depth, panel + fp8_place(row, turned), kPanelRows);
      }
    }
    for (int64_t n = begin; n < end; ++n) {
      const HeldRow row(first_row + n, step, offset);
      uint8_t* panel = panel_of<Fp8Step>(to, row, depth);
      for (int64_t k = turned; k < depth; ++k) panel[fp8_place(row, k)] = from[n * depth + k];
      if (row.lane != 0) continue;
      for (int64_t k = 0; k < depth; k += kHeldStep, panel += Fp8Step::kBytes) {
        const float* one = scale_of + n / kScaleBlock * blocks + k / kScaleBlock;
        std::memcpy(panel + kFp8StepNumel + row.vector * sizeof(float), one, sizeof(float));
      }
    }
  });
}

std::tuple<at::Tensor, at::Tensor> unpack_rows_fp8(const at::Tensor& packed, int64_t depth, int64_t first_row,
                                                   int64_t num_rows, int64_t step, int64_t offset) {
  check_held<Fp8Step>(packed, at::kFloat8_e4m3fn, depth, first_row, num_rows, step, offset);
  const int64_t blocks = blocks_of(depth);
  at::Tensor weight = at::empty({num_rows, depth}, packed.options());
  at::Tensor scale = at::empty({blocks_of(num_rows), blocks}, packed.options().dtype(at::kFloat));
  const auto* from = static_cast<const uint8_t*>(packed.const_data_ptr());
  auto* to = static_cast<uint8_t*>(weight.mutable_data_ptr());
  float* scale_of = scale.mutable_data_ptr<float>();
  for_spans(num_rows, kScaleBlock, num_rows * depth, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const HeldRow row(first_row + n, step, offset);
      const uint8_t* panel = panel_of<Fp8Step>(from, row, depth);
      for (int64_t k = 0; k < depth; ++k) {
        to[n * depth + k] = panel[fp8_place(row, k)];
      }
      if (n % kScaleBlock != 0) continue;
      for (int64_t k = 0; k < depth; k += kScaleBlock) {
        const uint8_t* one = panel + k / kHeldStep * Fp8Step::kBytes + kFp8StepNumel + row.vector * sizeof(float);
        std::memcpy(scale_of + n / kScaleBlock * blocks + k / kScaleBlock, one, sizeof(float));
      }
    }
  });
  return {weight, scale};
}

// Of element k of a row, the byte with its integer, which is the upper half where k is odd.
int64_t int4_place(const HeldRow& row, int64_t k) {
  return k / kHeldStep * Int4Step::kBytes + k % kHeldStep / 2 * kPanelRows + row.column();
}

int64_t int4_scale_place(const HeldRow& row, int64_t k) {
  return k / kHeldStep * Int4Step::kBytes + kInt4StepNumel + row.column() * static_cast<int64_t>(sizeof(bf16));
}

// Of the integers of a step, two a byte, the even one in the low half.
void join_halves(const int8_t* from, uint8_t* to) {
#if LOCKSTEP_AVX512 || LOCKSTEP_AVX2
  const __m256i low = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), _mm256_set1_epi8(15));
  const __m256i pairs = _mm256_maddubs_epi16(low, _mm256_set1_epi16(16 << 8 | 1));  // even + 16 odd
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(bytes));
#else
  for (int64_t i = 0; i < kHeldStep / 2; ++i) {
    to[i] = static_cast<uint8_t>((from[2 * i] & 15) | (from[2 * i + 1] & 15) << 4);
  }
#endif
}

void pack_rows_int4(at::Tensor& packed, const at::Tensor& weight, const at::Tensor& scale, int64_t first_row,
                    int64_t step, int64_t offset) {
  TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == at::kChar, "the weight must be [N, K] int8");
  const int64_t num_rows = weight.size(0), depth = weight.size(1), steps = held_steps_of(depth);
  TORCH_CHECK(scale.dim() == 2 && scale.size(0) == num_rows && scale.size(1) == steps &&
                  scale.scalar_type() == at::kBFloat16,
              "the scales must be [N, s] bfloat16");
  check_held<Int4Step>(packed, at::kByte, depth, first_row, num_rows, step, offset);
  const at::Tensor elements = weight.contiguous(), scales = scale.contiguous();
  const int8_t* from = elements.const_data_ptr<int8_t>();
  const bf16* scale_of = scales.const_data_ptr<bf16>();
  auto* to = static_cast<uint8_t*>(packed.mutable_data_ptr());
  for_spans(num_rows, kLanes, num_rows * depth, [&](int64_t begin, int64_t end) {
    int64_t turned = 0;  // elements of each row that are written sixteen rows at a time
    if (is_vector(begin, end, first_row)) {
      const HeldRow row(first_row + begin, step, offset);
      uint8_t* panel = panel_of<Int4Step>(to, row, depth);
      for (; turned + kHeldStep <= depth; turned += kHeldStep) {
        uint8_t halves[kLanes][kHeldStep / 2];
        for (int64_t lane = 0; lane < kLanes; ++lane) join_halves(from + (begin + lane) * depth + turned, halves[lane]);
        turn_over(halves[0], kHeldStep / 2, panel + int4_place(row, turned), kPanelRows);
      }
    }
    for (int64_t n = begin; n < end; ++n) {
      const HeldRow row(first_row + n, step, offset);
      uint8_t* panel = panel_of<Int4Step>(to, row, depth);
      for (int64_t k = turned; k < depth; k += 2) {
        const uint8_t even = from[n * depth + k] & 15, odd = k + 1 < depth ? from[n * depth + k + 1] & 15 : 0;
        panel[int4_place(row, k)] = static_cast<uint8_t>(even | odd << 4);
      }
      for (int64_t s = 0; s < steps; ++s) {
        std::memcpy(panel + int4_scale_place(row, s * kHeldStep), scale_of + n * steps + s, sizeof(bf16));
      }
    }
  });
}

std::tuple<at::Tensor, at::Tensor> unpack_rows_int4(const at::Tensor& packed, int64_t depth, int64_t first_row,
                                                    int64_t num_rows, int64_t step, int64_t offset) {
  check_held<Int4Step>(packed, at::kByte, depth, first_row, num_rows, step, offset);
  const int64_t steps = held_steps_of(depth);
  at::Tensor weight = at::empty({num_rows, depth}, packed.options().dtype(at::kChar));
  at::Tensor scale = at::empty({num_rows, steps}, packed.options().dtype(at::kBFloat16));
  const auto* from = static_cast<const uint8_t*>(packed.const_data_ptr());
  int8_t* to = weight.mutable_data_ptr<int8_t>();
  bf16* scale_of = scale.mutable_data_ptr<bf16>();
  for_spans(num_rows, kLanes, num_rows * depth, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const HeldRow row(first_row + n, step, offset);
      const uint8_t* panel = panel_of<Int4Step>(from, row, depth);
      for (int64_t k = 0; k < depth; ++k) {
        const auto both = static_cast<int8_t>(panel[int4_place(row, k)]);
        to[n * depth + k] = static_cast<int8_t>(k % 2 == 0 ? static_cast<int8_t>(both * 16) >> 4 : both >> 4);
      }
      for (int64_t s = 0; s < steps; ++s) {
        std::memcpy(scale_of + n * steps + s, panel + int4_scale_place(row, s * kHeldStep), sizeof(bf16));
      }
    }
  });
  return {weight, scale};
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  m.def("empty_packed_fp8(int[] lead, int rows, int depth) -> Tensor", &lockstep::empty_packed_fp8);
  m.def("pack_rows_fp8(Tensor(a!) packed, Tensor weight, Tensor scale, int first_row, int step, int offset) -> ()");
  m.def("unpack_rows_fp8(Tensor packed, int depth, int first_row, int rows, int step, int offset) -> (Tensor, Tensor)");
  m.def("empty_packed_int4(int[] lead, int rows, int depth) -> Tensor", &lockstep::empty_packed_int4);
  m.def("pack_rows_int4(Tensor(a!) packed, Tensor weight, Tensor scale, int first_row, int step, int offset) -> ()");
  m.def("unpack_rows_int4(Tensor packed, int depth, int first_row, int rows, int step, int offset) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(lockstep, CPU, m) {
  m.impl("pack_rows_fp8", &lockstep::pack_rows_fp8);
  m.impl("unpack_rows_fp8", &lockstep::unpack_rows_fp8);
  m.impl("pack_rows_int4", &lockstep::pack_rows_int4);
  m.impl("unpack_rows_int4", &lockstep::unpack_rows_int4);
}
