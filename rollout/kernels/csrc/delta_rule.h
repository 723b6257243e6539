// The gated delta rule of one head of one sequence: convolution, recurrence, norm and gate.
//
// Token by token, in prefill as in decode: columns of a head's state do not depend on each other, and what a column goes
// through is the same in any step, chunk, batch and with any number of threads.  The state stays in the caches while the
// tokens go through it, a tile of them and a block of columns at a time.
//
// Rounding as in gated_delta.py.  Sums over the keys run in four parts, of keys 0, 4, 8 .., of 1, 5, 9 .. and so on,
// joined as (0 + 2) + (1 + 3).
//
// Shapes: T tokens, R rows of the pools, Hk key heads, H value heads, dk and dv sizes of a head's keys and values,
// C = 2 Hk dk + H dv channels of the convolution over w tokens.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "simd.h"

namespace lockstep::delta {

constexpr int64_t kTile = 16;   // tokens that go through a block of columns while it is in the first cache
constexpr int64_t kSums = 4;    // of a sum over keys
constexpr int64_t kMaxTaps = 8;
constexpr int64_t kAhead = 1024;  // elements of a state that are fetched before they are loaded
constexpr float kUnitEps = 1e-6f;
#if LOCKSTEP_AVX512
constexpr int kVectors = 2;
#else
constexpr int kVectors = 1;  // half the registers
#endif
constexpr int64_t kBlock = kVectors * kLanes;  // columns of a state

inline int64_t up(int64_t size, int64_t step) { return (size + step - 1) / step * step; }

// A masked store of sixteen lanes takes several times as long as a plain one, and what is loaded next waits for it.
template <class T>
inline void put(T* place, F32x16 x, int n) {
  if (n == kLanes) {
    store(place, x);
  } else {
    store(place, x, n);
  }
}

template <class T>
inline float rounded(float x) {
  return static_cast<float>(static_cast<T>(x));
}

// The sum of the squares of a row.
template <class T>
inline float squares(const T* row, int64_t size) {
  F32x16 total = splat(0.0f);
  for (int64_t d = 0; d < size; d += kLanes) {
    const F32x16 x = load(row + d, static_cast<int>(std::min<int64_t>(kLanes, size - d)));
    total = fma(x, x, total);
  }
  return sum(total);
}

// Where a sequence of the step begins, and what becomes of its state on the way: rows by tokens done, ascending.
struct Sequence {
  struct Copy {
    int64_t done, row;
  };
  int64_t first, length, source;
  std::vector<Copy> copies;
};

struct Sizes {
  int64_t num_key_heads, num_heads, key_dim, value_dim, taps;

  int64_t first_value() const { return 2 * num_key_heads * key_dim; }
  int64_t channels() const { return first_value() + num_heads * value_dim; }
  int64_t columns() const { return channels() + num_heads * value_dim + 2 * num_heads; }
  int64_t state() const { return key_dim * value_dim; }
};

// What a thread computes with for one head.
struct Buffers {
  Buffers(int64_t key_dim, int64_t value_dim)
      : key_dim(key_dim),
        value_dim(value_dim),
        keys(up(key_dim, kSums)),
        values(up(value_dim, kBlock)),
        state(keys * values),
        query(kTile * keys),
        key(kTile * keys),
        value(kTile * values),
        read(kTile * values) {}

  // This thread's own, kept from call to call.
  static Buffers& of(const Sizes& sizes) {
    thread_local std::unique_ptr<Buffers> kept;
    if (kept == nullptr || kept->key_dim != sizes.key_dim || kept->value_dim != sizes.value_dim) {
      kept = std::make_unique<Buffers>(sizes.key_dim, sizes.value_dim);
    }
    return *kept;
  }

