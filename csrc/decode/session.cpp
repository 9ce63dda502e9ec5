#include "decode/session.hpp"

#include <algorithm>
#include <cfenv>
#include <numeric>

#include "block/float_mode.hpp"

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

namespace looped::decode {

using block::LoopNorm;

namespace {

constexpr size_t slots_at_first = 16;

long own_process() {
#if defined(__unix__) || defined(__APPLE__)
    return long(::getpid());
#else
    return 0;
#endif
}

template <class T>
void copy_rows(Rows<const T> from, Rows<T> to) {
    for (size_t i = 0; i < from.n_rows; ++i) std::ranges::copy(from.row_span(i), to.row(i));
}

}  // namespace

// One call of extend.
template <class T>
struct Session<T>::Run {
    const Extension<T>& extension;
    const Spec& spec;
    block::StopRequest& stop;
    Judge<T> judge;
    std::vector<Token> tokens, moving_tokens;
    std::vector<size_t> moving;  // which of the tokens
    std::vector<char> leaves;
    size_t n_slots = 0;
};

template <class T>
Session<T>::Session(std::shared_ptr<const block::Model<T>> model, const Policy& policy, const Gate<T>& gate)
    : model_(std::move(model)), policy_(policy), gate_(gate), cache_(model_->shape, model_->kernels->panel), layers_(*model_) {}

template <class T>
Session<T>::~Session() {
    if (team_process_ != own_process()) (void)team_.release();  // of a parent, whose threads are not here
}

template <class T>
std::unique_lock<std::mutex> Session<T>::claim() const {
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) throw Busy();
    return lock;
}

template <class T>
std::unique_ptr<Session<T>> Session<T>::copy() const {
    const auto lock = claim();
    auto other = std::make_unique<Session>(model_, policy_, gate_);
    other->cache_ = cache_;
    other->last_states_ = last_states_;
    return other;
}

// Kept between calls, so that a token does not wait for threads to start.
template <class T>
block::Team& Session<T>::team(size_t n_threads) {
    if (team_process_ != own_process()) (void)team_.release();
    if (!team_ || team_asked_ != n_threads) {
        team_.reset();
        team_ = std::make_unique<block::Team>(n_threads);
        team_asked_ = n_threads;
        team_process_ = own_process();
    }
    return *team_;
}

template <class T>
void Session<T>::crop(size_t row, size_t n_kept) {
    const auto lock = claim();
    cache_.crop(row, n_kept);
    last_states_.assign(n_rows(), {});
}

template <class T>
void Session<T>::select(const std::vector<size_t>& rows) {
    const auto lock = claim();
    std::vector<std::vector<T>> states;
    states.reserve(rows.size());
    for (size_t row : rows) states.push_back(last_states_[row]);
    cache_.select(rows);
    last_states_ = std::move(states);
}

template <class T>
void Session<T>::reset(size_t n_rows) {
    const auto lock = claim();
    cache_.start(n_rows, false);
    last_states_.assign(n_rows, {});
}

