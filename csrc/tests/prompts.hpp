// A ragged batch and everything a loop remembers of it, in arrays that end where their contents do.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "batch/run.hpp"
#include "tests/plain_model.hpp"

namespace looped::tests {

using loop::Rule, loop::Spec, loop::Status;

template <class T>
class Prompts {
public:
    // Random features; rows of padding hold NaN wherever the engine could read them.
    Prompts(const block::Model<T>& model, std::vector<std::int64_t> lengths, std::uint64_t seed = 1, size_t n_tokens = 0)
        : model_(model), lengths_(std::move(lengths)) {
        n_tokens_ = n_tokens ? n_tokens : size_t(std::max<std::int64_t>(1, lengths_.empty() ? 0 : std::ranges::max(lengths_)));
        for (size_t i = 0; i < lengths_.size(); ++i) {
            Dice dice(seed + 100 * i);
            add_prompt(dice.rolls(n_tokens_ * width()), size_t(lengths_[i]));
        }
    }
    // Given prompts, each [length, width].
    Prompts(const block::Model<T>& model, const std::vector<Numbers>& contents, size_t n_tokens) : model_(model), n_tokens_(n_tokens) {
        for (Numbers own : contents) {
            lengths_.push_back(std::int64_t(own.size() / width()));
            own.resize(n_tokens * width());
            add_prompt(own, size_t(lengths_.back()));
        }
    }

    size_t width() const { return model_.shape.input_kind == block::InputKind::features ? model_.shape.n_dims : model_.shape.d_model; }
    size_t size() const { return lengths_.size(); }
    size_t n_tokens() const { return n_tokens_; }
    const std::vector<std::int64_t>& lengths() const { return lengths_; }
    Numbers contents(size_t i) const {
        const auto first = features_.begin() + std::ptrdiff_t(i * n_tokens_ * width());
        return Numbers(first, first + std::ptrdiff_t(size_t(lengths_[i]) * width()));
    }
    std::vector<T>& features() { return features_; }

    // The injected signals [B, T, C]; padding holds NaN.
    std::vector<T> embedded(size_t n_threads = 1) const {
        std::vector<T> signal(size() * n_tokens_ * model_.shape.d_model, nan);
        if (model_.shape.input_kind == block::InputKind::tokens) return signal;  // the test has the ids
        const batch::RawPrompts<T> raw{.n_tokens = n_tokens_, .lengths = lengths_, .features = features_, .ids = {}};
        batch::embed<T>(model_, raw, signal, {.n_threads = n_threads, .keeps_going = {}});
        return signal;
    }

private:
    static constexpr T nan = std::numeric_limits<T>::quiet_NaN();

    void add_prompt(const Numbers& numbers, size_t length) {
        for (size_t k = 0; k < numbers.size(); ++k) features_.push_back(k < length * width() ? T(numbers[k]) : nan);
    }

    const block::Model<T>& model_;
    std::vector<std::int64_t> lengths_;
    size_t n_tokens_ = 0;
    std::vector<T> features_;
};

template <class T>
class Run {
public:
    Run(const block::Model<T>& model, const Prompts<T>& prompts, const Spec& spec)
        : spec(spec), model_(model), lengths_(prompts.lengths()), n_tokens_(prompts.n_tokens()), signal(prompts.embedded()) {
        const block::Shape& shape = model.shape;
        const size_t B = prompts.size(), L = n_tokens_, C = shape.d_model, units = spec.is_prefix ? B * L : B;
        state.assign(B * L * C, std::numeric_limits<T>::quiet_NaN());
        for (size_t i = 0; i < B; ++i) std::fill_n(state.begin() + std::ptrdiff_t(i * L * C), size_t(lengths_[i]) * C, T(0));
        y = state;
        for (auto* counts : {&t, &status, &without_gain}) counts->assign(B, 0);
        for (auto* flags : {&done, &damped, &has_prediction, &finished}) *flags = std::make_unique<bool[]>(B);
        residual.assign(B, std::numeric_limits<double>::quiet_NaN());
        best_g.assign(B, std::numeric_limits<double>::infinity());
        passes.assign(units, 0);
        t_prev.assign(units, 0);
        s_prev.assign(units, std::numeric_limits<double>::quiet_NaN());
        n_read_ = shape.n_read(L) * shape.read_width();
        prediction.assign(B * n_read_, T(0));
        if (spec.rule == Rule::readout) last_prediction.assign(B * n_read_, 0.0);
        if (spec.is_prefix) {
            frozen.assign(B, 0);
            token_loops.assign(B * L, 0);
            token_g.assign(B * L, 0.0);
            token_n.assign(B * L, 0.0);
            keys.assign(B * shape.n_core * L * shape.attention_width(), T(0));
            values = keys;
        }
        if (spec.anderson_depth) {
            d_residual.assign(B * size_t(spec.anderson_depth) * L * C, T(0));
            d_image = d_residual;
            aa_residual.assign(B * L * C, T(0));
            aa_image = aa_residual;
            aa_g.assign(B, 0.0);
            n_seen.assign(B, 0);
        }
    }

