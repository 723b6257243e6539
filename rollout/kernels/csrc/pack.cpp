// Between logical rows and packed weights: writing and reading back.
//
// Blocks of sixteen logical rows lie `step` half-panels apart from half-panel `offset` on: 1 and 0 where a matrix is
// alone; 2 and 0, 2 and 1 where two of one size alternate (gate and up projections of an expert).
//
// Shapes: N rows, K their elements.
#include <ATen/ops/empty.h>
#include <torch/library.h>
#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

#include "checks.h"
#include "packed_rows.h"
#include "parallel.h"

namespace lockstep {
namespace {

// Weights are streamed once a step: with pages of 4 KiB, address translation takes a good part of that time.
void advise_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kHuge = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHuge * kHuge;
  // Where the kernel has none to give, everything works as before.
  if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// Zeros that hold a packed [N, K].
at::Tensor empty_packed(at::IntArrayRef lead, int64_t rows, int64_t depth, at::ScalarType dtype) {
  std::vector<int64_t> shape(lead.begin(), lead.end());
  const bool is_bf16 = dtype == at::kBFloat16;
  const int64_t group = is_bf16 ? kGroup<bf16> : kGroup<float>;
  const int64_t groups = is_bf16 ? groups_of<bf16>(depth) : groups_of<float>(depth);
  shape.insert(shape.end(), {panels_of(rows), groups, kPanelRows, group});
  at::Tensor packed = at::empty(shape, at::TensorOptions().dtype(dtype));
  advise_huge_pages(packed.mutable_data_ptr(), packed.nbytes());
  return packed.zero_();
}

void pack_rows(at::Tensor& packed, const at::Tensor& source, int64_t first_row, int64_t step, int64_t offset) {
  TORCH_CHECK(source.dim() == 2 && first_row >= 0, "the source must be [N, K]");
  check_same_dtype(packed, {source});
  const int64_t num_rows = source.size(0), depth = source.size(1);
  check_packed(packed, depth, first_row + num_rows - 1, step, offset);
  const at::Tensor rows = source.contiguous();
  with_dtype(packed, [&](auto zero) {
    using T = decltype(zero);
    const T* from = rows.const_data_ptr<T>();
    T* to = packed.mutable_data_ptr<T>();
    for_spans(num_rows, kLanes, num_rows * depth / 8, [&](int64_t begin, int64_t end) {
      const PackedRows<T> place{to, depth, step, offset};
      place.put(from + begin * depth, depth, first_row + begin, end - begin, 0, depth);
      streamed();
    });
  });
}

at::Tensor unpack_rows(const at::Tensor& packed, int64_t depth, int64_t first_row, int64_t num_rows, int64_t step,
                       int64_t offset) {
  TORCH_CHECK(first_row >= 0 && num_rows >= 0, "rows must not be negative");
  check_packed(packed, depth, first_row + num_rows - 1, step, offset);
  at::Tensor out = at::empty({num_rows, depth}, packed.options());
  with_dtype(packed, [&](auto zero) {
    using T = decltype(zero);
    const T* from = packed.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    for_spans(num_rows, kLanes, num_rows * depth / 8, [&](int64_t begin, int64_t end) {
      const T* place = row_place(from, depth, first_row + begin, step, offset);
      const int64_t in_squares = turned(to + begin * depth, depth, depth, first_row + begin, end - begin);
      for (int64_t k = 0; k < in_squares; k += kLanes * kGroup<T>) {
        turn(place + k / kGroup<T> * kRowStride<T>, kRowStride<T>, to + begin * depth + k, depth,
             [](float* at, const F32x16& vector) { store(at, vector); });
      }
      for (int64_t n = begin; n < end; ++n) {
        unpack_row(row_place(from, depth, first_row + n, step, offset), in_squares, depth, to + n * depth);
      }
    });
  });
  return out;
}

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  m.def("empty_packed(int[] lead, int rows, int depth, ScalarType dtype) -> Tensor", &lockstep::empty_packed);
  m.def("pack_rows(Tensor(a!) packed, Tensor source, int first_row, int step, int offset) -> ()");
  m.def("unpack_rows(Tensor packed, int depth, int first_row, int num_rows, int step, int offset) -> Tensor");
}

TORCH_LIBRARY_IMPL(lockstep, CPU, m) {
  m.impl("pack_rows", &lockstep::pack_rows);
  m.impl("unpack_rows", &lockstep::unpack_rows);
}
