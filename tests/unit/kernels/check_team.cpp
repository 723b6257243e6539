// Checks parallel.h and the team under it: with more threads than cores, with a helper that does not come, with work
// that throws, from several threads at once and after a fork; exit status 1 if a check failed.
//
// What must not hang ends the program by SIGALRM.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "parallel.h"
#include "patience.cpp"
#include "team.cpp"

using namespace lockstep;

namespace {

#if !defined(LOCKSTEP_DEADLINE_SECONDS)
#define LOCKSTEP_DEADLINE_SECONDS 60
#endif
constexpr unsigned kDeadlineSeconds = LOCKSTEP_DEADLINE_SECONDS;
std::atomic<int> failures{0};

void expect(bool holds, const char* what) {
  if (holds || ++failures > 20) return;
  std::printf("%s\n", what);
}

// A little work, so that threads meet in every order.
void linger(uint32_t turns) {
  for (uint32_t i = 0; i < turns % 200; ++i) pause_briefly();
}

// Items of three phases: each once, and none before all of the phase before it.
void run_three_phases(int threads, std::mt19937& random) {
  int64_t sizes[3];
  for (int64_t& size : sizes) size = random() % 40;
  std::vector<int> times[3];
  std::atomic<int64_t> finished[3] = {};
  std::atomic<int> at_once{0};
  const uint32_t turns = random();
  const auto phase = [&](int p) {
    times[p].assign(sizes[p], 0);
    return [&, p](int64_t item) {
      expect(++at_once <= threads, "more threads than were asked for");
      for (int before = 0; before < p; ++before) {
        expect(finished[before].load() == sizes[before], "a phase began before the last one was finished");
      }
      linger(turns * static_cast<uint32_t>(item + 1));
      ++times[p][item];
      ++finished[p];
      --at_once;
    };
  };
  const auto one = phase(0), two = phase(1), three = phase(2);
  ItemQueue first(sizes[0]), second(sizes[1]), third(sizes[2]);
  run_phases(threads, Phase{first, one}, Phase{second, two}, Phase{third, three});
  for (const std::vector<int>& of_phase : times) {
    for (const int n : of_phase) expect(n == 1, "an item was not worked at once");
  }
  expect(at_once.load() == 0, "a call returned while its items were worked at");
}

void check_phases() {
  const auto call_often = [](uint32_t seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < 3000; ++i) {
      run_three_phases(1 + random() % 5, random);
      if (random() % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(4));  // helpers fall asleep
    }
  };
  call_often(1);
  std::vector<std::thread> callers;
  for (uint32_t seed = 2; seed < 5; ++seed) callers.emplace_back(call_often, seed);
  for (std::thread& caller : callers) caller.join();
}

// True if a helper comes, which may take until the system has a core for it.
bool helper_comes() {
  std::atomic<int> inside{0};
  const auto began = std::chrono::steady_clock::now();
  std::atomic<bool> met{false};
  while (!met.load() && std::chrono::steady_clock::now() - began < std::chrono::seconds(10)) {
    std::atomic<bool> is_late{false};
    Team::of_process().run(2, [&] {
      ++inside;
      for (int i = 0; i < 100000 && inside.load() < 2 && !is_late.load(); ++i) pause_briefly();
      if (inside.load() == 2) met = true;
      is_late = true;
    });
    inside = 0;
  }
  return met.load();
}

void check_helpers_wake() {
  for (int i = 0; i < 20; ++i) {
    expect(helper_comes(), "no helper came");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // longer than it looks for work
  }
}

