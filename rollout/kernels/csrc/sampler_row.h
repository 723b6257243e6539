// One row of logits as a distribution: its largest logit, its total weight, log-probabilities and draws.
//
// The weight of token i is e^(x_i - largest) in float.  Weights are summed in double, in blocks of fixed size and in
// vocabulary order, so every number depends on the row only.
//
// A row that holds a NaN or +infinity, or nothing above -infinity, is no distribution.
#pragma once

#include <vector>

#include "sampler_vector.h"

namespace lockstep::sampler {

inline constexpr int64_t kBlock = 256;
// The weights of rows of so many blocks are kept for the draw: where there are few, a block is much of the row.
inline constexpr size_t kFewBlocks = 16;

// A number in [0, 1) with 53 bits from (seed, position) alone.  The mix is SplitMix64's finaliser (Steele, Lea, Flood,
// "Fast splittable pseudorandom number generators", 2014).
inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

inline double uniform(uint64_t seed, uint64_t position) {
  constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;
  return static_cast<double>(mix(mix(seed + kGamma) + (position + 1) * kGamma) >> 11) * 0x1p-53;
}

class Row {
 public:
  // Buffers are kept from row to row.
  void set(const float* logits, int64_t size) {
    logits_ = logits;
    size_ = size;
    block_largest_.resize((size + kBlock - 1) / kBlock);
    largest_ = -kInfinity;
    F32x16 poison = splat(0.0f);
    for (size_t block = 0; block < block_largest_.size(); ++block) {
      F32x16 best = splat(-kInfinity), strange = splat(0.0f);
      each_vector(block, [&](int64_t, F32x16 x) {
        best = max(x, best);
        // 0 times a number is 0; times NaN or infinity it is NaN.  -infinity is allowed.
        strange = fma(max(splat(-std::numeric_limits<float>::max()), x), splat(0.0f), strange);
      });
      poison = poison + strange;
      block_largest_[block] = largest_lane(best);
      largest_ = std::max(largest_, block_largest_[block]);
    }
    is_distribution_ = sum(poison) == 0.0f && largest_ > -kInfinity;
  }

  int64_t size() const { return size_; }
  bool is_distribution() const { return is_distribution_; }
  float operator[](int64_t id) const { return logits_[id]; }
  float largest() const { return largest_; }
  size_t num_blocks() const { return block_largest_.size(); }
  const std::vector<float>& block_largest() const { return block_largest_; }
  // `exp` is 0 below -104.  Such lanes, of forbidden tokens above all, are not left to it: a product that is too small
  // for a float costs a hundred cycles.
  [[gnu::always_inline]] F32x16 weight(F32x16 x) const {
    const F32x16 below = x - splat(largest_);
    return where_at_least(below, -104.0f, exp(where_at_least(below, -104.0f, below)));
  }

  // Lowest id of the largest logit; of a row with NaN, that of the first NaN.
  int64_t best() const {
    if (!is_distribution_) return best_of_anything();
    int64_t id = 0;
    while (block_largest_[id / kBlock] != largest_) id += kBlock;
    while (logits_[id] != largest_) ++id;
    return id;
  }

  // Calls `body(id of the first lane, logits)` for every vector of a block; lanes past the end are -infinity.
  template <class F>
  void each_vector(size_t block, F&& body) const {
    int64_t id = static_cast<int64_t>(block) * kBlock;
    const int64_t end = std::min(id + kBlock, size_);
    for (; id + kLanes <= end; id += kLanes) body(id, load(logits_ + id));
    if (id < end) body(id, load_padded(logits_ + id, static_cast<int>(end - id)));
  }

 private:
  int64_t best_of_anything() const {
    int64_t best = 0;
    for (int64_t id = 0; id < size_; ++id) {
      if (std::isnan(logits_[id])) return id;
      if (logits_[id] > logits_[best]) best = id;
    }
    return best;
  }

  const float* logits_ = nullptr;
  int64_t size_ = 0;
  float largest_ = 0.0f;
  bool is_distribution_ = false;
  std::vector<float> block_largest_;
};

// The weights of a distribution, or of a part of it, block by block.
class BlockSums {
 public:
  // `weights(id of the first lane, logits)`; blocks with nothing of at least `bound` are known to weigh nothing.
  template <class F>
  void set(const Row& row, float bound, F&& weights) {
    sums_.resize(row.num_blocks());
    total_ = 0.0;
    for (size_t block = 0; block < sums_.size(); ++block) {
      LaneSums sums;
      if (row.block_largest()[block] >= bound) {
        row.each_vector(block, [&](int64_t id, F32x16 x) { sums.add(weights(id, x)); });
      }
      sums_[block] = sums.total();
      total_ += sums_[block];
    }
  }

  double total() const { return total_; }

  // The first token with which the cumulative weight exceeds `noise` times the total, which is not 0.  Never one of
  // weight 0.
  template <class F>
  int64_t draw(const Row& row, double noise, F&& weights) const {
    const double target = std::min(noise * total_, kAlmostOne * total_);
    size_t block = 0;
    double before = 0.0;
    while (block + 1 < sums_.size() && before + sums_[block] <= target) before += sums_[block++];
    float lanes[kBlock] = {};
    row.each_vector(block, [&](int64_t id, F32x16 x) { store(lanes + id % kBlock, weights(id, x)); });
    int64_t last = 0;
    for (int64_t i = 0; i < kBlock && before <= target; ++i) {
      if (lanes[i] == 0.0f) continue;
      last = i;
      before += lanes[i];
    }
    // One by one the weights may add up to an ulp less than by lanes: then it is the last of them.
    return static_cast<int64_t>(block) * kBlock + last;
  }

 private:
  static constexpr double kAlmostOne = 1.0 - 0x1p-53;

  std::vector<double> sums_;
  double total_ = 0.0;
};

// The whole row's weights and log-probabilities.
class Distribution {
 public:
  // With `keep_weights`, the weight of every token is there to be read.
  void set(const Row& row, bool keep_weights) {
    has_weights_ = keep_weights || row.num_blocks() <= kFewBlocks;
    if (has_weights_) {
      weights_.resize(row.num_blocks() * kBlock);
      sums_.set(row, -kInfinity, [&](int64_t id, F32x16 x) {
        const F32x16 weights = row.weight(x);
        store(weights_.data() + id, weights);
        return weights;
      });
    } else {
      sums_.set(row, -kInfinity, [&](int64_t, F32x16 x) { return row.weight(x); });
    }
    largest_ = row.largest();
    log_total_ = std::log(sums_.total());
  }

  double total() const { return sums_.total(); }
  const float* weights() const { return weights_.data(); }

  float logprob(float logit) const {
    return static_cast<float>(static_cast<double>(logit) - static_cast<double>(largest_) - log_total_);
  }

  int64_t draw(const Row& row, double noise) const {
    if (has_weights_) {
      return sums_.draw(row, noise, [&](int64_t id, F32x16) { return load(weights_.data() + id); });
    }
    return sums_.draw(row, noise, [&](int64_t, F32x16 x) { return row.weight(x); });
  }

 private:
  BlockSums sums_;
  std::vector<float> weights_;
  bool has_weights_ = false;
  double largest_ = 0.0, log_total_ = 0.0;
};

}  // namespace lockstep::sampler
