// What a request asks of its row, and the logits as its bias, penalties, minimum length and temperature leave them.
//
// Shapes: V vocabulary.
#pragma once

#include <vector>

#include "sampler_filter.h"

namespace lockstep::sampler {

// Entries `begin .. end - 1` of one of the lists that come with a batch.
struct Span {
  int64_t begin, end;
  bool empty() const { return begin == end; }
};

// The same fields in the same order as `ROW_SETTINGS` in rollout/sampling/batch_info.py, eight bytes each.
struct RowSettings {
  uint64_t seed;
  double temperature;
  double top_p, min_p;
  double frequency_penalty, presence_penalty, repetition_penalty;
  int64_t top_k;  // 0 or less: no limit
  int64_t is_greedy;
  int64_t wants_logprob;
  int64_t wants_mask;  // the tokens that the filters leave
  int64_t top_logprobs;
  int64_t min_new_tokens;
  int64_t allowed;  // the row of its allowed tokens, -1 if all are
  Span chosen;   // token ids whose log-probabilities are wanted
  Span bias;     // token ids and what is added to their logits
  Span ends;     // token ids that end the request
  Span prompt;   // its tokens so far, where a penalty wants them
  Span output;

  bool filters(int64_t vocab) const { return (0 < top_k && top_k < vocab) || top_p < 1.0 || min_p > 0.0; }
  Filter filter(int64_t vocab) const { return {0 < top_k && top_k < vocab ? top_k : vocab, top_p, min_p}; }
};

// The lists that the spans point into, and the sets of allowed tokens [G, W], 32 in a word.
struct Lists {
  const int64_t *chosen, *bias, *ends, *histories;
  const float* bias_values;
  const int32_t* allowed;
};

// Of `count` tokens, those whose bit is 0 become -infinity.  Every logit is stored, so that it takes no branch.
inline void forbid_word(uint32_t word, int64_t count, float* logits) {
  for (int64_t i = 0; i < count; ++i) logits[i] = (word >> i & 1) != 0 ? logits[i] : -kInfinity;
}

// Tokens that the set does not hold become -infinity.
inline void forbid(const int32_t* words, int64_t size, float* logits) {
  for (int64_t first = 0; first < size; first += 32) {
    const uint32_t word = static_cast<uint32_t>(words[first / 32]);
    if (word == ~uint32_t{0}) continue;
    if (first + 32 <= size) {
      forbid_word(word, 32, logits + first);
    } else {
      forbid_word(word, size - first, logits + first);
    }
  }
}

// Logits [V] in float, divided by the temperature.
template <class T>
void widen(const T* logits, int64_t size, float temperature, float* out) {
  const F32x16 divisor = splat(temperature);
  const bool divides = temperature != 1.0f;
  for (int64_t i = 0; i < size; i += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, size - i));
    const F32x16 x = n == kLanes ? load(logits + i) : load(logits + i, n);
    const F32x16 y = divides ? x / divisor : x;
    if (n == kLanes) {
      store(out + i, y);
    } else {
      store(out + i, y, n);
    }
  }
}

class Editor {
 public:
  // The row as its settings leave it: in place of `logits` if they change nothing, else in a buffer of this object
  // that the next call overwrites.  `position`: how many tokens the request has sampled so far.
  template <class T>
  const float* edit(const T* logits, int64_t size, const RowSettings& row, int64_t position, const Lists& lists) {
    const bool ends = position < row.min_new_tokens && !row.ends.empty();
    const bool edits = ends || !row.bias.empty() || !row.prompt.empty() || !row.output.empty() || row.allowed >= 0;
    const float temperature = static_cast<float>(row.temperature);
    if constexpr (std::is_same_v<T, float>) {
      if (!edits && temperature == 1.0f) return logits;
    }
    buffer_.resize(size);
    widen(logits, size, edits ? 1.0f : temperature, buffer_.data());
    if (!edits) return buffer_.data();
    for (int64_t i = row.bias.begin; i < row.bias.end; ++i) buffer_[lists.bias[i]] += lists.bias_values[i];
    penalise(row, lists.histories);
    for (int64_t i = row.ends.begin; ends && i < row.ends.end; ++i) buffer_[lists.ends[i]] = -kInfinity;
    if (row.allowed >= 0) forbid(lists.allowed + row.allowed * ((size + 31) / 32), size, buffer_.data());
    if (temperature != 1.0f) widen(buffer_.data(), size, temperature, buffer_.data());
    return buffer_.data();
  }

 private:
  // Frequency and presence count output tokens (OpenAI's definition); repetition counts prompt and output (Keskar et
  // al., "CTRL", 2019) and comes first.
  void penalise(const RowSettings& row, const int64_t* histories) {
    if (row.prompt.empty() && row.output.empty()) return;
    uses_.resize(buffer_.size(), 0);
    const auto each = [&](Span span, auto&& body) {
      for (int64_t i = span.begin; i < span.end; ++i) body(histories[i]);
    };
    const float repetition = static_cast<float>(row.repetition_penalty);
    const auto repeat = [&](int64_t id) {
      float& x = buffer_[id];
      if (repetition != 1.0f && uses_[id] == 0) x = x > 0.0f ? x / repetition : x * repetition;
    };
    const float frequency = static_cast<float>(row.frequency_penalty);
    const float presence = static_cast<float>(row.presence_penalty);
    each(row.output, [&](int64_t id) {
      repeat(id);
      ++uses_[id];
    });
    each(row.output, [&](int64_t id) {
      if (uses_[id] > 0) buffer_[id] -= frequency * static_cast<float>(uses_[id]) + presence;
      uses_[id] = kDone;
    });
    each(row.prompt, [&](int64_t id) {
      repeat(id);
      uses_[id] = kDone;
    });
    each(row.output, [&](int64_t id) { uses_[id] = 0; });
    each(row.prompt, [&](int64_t id) { uses_[id] = 0; });
  }

  static constexpr int32_t kDone = -1;

  std::vector<float> buffer_;
  std::vector<int32_t> uses_;  // [V], all 0 between calls
};

}  // namespace lockstep::sampler
