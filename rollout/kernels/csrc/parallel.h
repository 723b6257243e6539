// A team of threads that works through numbered items, phase by phase.
//
// Which thread gets an item is left to chance; every item writes places of its own, so the result is not.
#pragma once

#include <atomic>
#include <cstdint>

#include <ATen/Parallel.h>

namespace lockstep {

// Hands out 0 .. size - 1, each once.
class ItemQueue {
 public:
  explicit ItemQueue(int64_t size) : size_(size) {}

  template <class F>
  void drain(F&& work) {
    for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < size_;) work(item);
  }

 private:
  std::atomic<int64_t> next_{0};
  const int64_t size_;
};

// How many threads `work` multiplications are worth, at most torch's own number.
inline int team_size(int64_t work) {
  constexpr int64_t kWorthAThread = 1 << 15;
  const int64_t wanted = 1 + work / kWorthAThread;
  return static_cast<int>(wanted < at::get_num_threads() ? wanted : at::get_num_threads());
}

}  // namespace lockstep
