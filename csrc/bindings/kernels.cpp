#include "bindings/kernels.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "bindings/arrays.hpp"
#include "block/forward.hpp"
#include "simd/isa.hpp"

namespace looped {
namespace {

using block::Activation, block::Inject, block::Rows;

// A matrix in the engine's layout: rows with room for a panel beyond the width, which kernels may write to.
template <class T>
struct Buffer {
    Buffer(size_t n_rows, size_t width) : n_rows(n_rows), matrix(n_rows, width) {
        std::ranges::fill(matrix.memory.span(), std::numeric_limits<T>::quiet_NaN());  // what is not written shows
    }

    Rows<T> rows() const { return matrix.rows(n_rows); }

    size_t n_rows;
    block::Matrix<T> matrix;
};

template <class T>
std::unique_ptr<Buffer<T>> buffer_of(const py::array_t<T, py::array::c_style>& array) {
    if (array.ndim() != 2)
        refuse("kernels.matrix: values must be an array [rows, width], got " + std::to_string(array.ndim()) + " dimensions");
    auto buffer = std::make_unique<Buffer<T>>(size_t(array.shape(0)), size_t(array.shape(1)));
    for (size_t i = 0; i < buffer->n_rows; ++i) std::copy_n(array.data(py::ssize_t(i), 0), buffer->matrix.width, buffer->rows().row(i));
    return buffer;
}

template <class T>
void check_shape(const std::string& name, const Buffer<T>& buffer, size_t n_rows, size_t width) {
    if (buffer.n_rows == n_rows && buffer.matrix.width == width) return;
    refuse(name + " must be [" + std::to_string(n_rows) + ", " + std::to_string(width) + "], got [" + std::to_string(buffer.n_rows) +
           ", " + std::to_string(buffer.matrix.width) + "]");
}

template <class T>
std::span<const T> vector_of(const py::object& values, const std::string& name, size_t n) {
    return values.is_none() ? std::span<const T>{} : view<T>(values, name, {py::ssize_t(n)});
}

template <class T>
block::PackedMatrix<T> pack(const py::array_t<T, py::array::c_style>& weight, const py::object& bias) {
    if (weight.ndim() != 2) refuse("kernels.pack: weight must be an array [n_out, n_in]");
    const size_t n_out = size_t(weight.shape(0)), n_in = size_t(weight.shape(1));
    return block::pack<T>({.weight = {weight.data(), n_out * n_in},
                           .bias = vector_of<T>(bias, "kernels.pack: bias", n_out),
                           .n_in = n_in,
                           .n_out = n_out,
                           .gain = {},
                           .shift = {}},
                          simd::kernels<T>().panel);
}

template <class T>
void product(const Buffer<T>& a, const block::PackedMatrix<T>& w, const Buffer<T>& out, const std::string& activation,
             bool adds_to_out) {
    const std::pair<const char*, Activation> known[] = {
        {"none", Activation::none}, {"relu", Activation::relu}, {"gelu_tanh", Activation::gelu_tanh}, {"gelu", Activation::gelu}};
    const auto* found = std::ranges::find(known, activation, [](const auto& entry) { return std::string(entry.first); });
    if (found == std::end(known)) refuse("kernels.product: activation='" + activation + "' is not one of none, relu, gelu_tanh, gelu");
    if (adds_to_out && found->second != Activation::none) refuse("kernels.product: adds_to_out goes with activation='none'");
    check_shape("kernels.product: a", a, a.n_rows, w.n_in);
    check_shape("kernels.product: out", out, a.n_rows, w.n_out);
    simd::kernels<T>().product({.a = a.rows(),
                                .panels = w.panels.data(),
                                .bias = w.bias.data(),
                                .n_columns = w.n_out,
                                .out = out.rows(),
                                .adds_to_out = adds_to_out,
                                .activation = found->second});
}

template <class T>
void attend(const Buffer<T>& qkv, const Buffer<T>& out, const Buffer<T>& keys, const Buffer<T>& scores, size_t n_heads, size_t first,
            bool is_causal, std::optional<size_t> end) {
    const block::Kernels<T>& kernels = simd::kernels<T>();
    const size_t n_tokens = qkv.n_rows, width = out.matrix.width,
                 n_keys = (n_tokens + kernels.panel - 1) / kernels.panel * kernels.panel;
    if (!n_heads || width % n_heads) refuse("kernels.attend: the width of out must divide by n_heads");
    if (first > n_tokens) refuse("kernels.attend: first must lie in 0 .. " + std::to_string(n_tokens));
    if (end && (*end < first || *end > n_tokens)) {
        refuse("kernels.attend: end must lie in first .. " + std::to_string(n_tokens) + ", got " + std::to_string(*end));
    }
    check_shape("kernels.attend: qkv", qkv, n_tokens, 3 * width);
    check_shape("kernels.attend: out", out, n_tokens, width);
    check_shape("kernels.attend: keys", keys, width / n_heads, n_keys);
    check_shape("kernels.attend: scores", scores, kernels.tile_rows, n_keys);
    kernels.attend({.qkv = qkv.rows(),
                    .first = first,
                    .end = end.value_or(n_tokens),
                    .n_heads = n_heads,
                    .head_dim = width / n_heads,
                    .is_causal = is_causal,
                    .out = out.rows(),
                    .keys = keys.rows(),
                    .scores = scores.rows()});
}

template <class T>
void normalize(const Buffer<T>& x, const Buffer<T>& out, double eps, const py::object& gain, const py::object& shift,
               const std::string& norm) {
    if (norm != "layernorm" && norm != "rms") refuse("kernels.normalize: norm='" + norm + "' is not one of layernorm, rms");
    const bool has_shift = norm == "layernorm";
    if (has_shift ? gain.is_none() != shift.is_none() : !shift.is_none()) {
        refuse(has_shift ? "kernels.normalize: gain and shift go together" : "kernels.normalize: norm='rms' has no shift");
    }
    check_shape("kernels.normalize: out", out, x.n_rows, x.matrix.width);
    simd::kernels<T>().normalize(has_shift ? block::Norm::layernorm : block::Norm::rms, x.rows(), out.rows(), T(eps),
                                 vector_of<T>(gain, "kernels.normalize: gain", x.matrix.width).data(),
                                 vector_of<T>(shift, "kernels.normalize: shift", x.matrix.width).data());
}

template <class T>
void inject(const std::string& how, const Buffer<T>& state, const Buffer<T>& signal, const Buffer<T>* positions, const Buffer<T>& out) {
    const std::pair<const char*, Inject> known[] = {{"add", Inject::add}, {"mul", Inject::mul}, {"none", Inject::none}};
    const auto* found = std::ranges::find(known, how, [](const auto& entry) { return std::string(entry.first); });
    if (found == std::end(known)) refuse("kernels.inject: how='" + how + "' is not one of add, mul, none");
    const size_t n_rows = state.n_rows, width = state.matrix.width;
    check_shape("kernels.inject: signal", signal, n_rows, width);
    check_shape("kernels.inject: out", out, n_rows, width);
    if (positions) check_shape("kernels.inject: positions", *positions, n_rows, width);
    simd::kernels<T>().inject(found->second, state.rows(), signal.rows(),
                              positions ? Rows<const T>(positions->rows()) : Rows<const T>{}, out.rows());
}

template <class T>
std::pair<py::array_t<double>, py::array_t<double>> squares(const Buffer<T>& a, const Buffer<T>& b) {
    check_shape("kernels.squares: b", b, a.n_rows, a.matrix.width);
    py::array_t<double> of_difference(py::ssize_t(a.n_rows)), of_a(py::ssize_t(a.n_rows));
    simd::kernels<T>().squares(a.rows(), b.rows(), of_difference.mutable_data(), of_a.mutable_data());
    return {of_difference, of_a};
}

template <class T>
void add_kernels_of(py::module_& module, const std::string& suffix) {
    using Packed = block::PackedMatrix<T>;
    py::class_<Buffer<T>>(module, ("Matrix" + suffix).c_str(), "Rows in the engine's layout.")
        .def(py::init<size_t, size_t>(), py::arg("n_rows"), py::arg("width"))
        .def_property_readonly("array", [](const py::object& self) {
            const auto& buffer = self.cast<const Buffer<T>&>();
            const auto stride = py::ssize_t(buffer.matrix.stride * sizeof(T));
            return py::array_t<T>({py::ssize_t(buffer.n_rows), py::ssize_t(buffer.matrix.width)}, {stride, py::ssize_t(sizeof(T))},
                                  buffer.matrix.memory.data(), self);
        });
    py::class_<Packed>(module, ("Packed" + suffix).c_str(), "A weight in panels, with its bias.")
        .def_readonly("n_in", &Packed::n_in)
        .def_readonly("n_out", &Packed::n_out);
    module.def("matrix", &buffer_of<T>, py::arg("values").noconvert());
    module.def("pack", &pack<T>, py::arg("weight").noconvert(), py::arg("bias") = py::none());
    module.def("product", &product<T>, py::arg("a"), py::arg("w"), py::arg("out"), py::arg("activation") = "none",
               py::arg("adds_to_out") = false);
    module.def("attend", &attend<T>, py::arg("qkv"), py::arg("out"), py::arg("keys"), py::arg("scores"), py::arg("n_heads"),
               py::arg("first") = 0, py::arg("is_causal") = true, py::arg("end") = py::none());
    module.def("normalize", &normalize<T>, py::arg("x"), py::arg("out"), py::arg("eps"), py::arg("gain") = py::none(),
               py::arg("shift") = py::none(), py::arg("norm") = "layernorm");
    module.def("inject", &inject<T>, py::arg("how"), py::arg("state"), py::arg("signal"), py::arg("positions"), py::arg("out"));
    module.def("squares", &squares<T>, py::arg("a"), py::arg("b"));
}

}  // namespace

void add_kernels(py::module_ module) {
    add_kernels_of<float>(module, "32");
    add_kernels_of<double>(module, "64");
    module.def(
        "tile",
        [](bool is_double) {
            return is_double ? std::pair{simd::kernels<double>().tile_rows, simd::kernels<double>().panel}
                             : std::pair{simd::kernels<float>().tile_rows, simd::kernels<float>().panel};
        },
        py::arg("double") = false);
}

}  // namespace looped
