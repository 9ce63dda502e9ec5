#include "bindings/decode.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <utility>

#include "bindings/arrays.hpp"
#include "decode/session.hpp"

namespace looped {
namespace {

using block::Rows;
using decode::Spec;

bool no_signal_came() {
    const py::gil_scoped_acquire acquire;
    return PyErr_CheckSignals() == 0;
}

// Runs job(controls) without the GIL. What Ctrl-C or another signal raised meanwhile comes through.
template <class Job>
void without_gil(const std::string& call, size_t n_threads, const Job& job) {
    if (n_threads < 1) refuse(call + ": n_threads must be at least 1");
    bool is_complete = false;
    try {
        const py::gil_scoped_release release;
        is_complete = job(decode::Controls{.n_threads = n_threads, .keeps_going = no_signal_came});
    } catch (const decode::Busy& error) {
        throw std::runtime_error(call + ": " + error.what());
    }
    if (!is_complete) throw py::error_already_set();
}

Spec spec_of(const py::dict& values) {
    using decode::Rule;
    Spec spec;
    const auto number = [&](const char* key) { return values[key].cast<std::int64_t>(); };
    const std::pair<const char*, Rule> known[] = {{"fixed", Rule::fixed},
                                                  {"exact", Rule::exact},
                                                  {"absolute", Rule::absolute},
                                                  {"relative", Rule::relative},
                                                  {"contraction", Rule::contraction},
                                                  {"readout", Rule::readout},
                                                  {"entropydifference", Rule::entropy},
                                                  {"kldivergence", Rule::kl},
                                                  {"argmaxstable", Rule::argmax},
                                                  {"gate", Rule::gate}};
    const auto name = values["rule"].cast<std::string>();
    const auto* found = std::ranges::find(known, name, [](const auto& entry) { return std::string(entry.first); });
    if (found == std::end(known)) refuse("extend: rule='" + name + "' is none of this engine's");
    spec.rule = found->second;
    spec.n_loops = number("n_loops");
    spec.check_every = number("check_every");
    spec.min_loops = number("min_loops");
    spec.phi = values["phi"].cast<double>();
    spec.warm_start = values["warm_start"].cast<bool>();
    if (values.contains("tol")) spec.tol = values["tol"].cast<double>();
    if (values.contains("patience")) spec.patience = number("patience");
    if (values.contains("threshold")) spec.threshold = values["threshold"].cast<double>();
    if (spec.n_loops < 0 || spec.check_every < 1 || spec.patience < 1 || !(spec.tol >= 0)) {
        refuse("extend: n_loops and tol must be at least 0, check_every and patience at least 1");
    }
    return spec;
}

template <class T>
Rows<const T> rows_of(const py::object& array, const std::string& name, size_t width) {
    if (!py::isinstance<py::array>(array) || py::cast<py::array>(array).ndim() != 2) {
        refuse(name + " must be an array [N, " + std::to_string(width) + "]");
    }
    const py::ssize_t n = py::cast<py::array>(array).shape(0);
    return {view<T>(array, name, {n, py::ssize_t(width)}).data(), size_t(n), width, width};
}

template <class T>
class TypedSession {
public:
    explicit TypedSession(std::unique_ptr<decode::Session<T>> session) : session_(std::move(session)) {}

    std::vector<size_t> lengths() const {
        std::vector<size_t> all;
        for (size_t row = 0; row < session_->n_rows(); ++row) all.push_back(session_->n_tokens(row));
        return all;
    }

