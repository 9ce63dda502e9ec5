// What the processor could compute at best: the ceiling that the engine's figures are held against.
#pragma once

#include <pybind11/pybind11.h>

namespace looped {

void add_fma_peak(pybind11::module_& module);

}  // namespace looped