template <class T>
bool Session<T>::extend(const Extension<T>& extension, const Spec& spec, const Controls& controls) {
    const auto lock = claim();
    const size_t n_tokens = extension.embeds.n_rows, C = model_->shape.d_model;
    const bool is_new = n_rows() == 0;
    const bool has_any = [&] {
        for (size_t row = 0; row < n_rows(); ++row) {
            if (this->n_tokens(row)) return true;
        }
        return false;
    }();
    if (has_any && spec.reads_logits() && !model_->coda.empty() && !cache_.has_checks()) {
        throw std::invalid_argument("the cached tokens have no keys of the coda at checks");
    }
    if (!has_any) {
        cache_.start(extension.lengths.size(), spec.reads_logits());
        last_states_.assign(extension.lengths.size(), {});
    }
    block::StopRequest stop(controls.keeps_going);
    Run run{.extension = extension,
            .spec = spec,
            .stop = stop,
            .judge = Judge<T>(*model_, spec, gate_, n_tokens),
            .tokens = {},
            .moving_tokens = {},
            .moving = {},
            .leaves = {}};
    try {
        size_t most_keys = 1;
        for (size_t row = 0; row < extension.lengths.size(); ++row) {
            const size_t before = this->n_tokens(row);
            for (size_t k = 0; k < extension.lengths[row]; ++k) {
                const size_t place = before + k, i = run.tokens.size();
                run.tokens.push_back({row, place, extension.positions.empty() ? place : extension.positions[i]});
                most_keys = std::max(most_keys, place + 1);
            }
        }
        run.n_slots = policy_.n_slots(size_t(spec.n_loops));
        // Slots for loops that every token may have left before are made when one comes to them.
        cache_.deepen(spec.is_fixed() ? run.n_slots : std::min(run.n_slots, slots_at_first));
        for (size_t row = 0; row < extension.lengths.size(); ++row) cache_.make_room(row, extension.lengths[row]);
        if (n_tokens > n_room_ || n_tokens < n_room_ / 4) {
            n_room_ = 0;
            for (auto* each : {&signal_, &state_, &image_, &own_state_, &closed_}) *each = Matrix<T>(n_tokens, C);
            n_room_ = n_tokens;
        }
        const block::FloatMode callers;
        std::fesetenv(FE_DFL_ENV);
        layers_.prepare(team(controls.n_threads), stop, n_tokens, most_keys);
        compute(run);
        if (!stop.is_made()) {
            std::vector<std::vector<T>> last = last_states_;
            for (size_t i = 0; i < n_tokens; ++i) {
                if (i + 1 < n_tokens && run.tokens[i + 1].row == run.tokens[i].row) continue;
                const auto own = state_.rows(n_tokens).row_span(i);
                last[run.tokens[i].row].assign(own.begin(), own.end());
            }
            last_states_ = std::move(last);
        }
    } catch (...) {
        if (is_new) cache_.start(0, false);
        throw;
    }
    if (stop.is_made()) {
        if (is_new) cache_.start(0, false);
        if (stop.error()) std::rethrow_exception(stop.error());
        return false;
    }
    for (size_t row = 0; row < extension.lengths.size(); ++row) cache_.append(row, extension.lengths[row]);
    return true;
}

template <class T>
bool Session<T>::pass(Run& run, const std::vector<block::Layer<T>>& layers, Rows<T> x, Part part, size_t t) {
    const bool is_whole = part == Part::prelude || part == Part::coda;
    const std::span<const Token> tokens = is_whole ? run.tokens : run.moving_tokens;
    for (size_t i = 0; i < layers.size(); ++i) {
        if (!layers_.run(layers[i], x, tokens, cache_, part, t ? policy_.slot(t) : 0, i)) return false;
    }
    return true;
}

template <class T>
void Session<T>::compute(Run& run) {
    const block::Shape& shape = model_->shape;
    const block::Kernels<T>& kernels = *model_->kernels;
    const size_t n = run.tokens.size();
    const auto place_of = [&](const Token& token) { return model_->position_rows().between(token.position, token.position + 1); };
    const Rows<T> signal = signal_.rows(n), state = state_.rows(n);
    for (size_t i = 0; i < n; ++i) {
        const Rows<const T> own = run.extension.embeds.between(i, i + 1);
        const Rows<const T> place = shape.has_positions && shape.adds_positions_once ? place_of(run.tokens[i]) : Rows<const T>{};
        kernels.inject(block::Inject::none, own, own, place, signal.between(i, i + 1));
    }
    if (!pass(run, model_->prelude, signal, Part::prelude, 0)) return;
    for (size_t i = 0; i < n; ++i) {
        const std::vector<T>& last = last_states_[run.tokens[i].row];
        if (run.spec.warm_start && !last.empty()) {
            std::ranges::copy(last, state.row(i));
        } else if (shape.state_init == block::StateInit::embedding) {
            std::ranges::copy(signal.row_span(i), state.row(i));
        } else {
            std::ranges::fill(state.row_span(i), T(shape.state_init == block::StateInit::ones ? 1 : 0));
        }
    }
    const auto keep_states = [&](size_t t) {
        if (run.extension.states.empty()) return;
        const size_t C = shape.d_model;
        copy_rows<T>(state, {run.extension.states.data() + t * n * C, n, C, C});
    };
    keep_states(0);
    run.moving.resize(n);
    std::iota(run.moving.begin(), run.moving.end(), size_t(0));
    run.moving_tokens = run.tokens;
    std::ranges::fill(run.extension.n_loops, 0);
    for (size_t t = 1; t <= size_t(run.spec.n_loops); ++t) {
        if (run.moving.empty() && run.extension.states.empty()) break;
        if (!run.moving.empty() && !loop(run, t)) return;
        keep_states(t);
    }
    run.leaves.assign(run.moving.size(), 1);
    let_go(run, size_t(run.spec.n_loops));
    const Rows<T> closed = close(run, state, Part::coda, 0);
    if (run.stop.is_made()) return;
    copy_rows<T>(closed, run.extension.hidden);
}

