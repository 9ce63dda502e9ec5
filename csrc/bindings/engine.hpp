// looped._engine.Engine: a model packed, and batches of prompts looped through it.
#pragma once

#include <pybind11/pybind11.h>

namespace looped {

void add_engine(pybind11::module_& module);

}  // namespace looped
