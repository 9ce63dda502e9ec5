// NumPy arrays as spans, and how a call is refused.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace looped {

namespace py = pybind11;
using std::size_t;

[[noreturn]] inline void refuse(const std::string& message) { throw py::value_error(message); }

inline std::string shape_text(const std::vector<py::ssize_t>& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

// A caller's array as it is: C-contiguous, of this type and shape.
template <class T>
std::span<const T> view(const py::handle& object, const std::string& name, const std::vector<py::ssize_t>& shape) {
    if (!py::isinstance<py::array>(object))
        throw py::type_error(name + " must be a NumPy array, got " + std::string(py::str(py::type::of(object))));
    const auto array = py::reinterpret_borrow<py::array>(object);
    const std::vector<py::ssize_t> got(array.shape(), array.shape() + array.ndim());
    if (!py::dtype::of<T>().equal(array.dtype()) || got != shape || !(array.flags() & py::array::c_style)) {
        refuse(name + " must be C-contiguous " + std::string(py::str(py::dtype::of<T>())) + " " + shape_text(shape) + ", got " +
               std::string(py::str(array.dtype())) + " " + shape_text(got) +
               (array.flags() & py::array::c_style ? "" : ", not contiguous"));
    }
    if (reinterpret_cast<std::uintptr_t>(array.data()) % alignof(T)) refuse(name + " must be aligned; copy it first");
    return {static_cast<const T*>(array.data()), size_t(array.size())};
}

}  // namespace looped
