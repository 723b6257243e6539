// The tokens of a row that top-k, top-p and min-p leave, and its n best, without sorting the row.
//
// Tokens are ordered by logit, of equal logits the lower id first.  Every filter keeps a beginning of that order.  Where
// it ends is found by bisection: count and weigh the tokens above some logit, halve the range that the end can be in,
// and sort the few tokens that are left in it.
#pragma once

#include <bit>

#include "sampler_row.h"

namespace lockstep::sampler {

// What a request asks for; a `top_k` of the vocabulary's size, a `top_p` of 1 and a `min_p` of 0 ask for nothing.
struct Filter {
  int64_t top_k;
  double top_p, min_p;
};

struct Token {
  float logit;
  int32_t id;
};

inline bool comes_before(const Token& a, const Token& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

// The tokens of a row that can be drawn, in vocabulary order, with their log-probabilities among one another.
struct Kept {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;

  void set(int64_t only, float logprob) {
    ids = {static_cast<int32_t>(only)};
    logprobs = {logprob};
  }
};

class Selection {
 public:
  // A draw among the tokens that `filter` leaves; they are entered in `kept_tokens` where that is not null.
  int64_t draw(const Row& row, const Distribution& distribution, const Filter& filter, double noise,
               Kept* kept_tokens) {
    const float* weights = distribution.weights();
    // What has no weight is not drawn, kept or not.
    Token last{row.largest() - kNoWeight, INT32_MAX};
    const auto kept = [&](int64_t id, F32x16 x) { return kept_weights(last, id, x, load(weights + id)); };
    double whole = distribution.total();
    if (filter.top_k < row.size()) {
      const float bound = std::max(last.logit, bound_of_count(row, filter.top_k));
      last = end(row, weights, bound, filter.top_k, kUnlimited);
      sums_.set(row, last.logit, kept);
      whole = sums_.total();
    }
    if (filter.top_p < 1.0) {
      const Token of_mass = end(row, weights, std::max(last.logit, bound_of_mass(row, distribution, filter.top_p)),
                                row.size(), filter.top_p * whole);
      if (comes_before(of_mass, last)) last = of_mass;
    }
    const float least = least_float(filter.min_p);
    const auto chosen = [&](int64_t id, F32x16 x) {
      const F32x16 values = kept(id, x);
      return where_at_least(values, least, values);
    };
    sums_.set(row, last.logit, chosen);
    if (kept_tokens != nullptr) enter(row, last.logit, chosen, kept_tokens);
    return sums_.draw(row, noise, chosen);
  }

  // The `count` best tokens, best first; `count` is at least 1 and at most the size of the vocabulary.
  const std::vector<Token>& best(const Row& row, int64_t count) {
    float bound = bound_of_count(row, count);
    if (bound == -kInfinity) {
      bound = row.largest() - kNoWeight;
      if (above(row, nullptr, bound).count < count) bound = -kInfinity;
    }
    if (bound > -kInfinity) bound = end(row, nullptr, bound, count, kUnlimited).logit;
    gather(row, bound, kInfinity);
    std::nth_element(tokens_.begin(), tokens_.begin() + (count - 1), tokens_.end(), comes_before);
    tokens_.resize(count);
    sort_tokens(row);
    return tokens_;
  }

 private:
  // The tokens that `weights` gives a weight, of which `sums_` holds the total.
  template <class F>
  void enter(const Row& row, float bound, F&& weights, Kept* kept_tokens) const {
    const double normaliser = static_cast<double>(row.largest()) + std::log(sums_.total());
    kept_tokens->ids.clear();
    kept_tokens->logprobs.clear();
    for (size_t block = 0; block < row.num_blocks(); ++block) {
      if (row.block_largest()[block] < bound) continue;
      row.each_vector(block, [&](int64_t first, F32x16 x) {
        float lanes[kLanes];
        store(lanes, weights(first, x));
        for (int64_t i = 0; i < kLanes && first + i < row.size(); ++i) {
          if (lanes[i] == 0.0f) continue;
          kept_tokens->ids.push_back(static_cast<int32_t>(first + i));
          kept_tokens->logprobs.push_back(static_cast<float>(static_cast<double>(row[first + i]) - normaliser));
        }
      });
    }
  }

  // Tokens of at least some logit.
  struct Amount {
    int64_t count;
    double weight;
  };

  static constexpr int64_t kSortAtOnce = 256;
  static constexpr float kNarrow = 1e-6f;     // range of logits that is not halved any more
  static constexpr float kNoWeight = 105.0f;  // e^-105 is 0 in float
  static constexpr double kMargin = 1e-3;     // for the rounding of logarithms and weights
  static constexpr double kUnlimited = std::numeric_limits<double>::infinity();

  static float least_float(double x) {
    const float nearest = static_cast<float>(x);
    return nearest < x ? std::nextafter(nearest, kInfinity) : nearest;
  }

  // The weights of tokens up to `last`, 0 for those after it.
  static F32x16 kept_weights(const Token& last, int64_t id, F32x16 x, F32x16 weights) {
    if (id + kLanes - 1 <= last.id) return where_at_least(x, last.logit, weights);
    const float next = std::nextafter(last.logit, kInfinity);
    if (id > last.id) return where_at_least(x, next, weights);
    float lanes[kLanes];
    store(lanes, where_at_least(x, last.logit, weights));
    float above[kLanes];
    store(above, where_at_least(x, next, weights));
    for (int64_t i = last.id + 1 - id; i < kLanes; ++i) lanes[i] = above[i];
    return load(lanes);
  }

  // Blocks are disjoint, so of the largest logits of all blocks, the count-th is at most the count-th of the row.
  float bound_of_count(const Row& row, int64_t count) {
    if (count > static_cast<int64_t>(row.num_blocks())) return -kInfinity;
    heads_ = row.block_largest();
    std::nth_element(heads_.begin(), heads_.begin() + (count - 1), heads_.end(), std::greater<>());
    return heads_[count - 1];
  }

  // If a logit and all V that are no larger weigh less than (1 - top_p) of the total together, the tokens before it
  // have the mass already.
  static float bound_of_mass(const Row& row, const Distribution& distribution, double top_p) {
    const double share = (1.0 - top_p) * distribution.total() / static_cast<double>(row.size());
    return static_cast<float>(row.largest() + std::log(share) - kMargin);
  }

  // Without `weights` their sum is 0.
  static Amount above(const Row& row, const float* weights, float bound) {
    Amount amount{0, 0.0};
    LaneSums sums;
    for (size_t block = 0; block < row.num_blocks(); ++block) {
      if (row.block_largest()[block] < bound) continue;
      row.each_vector(block, [&](int64_t id, F32x16 x) {
        amount.count += std::popcount(lanes_at_least(x, bound));
        if (weights != nullptr) sums.add(where_at_least(x, bound, load(weights + id)));
      });
    }
    amount.weight = sums.total();
    return amount;
  }

  // The last token of the shortest beginning that has `count` tokens or weighs `mass`; it is known to be at `bound`,
  // which is finite, or above.  If there is no such beginning, all tokens down to the bound.
  Token end(const Row& row, const float* weights, float bound, int64_t count, double mass) {
    float low = bound, high = kInfinity;  // the end is in low .. high, high not included
    Amount inside = above(row, weights, low), before{0, 0.0};
    const auto reaches = [&](const Amount& amount) { return amount.count >= count || amount.weight >= mass; };
    if (!reaches(inside)) return {bound, INT32_MAX};
    while (inside.count - before.count > kSortAtOnce) {
      const float width = std::min(high, row.largest()) - low, middle = low + width * 0.5f;
      if (width < kNarrow || !(low < middle && middle < high)) break;
      const Amount amount = above(row, weights, middle);
      if (reaches(amount)) {
        low = middle;
        inside = amount;
      } else {
        high = middle;
        before = amount;
      }
    }
    gather(row, low, high);
    if (const int64_t left = count - before.count; weights == nullptr && left <= static_cast<int64_t>(tokens_.size())) {
      std::nth_element(tokens_.begin(), tokens_.begin() + (left - 1), tokens_.end(), comes_before);
      return tokens_[left - 1];
    }
    // Many are left if their logits are almost equal; equal ones are in order already.
    if (!std::is_sorted(tokens_.begin(), tokens_.end(), comes_before)) {
      std::sort(tokens_.begin(), tokens_.end(), comes_before);
    }
    for (const Token& token : tokens_) {
      ++before.count;
      if (weights != nullptr) before.weight += weights[token.id];
      if (reaches(before)) return token;
    }
    return tokens_.back();
  }

  // By one number each, which orders them as `comes_before` does: half the time of comparing logits and ids.
  void sort_tokens(const Row& row) {
    keys_.clear();
    for (const Token& token : tokens_) {
      const uint32_t bits = std::bit_cast<uint32_t>(token.logit + 0.0f);  // -0 is 0
      const uint32_t ascending = bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
      keys_.push_back(static_cast<uint64_t>(~ascending) << 32 | static_cast<uint32_t>(token.id));
    }
    std::sort(keys_.begin(), keys_.end());
    for (size_t i = 0; i < keys_.size(); ++i) {
      const int32_t id = static_cast<int32_t>(keys_[i]);
      tokens_[i] = {row[id], id};
    }
  }

  // The tokens in low .. high, high not included, in vocabulary order.
  void gather(const Row& row, float low, float high) {
    tokens_.clear();
    for (size_t block = 0; block < row.num_blocks(); ++block) {
      if (row.block_largest()[block] < low) continue;
      row.each_vector(block, [&](int64_t first, F32x16 x) {
        uint32_t bits = lanes_at_least(x, low);
        if (row.size() - first < kLanes) bits &= (1u << (row.size() - first)) - 1;
        for (; bits != 0; bits &= bits - 1) {
          const int64_t id = first + std::countr_zero(bits);
          if (row[id] < high) tokens_.push_back({row[id], static_cast<int32_t>(id)});
        }
      });
    }
  }

  BlockSums sums_;
  std::vector<Token> tokens_;
  std::vector<uint64_t> keys_;
  std::vector<float> heads_;
};

}  // namespace lockstep::sampler
