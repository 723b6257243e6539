// paged_attention: causal attention over keys and values that lie in slots of a pool.
//
// Tensors are checked here, and work divided over threads.  The arithmetic is in attention_tile.h.
//
// Shapes: T query tokens, N sequences, H query heads, Hkv key/value heads, G = H / Hkv, hd size of a query and a key, vd of
// a value, S slots of the pool, R rows and C positions of the slot table.
#include <atomic>
#include <memory>
#include <optional>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/SmallVector.h>
#include <torch/library.h>

#include "attention_tile.h"
#include "parallel.h"

namespace lockstep::attention {
namespace {

constexpr int kMaxKeySize = 576, kMaxValueSize = 512;
// Most rows of a tile: its keys and values are packed once for all of them.  Fewer of large heads: queries and sums of a
// tile fit the second level of the cache.
constexpr int kTileRows = 256, kLargeHeadRows = 64, kLargeHead = 256;
constexpr int64_t kNoWindow = int64_t{1} << 40;  // positions
// Pieces of work for each thread, so that none waits long for the last.
constexpr int64_t kPiecesPerThread = 8;
// Multiplications of a thread in a nanosecond, about: with the few rows that share a key when sequences are decoded, which
// are bound by loading keys and values, and with many.
#if LOCKSTEP_AVX512
constexpr int64_t kSpeedOfFew = 16, kSpeedOfMany = 64;
#else
constexpr int64_t kSpeedOfFew = 6, kSpeedOfMany = 24;
#endif

struct Sequence {
  const int64_t* slots;
  int64_t first_query;     // row of q
  int64_t first_position;  // of that query
  int64_t num_queries;

  int64_t length() const { return first_position + num_queries; }
};

// A tile, or one segment of a tile, for one thread.
struct Work {
  int64_t sequence;
  int64_t first;  // query of the sequence
  int kv_head, heads, positions;
  int segment;      // -1: all of them, and the result is written
  int64_t split;    // the tile among those that are cut into segments
  int64_t partial;  // where in the partial results the segment goes, in floats
};

using Sequences = c10::SmallVector<Sequence, 8>;
using Works = c10::SmallVector<Work, 8>;

struct Arguments {
  const at::Tensor &q, &k_pool, &v_pool;
  at::Tensor& out;
  const std::optional<at::Tensor>& sinks;
  Sequences sequences;
  float scale, value_scale;
  int64_t window;

  bool is_fp8() const { return k_pool.scalar_type() == at::kFloat8_e4m3fn; }
  HeadSizes sizes() const { return {static_cast<int>(q.size(2)), static_cast<int>(v_pool.size(2))}; }
  int tile_rows() const { return sizes().key > kLargeHead ? kLargeHeadRows : kTileRows; }
  int kv_heads() const { return static_cast<int>(k_pool.size(1)); }
  int group() const { return static_cast<int>(q.size(1) / k_pool.size(1)); }
  // For one thread, about; masked keys included.
  int64_t nanoseconds() const {
    int64_t nanoseconds = 0;
    for (const Sequence& x : sequences) {
      const int64_t products = x.num_queries * std::min(x.length(), window + x.num_queries);
      const int64_t speed = x.num_queries * group() <= kInPlaceRows ? kSpeedOfFew : kSpeedOfMany;
      nanoseconds += q.size(1) * (sizes().key + sizes().value) * products / speed;
    }
    return nanoseconds;
  }
};

// Cuts the step into work.  What is cut where changes no result, see attention_tile.h.  A sequence with few queries is
// cut by segments and heads, as far as there are threads for them; one with many by queries, and each head is on its
// own.
class Division {
 public:
  Division(const Arguments& arguments, int threads) : arguments_(arguments), threads_(threads) {
    int64_t pieces = 0;
    for (const Sequence& x : arguments.sequences) pieces += is_short(x) ? segments_of(x) : x.num_queries;
    heads_ = static_cast<int>(std::min<int64_t>(arguments.kv_heads(),
                                                arguments.kv_heads() * pieces / (kPiecesPerThread * threads)));
    if (threads == 1) heads_ = arguments.kv_heads();
    for (int64_t i = 0; i < static_cast<int64_t>(arguments.sequences.size()); ++i) {
      is_short(arguments.sequences[i]) ? cut_by_segments(i) : cut_by_queries(i);
    }
  }

  Works works;
  int64_t partial_floats = 0;
  int64_t splits = 0;

 private:
  int most_positions() const { return std::max(1, arguments_.tile_rows() / arguments_.group()); }
  bool is_short(const Sequence& x) const { return x.num_queries <= most_positions(); }
  int first_segment_of(const Sequence& x) const {
    return static_cast<int>(std::max<int64_t>(0, x.first_position + 1 - arguments_.window) / kSegment);
  }
  int segments_of(const Sequence& x) const {
    if (threads_ == 1) return 1;
    return static_cast<int>((x.length() + kSegment - 1) / kSegment) - first_segment_of(x);
  }

