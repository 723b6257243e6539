// A recorded forward: operator calls one after the other, played again on other inputs by one call, which holds no lock
// of Python's.
//
// A step of a small model spends more time between operators than in them, in Python.  A tape holds no more than what
// was called and with what: inputs and results by number, everything else as it was.
#include <chrono>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/custom_class.h>
#include <torch/library.h>

namespace lockstep {
namespace {

struct Tape : torch::CustomClassHolder {
  // A slot is a value: first the inputs, then every result.
  struct Argument {
    int64_t position, slot;
  };
  struct Call {
    c10::OperatorHandle op;
    std::vector<c10::IValue> constants;  // one an argument; None where a slot goes
    std::vector<Argument> slots;
    int64_t first_result, num_results;
    std::vector<int64_t> last_used;  // slots that no later call needs
  };

  explicit Tape(int64_t num_inputs) : num_inputs(num_inputs), num_slots(num_inputs) {}

  // Arguments follow; `seal` ends the list of calls.
  void call(const std::string& name, const std::string& overload) {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
    const int64_t results = static_cast<int64_t>(op.schema().returns().size());
    calls.push_back({op, {}, {}, num_slots, results, {}});
    num_slots += results;
  }
  void slot(int64_t number) {
    TORCH_CHECK(0 <= number && number < calls.back().first_result, "slot ", number, " has no value yet");
    calls.back().slots.push_back({static_cast<int64_t>(calls.back().constants.size()), number});
    calls.back().constants.emplace_back();
  }
  void constant(const c10::IValue& value) { calls.back().constants.push_back(value); }
  // A list of integers: a single value of several types cannot be passed as one.
  void integers(std::vector<int64_t> values) { calls.back().constants.emplace_back(c10::List<int64_t>(values)); }

  void seal(int64_t result_slot) {
    result = result_slot;
    std::vector<bool> seen(num_slots, false);
    seen[result] = true;
    for (auto it = calls.rbegin(); it != calls.rend(); ++it) {
      TORCH_CHECK(it->constants.size() == it->op.schema().arguments().size(), it->op.schema().name(),
                  ": a recorded call has every argument");
      const auto note = [&](int64_t number) {
        if (!seen[number] && number >= num_inputs) it->last_used.push_back(number);
        seen[number] = true;
      };
      for (const Argument& argument : it->slots) note(argument.slot);
      for (int64_t i = 0; i < it->num_results; ++i) note(it->first_result + i);
    }
  }

  at::Tensor play(const std::vector<at::Tensor>& inputs) const { return play(inputs, nullptr); }

  // The same, and the nanoseconds from each call to its return.
  std::tuple<at::Tensor, std::vector<int64_t>> play_clocked(const std::vector<at::Tensor>& inputs) const {
    std::vector<int64_t> nanoseconds;
    nanoseconds.reserve(calls.size());
    at::Tensor played = play(inputs, &nanoseconds);
    return {std::move(played), std::move(nanoseconds)};
  }

  at::Tensor play(const std::vector<at::Tensor>& inputs, std::vector<int64_t>* nanoseconds) const {
    using Clock = std::chrono::steady_clock;
    TORCH_CHECK(static_cast<int64_t>(inputs.size()) == num_inputs && result >= 0, "the tape takes ", num_inputs, " inputs");
    std::vector<c10::IValue> values(num_slots);
    for (int64_t i = 0; i < num_inputs; ++i) values[i] = inputs[i];
    torch::jit::Stack stack;
    for (const Call& one : calls) {
      stack.assign(one.constants.begin(), one.constants.end());
      for (const Argument& argument : one.slots) stack[argument.position] = values[argument.slot];
      const Clock::time_point start = nanoseconds != nullptr ? Clock::now() : Clock::time_point();
      one.op.callBoxed(stack);
      if (nanoseconds != nullptr) nanoseconds->push_back(std::chrono::nanoseconds(Clock::now() - start).count());
      for (int64_t i = 0; i < one.num_results; ++i) values[one.first_result + i] = std::move(stack[i]);
      for (const int64_t number : one.last_used) values[number] = c10::IValue();
    }
    return values[result].toTensor();
  }

  int64_t num_inputs, num_slots, result = -1;
  std::vector<Call> calls;
};

}  // namespace
}  // namespace lockstep

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  using lockstep::Tape;
  m.class_<Tape>("Tape")
      .def(torch::init<int64_t>())
      .def("call", &Tape::call)
      .def("slot", &Tape::slot)
      .def("constant", [](const c10::intrusive_ptr<Tape>& self, const c10::IValue& value) { self->constant(value); })
      .def("integers", &Tape::integers)
      .def("seal", &Tape::seal)
      .def("play", [](const c10::intrusive_ptr<Tape>& self, std::vector<at::Tensor> inputs) { return self->play(inputs); })
      .def("play_clocked", &Tape::play_clocked);
}
