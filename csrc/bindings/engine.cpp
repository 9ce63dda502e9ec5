#include "bindings/engine.hpp"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <variant>

#include "batch/run.hpp"
#include "bindings/batch_memory.hpp"
#include "bindings/config.hpp"
#include "bindings/decode.hpp"

namespace looped {
namespace {

// Calls back to Python while workers run: signals, and the caller's own progress function. False once one has raised.
std::function<bool(size_t)> watcher(const py::object& progress) {
    return [&progress](size_t n_finished) {
        const py::gil_scoped_acquire acquire;
        if (PyErr_CheckSignals() != 0) return false;
        if (progress.is_none()) return true;
        try {
            progress(n_finished);
            return true;
        } catch (py::error_already_set& error) {
            error.restore();  // raised again once the workers have left
            return false;
        }
    };
}

// Runs `job` without the GIL; what it throws, or the watcher raised, comes back as a Python error. Returns false, and takes the
// error, where that was a KeyboardInterrupt.
template <class Job>
bool without_gil(const std::string& call, const Job& job) {
    bool is_complete = false;
    try {
        const py::gil_scoped_release release;
        is_complete = job();
    } catch (const batch::PromptError& error) {
        const std::string what = call + ": prompt " + std::to_string(error.prompt) + ": " + error.what();
        if (!error.lacks_memory) throw std::runtime_error(what);
        PyErr_SetString(PyExc_MemoryError, what.c_str());
        throw py::error_already_set();
    }
    if (is_complete && PyErr_CheckSignals() == 0) return true;  // a signal since the watcher looked last, too
    if (!PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) throw py::error_already_set();
    PyErr_Clear();
    return false;
}

template <class T>
class TypedEngine {
public:
    TypedEngine(const py::dict& config, const py::dict& weights)
        : model_(shape_of(config), [&](const std::string& name, size_t rows, size_t columns) {
              if (!weights.contains(name)) refuse("Engine: weights hold no '" + name + "'");
              std::vector<py::ssize_t> shape{py::ssize_t(rows)};
              const bool is_vector = columns == 1 && py::cast<py::array>(weights[name.c_str()]).ndim() == 1;
              if (!is_vector) shape.push_back(py::ssize_t(columns));
              return view<T>(weights[name.c_str()], "Engine: weights['" + name + "']", shape);
          }) {}

    py::array embed(const py::object& prompts, const py::object& lengths, size_t n_threads) const;
    py::dict run(const py::object& signal, const py::object& state, const py::object& lengths, const py::dict& spec_values,
                 const py::object& memory, size_t n_threads, const py::object& progress) const;

