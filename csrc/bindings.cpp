// The Python module looped._engine. This file and those of bindings/ are the only ones that know Python and handle raw addresses.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <thread>
#include <variant>

#include "batch/run.hpp"
#include "bindings/arrays.hpp"
#include "bindings/bandwidth.hpp"
#include "bindings/decode.hpp"
#include "bindings/kernels.hpp"
#include "bindings/packing.hpp"
#include "block/fingerprint.hpp"
#include "simd/isa.hpp"

namespace looped {
namespace {

using block::Shape;
using block::StateInit;
using loop::BatchMemory;
using loop::Spec;

// A value of a dictionary by its name in a table of names.
template <class Value>
Value choice(const py::dict& values, const char* key, std::initializer_list<std::pair<const char*, Value>> table) {
    const auto name = values[key].cast<std::string>();
    std::string allowed;
    for (const auto& [known, value] : table) {
        if (name == known) return value;
        allowed += (allowed.empty() ? "" : ", ") + std::string(known);
    }
    refuse(std::string(key) + "='" + name + "' is not one of " + allowed);
}

Shape shape_of(const py::dict& config) {
    using block::Activation, block::Inject, block::InputKind, block::LoopNorm, block::Norm;
    const auto size = [&](const char* key) { return config[key].cast<size_t>(); };
    Shape shape;
    shape.d_model = size("d_model");
    shape.n_heads = size("n_heads");
    shape.head_dim = size("head_dim");
    shape.d_ff = size("d_ff");
    shape.n_prelude = size("n_prelude");
    shape.n_core = size("n_core");
    shape.n_coda = size("n_coda");
    shape.activation = choice<Activation>(config, "activation",
                                          {{"gelu_tanh", Activation::gelu_tanh},
                                           {"gelu", Activation::gelu},
                                           {"relu", Activation::relu},
                                           {"silu_gated", Activation::silu_gated}});
    shape.norm = choice<Norm>(config, "norm_kind", {{"layernorm", Norm::layernorm}, {"rms", Norm::rms}, {"none", Norm::none}});
    shape.norm_eps = config["norm_eps"].cast<double>();
    shape.has_bias = config["bias"].cast<bool>();
    shape.is_causal = choice<bool>(config, "mask_kind", {{"causal", true}, {"full", false}});
    shape.has_positions = choice<bool>(config, "pos_kind", {{"learned", true}, {"none", false}});
    shape.adds_positions_once = choice<bool>(config, "pos_when", {{"once", true}, {"each_loop", false}});
    shape.n_positions = shape.has_positions ? size("n_positions") : 0;
    shape.input_kind = choice<InputKind>(
        config, "input_kind", {{"features", InputKind::features}, {"tokens", InputKind::tokens}, {"states", InputKind::states}});
    if (shape.input_kind == InputKind::features) shape.n_dims = size("n_dims");
    if (shape.input_kind == InputKind::tokens) shape.vocab_size = size("vocab_size");
    shape.inject = choice<Inject>(config, "inject", {{"add", Inject::add}, {"mul", Inject::mul}, {"none", Inject::none}});
    shape.loop_norm = choice<LoopNorm>(config, "loop_norm",
                                       {{"each", LoopNorm::each}, {"once", LoopNorm::once}, {"none", LoopNorm::none}});
    shape.state_init = choice<StateInit>(
        config, "state_init",
        {{"zeros", StateInit::zeros}, {"ones", StateInit::ones}, {"embedding", StateInit::embedding}, {"given", StateInit::given}});
    const auto readout = config["readout"].cast<std::string>();
    shape.readout_width = readout == "scalar"       ? 1
                          : readout == "classes"    ? size("n_classes")
                          : readout == "vocabulary" ? size("vocab_size")
                                                    : 0;
    shape.readout_has_bias = readout != "vocabulary";
    shape.tie_readout = config["tie_readout"].cast<bool>();
    shape.read_stride = readout == "none" ? 1 : size("read_stride");
    if (!shape.d_model || !shape.n_heads || !shape.head_dim || !shape.d_ff || !shape.n_core || !shape.read_stride) {
        refuse("Engine: d_model, n_heads, head_dim, d_ff, n_core and read_stride must be at least 1");
    }
    constexpr size_t most = size_t(1) << 31;  // so that no product of two wraps
    for (size_t own : {shape.d_model, shape.n_heads, shape.head_dim, shape.d_ff, shape.n_positions, shape.n_dims, shape.vocab_size,
                       shape.readout_width, shape.read_stride, shape.attention_width()}) {
        if (own >= most) refuse("Engine: the config has a size of " + std::to_string(own) + "; all must be below 2^31");
    }
    return shape;
}

Spec spec_of(const py::dict& values, bool is_causal) {
    using loop::OnStall, loop::Rule;
    Spec spec;
    const auto number = [&](const char* key) { return values[key].cast<std::int64_t>(); };
    spec.n_loops = number("n_loops");
    spec.rule = choice<Rule>(values, "rule",
                             {{"fixed", Rule::fixed},
                              {"exact", Rule::exact},
                              {"absolute", Rule::absolute},
                              {"relative", Rule::relative},
                              {"contraction", Rule::contraction},
                              {"readout", Rule::readout}});
    if (spec.rule != Rule::fixed && spec.rule != Rule::exact) spec.tol = values["tol"].cast<double>();
    if (spec.rule == Rule::contraction) spec.phi = values["phi"].cast<double>();
    if (spec.rule == Rule::readout) spec.patience = number("patience");
    spec.check_every = number("check_every");
    spec.min_loops = number("min_loops");
    spec.stall_window = number("stall_window");
    spec.is_prefix = choice<bool>(values, "scope", {{"prompt", false}, {"prefix", true}});
    spec.on_stall = choice<OnStall>(values, "on_stall",
                                    {{"ignore", OnStall::ignore}, {"exit", OnStall::exit}, {"damp", OnStall::damp}});
    spec.anderson_depth = values["depth"].cast<int>();
    spec.return_predictions = values["return_predictions"].cast<bool>();
    if (spec.n_loops < 0) refuse("run: n_loops must be 0 or more, got " + std::to_string(spec.n_loops));
    if (spec.check_every < 1 || spec.stall_window < 1 || spec.patience < 1) {
        refuse("run: check_every, stall_window and patience must be at least 1");
    }
    if (spec.anderson_depth < 0 || spec.anderson_depth > 3) refuse("run: depth must lie in 0 .. 3");
    if (!(spec.tol >= 0)) refuse("run: tol must be a number of at least 0");
    if (spec.rule == Rule::exact && spec.anderson_depth) refuse("run: rule='exact' is for programs, which are never accelerated");
    if (spec.is_prefix && (!spec.is_plain() || !is_causal)) {
        refuse("run: scope='prefix' needs a causal mask and plain iteration; drop depth and on_stall='damp', or use scope='prompt'");
    }
    return spec;
}

// Tokens of each prompt, checked. Throws ValueError that names the prompt.
std::vector<std::int64_t> lengths_of(const std::string& call, const py::object& lengths, py::ssize_t B, py::ssize_t L,
                                     const Shape& shape) {
    std::vector<std::int64_t> own(size_t(B), L);
    if (!lengths.is_none()) std::ranges::copy(view<std::int64_t>(lengths, call + ": lengths", {B}), own.begin());
    for (size_t i = 0; i < own.size(); ++i) {
        const std::string prompt = call + ": prompt " + std::to_string(i) + " has ";
        if (own[i] < 0 || own[i] > L) {
            refuse(prompt + "length " + std::to_string(own[i]) + ", which must lie in 0 .. " + std::to_string(L));
        }
        if (shape.has_positions && size_t(own[i]) > shape.n_positions) {
            refuse(prompt + std::to_string(own[i]) + " tokens but the model has " + std::to_string(shape.n_positions) +
                   " positions; shorten it or use a model with more positions");
        }
    }
    return own;
}

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
    BatchMemory<T> batch_of(const py::object& signal, const py::object& state, const py::object& lengths, const Spec& spec,
                            Arrays& arrays, std::vector<std::int64_t>& own_lengths) const;

