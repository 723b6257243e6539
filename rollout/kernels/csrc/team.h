// The threads that operators share: whoever calls one, and helpers.
//
//     caller     open     body()     close, wait for the helpers inside
//     helper   called,  enter, body(), leave     look for the next call, sleep
//
// Nobody waits for a helper that has not come: where another process has its core, the others do its part.  What is
// waited for is a helper that took an item and has not finished it.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "patience.h"

namespace lockstep {

class Team {
 public:
  // That of the process; a process that was forked gets its own.
  static Team& of_process();

  // Calls `body` here and, as far as they come in time, on `threads - 1` helpers, at the same time; returns when all
  // calls have.  A call that another thread makes in the meantime stays without helpers.  Throws what `body` threw, and
  // `runtime_error`, before any call, if the system starts no thread.
  template <class F>
  void run(int threads, const F& body) {
    run_body(threads, [](const void* place) { (*static_cast<const F*>(place))(); }, &body);
  }

  // Helpers sleep until the next call: none follows soon, and others may use their cores meanwhile.
  static void rest();

  void wait_for_zero(Count& count) { count.wait_for_zero(patience_); }

 private:
  struct Helper;
  using Body = void (*)(const void*);
  static constexpr uint32_t kOpen = uint32_t{1} << 30;

  Team() = default;
  void run_body(int threads, Body body, const void* place);
  void start_helper();
  void help(Helper& me);
  void try_body();

  std::mutex caller_;
  std::vector<std::unique_ptr<Helper>> helpers_;
  Patience patience_;
  // What is to be done; written while no helper is inside.
  Body body_ = nullptr;
  const void* place_ = nullptr;
  size_t wanted_ = 0;
  std::mutex failure_;
  std::exception_ptr error_;
  // Helpers, and `kOpen` while they may begin.
  alignas(64) Count inside_;
};

}  // namespace lockstep
