// Texts in which drafts are looked up: what `rollout/drafts/plain_texts.py` does, with the same results.
//
// Texts of one prompt share an index.  It has an entry for each run of `shortest` tokens: the last place where the run
// ended.  Each place knows the one before.
#include <algorithm>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace lockstep {
namespace {

constexpr int64_t kPlaces = 8;    // that are compared for one proposal
constexpr int64_t kLongest = 32;  // tokens of a match that are compared
constexpr int64_t kAhead = 12;    // places whose entries are on their way from memory while a prompt is read
constexpr int64_t kNowhere = -1;
constexpr int64_t kAsk = 4;  // numbers of one ask: index, text, tokens to append, most tokens of the draft
constexpr uint64_t kMix = 0x9E3779B97F4A7C15;

// The number of a text, and the index of the token that follows the run.
constexpr int64_t place_of(int64_t text, int64_t end) { return text << 32 | end; }

uint64_t hash_of(const int64_t* ids, int64_t count) {
  uint64_t value = 0;
  for (int64_t i = 0; i < count; ++i) value = (value ^ static_cast<uint64_t>(ids[i])) * kMix;
  return value;
}

// The last place of each run, by its hash.
class Newest {
 public:
  Newest() : entries_(64) {}

  void reserve(int64_t count) {
    size_t size = entries_.size();
    while (size < 2 * (count_ + count)) size *= 2;
    if (size > entries_.size()) resize(size);
  }

  void prefetch(uint64_t key) const { __builtin_prefetch(&entries_[first(key)]); }

  int64_t get(uint64_t key) const { return entries_[at(key)].place; }

  // Returns the place before.
  int64_t put(uint64_t key, int64_t place) {
    if (2 * (count_ + 1) > entries_.size()) resize(2 * entries_.size());
    Entry& entry = entries_[at(key)];
    if (entry.place == kNowhere) ++count_;
    entry.key = key;
    return std::exchange(entry.place, place);
  }

 private:
  struct Entry {
    uint64_t key = 0;
    int64_t place = kNowhere;
  };

  size_t first(uint64_t key) const { return (key ^ key >> 32) & (entries_.size() - 1); }

  size_t at(uint64_t key) const {
    size_t i = first(key);
    while (entries_[i].place != kNowhere && entries_[i].key != key) i = (i + 1) & (entries_.size() - 1);
    return i;
  }

  void resize(size_t size) {
    std::vector<Entry> old(size);
    old.swap(entries_);
    for (const Entry& entry : old) {
      if (entry.place != kNowhere) entries_[at(entry.key)] = entry;
    }
  }

  std::vector<Entry> entries_;  // a power of two of them, at most half of them in use
  size_t count_ = 0;
};

struct Text {
  std::vector<int64_t> ids, before;  // before[i]: the place before of the run that ends at token i
};

struct Index {
  std::vector<Text> texts;  // the first is the prompt
  Newest newest;

  // `enters`: the new runs can be found from now on.
  void feed(int64_t number, const int64_t* ids, int64_t count, int64_t shortest, bool enters) {
    Text& text = texts[number];
    const auto begin = static_cast<int64_t>(text.ids.size());
    text.ids.insert(text.ids.end(), ids, ids + count);
    text.before.resize(begin + count, kNowhere);
    if (!enters) return;
    const int64_t first = std::max(begin, shortest - 1), last = begin + count;
    const auto key_at = [&](int64_t i) { return hash_of(text.ids.data() + i + 1 - shortest, shortest); };
    for (int64_t i = first; i < last; ++i) {
      if (i + kAhead < last) newest.prefetch(key_at(i + kAhead));
      text.before[i] = newest.put(key_at(i), place_of(number, i + 1));
    }
  }
};

// The last tokens of `ids` that are the ones before index `end` of `other`, up to a limit.
int64_t match(const std::vector<int64_t>& ids, const std::vector<int64_t>& other, int64_t end) {
  const auto size = static_cast<int64_t>(ids.size());
  const int64_t limit = std::min({size, end, kLongest});
  int64_t length = 0;
  while (length < limit && ids[size - 1 - length] == other[end - 1 - length]) ++length;
  return length;
}

struct Found {
  int64_t length = 0, count = 0;  // of the match, and of what follows it
  const int64_t* ids = nullptr;
};

// What follows the longest match of the end of a text; of equal ones, the newest with the most tokens.
Found best(const Index& index, int64_t number, int64_t most, int64_t shortest) {
  const std::vector<int64_t>& ids = index.texts[number].ids;
  Found found;
  if (most <= 0 || static_cast<int64_t>(ids.size()) < shortest) return found;
  int64_t place = index.newest.get(hash_of(ids.data() + ids.size() - shortest, shortest));
  for (int64_t n = 0; n < kPlaces && place != kNowhere; ++n) {
    const Text& text = index.texts[place >> 32];
    const int64_t end = place & 0xFFFFFFFF, size = static_cast<int64_t>(text.ids.size());
    const int64_t length = end < size ? match(ids, text.ids, end) : 0;
    const int64_t count = std::min(most, size - end);
    if (length >= shortest && std::pair(length, count) > std::pair(found.length, found.count)) {
      found = {length, count, text.ids.data() + end};
    }
    place = text.before[end - 1];
  }
  return found;
}

struct DraftTexts : torch::CustomClassHolder {
  explicit DraftTexts(int64_t shortest) : shortest(shortest) { TORCH_CHECK(shortest >= 1, "a match has a token"); }