  const int64_t key_dim, value_dim, keys, values;  // the latter with zeros behind them
  std::vector<float> state;                        // [blocks][keys][kBlock]
  std::vector<float> query, key, value, read;
  std::array<float, kTile> decay, beta;
};

// One token through a block of columns: S *= decay; S += k ((v - S^T k) beta)^T; out = S^T q.
inline void advance(float* state, const float* query, const float* key, int64_t keys, float decay, float beta,
                    const float* value, float* out) {
  F32x16 sums[kSums][kVectors], delta[kVectors];
  const auto clear = [&] {
    for (auto& part : sums) std::fill(part, part + kVectors, splat(0.0f));
  };
  const auto joined = [&](int v) { return (sums[0][v] + sums[2][v]) + (sums[1][v] + sums[3][v]); };
  clear();
  for (int64_t i = 0; i < keys; i += kSums) {
#pragma GCC unroll 4
    for (int64_t p = 0; p < kSums; ++p) {
      const F32x16 k = splat(key[i + p]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sums[p][v] = fma(load(state + (i + p) * kBlock + v * kLanes), k, sums[p][v]);
    }
  }
  const F32x16 kept = splat(decay);
  for (int v = 0; v < kVectors; ++v) delta[v] = (load(value + v * kLanes) - joined(v) * kept) * splat(beta);
  clear();
  for (int64_t i = 0; i < keys; i += kSums) {
#pragma GCC unroll 4
    for (int64_t p = 0; p < kSums; ++p) {
      const F32x16 k = splat(key[i + p]), q = splat(query[i + p]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        float* place = state + (i + p) * kBlock + v * kLanes;
        const F32x16 moved = fma(k, delta[v], load(place) * kept);
        store(place, moved);
        sums[p][v] = fma(moved, q, sums[p][v]);
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) store(out + v * kLanes, joined(v));
}

template <class T>
class DeltaRule {
 public:
  const Sizes sizes;
  const T *projected, *conv_weight, *a_log, *dt_bias, *norm_weight;
  T *conv_pool, *mixed, *out;
  float* state_pool;
  int64_t num_tokens;
  double eps;

  // silu of the convolution of one token of a sequence, into `mixed`, where a head's tokens lie together: a thread that
  // takes a head reads them one after the other.
  void convolve(const Sequence& sequence, int64_t token) const {
    std::array<const T*, kMaxTaps> inputs;
    for (int64_t tap = 0; tap < sizes.taps; ++tap) {
      inputs[tap] = input(sequence, token - sequence.first - (sizes.taps - 1) + tap);
    }
    const int64_t channels = sizes.channels();
    const auto head = [&](int64_t first, int64_t size) {
      T* place = mixed + first * num_tokens + token * size;
      for (int64_t d = 0; d < size; d += kLanes) {
        const int n = static_cast<int>(std::min<int64_t>(kLanes, size - d));
        F32x16 sum = splat(0.0f);
        for (int64_t tap = 0; tap < sizes.taps; ++tap) {
          if (inputs[tap] == nullptr) continue;
          sum = fma(load(conv_weight + tap * channels + first + d, n), load(inputs[tap] + first + d, n), sum);
        }
        put(place + d, silu(round_to<T>(sum)), n);
      }
    };
    for (int64_t c = 0; c < sizes.first_value(); c += sizes.key_dim) head(c, sizes.key_dim);
    for (int64_t c = sizes.first_value(); c < channels; c += sizes.value_dim) head(c, sizes.value_dim);
  }

  // All tokens of a sequence through the state of one head.
  void head(const Sequence& sequence, int64_t h, Buffers& buffers) const {
    load_state(sequence.source, h, buffers);
    auto copy = sequence.copies.begin();
    for (int64_t done = 0; done < sequence.length;) {
      const int64_t count = std::min({kTile, sequence.length - done, copy->done - done});
      prepare(sequence.first + done, count, h, buffers);
      for (int64_t column = 0; column < buffers.values; column += kBlock) {
        for (int64_t t = 0; t < count; ++t) {
          advance(buffers.state.data() + column * buffers.keys, buffers.query.data() + t * buffers.keys,
                  buffers.key.data() + t * buffers.keys, buffers.keys, buffers.decay[t], buffers.beta[t],
                  buffers.value.data() + t * buffers.values + column, buffers.read.data() + t * buffers.values + column);
        }
      }
      finish(sequence.first + done, count, h, buffers);
      done += count;
      for (; copy != sequence.copies.end() && copy->done == done; ++copy) {
        if (copy->row < 0) continue;  // nothing is kept
        store_state(copy->row, h, buffers);
        if (h == 0) store_inputs(sequence, done, copy->row);
      }
    }
  }

 private:
  // What the convolution reads at a place counted from the sequence's first token of this step; null: zeros.
  const T* input(const Sequence& sequence, int64_t place) const {
    if (place >= 0) return projected + (sequence.first + place) * sizes.columns();
    if (sequence.source < 0) return nullptr;
    return conv_pool + (sequence.source * (sizes.taps - 1) + (sizes.taps - 1) + place) * sizes.channels();
  }

  // The last inputs after `done` tokens.  Ascending, so that a row may be read while it is written.
  void store_inputs(const Sequence& sequence, int64_t done, int64_t row) const {
    const int64_t size = sizes.channels(), kept = sizes.taps - 1;
    for (int64_t j = 0; j < kept; ++j) {
      T* place = conv_pool + (row * kept + j) * size;
      const T* from = input(sequence, done - kept + j);
      if (from == nullptr) {
        std::memset(place, 0, size * sizeof(T));
      } else {
        std::memcpy(place, from, size * sizeof(T));
      }
    }
  }

  template <class F>
  void each_piece(const Buffers& buffers, F&& piece) const {
    for (int64_t i = 0; i < sizes.key_dim; ++i) {
      for (int64_t d = 0; d < sizes.value_dim; d += kLanes) {
        const int64_t block = d / kBlock * kBlock;
        piece(i * sizes.value_dim + d, (block * buffers.keys) + i * kBlock + d - block,
              static_cast<int>(std::min<int64_t>(kLanes, sizes.value_dim - d)));
      }
    }
  }

  void load_state(int64_t source, int64_t h, Buffers& buffers) const {
    const bool is_padded = buffers.keys != sizes.key_dim || buffers.values != sizes.value_dim;
    if (source < 0 || is_padded) std::fill(buffers.state.begin(), buffers.state.end(), 0.0f);
    if (source < 0) return;
    const float* from = state_pool + (source * sizes.num_heads + h) * sizes.state();
    each_piece(buffers, [&](int64_t there, int64_t here, int n) {
      __builtin_prefetch(from + there + kAhead);
      store(&buffers.state[here], load(from + there, n));
    });
  }

  void store_state(int64_t row, int64_t h, const Buffers& buffers) const {
    float* to = state_pool + (row * sizes.num_heads + h) * sizes.state();
    each_piece(buffers, [&](int64_t there, int64_t here, int n) { put(to + there, load(&buffers.state[here]), n); });
  }

  void prepare(int64_t first, int64_t count, int64_t h, Buffers& buffers) const {
    const int64_t key_head = h / (sizes.num_heads / sizes.num_key_heads), size = sizes.value_dim;
    const int64_t first_key = sizes.num_key_heads * sizes.key_dim, first_b = sizes.channels() + sizes.num_heads * size;
    const T* queries = mixed + key_head * sizes.key_dim * num_tokens;
    const T *keys = queries + first_key * num_tokens, *values = mixed + (sizes.first_value() + h * size) * num_tokens;
    const float root = 1.0f / std::sqrt(static_cast<float>(sizes.key_dim));
    const float rate = -std::exp(static_cast<float>(a_log[h])), bias = static_cast<float>(dt_bias[h]);
    for (int64_t t = 0; t < count; ++t) {
      unit(queries + (first + t) * sizes.key_dim, root, &buffers.query[t * buffers.keys]);
      unit(keys + (first + t) * sizes.key_dim, 1.0f, &buffers.key[t * buffers.keys]);
      for (int64_t d = 0; d < size; d += kLanes) {
        const int n = static_cast<int>(std::min<int64_t>(kLanes, size - d));
        put(&buffers.value[t * buffers.values + d], load(values + (first + t) * size + d, n), n);
      }
      const T* beside = projected + (first + t) * sizes.columns() + first_b;
      const float b = static_cast<float>(beside[h]), a = static_cast<float>(beside[sizes.num_heads + h]) + bias;
      buffers.beta[t] = rounded<T>(1.0f / (1.0f + std::exp(-b)));
      buffers.decay[t] = std::exp(rate * (a > 20.0f ? a : std::log1p(std::exp(a))));
      for (int64_t d = 0; d < size; d += 64 / sizeof(T)) __builtin_prefetch(gate(first + t, h) + d);
    }
  }

  void unit(const T* from, float scale, float* to) const {
    const F32x16 inverse = splat(1.0f / std::sqrt(squares(from, sizes.key_dim) + kUnitEps));
    for (int64_t d = 0; d < sizes.key_dim; d += kLanes) {
      const int n = static_cast<int>(std::min<int64_t>(kLanes, sizes.key_dim - d));
      put(to + d, load(from + d, n) * inverse * splat(scale), n);
    }
  }

  // The norm of what was read, rounded, times silu of the gate.
  void finish(int64_t first, int64_t count, int64_t h, Buffers& buffers) const {
    const int64_t size = sizes.value_dim;
    for (int64_t t = 0; t < count; ++t) {
      float* read = &buffers.read[t * buffers.values];
      for (int64_t d = 0; d < size; d += kLanes) store(read + d, round_to<T>(load(read + d)));
      const float mean = squares(read, size) / static_cast<float>(size);
      const F32x16 scale = splat(1.0f / std::sqrt(mean + static_cast<float>(eps)));
      const T* z = gate(first + t, h);
      T* place = out + ((first + t) * sizes.num_heads + h) * size;
      for (int64_t d = 0; d < size; d += kLanes) {
        const int n = static_cast<int>(std::min<int64_t>(kLanes, size - d));
        const F32x16 normed = round_to<T>(round_to<T>(load(read + d) * scale) * load(norm_weight + d, n));
        put(place + d, normed * silu(load(z + d, n)), n);
      }
    }
  }

  const T* gate(int64_t token, int64_t h) const {
    return projected + token * sizes.columns() + sizes.channels() + h * sizes.value_dim;
  }
};

}  // namespace lockstep::delta