  void cut_by_segments(int64_t i) {
    const Sequence& sequence = arguments_.sequences[i];
    const int positions = static_cast<int>(sequence.num_queries), segments = segments_of(sequence);
    if (positions == 0) return;
    const int head_rows = positions * arguments_.group();
    const int most = std::clamp(arguments_.tile_rows() / std::max(kInPlaceRows, head_rows), 1, std::max(1, heads_));
    for (int kv_head = 0; kv_head < arguments_.kv_heads(); kv_head += most) {
      const int heads = std::min(most, arguments_.kv_heads() - kv_head);
      const int64_t floats = round_up(
          static_cast<int>(RunningSoftmax::floats(heads * head_rows, arguments_.sizes().value_columns())), kLanes);
      const int first_segment = first_segment_of(sequence);
      for (int n = 0; n < segments; ++n) {
        const int segment = segments == 1 ? -1 : first_segment + n;
        works.push_back({i, 0, kv_head, heads, positions, segment, splits, partial_floats});
        if (segments > 1) partial_floats += floats;
      }
      if (segments > 1) ++splits;
    }
  }

  // Descending: the tiles with the longest past start first.
  void cut_by_queries(int64_t i) {
    const Sequence& sequence = arguments_.sequences[i];
    const int most = most_positions();
    for (int64_t first = (sequence.num_queries - 1) / most * most; first >= 0; first -= most) {
      const int positions = static_cast<int>(std::min<int64_t>(most, sequence.num_queries - first));
      for (int kv_head = 0; kv_head < arguments_.kv_heads(); ++kv_head) {
        works.push_back({i, first, kv_head, 1, positions, -1, 0, 0});
      }
    }
  }

  const Arguments& arguments_;
  const int threads_;
  int heads_;  // of a piece of work, if it has few queries
};

// Memory of a thread, kept from call to call and aligned to a cache line.
float* thread_memory(int64_t floats) {
  struct alignas(64) Line {
    float x[16];
  };
  thread_local std::unique_ptr<Line[]> memory;
  thread_local int64_t lines = 0;
  const int64_t wanted = (floats + 15) / 16;
  if (lines < wanted) {
    memory.reset(new Line[wanted]);
    lines = wanted;
  }
  return memory[0].x;
}

template <class Scalar>
class Step {
 public:
  Step(const Arguments& arguments, int threads)
      : arguments_(arguments), threads_(threads), division_(arguments, threads) {
    if (division_.splits == 0) return;
    partials_.reset(new float[division_.partial_floats]);
    unfinished_.reset(new std::atomic<int>[division_.splits]());
    for (const Work& work : division_.works) {
      if (work.segment >= 0) ++unfinished_[work.split];
    }
  }

  void run() {
    const int64_t count = static_cast<int64_t>(division_.works.size());
    ItemQueue queue(count);
    const auto drain = [&] {
      const PanelScope scope;
      queue.drain([&](int64_t i) { attend(i); });
    };
    Team::of_process().run(static_cast<int>(std::min<int64_t>(count, threads_)), drain);
  }

 private:
  TileAttention<Units<Scalar>> tile_of(const Work& work) const {
    const Sequence& sequence = arguments_.sequences[work.sequence];
    const at::Tensor &q = arguments_.q, &k = arguments_.k_pool, &v = arguments_.v_pool;
    const HeadSizes sizes = arguments_.sizes();
    const int group = arguments_.group(), rows = std::max(arguments_.tile_rows(), group);
    const int64_t first_query = sequence.first_query + work.first;
    Tile<Scalar> tile{
        q.const_data_ptr<Scalar>() + first_query * q.stride(0) + work.kv_head * group * q.stride(1),
        q.stride(0),
        q.stride(1),
        first_of_head<Scalar>(k, work.kv_head),
        first_of_head<Scalar>(v, work.kv_head),
        k.stride(0),
        v.stride(0),
        k.stride(1),
        v.stride(1),
        sequence.slots,
        k.size(0),
        sequence.first_position + work.first,
        work.positions,
        group,
        work.heads,
        arguments_.window,
        arguments_.sinks ? arguments_.sinks->const_data_ptr<Scalar>() + work.kv_head * group : nullptr,
        first_of_head<Fp8>(k, work.kv_head),
        first_of_head<Fp8>(v, work.kv_head)};
    float* memory = thread_memory(Workspace::floats(rows, sizes, arguments_.is_fp8()));
    return {tile, Workspace(memory, rows, sizes), sizes, arguments_.scale, arguments_.value_scale};
  }