    block::Model<T> model_;
};

template <class T>
py::array TypedEngine<T>::embed(const py::object& prompts, const py::object& lengths, size_t n_threads) const {
    using block::InputKind;
    const Shape& shape = model_.shape;
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
BatchMemory<T> TypedEngine<T>::batch_of(const py::object& signal, const py::object& state, const py::object& lengths, const Spec& spec,
                                        Arrays& arrays, std::vector<std::int64_t>& own_lengths) const {
    using std::int64_t, py::ssize_t;
    const Shape& shape = model_.shape;
    constexpr double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
    if (!py::isinstance<py::array>(signal) || py::cast<py::array>(signal).ndim() != 3) {
        refuse("run: signal must be an array [B, T, " + std::to_string(shape.d_model) + "]");
    }
    const ssize_t B = py::cast<py::array>(signal).shape(0), L = py::cast<py::array>(signal).shape(1), C = ssize_t(shape.d_model);
    if (L < 1) refuse("run: signal must hold at least one row a prompt, of padding if need be");

    BatchMemory<T> batch;
    batch.shape = shape;
    batch.n_prompts = size_t(B);
    batch.n_tokens = size_t(L);
    batch.signal = view<T>(signal, "run: signal", {B, L, C});
    const auto first_state = view<T>(state, "run: state", {B, L, C});
    own_lengths = lengths_of("run", lengths, B, L, shape);
    batch.lengths = own_lengths;

    batch.t = arrays.make<int64_t>("t", {B}, 0, false);
    batch.done = arrays.make<bool>("done", {B}, false, false);
    batch.status = arrays.make<int64_t>("status", {B}, 0, false);
    batch.residual = arrays.make<double>("residual", {B}, nan, false);
    if (!arrays.is_given("passes")) {  // new counters: only what has left the finite numbers stays finished
        for (size_t i = 0; i < batch.n_prompts; ++i) {
            batch.done[i] = batch.status[i] == int64_t(loop::Status::nonfinite);
            if (!batch.done[i]) batch.status[i] = int64_t(loop::Status::max_loops);
        }
    }
    const std::vector<ssize_t> units = spec.is_prefix ? std::vector<ssize_t>{B, L} : std::vector<ssize_t>{B};
    batch.passes = arrays.make<int64_t>("passes", units, 0);
    batch.s_prev = arrays.make<double>("s_prev", units, nan);
    batch.t_prev = arrays.make<int64_t>("t_prev", units, 0);
    batch.best_g = arrays.make<double>("best_g", {B}, infinity);
    batch.checks_without_gain = arrays.make<int64_t>("checks_without_gain", {B}, 0);
    batch.damped = arrays.make<bool>("damped", {B}, false);

    std::vector<ssize_t> read{B, ssize_t(shape.n_read(size_t(L)))};
    if (shape.readout_width != 1) read.push_back(ssize_t(shape.read_width()));
    if (spec.rule == loop::Rule::readout) {
        batch.has_prediction = arrays.make<bool>("rule.has_prediction", {B}, false);
        batch.last_prediction = arrays.make<double>("rule.prediction", read, 0.0);
    }
    if (spec.is_prefix) {
        const std::vector<ssize_t> cache{B, ssize_t(shape.n_core), L, ssize_t(shape.n_heads), ssize_t(shape.head_dim)};
        const auto prefix_lengths = arrays.make<int64_t>("prefix.lengths", {B}, 0);
        std::ranges::copy(own_lengths, prefix_lengths.begin());
        batch.frozen = arrays.make<int64_t>("prefix.frozen", {B}, 0);
        batch.token_loops = arrays.make<int64_t>("prefix.n_loops", {B, L}, 0);
        batch.keys = arrays.make<T>("prefix.keys", cache, T(0));
        batch.values = arrays.make<T>("prefix.values", cache, T(0));
        batch.token_g = arrays.make<double>("prefix.g", {B, L}, 0.0);
        batch.token_n = arrays.make<double>("prefix.n", {B, L}, 0.0);
    }
    if (spec.anderson_depth > 0) {
        batch.d_residual = arrays.make<T>("aa.d_residual", {B, spec.anderson_depth, L * C}, T(0));
        batch.d_image = arrays.make<T>("aa.d_image", {B, spec.anderson_depth, L * C}, T(0));
        batch.aa_residual = arrays.make<T>("aa.residual", {B, L * C}, T(0));
        batch.aa_image = arrays.make<T>("aa.image", {B, L * C}, T(0));
        batch.aa_g = arrays.make<double>("aa.g", {B}, 0.0);
        batch.n_seen = arrays.make<int64_t>("aa.n_seen", {B}, 0);
    }
    for (size_t i = 0; i < batch.n_prompts; ++i) {
        const bool is_frozen_wrong = spec.is_prefix && (batch.frozen[i] < 0 || batch.frozen[i] > own_lengths[i]);
        if (batch.t[i] < 0 || is_frozen_wrong) refuse("run: memory of prompt " + std::to_string(i) + " does not fit it");
    }

    // Only a prompt's own tokens are taken over; padding is zero.
    const auto take = [&](const char* name, std::span<const T> from) {
        const auto to = arrays.make<T>(name, {B, L, C}, T(0), true);
        std::ranges::fill(to, T(0));
        for (size_t i = 0; i < batch.n_prompts; ++i) {
            const size_t start = i * size_t(L * C), n = size_t(own_lengths[i]) * size_t(C);
            std::ranges::copy(from.subspan(start, n), to.begin() + std::ptrdiff_t(start));
        }
        return to;
    };
    std::vector<T> next(first_state.begin(), first_state.end());
    if (arrays.is_given("Y")) {
        const auto given = arrays.make<T>("Y", {B, L, C}, T(0), false);
        next.assign(given.begin(), given.end());
    }
    batch.state = take("Y", next);
    batch.y = take("y", first_state);

    batch.finished = arrays.make<bool>("finished", {B}, false);
    std::ranges::fill(batch.finished, false);
    batch.prediction = arrays.make<T>("prediction", read, T(0));
    std::ranges::fill(batch.prediction, T(0));
    if (spec.return_predictions) {
        batch.first_loop = B ? std::ranges::min(batch.t) : 0;
        std::vector<ssize_t> all = read;
        all.insert(all.begin() + 1, ssize_t(std::max<int64_t>(0, spec.n_loops - batch.first_loop)));
        batch.predictions = arrays.make<T>("predictions", all, T(0));
    }
    return batch;
}

template <class T>
py::dict TypedEngine<T>::run(const py::object& signal, const py::object& state, const py::object& lengths, const py::dict& spec_values,
                             const py::object& memory, size_t n_threads, const py::object& progress) const {
    const Spec spec = spec_of(spec_values, model_.shape.is_causal);
    if (n_threads < 1) refuse("run: n_threads must be at least 1");
    const bool resumes = !memory.is_none() && py::cast<py::dict>(memory).contains("passes");
    Arrays arrays(memory, resumes);
    std::vector<std::int64_t> own_lengths;
    const BatchMemory<T> batch = batch_of(signal, state, lengths, spec, arrays, own_lengths);

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

// Of pieces of memory, each (address, bytes), that the caller keeps alive.
std::uint64_t fingerprint(const std::vector<std::pair<std::uintptr_t, size_t>>& pieces) {
    const py::gil_scoped_release release;
    std::uint64_t all = 0;
    for (const auto& [address, n] : pieces) all = block::fingerprint({reinterpret_cast<const std::byte*>(address), n}, all);
    return all;
}

// GFLOP/s of fused multiply-adds on registers, all threads together: what they did from their common start until the last has ended.
// Threads that take turns on a core do not count its time twice.
double fma_peak(size_t n_threads, double seconds, bool is_double) {
    using Clock = std::chrono::steady_clock;
    constexpr double most_seconds = 60;  // no signal is looked at meanwhile
    if (n_threads < 1) refuse("fma_peak: n_threads must be at least 1");
    if (!(seconds > 0 && seconds <= most_seconds)) {
        refuse("fma_peak: seconds must lie above 0 and be at most 60, got " + std::to_string(seconds));
    }
    const auto rounds = is_double ? simd::kernels<double>().fma_rounds : simd::kernels<float>().fma_rounds;
    const py::gil_scoped_release release;
    struct Work {
        double done = 0;
        Clock::time_point ended;
    };
    std::vector<Work> work(n_threads);
    std::atomic<bool> has_started{false};
    Clock::time_point start, end;
    const auto start_all = [&](double for_seconds) {
        start = Clock::now();
        end = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(for_seconds));
        has_started = true;
        has_started.notify_all();
    };
    {
        std::vector<std::jthread> threads;
        try {
            for (Work& own : work) {
                threads.emplace_back([&, rounds] {
                    has_started.wait(false);
                    while ((own.ended = Clock::now()) < end) own.done += rounds(100000);
                });
            }
        } catch (...) {
            start_all(0);  // those that are there wait
            throw;
        }
        start_all(seconds);
    }
    double done = 0;
    for (const Work& own : work) done += own.done;
    const auto last = std::ranges::max(work, {}, &Work::ended).ended;
    return done / std::chrono::duration<double>(last - start).count() * 1e-9;
}

}  // namespace
}  // namespace looped

