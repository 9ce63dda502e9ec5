// A batch's arrays, as Python gives them and as the loop takes them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "bindings/arrays.hpp"
#include "loop/memory.hpp"

namespace looped {

// The arrays of a run by name: copies of the caller's where it gave some, else filled with what a loop starts from.
class Arrays {
public:
    Arrays(const py::object& given, bool resumes) : given_(given), resumes_(resumes) {}

    bool is_given(const char* name) const { return !given_.is_none() && py::cast<py::dict>(given_).contains(name); }

    // `is_counter`: belongs to one exit rule, and is fresh under another.
    template <class T>
    std::span<T> make(const char* name, const std::vector<py::ssize_t>& shape, T fresh, bool is_counter = true) {
        py::array_t<T> array(shape);
        const std::span<T> values(array.mutable_data(), size_t(array.size()));
        if (is_given(name) && (resumes_ || !is_counter)) {
            std::ranges::copy(view<T>(py::cast<py::dict>(given_)[name], std::string("run: memory['") + name + "']", shape),
                              values.begin());
        } else {
            std::ranges::fill(values, fresh);
        }
        made[name] = array;
        return values;
    }

    py::dict made;

private:
    py::object given_;
    bool resumes_;
};

// Tokens of each of B prompts in L rows, checked. Throws ValueError that names the prompt.
std::vector<std::int64_t> lengths_of(const std::string& call, const py::object& lengths, py::ssize_t B, py::ssize_t L,
                                     const block::Shape& shape);

// Views of the caller's arrays, and `arrays` for what the run writes. `own_lengths` has to outlive what is returned. Throws ValueError
// for an array that does not fit, naming it.
template <class T>
loop::BatchMemory<T> batch_of(const block::Shape& shape, const py::object& signal, const py::object& state, const py::object& lengths,
                              const loop::Spec& spec, Arrays& arrays, std::vector<std::int64_t>& own_lengths);

}  // namespace looped
