// What a loop remembers of every prompt, in the arrays and under the names of the eager backend's LoopState.
#pragma once

#include <span>

#include "block/weights.hpp"
#include "loop/spec.hpp"

namespace looped::loop {

using block::Rows;
using std::size_t;

// One prompt's counters. A unit is the prompt, or each of its tokens under Spec::is_prefix.
struct Counters {
    std::int64_t& t;
    bool& done;
    std::int64_t& status;
    double& residual;
    bool& damped;
    double& best_g;
    std::int64_t& checks_without_gain;
    std::span<std::int64_t> passes;
    std::span<double> s_prev;
    std::span<std::int64_t> t_prev;
};

template <class T>
struct AndersonMemory {
    Rows<T> d_residual, d_image;  // [depth, own numbers]
    std::span<T> residual, image;
    double& g;
    std::int64_t& n_seen;
};

struct PrefixMemory {
    std::int64_t& frozen;
    std::span<std::int64_t> n_loops;
    std::span<double> g, n;
};

struct ReadoutMemory {
    bool& has_prediction;
    std::span<double> prediction;
};

// All prompts' arrays, prompts first. Arrays that the spec does not need are empty.
template <class T>
struct BatchMemory {
    size_t n_prompts = 0, n_tokens = 0;
    block::Shape shape;
    std::span<const std::int64_t> lengths;
    std::span<const T> signal;  // [B, T, C]
    std::span<T> y, state;      // [B, T, C]: F and Y

    std::span<std::int64_t> t, status, passes, t_prev, checks_without_gain;
    std::span<bool> done, damped;
    std::span<double> residual, s_prev, best_g;

    std::span<bool> has_prediction;
    std::span<double> last_prediction;  // [B, N, width]

    std::span<std::int64_t> frozen, token_loops;
    std::span<double> token_g, token_n;
    std::span<T> keys, values;  // [B, n_core, T, H, head_dim]

    std::span<T> d_residual, d_image, aa_residual, aa_image;
    std::span<double> aa_g;
    std::span<std::int64_t> n_seen;

    std::span<bool> finished;  // [B], set by the run: false where it was cancelled first
    std::span<T> prediction;   // [B, N, width]; NaN where not finished
    std::span<T> predictions;  // [B, loops, N, width] or empty
    std::int64_t first_loop = 0;  // loop before the first of `predictions`

    size_t length(size_t i) const { return size_t(lengths[i]); }
    size_t prediction_size() const { return shape.n_read(n_tokens) * shape.read_width(); }

    Rows<T> token_rows(std::span<T> all, size_t i) const {
        return {all.data() + i * n_tokens * shape.d_model, length(i), shape.d_model, shape.d_model};
    }
    Rows<const T> signal_rows(size_t i) const {
        return {signal.data() + i * n_tokens * shape.d_model, length(i), shape.d_model, shape.d_model};
    }
    // One layer's keys or values of a prompt, [T, H head_dim].
    Rows<T> cache_rows(std::span<T> all, size_t i, size_t layer) const {
        const size_t width = shape.attention_width();
        return {all.data() + (i * shape.n_core + layer) * n_tokens * width, length(i), width, width};
    }
    Counters counters(size_t i) const {
        const size_t n_units = passes.size() / n_prompts;
        return {t[i],
                done[i],
                status[i],
                residual[i],
                damped[i],
                best_g[i],
                checks_without_gain[i],
                passes.subspan(i * n_units, n_units),
                s_prev.subspan(i * n_units, n_units),
                t_prev.subspan(i * n_units, n_units)};
    }
    PrefixMemory prefix(size_t i) const {
        return {frozen[i], token_loops.subspan(i * n_tokens, n_tokens), token_g.subspan(i * n_tokens, n_tokens),
                token_n.subspan(i * n_tokens, n_tokens)};
    }
    ReadoutMemory readout(size_t i) const {
        return {has_prediction[i], last_prediction.subspan(i * prediction_size(), prediction_size())};
    }
    AndersonMemory<T> anderson(size_t i) const {
        const size_t size = n_tokens * shape.d_model, own = length(i) * shape.d_model, depth = d_residual.size() / (n_prompts * size);
        return {{d_residual.data() + i * depth * size, depth, own, size},
                {d_image.data() + i * depth * size, depth, own, size},
                aa_residual.subspan(i * size, own),
                aa_image.subspan(i * size, own),
                aa_g[i],
                n_seen[i]};
    }
};

}  // namespace looped::loop
