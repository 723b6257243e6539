// The instruction set that these operators were compiled for.
#include <string>

#include <torch/library.h>

#include "packed.h"

TORCH_LIBRARY_FRAGMENT(lockstep, m) {
  m.def("isa() -> str", []() { return std::string(lockstep::kIsa); });
  m.def("tiles_agree() -> bool", &lockstep::tiles_agree);
}
