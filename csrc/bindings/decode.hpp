// looped._engine.Session: decoding (decode/session.hpp).
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "block/weights.hpp"

namespace looped {

// An empty session of a model. Raises ValueError for a policy or gate that is none.
template <class T>
pybind11::object make_session(std::shared_ptr<const block::Model<T>> model, const std::string& policy, std::size_t period,
                              std::size_t n_rows, const pybind11::object& gate_weight, const pybind11::object& gate_bias);

void add_decode(pybind11::module_& module);

}  // namespace looped