  int64_t add_index(const at::Tensor& prompt) {
    TORCH_CHECK(prompt.dim() == 1 && prompt.scalar_type() == at::kLong && prompt.is_contiguous(), "a prompt is int64 [n]");
    Index& index = indices[next];
    index.texts.emplace_back();
    index.texts[0].ids.reserve(prompt.numel());
    index.texts[0].before.reserve(prompt.numel());
    index.newest.reserve(prompt.numel());
    index.feed(0, prompt.const_data_ptr<int64_t>(), prompt.numel(), shortest, true);
    return next++;
  }

  int64_t add_text(int64_t number) {
    Index& index = at(number);
    const std::vector<int64_t>& prompt = index.texts[0].ids;
    const int64_t count = std::min<int64_t>(prompt.size(), kLongest);
    const std::vector<int64_t> ids(prompt.end() - count, prompt.end());
    const auto own = static_cast<int64_t>(index.texts.size());
    index.texts.emplace_back();
    const int64_t last = std::min<int64_t>(count, 1);
    index.feed(own, ids.data(), count - last, shortest, false);
    index.feed(own, ids.data() + count - last, last, shortest, true);  // what follows the prompt is found from now on
    return own;
  }

  void drop_index(int64_t number) { indices.erase(number); }

  // Tokens of the prompt, and of the other texts.
  std::tuple<int64_t, int64_t> sizes(int64_t number) {
    const Index& index = at(number);
    int64_t tokens = 0;
    for (const Text& text : index.texts) tokens += static_cast<int64_t>(text.ids.size());
    const auto prompt = static_cast<int64_t>(index.texts[0].ids.size());
    return {prompt, tokens - prompt};
  }

  // Appends the tokens of all asks, then looks up all.  `given`: N, four numbers of each of N asks, and the tokens to
  // append.  Returns N lengths of matches, N numbers of tokens that follow them, and these tokens.  Numbers go in tensors
  // as each of a list would take a microsecond.
  at::Tensor propose(const at::Tensor& given) {
    TORCH_CHECK(given.dim() == 1 && given.scalar_type() == at::kLong && given.is_contiguous(), "asks are int64 [n]");
    const auto* asks = given.const_data_ptr<int64_t>() + 1;
    const int64_t size = given.numel() - 1, num_asks = size < 0 ? 0 : asks[-1];
    TORCH_CHECK(0 <= num_asks && kAsk * num_asks <= size, "there are fewer numbers than of ", num_asks, " asks");
    const int64_t *next = asks + kAsk * num_asks, *last = asks + std::max<int64_t>(size, 0);
    for (const int64_t* ask = asks; ask < asks + kAsk * num_asks; ask += kAsk) {
      Index& index = at(ask[0]);
      TORCH_CHECK(0 < ask[1] && ask[1] < static_cast<int64_t>(index.texts.size()), "no text ", ask[1]);
      TORCH_CHECK(0 <= ask[2] && ask[2] <= last - next, "an ask appends ", ask[2], " of ", last - next, " tokens");
      index.feed(ask[1], next, ask[2], shortest, true);
      next += ask[2];
    }
    std::vector<int64_t> found(2 * num_asks);
    for (int64_t n = 0; n < num_asks; ++n) {
      const Found one = best(at(asks[kAsk * n]), asks[kAsk * n + 1], asks[kAsk * n + 3], shortest);
      found[n] = one.length;
      found[num_asks + n] = one.count;
      found.insert(found.end(), one.ids, one.ids + one.count);
    }
    at::Tensor result = at::empty({static_cast<int64_t>(found.size())}, given.options());
    std::copy(found.begin(), found.end(), result.mutable_data_ptr<int64_t>());
    return result;
  }

  Index& at(int64_t number) {
    const auto found = indices.find(number);
    TORCH_CHECK(found != indices.end(), "no index ", number);
    return found->second;
  }

  int64_t shortest, next = 0;
  std::unordered_map<int64_t, Index> indices;
};

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  using lockstep::DraftTexts;
  m.class_<DraftTexts>("DraftTexts")
      .def(torch::init<int64_t>())
      .def("add_index", &DraftTexts::add_index)
      .def("add_text", &DraftTexts::add_text)
      .def("drop_index", &DraftTexts::drop_index)
      .def("sizes", &DraftTexts::sizes)
      .def("propose", &DraftTexts::propose);
}
