// How a thread waits for another one of its process: it looks for a while, then sleeps.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
namespace lockstep {

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps while the word is `value`; may return early.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value);
void wake_all(std::atomic<uint32_t>& word);

using Time = int64_t;  // nanoseconds
inline Time now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

// How long a thread looks before it sleeps.
//
// To wake a thread takes tens of microseconds in a virtual machine whose cores halt when idle, more than a small
// operator: alone on its core a thread looks for long.  Beside a process that computes no core halts, and who looks
// takes the time of the thread that it waits for: there it sleeps soon.  Which of both it is Linux counts, as the time
// that a thread stood in line for a core.  `OMP_WAIT_POLICY`, OpenMP's variable, decides instead where it is set:
// "passive" sleeps at once, "active" never.
class Patience {
 public:
  Patience();

  // True as soon as `ready()`, false when it is time to sleep.  `has_begun`: what is waited for has.
  template <class F>
  bool look(F&& ready, bool has_begun) {
    // Most waits end before a clock is worth reading.
    for (int i = 0; i < kGlances; ++i) {
      if (ready()) return true;
      pause_briefly();
    }
    const Time began = now(), limit = this->limit(began, has_begun);
    do {
      for (int i = 0; i < kGlances; ++i) {
        if (ready()) return true;
        pause_briefly();
      }
    } while (now() - began <= limit);
    return false;
  }

  // How long to look from `time` on.
  Time limit(Time time, bool has_begun) const;
  // Until `time`, a helper computed for so long and stood in line for a core for so long.
  void note(Time time, Time computed, Time waited);
  // Nobody counts that.
  void note_unknown();

 private:
  static constexpr int kGlances = 16;

  std::atomic<Time> idle_;
  Time begun_, crowded_;
  std::atomic<Time> crowded_until_{0}, period_{0};
};

// What Linux counts of the thread that made it.
class Account {
 public:
  Account();
  ~Account();
  Account(const Account&) = delete;
  Account& operator=(const Account&) = delete;
  // Now and then, the time since the last time.
  void tell(Patience& patience);

 private:
  int file_ = -1;
  Time read_ = 0, computed_ = 0, waited_ = 0;
};

// A number below 2^31 that threads wait for to become 0.
class Count {
 public:
  explicit Count(uint32_t number = 0) : word_(number) {}

  // The number before.
  uint32_t add(uint32_t n) { return word_.fetch_add(n) & ~kAwaited; }

  void subtract(uint32_t n) {
    if (word_.fetch_sub(n) == (kAwaited | n)) wake_all(word_);
  }

  void wait_for_zero(Patience& patience) {
    const auto is_zero = [this] { return (word_.load(std::memory_order_acquire) & ~kAwaited) == 0; };
    while (!patience.look(is_zero, true)) {
      const uint32_t value = word_.fetch_or(kAwaited) | kAwaited;
      if (value != kAwaited) sleep_while(word_, value);
    }
    if (word_.load(std::memory_order_relaxed) & kAwaited) word_.fetch_and(~kAwaited);
  }

 private:
  static constexpr uint32_t kAwaited = uint32_t{1} << 31;  // somebody sleeps
  std::atomic<uint32_t> word_;
};

}  // namespace lockstep