PYBIND11_MODULE(_engine, module) {
    using namespace looped;
    module.doc() = "The CPU engine of looped: prompts looped to rest, one prompt a thread, or several threads on one.";
    module.attr("version") = LOOPED_VERSION;
    module.def(
        "isa", [] { return std::string(simd::kernels<float>().isa); },
        "The instruction set in use: portable, avx2, avx512 or neon. LOOPED_ISA in the environment forces one.");
    module.def("fma_peak", &fma_peak, py::arg("n_threads") = 1, py::arg("seconds") = 0.1, py::arg("double") = false,
               "GFLOP/s of fused multiply-adds on registers, all threads together: the ceiling of every figure of this engine.");
    module.def("fingerprint", &fingerprint, py::arg("pieces"), "A number that tells whether the memory of any piece has changed.");
    py::class_<Engine>(module, "Engine", "A model's weights, packed. Neither changed nor kept: pack again after an edit.")
        .def(py::init<const py::dict&, const py::dict&>(), py::arg("config"), py::arg("weights"))
        .def_property_readonly("dtype", &Engine::dtype)
        .def("session", &Engine::session, py::arg("policy") = "per_loop", py::arg("period") = 1, py::arg("n_rows") = 0,
             py::arg("gate_weight") = py::none(), py::arg("gate_bias") = py::none())
        .def("embed", &Engine::embed, py::arg("prompts"), py::arg("lengths") = py::none(), py::arg("n_threads") = 1)
        .def("run", &Engine::run, py::arg("signal"), py::arg("state"), py::arg("lengths"), py::arg("spec"),
             py::arg("memory") = py::none(), py::arg("n_threads") = 1, py::arg("progress") = py::none());
    add_decode(module);
    add_bandwidth(module);
    add_packing(module);
    add_kernels(module.def_submodule("kernels", "The kernels of this processor one by one, for tests and benchmarks."));
}
