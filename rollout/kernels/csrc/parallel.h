// A team of threads that works through numbered items, phase by phase.
//
// Which thread gets an item is left to chance; every item writes places of its own, so the result is not.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include <ATen/Parallel.h>

#include "team.h"

namespace lockstep {

// Hands out 0 .. size - 1, each once, and knows when all are finished.
class ItemQueue {
 public:
  explicit ItemQueue(int64_t size) : size_(size), unfinished_(static_cast<uint32_t>(size)) {
    TORCH_CHECK(0 <= size && size < int64_t{1} << 30, "too many items of work: ", size);
  }

  template <class F>
  void drain(F&& work) {
    Taken taken{unfinished_};
    for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < size_;) {
      ++taken.items;
      work(item);
    }
  }

  // In runs of neighbours that get shorter towards the end (guided self-scheduling, Polychronopoulos and Kuck, 1987):
  // what is fetched ahead of an item's end is the beginning of the next one, and the threads end together.
  template <class F>
  void drain_runs(int threads, F&& work) {
    Taken taken{unfinished_};
    for (int64_t first = next_.load(std::memory_order_relaxed); first < size_;) {
      const int64_t last = first + std::max<int64_t>(1, (size_ - first) / (2 * threads));
      if (!next_.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
      taken.items += static_cast<uint32_t>(last - first);
      for (int64_t item = first; item < last; ++item) work(item);
      first = next_.load(std::memory_order_relaxed);
    }
  }

  int64_t size() const { return size_; }
  void wait_until_finished(Team& team) { team.wait_for_zero(unfinished_); }

 private:
  // What a thread took is finished when it leaves, also with an exception: nobody waits in vain.
  struct Taken {
    Count& unfinished;
    uint32_t items = 0;
    ~Taken() {
      if (items > 0) unfinished.subtract(items);
    }
  };

  std::atomic<int64_t> next_{0};
  const int64_t size_;
  Count unfinished_;
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

// Phases one after the other, each finished before the next begins.
template <class First, class... P>
inline void run_phases(int threads, First first, P... later) {
  if (threads <= 1) {
    first.drain(1);
    (later.drain(1), ...);
    return;
  }
  Team& team = Team::of_process();
  team.run(threads, [&] {
    first.drain(threads);
    ItemQueue* before = &first.queue;
    const auto run = [&](auto& phase) {
      before->wait_until_finished(team);
      phase.drain(threads);
      before = &phase.queue;
    };
    (run(later), ...);
  });
}

// One phase: `body(first, last)` over spans of at most `span` of the numbers 0 .. size - 1.
template <class F>
inline void for_spans(int64_t size, int64_t span, int64_t nanoseconds, F&& body) {
  ItemQueue queue((size + span - 1) / span);
  const auto work = [&](int64_t item) { body(item * span, std::min(size, (item + 1) * span)); };
  run_phases(static_cast<int>(std::min<int64_t>(queue.size(), team_size(nanoseconds))), Phase{queue, work});
}

}  // namespace lockstep