    // Runs to `n_loops` in total, and may be called again to go on. False where it was cancelled.
    bool operator()(std::int64_t n_loops, size_t n_threads = 1, std::function<bool(size_t)> keeps_going = {}) {
        spec.n_loops = n_loops;
        loop::BatchMemory<T> memory;
        memory.n_prompts = lengths_.size();
        memory.n_tokens = n_tokens_;
        memory.shape = model_.shape;
        memory.lengths = lengths_;
        memory.signal = signal;
        memory.y = y;
        memory.state = state;
        memory.t = t;
        memory.status = status;
        memory.passes = passes;
        memory.t_prev = t_prev;
        memory.checks_without_gain = without_gain;
        memory.done = {done.get(), lengths_.size()};
        memory.damped = {damped.get(), lengths_.size()};
        memory.residual = residual;
        memory.s_prev = s_prev;
        memory.best_g = best_g;
        memory.has_prediction = {has_prediction.get(), lengths_.size()};
        memory.last_prediction = last_prediction;
        memory.frozen = frozen;
        memory.token_loops = token_loops;
        memory.token_g = token_g;
        memory.token_n = token_n;
        memory.keys = keys;
        memory.values = values;
        memory.d_residual = d_residual;
        memory.d_image = d_image;
        memory.aa_residual = aa_residual;
        memory.aa_image = aa_image;
        memory.aa_g = aa_g;
        memory.n_seen = n_seen;
        memory.finished = {finished.get(), lengths_.size()};
        memory.prediction = prediction;
        if (spec.return_predictions) {
            memory.first_loop = t.empty() ? 0 : std::ranges::min(t);
            predictions.assign(lengths_.size() * size_t(std::max<std::int64_t>(0, n_loops - memory.first_loop)) * n_read_, T(0));
            memory.predictions = predictions;
        }
        return batch::run<T>(model_, spec, memory, {.n_threads = n_threads, .keeps_going = std::move(keeps_going)});
    }

    // Everything that belongs to prompt i's own tokens, as bytes.
    std::vector<std::byte> bits(size_t i) const {
        std::vector<std::byte> all;
        const auto take = [&]<class Value>(const std::vector<Value>& values, size_t first, size_t n) {
            const auto bytes = std::as_bytes(std::span(values).subspan(first, n));
            all.insert(all.end(), bytes.begin(), bytes.end());
        };
        const size_t own = size_t(lengths_[i]), C = model_.shape.d_model;
        take(y, i * n_tokens_ * C, own * C);
        take(state, i * n_tokens_ * C, own * C);
        take(prediction, i * n_read_, model_.shape.n_read(own) * model_.shape.read_width());
        for (const auto* counts : {&t, &status, &without_gain}) take(*counts, i, 1);
        for (const auto* numbers : {&residual, &best_g}) take(*numbers, i, 1);
        if (spec.is_prefix) take(token_loops, i * n_tokens_, own);
        return all;
    }
    std::vector<T> own_y(size_t i) const {
        const auto first = y.begin() + std::ptrdiff_t(i * n_tokens_ * model_.shape.d_model);
        return std::vector<T>(first, first + std::ptrdiff_t(size_t(lengths_[i]) * model_.shape.d_model));
    }
    Status ended(size_t i) const { return Status(status[i]); }

    Spec spec;

private:
    const block::Model<T>& model_;
    std::vector<std::int64_t> lengths_;
    size_t n_tokens_, n_read_ = 0;

public:
    std::vector<T> signal, state, y, prediction, predictions;
    std::vector<std::int64_t> t, status, without_gain, passes, t_prev;
    std::unique_ptr<bool[]> done, damped, has_prediction, finished;
    std::vector<double> residual, s_prev, best_g, last_prediction;
    std::vector<std::int64_t> frozen, token_loops;
    std::vector<double> token_g, token_n;
    std::vector<T> keys, values;
    std::vector<T> d_residual, d_image, aa_residual, aa_image;
    std::vector<double> aa_g;
    std::vector<std::int64_t> n_seen;
};

inline Spec with(Rule rule, double tol = 1e-3) {
    Spec spec;
    spec.rule = rule;
    spec.tol = rule == Rule::fixed || rule == Rule::exact ? 0.0 : tol;
    spec.phi = 2e-15;
    return spec;
}

}  // namespace looped::tests
