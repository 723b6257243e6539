// What is asked of the library as a whole: the instruction set that it was compiled for, and its threads.
#include <string>

#include <torch/library.h>

#include "packed.h"
#include "team.h"

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  m.def("isa() -> str", []() { return std::string(lockstep::kIsa); });
  m.def("tiles_agree() -> bool", &lockstep::tiles_agree);
  m.def("rest() -> ()", &lockstep::Team::rest);
}