    py::dict extend(const py::object& embeds, const std::vector<std::int64_t>& lengths, const py::dict& spec_values,
                    const py::object& positions, bool return_states, size_t n_threads) {
        const block::Shape& shape = session_->model().shape;
        const size_t C = shape.d_model;
        const Spec spec = spec_of(spec_values);
        const Rows<const T> rows = rows_of<T>(embeds, "extend: embeds", C);
        const std::vector<size_t> own = lengths_of(lengths, rows.n_rows);
        const std::vector<size_t> places = positions_of(positions, own, rows.n_rows);
        if (spec.rule == decode::Rule::gate && !session_->has_gate()) refuse("extend: rule='gate' needs a session with an exit gate");
        if (spec.reads_logits() && !shape.readout_width) refuse("extend: this rule reads logits, and the model has no read-out");
        const auto N = py::ssize_t(rows.n_rows);
        py::array_t<T> hidden({N, py::ssize_t(C)});
        py::array_t<std::int64_t> n_loops(N);
        py::array_t<T> states({return_states ? py::ssize_t(spec.n_loops) + 1 : 0, N, py::ssize_t(C)});
        decode::Extension<T> extension{.lengths = own,
                                       .embeds = rows,
                                       .positions = places,
                                       .hidden = {hidden.mutable_data(), rows.n_rows, C, C},
                                       .n_loops = {n_loops.mutable_data(), rows.n_rows},
                                       .states = {states.mutable_data(), size_t(states.size())}};
        without_gil("extend", n_threads, [&](const decode::Controls& controls) { return session_->extend(extension, spec, controls); });
        py::dict result;
        result["hidden"] = hidden;
        result["n_loops"] = n_loops;
        if (return_states) result["states"] = states;
        return result;
    }

    py::array read(const py::object& hidden, size_t n_threads) {
        const block::Shape& shape = session_->model().shape;
        if (!shape.readout_width) refuse("read: the model has no read-out");
        const Rows<const T> rows = rows_of<T>(hidden, "read: hidden", shape.d_model);
        py::array_t<T> logits({py::ssize_t(rows.n_rows), py::ssize_t(shape.readout_width)});
        const Rows<T> out{logits.mutable_data(), rows.n_rows, shape.readout_width, shape.readout_width};
        without_gil("read", n_threads, [&](const decode::Controls& controls) { return session_->read(rows, out, controls); });
        return logits;
    }

    void crop(const std::vector<std::int64_t>& dropped) {
        if (dropped.size() != session_->n_rows()) {
            refuse("crop: got numbers for " + std::to_string(dropped.size()) + " rows, but the session has " +
                   std::to_string(session_->n_rows()));
        }
        for (size_t row = 0; row < dropped.size(); ++row) {
            if (dropped[row] >= 0 && size_t(dropped[row]) <= session_->n_tokens(row)) continue;
            refuse("crop: row " + std::to_string(row) + " has " + std::to_string(session_->n_tokens(row)) + " tokens, so " +
                   std::to_string(dropped[row]) + " of them cannot be dropped");
        }
        for (size_t row = 0; row < dropped.size(); ++row) session_->crop(row, session_->n_tokens(row) - size_t(dropped[row]));
    }

    void select(const std::vector<std::int64_t>& rows) {
        for (std::int64_t row : rows) {
            if (row >= 0 && size_t(row) < session_->n_rows()) continue;
            refuse("select: there is no row " + std::to_string(row) + " among " + std::to_string(session_->n_rows()));
        }
        session_->select({rows.begin(), rows.end()});
    }

    void reset() { session_->reset(); }
    auto copy() const { return std::make_shared<TypedSession>(session_->copy()); }

private:
    std::vector<size_t> lengths_of(const std::vector<std::int64_t>& lengths, size_t n_tokens) const {
        if (session_->n_rows() && lengths.size() != session_->n_rows()) {
            refuse("extend: lengths are of " + std::to_string(lengths.size()) + " rows, but the session has " +
                   std::to_string(session_->n_rows()));
        }
        size_t sum = 0;
        for (size_t row = 0; row < lengths.size(); ++row) {
            if (lengths[row] < 0) refuse("extend: row " + std::to_string(row) + " has length " + std::to_string(lengths[row]));
            sum += std::min(size_t(lengths[row]), n_tokens + 1);
        }
        if (sum != n_tokens) refuse("extend: lengths must sum to the " + std::to_string(n_tokens) + " rows of embeds");
        return {lengths.begin(), lengths.end()};
    }