  // Of slot 0; null for a pool of another dtype.
  template <class Stored>
  static const Stored* first_of_head(const at::Tensor& pool, int kv_head) {
    if (pool.scalar_type() != c10::CppTypeToScalarType<Stored>::value) return nullptr;
    return pool.const_data_ptr<Stored>() + kv_head * pool.stride(1);
  }

  void write(const TileAttention<Units<Scalar>>& tile, const Work& work, const RunningSoftmax& state) const {
    const int64_t row = arguments_.sequences[work.sequence].first_query + work.first;
    const int64_t head = work.kv_head * arguments_.group();
    at::Tensor& out = arguments_.out;
    tile.write(state, out.mutable_data_ptr<Scalar>() + row * out.stride(0) + head * out.stride(1), out.stride(0));
  }

  RunningSoftmax partial(const Work& work) const {
    const int rows = work.heads * work.positions * arguments_.group();
    return RunningSoftmax::in(partials_.get() + work.partial, rows, arguments_.sizes().value_columns());
  }

  void attend(int64_t i) {
    const Work& work = division_.works[i];
    const TileAttention<Units<Scalar>> tile = tile_of(work);
    tile.pack_queries();
    if (work.segment < 0) {
      tile.attend_all(tile.total());
      write(tile, work, tile.total());
      return;
    }
    tile.attend_segment(work.segment, partial(work));
    // The last thread to finish combines them, in the order of the segments.
    if (--unfinished_[work.split] == 0) combine(tile, i - (work.segment - tile.first_segment()));
  }

  // Work `first` is the first segment of a tile, whose others follow it.
  void combine(const TileAttention<Units<Scalar>>& tile, int64_t first) const {
    const Works& works = division_.works;
    const RunningSoftmax total = partial(works[first]);
    const auto is_next = [&](int64_t i) { return i < std::ssize(works) && works[i].segment > works[i - 1].segment; };
    for (int64_t i = first + 1; is_next(i); ++i) {
      tile.merge_into(total, partial(works[i]), works[i].segment);
    }
    write(tile, works[first], total);
  }

