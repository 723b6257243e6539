// paged_attention: causal attention over keys and values that lie in slots of a pool.
//
// Knows tensors, their checks and how work is divided over threads.  The arithmetic is in attention_tile.h.
//
// Shapes: T query tokens, N sequences, H query heads, Hkv key/value heads, G = H / Hkv, hd head size, S slots of the
// pool, R rows and C positions of the slot table.
#include <memory>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "attention_tile.h"
#include "parallel.h"

namespace lockstep::attention {
namespace {

// Most rows of a tile: its keys and values are packed once for all of them.
constexpr int kTileRows = 128;

struct Sequence {
  const int64_t* slots;
  int64_t first_query;     // row of q
  int64_t first_position;  // of that query
  int64_t num_queries;
};

// A tile, or one segment of a tile, for one thread.
struct Work {
  int64_t sequence, kv_head;
  int64_t first;    // query of the sequence
  int positions;    // of the tile
  int segment;      // -1: all of them, and the result is written
  int64_t partial;  // where in the partial results a segment goes, in floats
};

struct Arguments {
  const at::Tensor &q, &k_pool, &v_pool;
  at::Tensor& out;
  std::vector<Sequence> sequences;
  float scale;

  int hd() const { return static_cast<int>(q.size(2)); }
  int columns() const { return round_up(hd(), kLanes); }
  int group() const { return static_cast<int>(q.size(1) / k_pool.size(1)); }
  // Of the whole step, masked ones included.
  int64_t multiplications() const {
    int64_t total = 0;
    for (const Sequence& x : sequences) total += x.num_queries * (x.first_position + x.num_queries);
    return 2 * q.size(1) * hd() * total;
  }
};

// Cuts the step into work.  What is cut where changes no result, see attention_tile.h.  A sequence with few queries
// and many keys is cut by segments; one with many queries by queries.
std::vector<Work> divide(const Arguments& arguments, int64_t& partial_floats) {
  const int most = std::max(1, kTileRows / arguments.group());
  std::vector<Work> works;
  partial_floats = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(arguments.sequences.size()); ++i) {
    const Sequence& sequence = arguments.sequences[i];
    const int64_t length = sequence.first_position + sequence.num_queries;
    const bool by_segment = sequence.num_queries <= most && length > kSegment;
    const int64_t tiles = (sequence.num_queries + most - 1) / most;
    for (int64_t kv_head = 0; kv_head < arguments.k_pool.size(1); ++kv_head) {
      // Descending: the tiles with the longest past start first.
      for (int64_t tile = tiles - 1; tile >= 0; --tile) {
        const int64_t first = tile * most;
        const int positions = static_cast<int>(std::min<int64_t>(most, sequence.num_queries - first));
        if (!by_segment) {
          works.push_back({i, kv_head, first, positions, -1, 0});
          continue;
        }
        for (int segment = 0; segment * int64_t{kSegment} < length; ++segment) {
          works.push_back({i, kv_head, first, positions, segment, partial_floats});
          partial_floats += round_up(RunningSoftmax::floats(positions * arguments.group(), arguments.columns()), 16);
        }
      }
    }
  }
  return works;
}

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
  explicit Step(const Arguments& arguments) : arguments_(arguments) {
    works_ = divide(arguments, partial_floats_);
    partials_.reset(new float[partial_floats_]);
  }

  void run() {
    for_each(static_cast<int64_t>(works_.size()), arguments_.multiplications(), [&](int64_t i) { attend(works_[i]); });
    std::vector<int64_t> split;
    for (int64_t i = 0; i < static_cast<int64_t>(works_.size()); ++i) {
      if (works_[i].segment == 0) split.push_back(i);
    }
    for_each(static_cast<int64_t>(split.size()), partial_floats_, [&](int64_t i) { combine(split[i]); });
  }

