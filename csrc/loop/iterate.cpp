// Read beside docs/exits.md and the eager backend: the order of what happens in one loop is theirs.
#include "loop/iterate.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "loop/anderson.hpp"

namespace looped::loop {
namespace {

constexpr double damping = 0.5;  // a in Y' = Y + a (F - Y)

template <class T>
void copy_rows(Rows<const T> from, Rows<T> to) {
    for (size_t i = 0; i < from.n_rows; ++i) std::ranges::copy(from.row_span(i), to.row(i));
}

template <class T>
bool has_same_bits(std::span<const T> a, std::span<const T> b) {
    return std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

double root_of_sum(std::span<const double> squares) {
    double sum = 0;
    for (double square : squares) sum += square;
    return std::sqrt(sum);
}

double norm_of_norms(std::span<const double> norms) {
    double sum = 0;
    for (double norm : norms) sum += norm * norm;
    return std::sqrt(sum);
}

}  // namespace

template <class T>
PromptLoop<T>::PromptLoop(const block::Model<T>& model, const Spec& spec, block::Team& team, block::StopRequest& stop, size_t n_tokens)
    : model_(model),
      spec_(spec),
      stop_(stop),
      forward_(model, team, stop, n_tokens, spec.is_prefix),
      g_(n_tokens),
      n_(n_tokens),
      scratch_(n_tokens),
      prediction_(model.shape.n_read(n_tokens) * model.shape.read_width()),
      is_still_(n_tokens) {
    for (size_t i = 0; i < (spec.is_plain() ? 2 : 4); ++i) buffers_[i] = block::Matrix<T>(n_tokens, model.shape.d_model);
}

template <class T>
bool PromptLoop<T>::run(const BatchMemory<T>& batch, size_t i) {
    if (batch.done[i] || batch.t[i] >= spec_.n_loops) {
        image_ = batch.token_rows(batch.y, i);
    } else {
        start(batch, i);
        const std::int64_t first_t = batch.t[i];
        Turn turn = once(batch, i);
        while (turn == Turn::more) {
            std::swap(state_, spec_.is_plain() ? image_ : next_);
            if (!spec_.is_plain()) std::swap(image_, last_image_);
            turn = once(batch, i);
        }
        if (turn == Turn::abandoned) {
            if (batch.t[i] > first_t) save(batch, i, spec_.is_plain() ? state_ : last_image_, state_);
            return false;
        }
        save(batch, i, image_, spec_.is_plain() ? image_ : next_);
    }
    forward_.read(image_, batch.prediction.subspan(i * batch.prediction_size(), batch.prediction_size()));
    return !stop_.is_made();
}

template <class T>
void PromptLoop<T>::start(const BatchMemory<T>& batch, size_t i) {
    const size_t n_tokens = batch.length(i);
    state_ = buffers_[0].rows(n_tokens);
    image_ = buffers_[1].rows(n_tokens);
    if (!spec_.is_plain()) {
        next_ = buffers_[2].rows(n_tokens);
        last_image_ = buffers_[3].rows(n_tokens);
    }
    copy_rows<T>(batch.token_rows(batch.state, i), state_);
    first_ = 0;
    if (spec_.is_prefix) {
        first_ = size_t(batch.frozen[i]);
        for (size_t layer = 0; layer < model_.shape.n_core; ++layer) {
            copy_rows<T>(batch.cache_rows(batch.keys, i, layer), forward_.keys(layer, n_tokens));
            copy_rows<T>(batch.cache_rows(batch.values, i, layer), forward_.values(layer, n_tokens));
        }
    }
}

template <class T>
void PromptLoop<T>::save(const BatchMemory<T>& batch, size_t i, Rows<const T> image, Rows<const T> next) {
    copy_rows<T>(image, batch.token_rows(batch.y, i));
    copy_rows<T>(next, batch.token_rows(batch.state, i));
    if (spec_.is_prefix) {
        for (size_t layer = 0; layer < model_.shape.n_core; ++layer) {
            copy_rows<T>(forward_.keys(layer, batch.length(i)), batch.cache_rows(batch.keys, i, layer));
            copy_rows<T>(forward_.values(layer, batch.length(i)), batch.cache_rows(batch.values, i, layer));
        }
    }
}

template <class T>
auto PromptLoop<T>::once(const BatchMemory<T>& batch, size_t i) -> Turn {
    Counters counters = batch.counters(i);
    Watch watch(spec_, counters);
    const size_t n_tokens = state_.n_rows;

    for (size_t k = 0; k < first_; ++k) std::ranges::copy(state_.row_span(k), image_.row(k));
    std::fill_n(g_.begin(), first_, 0.0);  // a frozen token does not move
    std::fill_n(n_.begin(), first_, 0.0);
    forward_.pass(state_, batch.signal_rows(i), image_, first_, [&](block::Share share) noexcept { measure(share); });
    // Read before anything is counted: a read-out, like the pass, may have been stopped inside.
    if (reads_at(counters.t + 1)) forward_.read(image_, prediction_);
    if (stop_.look()) return Turn::abandoned;
    counters.t += 1;
    double moving_g, g, n;  // of what moves; of all own tokens
    if (spec_.is_prefix) {
        const PrefixMemory prefix = batch.prefix(i);
        for (size_t k = first_; k < n_tokens; ++k) {
            prefix.g[k] = g_[k] = std::sqrt(g_[k]);
            prefix.n[k] = n_[k] = std::sqrt(n_[k]);
            prefix.n_loops[k] = counters.t;
        }
        moving_g = norm_of_norms(std::span(g_).first(n_tokens));
        g = norm_of_norms(prefix.g.first(n_tokens));
        n = norm_of_norms(prefix.n.first(n_tokens));
    } else {
        moving_g = g = root_of_sum(std::span(g_).first(n_tokens));
        n = root_of_sum(std::span(n_).first(n_tokens));
    }
    counters.residual = g == 0 ? 0.0 : g / n;

    double s = g;
    if (!spec_.is_plain()) {
        if (next_state(batch, i, counters, g)) watch.forget_rate();
        s = norm_of(next_, state_);
    }
    const bool is_nonfinite = !(std::isfinite(g) && std::isfinite(n));
    const bool is_at_rest = (spec_.is_prefix ? pass_tokens(batch, i, watch) : pass_prompt(batch, i, watch, g, n, s)) && !is_nonfinite;
    const bool is_stalled = watch.is_stalled(moving_g, has_all_moving_passed(counters));

    if (spec_.anderson_depth > 0 && counters.passes[0] > 0 && !counters.damped) {
        // A pass is confirmed on plain loops, which give the map's own rate.
        if (counters.t_prev[0] == counters.t) counters.s_prev[0] = g;
        copy_rows<T>(image_, next_);
    }
    const bool acts = is_stalled && watch.is_due();
    const bool ends_by_stall = acts && (spec_.on_stall == OnStall::damp ? counters.damped : spec_.on_stall == OnStall::exit);
    if (spec_.on_stall == OnStall::damp && acts && !counters.damped) {
        counters.damped = true;
        watch.reset();
    }
    const Status status = is_nonfinite ? Status::nonfinite
                          : is_at_rest ? Status::converged
                          : is_stalled ? Status::stalled
                                       : Status::max_loops;
    counters.status = std::int64_t(status);
    counters.done = is_nonfinite || is_at_rest || ends_by_stall;

    if (spec_.return_predictions) {
        const size_t size = batch.prediction_size(), own = model_.shape.n_read(n_tokens) * model_.shape.read_width();
        const size_t n_kept = size_t(spec_.n_loops - batch.first_loop);
        const size_t place = i * n_kept + size_t(counters.t - 1 - batch.first_loop);
        std::copy_n(prediction_.begin(), own, batch.predictions.begin() + std::ptrdiff_t(place * size));
    }
    return counters.done || counters.t >= spec_.n_loops ? Turn::last : Turn::more;
}

// g_ and n_: squares of F - Y and of F, token by token.
template <class T>
void PromptLoop<T>::measure(block::Share share) noexcept {
    const Rows<T> image = image_.between(share.begin, share.end);
    model_.kernels->squares(image, state_.from_row(share.begin), g_.data() + share.begin, n_.data() + share.begin);
}

template <class T>
double PromptLoop<T>::norm_of(Rows<const T> a, Rows<const T> b) {
    std::vector<double>& of_difference = scratch_;
    model_.kernels->squares(a, b, of_difference.data(), n_.data());  // n_ has been read
    return root_of_sum(std::span(of_difference).first(a.n_rows));
}

// Y' into next_. Returns whether the Anderson history was dropped.
template <class T>
bool PromptLoop<T>::next_state(const BatchMemory<T>& batch, size_t i, Counters& counters, double g) {
    bool dropped = false, is_mixed = false;
    if (spec_.anderson_depth > 0) {
        dropped = anderson_step<T>(batch.anderson(i), state_, image_, g, next_);
        is_mixed = !(dropped || counters.damped || counters.passes[0] > 0);
    }
    for (size_t k = 0; k < state_.n_rows && !is_mixed; ++k) {
        const T *y = state_.row(k), *f = image_.row(k);
        for (size_t j = 0; j < state_.width; ++j) next_.row(k)[j] = counters.damped ? y[j] + T(damping) * (f[j] - y[j]) : f[j];
    }
    return dropped;
}

template <class T>
bool PromptLoop<T>::pass_prompt(const BatchMemory<T>& batch, size_t i, Watch& watch, double g, double n, double s) {
    Step step{.g = g, .n = n, .s = s};
    if (watch.is_due() && spec_.rule == Rule::exact) {
        step.is_same = true;
        for (size_t k = 0; k < state_.n_rows && step.is_same; ++k) {
            step.is_same = has_same_bits<T>(image_.row_span(k), state_.row_span(k));
        }
    }
    if (watch.is_due() && spec_.rule == Rule::readout) {
        const bool has_before = batch.has_prediction[i];
        compare_predictions(batch, i, has_before);
        step.readout_is_still = has_before && is_within(change_, size_);
    }
    return watch.has_passed_enough(0, step);
}

template <class T>
bool PromptLoop<T>::has_all_moving_passed(const Counters& counters) const {
    if (!spec_.is_prefix) return counters.passes[0] > 0;
    const auto own = counters.passes.first(state_.n_rows);
    return std::ranges::all_of(own.subspan(first_), [](std::int64_t passes) { return passes > 0; });
}

// Freezes the longest prefix whose tokens have all passed often enough. Returns whether that has just become the whole prompt.
template <class T>
bool PromptLoop<T>::pass_tokens(const BatchMemory<T>& batch, size_t i, Watch& watch) {
    const size_t n_tokens = state_.n_rows;
    const bool is_due = watch.is_due();
    const bool has_before = is_due && spec_.rule == Rule::readout && batch.has_prediction[i];
    if (is_due && spec_.rule == Rule::readout) compare_predictions(batch, i, has_before);
    if (n_tokens == 0) return watch.has_passed_enough(0, {.g = 0, .n = 0, .s = 0, .is_same = true});
    size_t longest = 0;
    bool is_unbroken = true;
    for (size_t k = 0; k < n_tokens; ++k) {
        Step step{.g = g_[k], .n = n_[k], .s = g_[k]};
        if (is_due && spec_.rule == Rule::exact) step.is_same = has_same_bits<T>(image_.row_span(k), state_.row_span(k));
        const bool is_read = k % model_.shape.read_stride == 0;  // later tokens read the state of one that is not, while they move
        if (has_before) step.readout_is_still = is_read ? bool(is_still_[k]) : step.g <= spec_.tol * step.n;
        const bool has_passed = watch.has_passed_enough(k, step);
        is_unbroken = is_unbroken && (has_passed || k < first_);
        longest += is_unbroken;
    }
    const bool grows = longest > first_;
    batch.frozen[i] = std::int64_t(longest);
    first_ = longest;
    return grows && longest == n_tokens;
}

// Compares the predictions of F with those of the check before, and keeps them.
template <class T>
void PromptLoop<T>::compare_predictions(const BatchMemory<T>& batch, size_t i, bool has_prediction) {
    const ReadoutMemory memory = batch.readout(i);
    const size_t width = model_.shape.read_width(), n_read = model_.shape.n_read(state_.n_rows);
    double change = 0, size = 0;
    for (size_t r = 0; r < n_read; ++r) {
        double change_here = 0, size_here = 0;
        for (size_t c = r * width; c < (r + 1) * width; ++c) {
            const double now = double(prediction_[c]), before = has_prediction ? memory.prediction[c] : 0.0;
            change_here += (now - before) * (now - before);
            size_here += now * now;
            memory.prediction[c] = now;
        }
        is_still_[r * model_.shape.read_stride] = is_within(std::sqrt(change_here), std::sqrt(size_here));
        change += change_here;
        size += size_here;
    }
    change_ = std::sqrt(change);
    size_ = std::sqrt(size);
    memory.has_prediction = true;
}

template class PromptLoop<float>;
template class PromptLoop<double>;

}  // namespace looped::loop
