#include "patience.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string>

namespace lockstep {
namespace {

using namespace std::chrono_literals;
constexpr int64_t nanoseconds(std::chrono::nanoseconds time) { return time.count(); }

constexpr int64_t kIdle = nanoseconds(2ms);      // bridges what lies between two steps
constexpr int64_t kBegun = nanoseconds(200us);   // few items take as long
constexpr int64_t kCrowded = nanoseconds(5us);
constexpr int64_t kTogether = nanoseconds(30ms);  // what is lost by chance lies further apart
// How long a thread takes a crowd to last.  It doubles each time that the crowd turns out to be still there.
constexpr int64_t kFirstPeriod = nanoseconds(250ms), kLongestPeriod = nanoseconds(2s);

}  // namespace

Patience::Patience() : idle_(kIdle), begun_(kBegun), crowded_(kCrowded) {
  const char* given = std::getenv("OMP_WAIT_POLICY");
  std::string policy(given == nullptr ? "" : given);
  std::transform(policy.begin(), policy.end(), policy.begin(), [](unsigned char c) { return std::tolower(c); });
  if (policy == "passive") idle_ = begun_ = crowded_ = 0;
  if (policy == "active") idle_ = begun_ = crowded_ = INT64_MAX;
}

Patience::Time Patience::limit(Time time, bool has_begun) const {
  if (time < crowded_until_.load(std::memory_order_relaxed)) return crowded_;
  return has_begun ? begun_ : idle_;
}

void Patience::note_lost(Time time, Time lost) {
  const Time before = last_lost_.exchange(time, std::memory_order_relaxed);
  const Time until = crowded_until_.load(std::memory_order_relaxed), period = period_.load(std::memory_order_relaxed);
  if (time < until) return;
  const bool still = time - until < period, often = time - before < kTogether || lost > kTogether;
  if (!still && !often) return;
  const Time next = still ? std::min(2 * period, kLongestPeriod) : kFirstPeriod;
  period_.store(next, std::memory_order_relaxed);
  crowded_until_.store(time + next, std::memory_order_relaxed);
}

}  // namespace lockstep