    const block::Model<T>& model() const { return model_; }

private:
    block::Model<T> model_;
};

template <class T>
py::array TypedEngine<T>::embed(const py::object& prompts, const py::object& lengths, size_t n_threads) const {
    using block::InputKind;
    const block::Shape& shape = model_.shape;
    const bool is_tokens = shape.input_kind == InputKind::tokens;
    const auto width = py::ssize_t(shape.input_kind == InputKind::features ? shape.n_dims : shape.d_model);
    if (n_threads < 1) refuse("embed: n_threads must be at least 1");
    if (!py::isinstance<py::array>(prompts) || py::cast<py::array>(prompts).ndim() != (is_tokens ? 2 : 3)) {
        refuse("embed: prompts must be an array [B, T" + (is_tokens ? std::string("]") : ", " + std::to_string(width) + "]"));
    }
    const py::ssize_t B = py::cast<py::array>(prompts).shape(0), L = py::cast<py::array>(prompts).shape(1);
    const std::vector<std::int64_t> own_lengths = lengths_of("embed", lengths, B, L, shape);
    batch::RawPrompts<T> raw{.n_tokens = size_t(L), .lengths = own_lengths, .features = {}, .ids = {}};
    if (is_tokens) {
        raw.ids = view<std::int64_t>(prompts, "embed: prompts", {B, L});
        for (size_t i = 0; i < own_lengths.size(); ++i) {
            for (size_t j = 0; j < size_t(own_lengths[i]); ++j) {
                const std::int64_t id = raw.ids[i * size_t(L) + j];
                if (id >= 0 && size_t(id) < shape.vocab_size) continue;
                refuse("embed: prompt " + std::to_string(i) + " holds token id " + std::to_string(id) + " at position " +
                       std::to_string(j) + ", but ids must lie in 0 .. " + std::to_string(shape.vocab_size - 1));
            }
        }
    } else {
        raw.features = view<T>(prompts, "embed: prompts", {B, L, width});
    }
    py::array_t<T> signal({B, L, py::ssize_t(shape.d_model)});
    const std::span<T> values(signal.mutable_data(), size_t(signal.size()));
    std::ranges::fill(values, T(0));
    const py::object none = py::none();
    const bool is_complete = without_gil("embed", [&] {
        return batch::embed<T>(model_, raw, values, {.n_threads = n_threads, .keeps_going = watcher(none)});
    });
    if (is_complete) return signal;
    PyErr_SetNone(PyExc_KeyboardInterrupt);
    throw py::error_already_set();
}

template <class T>
py::dict TypedEngine<T>::run(const py::object& signal, const py::object& state, const py::object& lengths, const py::dict& spec_values,
                             const py::object& memory, size_t n_threads, const py::object& progress) const {
    const loop::Spec spec = spec_of(spec_values, model_.shape.is_causal);
    if (n_threads < 1) refuse("run: n_threads must be at least 1");
    const bool resumes = !memory.is_none() && py::cast<py::dict>(memory).contains("passes");
    Arrays arrays(memory, resumes);
    std::vector<std::int64_t> own_lengths;
    const loop::BatchMemory<T> batch = batch_of<T>(model_.shape, signal, state, lengths, spec, arrays, own_lengths);

    const std::vector<std::int64_t> first_t(batch.t.begin(), batch.t.end());
    const bool is_complete = without_gil("run", [&] {
        return batch::run<T>(model_, spec, batch, {.n_threads = n_threads, .keeps_going = watcher(progress)});
    });

    const bool has_each_run = std::ranges::equal(first_t, batch.t, [](std::int64_t before, std::int64_t now) { return before < now; });
    if (spec.is_plain() && has_each_run) arrays.made.attr("pop")("Y");  // y itself
    py::dict result;
    for (const char* name : {"y", "prediction", "predictions", "finished"}) {
        if (!arrays.made.contains(name)) continue;
        result[name] = arrays.made[name];
        arrays.made.attr("pop")(name);
    }
    result["memory"] = arrays.made;
    result["interrupted"] = !is_complete;
    return result;
}

class Engine {
public:
    Engine(const py::dict& config, const py::dict& weights) {
        constexpr const char* first = "core.0.attn.qkv.weight";
        if (!weights.contains(first) || !py::isinstance<py::array>(weights[first])) {
            refuse(std::string("Engine: weights hold no array '") + first + "'");
        }
        const py::dtype dtype = py::cast<py::array>(weights[first]).dtype();
        if (dtype.equal(py::dtype::of<float>())) {
            typed_ = std::make_shared<const TypedEngine<float>>(config, weights);
        } else if (dtype.equal(py::dtype::of<double>())) {
            typed_ = std::make_shared<const TypedEngine<double>>(config, weights);
        } else {
            refuse("Engine: weights are " + std::string(py::str(dtype)) + "; float32 and float64 are allowed");
        }
    }

    py::dict run(const py::object& signal, const py::object& state, const py::object& lengths, const py::dict& spec,
                 const py::object& memory, size_t n_threads, const py::object& progress) const {
        return std::visit([&](const auto& engine) { return engine->run(signal, state, lengths, spec, memory, n_threads, progress); },
                          typed_);
    }

    py::array embed(const py::object& prompts, const py::object& lengths, size_t n_threads) const {
        return std::visit([&](const auto& engine) { return engine->embed(prompts, lengths, n_threads); }, typed_);
    }

    py::object session(const std::string& policy, size_t period, size_t n_rows, const py::object& gate_weight,
                       const py::object& gate_bias) const {
        return std::visit(
            [&]<class T>(const std::shared_ptr<const TypedEngine<T>>& engine) {
                return make_session(std::shared_ptr<const block::Model<T>>(engine, &engine->model()), policy, period, n_rows,
                                    gate_weight, gate_bias);
            },
            typed_);
    }

    std::string dtype() const { return typed_.index() == 0 ? "float32" : "float64"; }

private:
    std::variant<std::shared_ptr<const TypedEngine<float>>, std::shared_ptr<const TypedEngine<double>>> typed_;
};

}  // namespace

void add_engine(py::module_& module) {
    py::class_<Engine>(module, "Engine", "A model's weights, packed. Neither changed nor kept: pack again after an edit.")
        .def(py::init<const py::dict&, const py::dict&>(), py::arg("config"), py::arg("weights"))
        .def_property_readonly("dtype", &Engine::dtype)
        .def("session", &Engine::session, py::arg("policy") = "per_loop", py::arg("period") = 1, py::arg("n_rows") = 0,
             py::arg("gate_weight") = py::none(), py::arg("gate_bias") = py::none())
        .def("embed", &Engine::embed, py::arg("prompts"), py::arg("lengths") = py::none(), py::arg("n_threads") = 1)
        .def("run", &Engine::run, py::arg("signal"), py::arg("state"), py::arg("lengths"), py::arg("spec"),
             py::arg("memory") = py::none(), py::arg("n_threads") = 1, py::arg("progress") = py::none());
}

}  // namespace looped
