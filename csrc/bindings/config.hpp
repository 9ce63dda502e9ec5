// What a model is and how it is looped, from the dictionaries that Python has them in.
#pragma once

#include <pybind11/pybind11.h>

#include "block/weights.hpp"
#include "loop/spec.hpp"

namespace looped {

// Of `LoopedConfig.to_dict`. Throws ValueError for a name that is not known, or a size that the engine cannot count with.
block::Shape shape_of(const pybind11::dict& config);

// Of `cpu.spec_values`. Throws ValueError for what does not go together.
loop::Spec spec_of(const pybind11::dict& values, bool is_causal);

}  // namespace looped
