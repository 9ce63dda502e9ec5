// Read beside looped.exits.Watch and looped.lm.exits: the rules are theirs.
#include "decode/judge.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace looped::decode {
namespace {

constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr size_t rows_at_once = 32;  // of logits

// log sum exp, and the entropy in nats, of logits.
struct Distribution {
    double log_sum, entropy;
};

template <class T>
Distribution distribution_of(std::span<const T> logits) {
    double most = -std::numeric_limits<double>::infinity(), sum = 0, weighed = 0;
    for (T x : logits) most = std::isnan(x) ? nan : std::max(most, double(x));
    for (T x : logits) {
        const double e = std::exp(double(x) - most);
        sum += e;
        if (e != 0) weighed += e * (double(x) - most);  // 0 log 0 = 0
    }
    return {most + std::log(sum), std::log(sum) - weighed / sum};
}

template <class T>
std::int64_t likeliest(std::span<const T> logits) {
    size_t best = 0;
    for (size_t i = 0; i < logits.size() && !std::isnan(logits[best]); ++i) {
        if (logits[i] > logits[best] || std::isnan(logits[i])) best = i;
    }
    return std::int64_t(best);
}

}  // namespace

template <class T>
Judge<T>::Judge(const block::Model<T>& model, const Spec& spec, const Gate<T>& gate, size_t n_tokens)
    : model_(model), spec_(spec), gate_(gate) {
    if (spec.is_fixed()) return;
    passes_.assign(n_tokens, 0);
    t_prev_.assign(n_tokens, 0);
    s_prev_.assign(n_tokens, nan);
    squares_of_difference_.resize(n_tokens);
    squares_.resize(n_tokens);
    value_.assign(n_tokens, spec.rule == Rule::gate ? 1.0 : nan);
    if (!spec.reads_logits()) return;
    number_.assign(n_tokens, -1);
    same_.assign(n_tokens, 0);
    has_before_.assign(n_tokens, 0);
    is_still_.assign(n_tokens, 0);
    const size_t V = model.shape.readout_width;
    if (spec.rule == Rule::readout || spec.rule == Rule::kl) before_.resize(block::checked_product(n_tokens, V));
    logits_ = Matrix<T>(std::min(rows_at_once, n_tokens), V);
}

template <class T>
void Judge<T>::ask(std::int64_t t, Rows<const T> image, Rows<const T> state, Rows<const T> closed, std::span<const size_t> moving,
                   Layers<T>& layers, std::vector<char>& leaves) {
    model_.kernels->squares(image, state, squares_of_difference_.data(), squares_.data());
    for (size_t first = 0; spec_.reads_logits() && first < moving.size(); first += rows_at_once) {
        const size_t last = std::min(moving.size(), first + rows_at_once);
        const Rows<T> logits = logits_.rows(last - first);
        layers.multiply_exactly(closed.between(first, last), model_.read_out, logits);
        compare_logits(logits, moving.subspan(first, last - first), layers);
    }
    for (size_t k = 0; k < moving.size(); ++k) {
        const size_t i = moving[k];
        const double g = std::sqrt(squares_of_difference_[k]), n = std::sqrt(squares_[k]);
        const bool passed = passes(i, t, g, n, image.row_span(k), state.row_span(k));
        passes_[i] = passed ? passes_[i] + 1 : 0;
        s_prev_[i] = g;
        t_prev_[i] = t;
        leaves[k] = passed && (passes_[i] >= spec_.passes_needed() || g == 0) && t >= spec_.min_loops;
    }
}

template <class T>
bool Judge<T>::passes(size_t token, std::int64_t t, double g, double n, std::span<const T> image, std::span<const T> state) {
    const bool is_unlimited = std::isinf(spec_.tol);
    const double limit = is_unlimited ? spec_.tol : spec_.tol * n;  // inf * 0 is NaN
    switch (spec_.rule) {
        case Rule::fixed: return false;
        case Rule::exact: return std::memcmp(image.data(), state.data(), image.size_bytes()) == 0;
        case Rule::absolute: return g <= spec_.tol;
        case Rule::relative: return is_unlimited || g <= limit;
        case Rule::contraction: {
            if (g == 0) return true;
            const double rho = std::pow(g / s_prev_[token], 1.0 / double(t - t_prev_[token]));
            const bool contracts = rho < 1 && g * rho / (1 - rho) <= limit;
            return g <= limit && (g <= spec_.phi * n || contracts);
        }
        case Rule::gate: {
            double logit = double(gate_.bias);
            for (size_t c = 0; c < image.size(); ++c) logit += double(gate_.weight[c]) * double(image[c]);
            value_[token] *= 1 / (1 + std::exp(logit));
            return 1 - value_[token] >= spec_.threshold;
        }
        case Rule::readout: return is_still_[token] || g == 0;
        case Rule::entropy:
        case Rule::kl:
        case Rule::argmax: return is_still_[token];
    }
    return false;
}

template <class T>
void Judge<T>::compare_logits(Rows<const T> logits, std::span<const size_t> tokens, Layers<T>& layers) {
    layers.split(tokens.size(), 40.0 * double(tokens.size() * logits.width), [&](Share share, size_t) noexcept {
        for (size_t k = share.begin; k < share.end; ++k) {
            is_still_[tokens[k]] = is_still(tokens[k], logits.row_span(k));
            has_before_[tokens[k]] = true;
        }
    });
}

template <class T>
bool Judge<T>::is_still(size_t token, std::span<const T> logits) noexcept {
    const bool has_before = has_before_[token];
    T* before = before_.data() + (before_.empty() ? 0 : token * logits.size());
    switch (spec_.rule) {
        case Rule::readout: {
            double change = 0, size = 0;
            for (size_t v = 0; v < logits.size(); ++v) {
                const double now = double(logits[v]), step = now - (has_before ? double(before[v]) : 0.0);
                change += step * step;
                size += now * now;
            }
            std::ranges::copy(logits, before);
            return has_before && (std::isinf(spec_.tol) || std::sqrt(change) <= spec_.tol * std::sqrt(size));
        }
        case Rule::entropy: {
            const double last = value_[token];
            value_[token] = distribution_of(logits).entropy;
            return std::abs(value_[token] - last) <= spec_.tol;
        }
        case Rule::kl: {
            const double log_sum = distribution_of(logits).log_sum, last = value_[token];
            double divergence = has_before ? 0 : nan;
            for (size_t v = 0; v < logits.size() && has_before; ++v) {
                const double log_p = double(logits[v]) - log_sum;
                if (log_p == -std::numeric_limits<double>::infinity()) continue;
                divergence += std::exp(log_p) * (log_p - (double(before[v]) - last));
            }
            std::ranges::copy(logits, before);
            value_[token] = log_sum;
            return divergence <= spec_.tol;
        }
        default: {
            const std::int64_t number = likeliest(logits);
            same_[token] = number == number_[token] ? same_[token] + 1 : 1;
            number_[token] = number;
            return same_[token] >= spec_.patience;
        }
    }
}

template class Judge<float>;
template class Judge<double>;

}  // namespace looped::decode
