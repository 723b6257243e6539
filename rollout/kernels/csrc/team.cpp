#include "team.h"

#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

// Of torch's OpenMP, where it has one.
extern "C" {
[[gnu::weak]] int omp_get_proc_bind();
[[gnu::weak]] int omp_get_num_places();
[[gnu::weak]] int omp_get_place_num_procs(int place);
[[gnu::weak]] void omp_get_place_proc_ids(int place, int* ids);
}

namespace lockstep {
namespace {

std::atomic<Team*> team_of_process{nullptr};

// `OMP_PROC_BIND` and its like bind the thread that loads OpenMP to one core, which threads that it starts inherit.
// Helpers may run on any core that OpenMP's threads are bound to.
void use_cores_of_openmp() {
#if defined(__linux__)
  if (omp_get_proc_bind == nullptr || omp_get_num_places == nullptr || omp_get_proc_bind() == 0) return;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (int place = 0; place < omp_get_num_places(); ++place) {
    std::vector<int> ids(omp_get_place_num_procs(place));
    omp_get_place_proc_ids(place, ids.data());
    for (const int id : ids) CPU_SET(id, &cores);
  }
  if (CPU_COUNT(&cores) > 0) sched_setaffinity(0, sizeof cores, &cores);
#endif
}

}  // namespace

struct alignas(64) Team::Helper {
  explicit Helper(size_t index) : index(index) {}

  // Changes with every call; odd while the helper sleeps.
  std::atomic<uint32_t> call{0};
  std::atomic<bool> rests{false};
  const size_t index;

  void wake() {
    rests.store(false, std::memory_order_relaxed);
    const uint32_t before = call.load(std::memory_order_relaxed) | 1;
    if (call.exchange(before + 1) == before) wake_all(call);
  }

  void wait_for_other_than(uint32_t seen, Patience& patience) {
    const auto is_called = [&] { return call.load(std::memory_order_acquire) != seen; };
    const auto is_over = [&] { return is_called() || rests.load(std::memory_order_relaxed); };
    if (patience.look(is_over, false) && is_called()) return;
    uint32_t expected = seen;
    if (!call.compare_exchange_strong(expected, seen + 1)) return;
    while (call.load(std::memory_order_acquire) == seen + 1) sleep_while(call, seen + 1);
  }
};

Team& Team::of_process() {
  Team* team = team_of_process.load(std::memory_order_acquire);
  if (team != nullptr) return *team;
  // Never deleted: helpers sleep on it until the process ends.
  auto* made = new Team;
  if (!team_of_process.compare_exchange_strong(team, made)) {
    delete made;
    return *team;
  }
  // The helpers of the parent are not in the child.
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, [] { team_of_process.store(nullptr); }); });
  return *made;
}

void Team::rest() {
  Team* team = team_of_process.load(std::memory_order_acquire);
  if (team == nullptr) return;
  const std::unique_lock<std::mutex> calling(team->caller_, std::try_to_lock);
  if (!calling.owns_lock()) return;
  for (const auto& helper : team->helpers_) helper->rests.store(true, std::memory_order_relaxed);
}

void Team::run_body(int threads, Body body, const void* place) {
  if (threads <= 1) return body(place);
  const std::unique_lock<std::mutex> calling(caller_, std::try_to_lock);
  if (!calling.owns_lock()) return body(place);
  wanted_ = static_cast<size_t>(threads - 1);
  while (helpers_.size() < wanted_) start_helper();
  body_ = body;
  place_ = place;
  inside_.add(kOpen);
  for (size_t i = 0; i < wanted_; ++i) helpers_[i]->wake();
  try_body();
  inside_.subtract(kOpen);
  inside_.wait_for_zero(patience_);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Team::start_helper() {
  auto helper = std::make_unique<Helper>(helpers_.size());
  helpers_.reserve(helpers_.size() + 1);
  try {
    std::thread([this, me = helper.get()] { help(*me); }).detach();
  } catch (const std::system_error& error) {
    throw std::runtime_error("cannot start a thread for the operators, of which --num-threads is the number: " +
                             std::string(error.what()));
  }
  helpers_.push_back(std::move(helper));
}

void Team::help(Helper& me) {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "lockstep-helper");
#endif
  use_cores_of_openmp();
  Account account;
  for (uint32_t seen = 0;;) {
    account.tell(patience_);
    me.wait_for_other_than(seen, patience_);
    seen = me.call.load(std::memory_order_acquire);
    if (inside_.add(1) & kOpen && me.index < wanted_) try_body();
    inside_.subtract(1);
  }
}

void Team::try_body() {
  try {
    body_(place_);
  } catch (...) {
    const std::lock_guard<std::mutex> guard(failure_);
    if (!error_) error_ = std::current_exception();
  }
}

}  // namespace lockstep
