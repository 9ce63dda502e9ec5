// looped._engine.read_bandwidth: the memory bandwidth that decoding is held against.
#pragma once

#include <pybind11/pybind11.h>

namespace looped {

void add_bandwidth(pybind11::module_& module);

}  // namespace looped
