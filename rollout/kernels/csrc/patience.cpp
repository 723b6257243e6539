#include "patience.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <string>

#if defined(__linux__)
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lockstep {
namespace {

using namespace std::chrono_literals;
constexpr Time nanoseconds(std::chrono::nanoseconds time) { return time.count(); }

constexpr Time kIdle = nanoseconds(2ms);     // bridges what lies between two steps
constexpr Time kBegun = nanoseconds(200us);  // few items take as long
constexpr Time kCrowded = nanoseconds(5us);
constexpr Time kUnknown = nanoseconds(40us);  // between two operators
// What is noted is of so long at least; beside two threads on two cores, one process that computes takes a third of it.
constexpr Time kNoted = nanoseconds(20ms);
constexpr int kCrowdedPart = 4;
// How long a thread takes a crowd to last.  It doubles each time that the crowd turns out to be still there.
constexpr Time kFirstPeriod = nanoseconds(250ms), kLongestPeriod = nanoseconds(2s);

}  // namespace

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
  word.wait(value);
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#else
  word.notify_all();
#endif
}

Patience::Patience() : idle_(kIdle), begun_(kBegun), crowded_(kCrowded) {
  const char* given = std::getenv("OMP_WAIT_POLICY");
  std::string policy(given == nullptr ? "" : given);
  std::transform(policy.begin(), policy.end(), policy.begin(), [](unsigned char c) { return std::tolower(c); });
  if (policy == "passive") idle_ = begun_ = crowded_ = 0;
  if (policy == "active") idle_ = begun_ = crowded_ = INT64_MAX;
}

Time Patience::limit(Time time, bool has_begun) const {
  if (time < crowded_until_.load(std::memory_order_relaxed)) return crowded_;
  return has_begun ? begun_ : idle_.load(std::memory_order_relaxed);
}

void Patience::note(Time time, Time computed, Time waited) {
  const Time until = crowded_until_.load(std::memory_order_relaxed), period = period_.load(std::memory_order_relaxed);
  if (time < until || kCrowdedPart * waited < computed + waited) return;
  const Time next = time - until < period ? std::min(2 * period, kLongestPeriod) : kFirstPeriod;
  period_.store(next, std::memory_order_relaxed);
  crowded_until_.store(time + next, std::memory_order_relaxed);
}

void Patience::note_unknown() {
  if (idle_ == kIdle) idle_ = kUnknown;
}

Account::Account() {
#if defined(__linux__)
  file_ = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
#endif
}

Account::~Account() {
#if defined(__linux__)
  if (file_ >= 0) close(file_);
#endif
}

void Account::tell(Patience& patience) {
  const Time time = now();
  if (time - read_ < kNoted) return;
  read_ = time;
  long long computed = -1, waited = 0;  // nanoseconds since the thread began
#if defined(__linux__)
  char line[96];
  const ssize_t size = file_ < 0 ? -1 : pread(file_, line, sizeof line - 1, 0);
  line[std::max<ssize_t>(size, 0)] = 0;
  if (std::sscanf(line, "%lld %lld", &computed, &waited) != 2) computed = -1;
#endif
  if (computed < 0) return patience.note_unknown();
  if (computed - computed_ + waited - waited_ < kNoted) return;
  patience.note(time, computed - computed_, waited - waited_);
  computed_ = computed;
  waited_ = waited;
}

}  // namespace lockstep