 private:
  template <class Body>
  static void for_each(int64_t count, int64_t work, const Body& body) {
    ItemQueue queue(count);
    const int64_t threads = std::min<int64_t>(count, team_size(work));
    // Unlike a bare parallel region, hands an exception on.
    at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { queue.drain(body); });
  }

  TileAttention<Units<Scalar>> tile_of(const Work& work) const {
    const Sequence& sequence = arguments_.sequences[work.sequence];
    const at::Tensor &q = arguments_.q, &k = arguments_.k_pool, &v = arguments_.v_pool;
    const int hd = arguments_.hd(), group = arguments_.group(), columns = arguments_.columns();
    const int rows = std::max(kTileRows, group);
    const int64_t first_query = sequence.first_query + work.first;
    Tile<Scalar> tile{
        q.const_data_ptr<Scalar>() + first_query * q.stride(0) + work.kv_head * group * q.stride(1),
        q.stride(0),
        q.stride(1),
        k.const_data_ptr<Scalar>() + work.kv_head * k.stride(1),
        v.const_data_ptr<Scalar>() + work.kv_head * v.stride(1),
        k.stride(0),
        v.stride(0),
        sequence.slots,
        k.size(0),
        sequence.first_position + work.first,
        work.positions,
        group};
    const Workspace space(thread_memory(Workspace::floats(rows, hd, columns)), rows, hd, columns);
    return {tile, space, hd, arguments_.scale};
  }

  void write(const TileAttention<Units<Scalar>>& tile, const Work& work, const RunningSoftmax& state) const {
    const int64_t row = arguments_.sequences[work.sequence].first_query + work.first;
    const int64_t head = work.kv_head * arguments_.group();
    at::Tensor& out = arguments_.out;
    tile.write(state, out.mutable_data_ptr<Scalar>() + row * out.stride(0) + head * out.stride(1), out.stride(0));
  }

  RunningSoftmax partial(const Work& work) const {
    const int rows = work.positions * arguments_.group();
    return RunningSoftmax::in(partials_.get() + work.partial, rows, arguments_.columns());
  }

  void attend(const Work& work) {
    const TileAttention<Units<Scalar>> tile = tile_of(work);
    tile.pack_queries();
    if (work.segment < 0) {
      tile.attend_all(tile.total());
      write(tile, work, tile.total());
    } else {
      tile.attend_segment(work.segment, partial(work));
    }
  }

  // Work `first` is the first segment of a tile, whose others follow it.
  void combine(int64_t first) {
    const TileAttention<Units<Scalar>> tile = tile_of(works_[first]);
    const RunningSoftmax total = partial(works_[first]);
    for (int64_t i = first + 1; i < static_cast<int64_t>(works_.size()) && works_[i].segment > 0; ++i) {
      tile.merge_into(total, partial(works_[i]), tile.first_row_of_segment(works_[i].segment));
    }
    write(tile, works_[first], total);
  }

  const Arguments& arguments_;
  std::vector<Work> works_;
  int64_t partial_floats_ = 0;
  std::unique_ptr<float[]> partials_;
};

void check(const at::Tensor& q, const at::Tensor& k_pool, const at::Tensor& v_pool, const at::Tensor& req_to_token,
           const at::Tensor& rows, const at::Tensor& query_lens, const at::Tensor& kv_lens, double scale) {
  TORCH_CHECK_VALUE(q.dim() == 3 && k_pool.dim() == 3 && v_pool.dim() == 3, "q and the pools have three dimensions");
  const int64_t hd = q.size(2), kv_heads = k_pool.size(1);
  TORCH_CHECK_VALUE(k_pool.sizes() == v_pool.sizes(), "the pools differ in shape");
  TORCH_CHECK_VALUE(k_pool.size(2) == hd, "head size of q is ", hd, ", of the pools ", k_pool.size(2));
  TORCH_CHECK_VALUE(hd > 0 && hd % 8 == 0 && hd <= kMaxHeadSize, "head size ", hd, " is not a multiple of 8 up to 256");
  TORCH_CHECK_VALUE(kv_heads > 0 && q.size(1) % kv_heads == 0, q.size(1), " query heads over ", kv_heads, " KV heads");
  TORCH_CHECK_TYPE(q.scalar_type() == k_pool.scalar_type() && q.scalar_type() == v_pool.scalar_type(),
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
  TORCH_CHECK_VALUE(scale > 0, "the scale is not positive");
}

std::vector<Sequence> read_sequences(const at::Tensor& q, const at::Tensor& req_to_token, const at::Tensor& rows,
                                     const at::Tensor& query_lens, const at::Tensor& kv_lens) {
  std::vector<Sequence> sequences;
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

// q [T, H, hd], k_pool and v_pool [S, Hkv, hd] of q's dtype (float32, bfloat16, float16), req_to_token [R, C], rows,
// query_lens and kv_lens [N], all int64 -> [T, H, hd].
//
// q holds the queries of one sequence after the other.  Those of sequence n are at its last query_lens[n] positions;
// its keys and values, their own included, lie in the slots req_to_token[rows[n], 0 : kv_lens[n]].  Query head h reads
// key/value head h / G.  A row of scores that are all -inf gives NaN.  NaN or infinity in a value makes NaN, and may
// also do so at the positions of the same call and block before it.  Raises ValueError, TypeError, IndexError.
at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& k_pool, const at::Tensor& v_pool,
                           const at::Tensor& req_to_token, const at::Tensor& rows, const at::Tensor& query_lens,
                           const at::Tensor& kv_lens, double scale) {
  check(q, k_pool, v_pool, req_to_token, rows, query_lens, kv_lens, scale);
  at::Tensor out = at::empty(q.sizes(), q.options());
  const Arguments arguments{q, k_pool, v_pool, out, read_sequences(q, req_to_token, rows, query_lens, kv_lens),
                            static_cast<float>(scale)};
  switch (q.scalar_type()) {
    case at::kFloat: Step<float>(arguments).run(); break;
    case at::kBFloat16: Step<bf16>(arguments).run(); break;
    case at::kHalf: Step<c10::Half>(arguments).run(); break;
    default: TORCH_CHECK_TYPE(false, "attention of ", q.scalar_type());
  }
  return out;
}

}  // namespace
}  // namespace lockstep::attention

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  m.def("paged_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor req_to_token, Tensor rows, Tensor query_lens, "
        "Tensor kv_lens, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(lockstep, CPU, m) { m.impl("paged_attention", &lockstep::attention::paged_attention); }
