#include "bindings/packing.hpp"

#include <pybind11/stl.h>

#include "batch/pack.hpp"
#include "bindings/arrays.hpp"

namespace looped {
namespace {

using batch::Group;

py::array_t<std::int32_t> order(const Group& group) {
    return py::array_t<std::int32_t>(py::ssize_t(group.order.size()), group.order.data());
}

// [n, 2]: tile and row of every prompt of the order.
py::array_t<std::int64_t> places(const Group& group) {
    py::array_t<std::int64_t> all({py::ssize_t(group.order.size()), py::ssize_t(2)});
    auto view = all.mutable_unchecked<2>();
    for (size_t k = 0; k < group.order.size(); ++k) {
        const batch::Place place = group.place(k);
        view(py::ssize_t(k), 0) = place.tile;
        view(py::ssize_t(k), 1) = place.row;
    }
    return all;
}

std::vector<Group> pack(const py::array& lengths, std::int64_t tile_rows) {
    return batch::pack(view<std::int64_t>(lengths, "pack: lengths", {lengths.size()}), tile_rows);
}

}  // namespace

void add_packing(py::module_ module) {
    py::class_<Group>(module, "Group", "Prompts that take equally many rows of a GPU kernel's tiles.")
        .def_readonly("slot_rows", &Group::slot_rows)
        .def_property_readonly("order", &order)
        .def_property_readonly("places", &places);
    module.def("pack", &pack, py::arg("lengths"), py::arg("tile_rows"),
               "How ragged prompts share tiles: every prompt in one group, groups of most rows first.");
}

}  // namespace looped