// What the head reads of states.
template <class T>
Rows<T> Session<T>::close(Run& run, Rows<const T> states, Part part, size_t t) {
    const Rows<T> closed = closed_.rows(states.n_rows);
    copy_rows<T>(states, closed);
    if (!pass(run, model_->coda, closed, part, t)) return closed;
    if (model_->shape.loop_norm == LoopNorm::once) {
        model_->kernels->normalize(model_->shape.norm, closed, closed, T(model_->shape.norm_eps), model_->final_gain.data(),
                                   model_->final_shift.data());
    }
    return closed;
}

// Loop t of the tokens that move. False where a stop was asked for.
template <class T>
bool Session<T>::loop(Run& run, size_t t) {
    const block::Shape& shape = model_->shape;
    const block::Kernels<T>& kernels = *model_->kernels;
    const size_t n = run.moving.size();
    if (policy_.slot(t) >= cache_.n_slots()) cache_.deepen(std::min(run.n_slots, 2 * cache_.n_slots()));
    const Rows<T> state = state_.rows(run.tokens.size()), signal = signal_.rows(run.tokens.size()), image = image_.rows(n);
    for (size_t k = 0; k < n; ++k) {
        const size_t i = run.moving[k], position = run.tokens[i].position;
        const Rows<const T> place = shape.adds_positions_each_loop() ? model_->position_rows().between(position, position + 1)
                                                                     : Rows<const T>{};
        kernels.inject(shape.inject, state.between(i, i + 1), signal.between(i, i + 1), place, image.between(k, k + 1));
    }
    if (!pass(run, model_->core, image, Part::core, t)) return false;
    if (shape.loop_norm == LoopNorm::each) {
        kernels.normalize(shape.norm, image, image, T(shape.norm_eps), model_->final_gain.data(), model_->final_shift.data());
    }
    run.leaves.assign(n, 0);
    const bool keeps_checks = run.spec.reads_logits() && !model_->coda.empty();
    if (run.judge.is_due(std::int64_t(t))) {
        const Rows<T> before = own_state_.rows(n);
        for (size_t k = 0; k < n; ++k) std::ranges::copy(state.row_span(run.moving[k]), before.row(k));
        Rows<T> closed;
        if (run.spec.reads_logits()) closed = close(run, image, Part::check, t);
        if (run.stop.is_made()) return false;
        run.judge.ask(std::int64_t(t), image, before, closed, run.moving, layers_, run.leaves);
        if (run.stop.look()) return false;
    } else if (keeps_checks && t > 1 && t <= run.n_slots) {  // a loop without a check has what the one before it had
        for (const Token& token : run.moving_tokens) {
            cache_.carry(Part::check, token.row, token.place, policy_.slot(t - 1), policy_.slot(t));
        }
    }
    for (size_t k = 0; k < n; ++k) {
        std::ranges::copy(image.row_span(k), state.row(run.moving[k]));
        run.extension.n_loops[run.moving[k]] = std::int64_t(t);
    }
    if (std::ranges::find(run.leaves, 1) != run.leaves.end()) let_go(run, t);
    return true;
}

// Those that leave after loop t keep its keys and values in the slots of later loops.
template <class T>
void Session<T>::let_go(Run& run, size_t t) {
    size_t n_left = 0;
    for (size_t k = 0; k < run.moving.size(); ++k) {
        const Token token = run.moving_tokens[k];
        if (!run.leaves[k]) {
            run.moving[n_left] = run.moving[k];
            run.moving_tokens[n_left++] = token;
            continue;
        }
        for (size_t slot = t; t > 0 && slot < cache_.n_slots(); ++slot) {
            cache_.carry(Part::core, token.row, token.place, t - 1, slot);
            cache_.carry(Part::check, token.row, token.place, t - 1, slot);
        }
    }
    run.moving.resize(n_left);
    run.moving_tokens.resize(n_left);
}

template <class T>
bool Session<T>::read(Rows<const T> hidden, Rows<T> logits, const Controls& controls) {
    const auto lock = claim();
    block::StopRequest stop(controls.keeps_going);
    const block::FloatMode callers;
    std::fesetenv(FE_DFL_ENV);
    layers_.prepare(team(controls.n_threads), stop, 0, 1);
    layers_.multiply_exactly(hidden, model_->read_out, logits);
    if (stop.error()) std::rethrow_exception(stop.error());
    return !stop.is_made();
}

template class Session<float>;
template class Session<double>;

}  // namespace looped::decode