// Helpers that may rest do not look for work, and come when they are called.
void check_rest() {
  Time most = 0;
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // longer than a first crowd is believed in
  for (int i = 0; i < 100; ++i) {
    expect(helper_comes(), "no helper came");
    std::atomic<pthread_t> helper{};
    const pthread_t self = pthread_self();
    while (helper.load() == pthread_t{}) {
      Team::of_process().run(2, [&] {
        if (!pthread_equal(pthread_self(), self)) helper = pthread_self();
        for (int wait = 0; wait < 1000 && helper.load() == pthread_t{}; ++wait) pause_briefly();
      });
    }
    Team::rest();
    clockid_t clock;
    pthread_getcpuclockid(helper.load(), &clock);
    const auto computed = [&] {
      timespec time{};
      clock_gettime(clock, &time);
      return Time{1'000'000'000} * time.tv_sec + time.tv_nsec;
    };
    const Time before = computed();
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    most = std::max(most, computed() - before);
  }
  expect(most < 500'000, "a helper that may rest looks for work");
}

std::atomic<bool> is_held{false}, may_go{false};
void hold(int) {
  is_held = true;
  while (!may_go.load()) pause_briefly();
}

// The only helper is kept by a signal handler, as by another process that has its core.
void check_nobody_waits_for_who_does_not_come() {
  pthread_t helper{};
  bool has_come = false;
  const pthread_t self = pthread_self();
  while (!has_come) {
    std::atomic<bool> came{false};
    Team::of_process().run(2, [&] {
      if (pthread_equal(pthread_self(), self)) {
        for (int i = 0; i < 100000 && !came.load(); ++i) pause_briefly();
      } else {
        helper = pthread_self();
        came = true;
      }
    });
    has_come = came.load();
  }
  std::signal(SIGUSR1, hold);
  pthread_kill(helper, SIGUSR1);
  while (!is_held.load()) pause_briefly();
  std::mt19937 random(7);
  for (int i = 0; i < 100; ++i) run_three_phases(2, random);
  may_go = true;
  expect(helper_comes(), "the helper did not come back");
}

void check_exceptions() {
  std::mt19937 random(3);
  for (int i = 0; i < 300; ++i) {
    const int64_t size = 1 + random() % 30, bad = random() % size;
    std::atomic<int64_t> later{0};
    ItemQueue first(size), second(size);
    const auto fail = [&](int64_t item) {
      linger(17 * static_cast<uint32_t>(item));
      if (item == bad) throw std::runtime_error("bad item");
    };
    const auto count = [&](int64_t) { ++later; };
    bool was_thrown = false;
    try {
      run_phases(3, Phase{first, fail}, Phase{second, count});
    } catch (const std::runtime_error&) {
      was_thrown = true;
    }
    expect(was_thrown, "an exception was lost");
  }
  run_three_phases(3, random);
}

// No memory for a thread's stack: the call is refused, and the next one works.
void check_no_thread_starts() {
  rlimit before{}, none{};
  getrlimit(RLIMIT_AS, &before);
  none = before;
  none.rlim_cur = 1 << 20;
  setrlimit(RLIMIT_AS, &none);
  bool was_refused = false;
  std::atomic<int> calls{0};
  try {
    Team::of_process().run(40, [&] { ++calls; });
  } catch (const std::runtime_error&) {
    was_refused = true;
  }
  setrlimit(RLIMIT_AS, &before);
  expect(was_refused && calls.load() == 0, "a call without the threads that it needs was not refused");
  std::mt19937 random(11);
  for (int i = 0; i < 100; ++i) run_three_phases(3, random);
  expect(helper_comes(), "a refused call broke the team");
}

// The child has none of its parent's helpers, and makes its own.
void check_fork() {
  const pid_t child = fork();
  if (child == 0) {
    alarm(kDeadlineSeconds / 2);
    std::mt19937 random(5);
    for (int i = 0; i < 100; ++i) run_three_phases(3, random);
    _exit(failures == 0 && helper_comes() ? 0 : 1);
  }
  int status = 0;
  expect(waitpid(child, &status, 0) == child && status == 0, "a forked process cannot use the team");
}

// To stand in line for a core now and then changes nothing; a third of the time makes threads sleep soon, and for longer each
// time that it is still so.
void check_patience() {
  constexpr Time kMs = 1'000'000;
  unsetenv("OMP_WAIT_POLICY");
  Patience patience;
  Time time = 1'000'000 * kMs;
  const Time idle = patience.limit(time, false), begun = patience.limit(time, true);
  const auto is_crowded = [&] { return patience.limit(time, false) < begun && patience.limit(time, true) < begun; };
  expect(begun < idle && !is_crowded(), "threads do not look for long where they are alone");
  for (int i = 0; i < 100; ++i) patience.note(time += 20 * kMs, 17 * kMs, 3 * kMs);
  expect(!is_crowded(), "little waiting is taken for a crowd");
  patience.note(time, 14 * kMs, 7 * kMs);
  for (int period = 250; period <= 2000; period *= 2) {
    expect(is_crowded(), "a crowd is not noticed");
    patience.note(time + 20 * kMs, 10 * kMs, 10 * kMs);  // changes nothing
    time += (period - 1) * kMs;
    expect(is_crowded(), "a crowd is forgotten too soon");
    time += 1 * kMs;
    expect(!is_crowded(), "a crowd is never forgotten");
    patience.note(time += 60 * kMs, 14 * kMs, 7 * kMs);
  }
  patience.note(time += 10'000 * kMs, 14 * kMs, 7 * kMs);
  time += 250 * kMs;
  expect(!is_crowded(), "a crowd of long ago counts");
  patience.note_unknown();
  expect(begun > patience.limit(time, false), "threads look for long where nobody knows of a crowd");
  for (const char* policy : {"PASSIVE", "active"}) {
    setenv("OMP_WAIT_POLICY", policy, 1);
    const Patience chosen;
    const Time wanted = policy[0] == 'P' ? 0 : INT64_MAX;
    expect(chosen.limit(time, false) == wanted && chosen.limit(time, true) == wanted, "the policy is not followed");
  }
}

// Two threads that compute on one core stand in line for half of the time; who sleeps does not.
void check_account() {
#if defined(__linux__)
  unsetenv("OMP_WAIT_POLICY");
  cpu_set_t before, one;
  sched_getaffinity(0, sizeof before, &before);
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  sched_setaffinity(0, sizeof one, &one);
  Patience until_now, beside;
  const auto is_crowded = [](const Patience& patience) { return patience.limit(now(), false) < 100'000; };
  std::atomic<uint32_t> word{0};
  Account account;
  // Less than what an account tells at once would be left to the next one.
  for (const Time began = now(); now() - began < 100'000'000;) pause_briefly();
  account.tell(until_now);
  const auto is_crowded_after_sleeping = [&] {
    Patience alone;
    for (int i = 0; i < 10; ++i) {
      const uint32_t seen = word.load();
      std::thread waker([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        ++word;
        wake_all(word);
      });
      while (word.load() == seen) sleep_while(word, seen);
      waker.join();
      account.tell(alone);
    }
    return is_crowded(alone);
  };
  bool is_taken_for_waiting = true;  // other processes may have the core at first
  for (int i = 0; i < 50 && is_taken_for_waiting; ++i) is_taken_for_waiting = is_crowded_after_sleeping();
  expect(!is_taken_for_waiting, "sleep is taken for waiting");
  std::atomic<bool> enough{false};
  std::thread neighbour([&] {
    while (!enough.load()) pause_briefly();
  });
  for (const Time began = now(); !is_crowded(beside) && now() - began < 5'000'000'000;) account.tell(beside);
  expect(is_crowded(beside), "a neighbour on the same core is not noticed");
  enough = true;
  neighbour.join();
  sched_setaffinity(0, sizeof before, &before);
#endif
}

}  // namespace

int main() {
  alarm(kDeadlineSeconds);
  check_helpers_wake();  // makes the team, which reads the policy, before `check_patience` changes that
  check_patience();
  check_rest();
  check_account();
  check_phases();
  check_nobody_waits_for_who_does_not_come();
  check_exceptions();
#if !defined(__SANITIZE_THREAD__)  // which needs memory of its own, and does not follow a fork of several threads
  check_no_thread_starts();
  check_fork();
#endif
  if (failures == 0) std::printf("ok\n");
  return failures == 0 ? 0 : 1;
}
