// looped._engine.kernels: the kernels one by one, for tests and benchmarks.
#pragma once

#include <pybind11/pybind11.h>

namespace looped {

void add_kernels(pybind11::module_ module);

}  // namespace looped
