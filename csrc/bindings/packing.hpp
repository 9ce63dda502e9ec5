// batch::pack for Python.
#pragma once

#include <pybind11/pybind11.h>

namespace looped {

void add_packing(pybind11::module_ module);

}  // namespace looped