    // Rows of the position table, where they are given. Raises ValueError where a token has none.
    std::vector<size_t> positions_of(const py::object& positions, const std::vector<size_t>& lengths, size_t n_tokens) const {
        const block::Shape& shape = session_->model().shape;
        if (positions.is_none()) {
            for (size_t row = 0; row < lengths.size() && shape.has_positions; ++row) {
                const size_t end = (session_->n_rows() ? session_->n_tokens(row) : 0) + lengths[row];
                if (lengths[row] == 0 || end <= shape.n_positions) continue;
                refuse("extend: row " + std::to_string(row) + " has " + std::to_string(end) + " tokens but the model has " +
                       std::to_string(shape.n_positions) + " positions; shorten it or use a model with more positions");
            }
            return {};
        }
        const auto own = view<std::int64_t>(positions, "extend: positions", {py::ssize_t(n_tokens)});
        if (!shape.has_positions) return {};
        for (std::int64_t position : own) {
            if (position >= 0 && size_t(position) < shape.n_positions) continue;
            refuse("extend: position " + std::to_string(position) + " does not lie in 0 .. " + std::to_string(shape.n_positions - 1));
        }
        return {own.begin(), own.end()};
    }

    std::unique_ptr<decode::Session<T>> session_;
};

decode::Policy policy_of(const std::string& kind, size_t period) {
    using Kind = decode::Policy::Kind;
    const std::pair<const char*, Kind> known[] = {{"per_loop", Kind::per_loop},
                                                  {"last_only", Kind::last_only},
                                                  {"modulo", Kind::modulo},
                                                  {"first_then_shared", Kind::first_then_shared}};
    const auto* found = std::ranges::find(known, kind, [](const auto& entry) { return std::string(entry.first); });
    if (found == std::end(known)) refuse("session: policy='" + kind + "' is not one of per_loop, last_only, modulo, first_then_shared");
    if (period < 1) refuse("session: period must be at least 1");
    return {found->second, period};
}

template <class T>
void add_session(py::module_& module, const char* name) {
    using Session = TypedSession<T>;
    py::class_<Session, std::shared_ptr<Session>>(module, name,
                                                  "Rows of tokens and what is kept of them; make one with Engine.session.")
        .def_property_readonly("lengths", &Session::lengths)
        .def("extend", &Session::extend, py::arg("embeds"), py::arg("lengths"), py::arg("spec"), py::arg("positions") = py::none(),
             py::arg("return_states") = false, py::arg("n_threads") = 1)
        .def("read", &Session::read, py::arg("hidden"), py::arg("n_threads") = 1)
        .def("crop", &Session::crop, py::arg("dropped"))
        .def("select", &Session::select, py::arg("rows"))
        .def("reset", &Session::reset)
        .def("copy", &Session::copy);
}

}  // namespace

template <class T>
py::object make_session(std::shared_ptr<const block::Model<T>> model, const std::string& policy, size_t period, size_t n_rows,
                        const py::object& gate_weight, const py::object& gate_bias) {
    const block::Shape& shape = model->shape;
    if (!shape.is_causal) refuse("session: decoding needs a causal mask");
    if (shape.input_kind == block::InputKind::features) refuse("session: decoding takes tokens or states, not features");
    if (shape.state_init == block::StateInit::given) refuse("session: state_init='given' has no first state of its own");
    decode::Gate<T> gate;
    if (!gate_weight.is_none()) {
        const auto weight = view<T>(gate_weight, "session: gate_weight", {py::ssize_t(shape.d_model)});
        gate.weight.assign(weight.begin(), weight.end());
        if (!gate_bias.is_none()) gate.bias = view<T>(gate_bias, "session: gate_bias", {1})[0];
    }
    auto session = std::make_unique<decode::Session<T>>(std::move(model), policy_of(policy, period), gate);
    session->reset(n_rows);
    return py::cast(std::make_shared<TypedSession<T>>(std::move(session)));
}

template py::object make_session(std::shared_ptr<const block::Model<float>>, const std::string&, size_t, size_t, const py::object&,
                                 const py::object&);
template py::object make_session(std::shared_ptr<const block::Model<double>>, const std::string&, size_t, size_t, const py::object&,
                                 const py::object&);

void add_decode(py::module_& module) {
    add_session<float>(module, "Session32");
    add_session<double>(module, "Session64");
}

}  // namespace looped
