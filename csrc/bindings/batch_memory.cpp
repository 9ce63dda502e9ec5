#include "bindings/batch_memory.hpp"

#include <limits>

namespace looped {

using block::Shape;
using loop::BatchMemory;
using loop::Spec;

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

template <class T>
BatchMemory<T> batch_of(const Shape& shape, const py::object& signal, const py::object& state, const py::object& lengths,
                        const Spec& spec, Arrays& arrays, std::vector<std::int64_t>& own_lengths) {
    using std::int64_t, py::ssize_t;
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

template BatchMemory<float> batch_of(const Shape&, const py::object&, const py::object&, const py::object&, const Spec&, Arrays&,
                                     std::vector<std::int64_t>&);
template BatchMemory<double> batch_of(const Shape&, const py::object&, const py::object&, const py::object&, const Spec&, Arrays&,
                                      std::vector<std::int64_t>&);

}  // namespace looped