  const Arguments& arguments_;
  const int threads_;
  const Division division_;
  std::unique_ptr<float[]> partials_;
  std::unique_ptr<std::atomic<int>[]> unfinished_;  // segments of each tile
};

void check(const at::Tensor& q, const at::Tensor& k_pool, const at::Tensor& v_pool, const at::Tensor& req_to_token,
           const at::Tensor& rows, const at::Tensor& query_lens, const at::Tensor& kv_lens, double scale,
           std::optional<int64_t> window, const std::optional<at::Tensor>& sinks, double value_scale) {
  TORCH_CHECK_VALUE(q.dim() == 3 && k_pool.dim() == 3 && v_pool.dim() == 3, "q and the pools have three dimensions");
  const int64_t hd = q.size(2), kv_heads = k_pool.size(1);
  const int64_t vd = v_pool.size(2);
  TORCH_CHECK_VALUE(k_pool.size(0) == v_pool.size(0) && v_pool.size(1) == kv_heads, "the pools differ in shape");
  TORCH_CHECK_VALUE(k_pool.size(2) == hd, "head size of q is ", hd, ", of the keys ", k_pool.size(2));
  TORCH_CHECK_VALUE(hd > 0 && hd % 8 == 0 && hd <= kMaxKeySize, "head size ", hd, " is not a multiple of 8 up to ",
                    kMaxKeySize);
  TORCH_CHECK_VALUE(vd > 0 && vd % 8 == 0 && vd <= kMaxValueSize, "value size ", vd, " is not a multiple of 8 up to ",
                    kMaxValueSize);
  TORCH_CHECK_VALUE(!window || *window > 0, "the window is not positive");
  TORCH_CHECK_VALUE(!sinks || (sinks->dim() == 1 && sinks->size(0) == q.size(1) && sinks->is_contiguous()),
                    "there is one sink a query head");
  TORCH_CHECK_TYPE(!sinks || sinks->scalar_type() == q.scalar_type(), "q and the sinks differ in dtype");
  TORCH_CHECK_VALUE(kv_heads > 0 && q.size(1) % kv_heads == 0, q.size(1), " query heads over ", kv_heads, " KV heads");
  TORCH_CHECK_TYPE(k_pool.scalar_type() == v_pool.scalar_type() &&
                       (q.scalar_type() == k_pool.scalar_type() || k_pool.scalar_type() == at::kFloat8_e4m3fn),
                   "q and the pools differ in dtype");
  for (const at::Tensor* x : {&q, &k_pool, &v_pool}) {
    TORCH_CHECK_VALUE(x->stride(2) == 1, "a head's elements are not next to each other");
  }
  for (const at::Tensor* x : {&req_to_token, &rows, &query_lens, &kv_lens}) {
    TORCH_CHECK_TYPE(x->scalar_type() == at::kLong, "slots, rows and lengths are int64");
  }
  TORCH_CHECK_VALUE(req_to_token.dim() == 2 && (req_to_token.size(1) <= 1 || req_to_token.stride(1) == 1),
                    "the slot table is two-dimensional with positions next to each other");
  TORCH_CHECK_VALUE(rows.dim() == 1 && rows.sizes() == query_lens.sizes() && rows.sizes() == kv_lens.sizes(),
                    "rows and lengths are vectors of one size");
  TORCH_CHECK_VALUE(scale > 0 && value_scale > 0, "a scale is not positive");
}

Sequences read_sequences(const at::Tensor& q, const at::Tensor& req_to_token, const at::Tensor& rows,
                                     const at::Tensor& query_lens, const at::Tensor& kv_lens) {
  Sequences sequences;
  const auto row = rows.accessor<int64_t, 1>(), queries = query_lens.accessor<int64_t, 1>();
  const auto length = kv_lens.accessor<int64_t, 1>();
  int64_t first_query = 0;
  for (int64_t i = 0; i < rows.size(0); ++i) {
    TORCH_CHECK_INDEX(row[i] >= 0 && row[i] < req_to_token.size(0), "row ", row[i], " is not in the slot table");
    TORCH_CHECK_VALUE(queries[i] >= 0 && queries[i] <= length[i] && length[i] <= req_to_token.size(1), "sequence ", i,
                      ": ", queries[i], " queries, ", length[i], " keys, ", req_to_token.size(1), " positions");
    const int64_t* slots = req_to_token.const_data_ptr<int64_t>() + row[i] * req_to_token.stride(0);
    sequences.push_back({slots, first_query, length[i] - queries[i], queries[i]});
    first_query += queries[i];
  }
  TORCH_CHECK_VALUE(first_query == q.size(0), "the sequences have ", first_query, " queries, q has ", q.size(0));
  return sequences;
}

// q [T, H, hd] (float32, bfloat16, float16), k_pool [S, Hkv, hd] and v_pool [S, Hkv, vd] of q's dtype or float8_e4m3fn,
// which may share memory, req_to_token [R, C], rows, query_lens and kv_lens [N], all int64 -> [T, H, vd].
//
// q holds the queries of one sequence after the other.  Those of sequence n are at its last query_lens[n] positions;
// its keys and values, their own included, lie in the slots req_to_token[rows[n], 0 : kv_lens[n]].  Query head h reads
// key/value head h / G.  With a window a query sees the keys of its own position and of the window - 1 before; the others
// are not read, but for those that a neighbouring query sees.  `sinks` [H] are one more logit, without a value.  A row of scores that are all -inf gives NaN.  NaN or infinity in a value makes NaN, and may
// also do so at the positions of the same call and block before it.  Results are multiplied by `value_scale`.  Raises ValueError, TypeError, IndexError.
at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& k_pool, const at::Tensor& v_pool,
                           const at::Tensor& req_to_token, const at::Tensor& rows, const at::Tensor& query_lens,
                           const at::Tensor& kv_lens, double scale, std::optional<int64_t> window,
                           const std::optional<at::Tensor>& sinks, double value_scale) {
  check(q, k_pool, v_pool, req_to_token, rows, query_lens, kv_lens, scale, window, sinks, value_scale);
  at::Tensor out = at::empty({q.size(0), q.size(1), v_pool.size(2)}, q.options());
  const Arguments arguments{.q = q,
                            .k_pool = k_pool,
                            .v_pool = v_pool,
                            .out = out,
                            .sinks = sinks,
                            .sequences = read_sequences(q, req_to_token, rows, query_lens, kv_lens),
                            .scale = static_cast<float>(scale),
                            .value_scale = static_cast<float>(value_scale),
                            .window = std::min(window.value_or(kNoWindow), kNoWindow)};
  const int threads = team_size(arguments.nanoseconds());
  switch (q.scalar_type()) {
    case at::kFloat: Step<float>(arguments, threads).run(); break;
    case at::kBFloat16: Step<bf16>(arguments, threads).run(); break;
    case at::kHalf: Step<c10::Half>(arguments, threads).run(); break;
    default: TORCH_CHECK_TYPE(false, "attention of ", q.scalar_type());
  }
  return out;
}

}  // namespace
}  // namespace lockstep::attention

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  m.def("paged_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor req_to_token, Tensor rows, Tensor query_lens, "
        "Tensor kv_lens, float scale, int? window=None, Tensor? sinks=None, float value_scale=1.0) -> Tensor");
}

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("paged_attention", &lockstep::attention::paged_attention); }
