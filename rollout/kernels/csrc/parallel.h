// A team of threads that works through numbered items, phase by phase.
//
// Which thread gets an item is left to chance; every item writes places of its own, so the result is not.
#pragma once

#include <algorithm>
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

  // In runs of neighbours that get shorter towards the end (guided self-scheduling, Polychronopoulos and Kuck, 1987):
  // what is fetched ahead of an item's end is the beginning of the next one, and the threads end together.
  template <class F>
  void drain_runs(int threads, F&& work) {
    for (int64_t first = next_.load(std::memory_order_relaxed); first < size_;) {
      const int64_t last = first + std::max<int64_t>(1, (size_ - first) / (2 * threads));
      if (!next_.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
      for (int64_t item = first; item < last; ++item) work(item);
      first = next_.load(std::memory_order_relaxed);
    }
  }

 private:
  std::atomic<int64_t> next_{0};
  const int64_t size_;
};

// How many threads work of about so many nanoseconds is worth; at most torch's own number.  To wake a team and to wait
// for it takes a microsecond or two, and far more where other processes want the cores.
inline int team_size(int64_t nanoseconds) {
  constexpr int64_t kWorthAThread = 15000;
  return static_cast<int>(std::min<int64_t>(1 + nanoseconds / kWorthAThread, at::get_num_threads()));
}

struct NoScope {
  NoScope() {}
};

// A queue and what is done with its items; each thread does so within a `Scope` of its own.
template <class F, class Scope = NoScope>
struct Phase {
  ItemQueue& queue;
  F& work;

  void drain(int threads) {
    const Scope scope;
    queue.drain_runs(threads, work);
  }
};
template <class F>
Phase(ItemQueue&, F&) -> Phase<F>;

// Phases one after the other, each finished by all threads before the next begins.
template <class... P>
inline void run_phases(int threads, P... phases) {
  if (threads <= 1) {
    (phases.drain(1), ...);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    const auto run = [threads](auto& phase) {
      phase.drain(threads);
#pragma omp barrier
    };
    (run(phases), ...);
  }
}

// One phase: `body(first, last)` over spans of at most `span` of the numbers 0 .. size - 1.
template <class F>
inline void for_spans(int64_t size, int64_t span, int64_t nanoseconds, F&& body) {
  const int64_t items = (size + span - 1) / span;
  const int threads = static_cast<int>(std::min<int64_t>(items, team_size(nanoseconds)));
  ItemQueue queue(items);
  const auto drain = [&] {
    queue.drain_runs(threads, [&](int64_t item) { body(item * span, std::min(size, (item + 1) * span)); });
  };
  if (threads <= 1) {
    drain();
  } else {
#pragma omp parallel num_threads(threads)
    drain();
  }
}

}  // namespace lockstep
