// Decoding: rows of tokens, and what is kept of them, extended a call at a time. Read beside looped/lm/session.py, whose semantics it
// has.
#pragma once

#include <mutex>
#include <stdexcept>

#include "decode/judge.hpp"

namespace looped::decode {

// A call that came while another was running.
class Busy : public std::runtime_error {
public:
    Busy() : std::runtime_error("the session is at work for another thread; give each thread a copy") {}
};

struct Controls {
    size_t n_threads = 1;
    // Asked about every 50 ms on the calling thread; false cancels.
    std::function<bool()> keeps_going;
};

// A call's new tokens, row after row.
template <class T>
struct Extension {
    std::span<const size_t> lengths;       // new tokens of each row
    Rows<const T> embeds;                  // [N, C], without positions
    std::span<const size_t> positions;     // [N]; empty: a row counts on from what it has
    Rows<T> hidden;                        // [N, C], written: what the head reads
    std::span<std::int64_t> n_loops;       // [N], written: loops run by each token
    std::span<T> states = {};              // [n_loops + 1, N, C], written, or empty
};

template <class T>
class Session {
public:
    Session(std::shared_ptr<const block::Model<T>> model, const Policy& policy, const Gate<T>& gate);
    ~Session();
    // Of the same model, with the same tokens, and independent of each other from now on.
    std::unique_ptr<Session> copy() const;

    size_t n_rows() const { return cache_.n_rows(); }
    size_t n_tokens(size_t row) const { return cache_.n_tokens(row); }
    const block::Model<T>& model() const { return *model_; }
    const Policy& policy() const { return policy_; }
    bool has_gate() const { return !gate_.weight.empty(); }

    // All loops and layers of the new tokens. The first call, and the first after reset, fixes the number of rows; the other arguments
    // fit the session. Returns false where it was cancelled. Then, and after an exception, the session is as it was.
    bool extend(const Extension<T>& extension, const Spec& spec, const Controls& controls);
    // The head: logits [N, V] of hidden states. False where it was cancelled.
    bool read(Rows<const T> hidden, Rows<T> logits, const Controls& controls);

    void crop(size_t row, size_t n_kept);
    void select(const std::vector<size_t>& rows);
    void reset(size_t n_rows = 0);  // rows without tokens

private:
    struct Run;

    std::unique_lock<std::mutex> claim() const;
    block::Team& team(size_t n_threads);
    void compute(Run& run);
    bool pass(Run& run, const std::vector<block::Layer<T>>& layers, Rows<T> x, Part part, size_t t);
    bool loop(Run& run, size_t t);
    void let_go(Run& run, size_t t);
    Rows<T> close(Run& run, Rows<const T> states, Part part, size_t t);

    std::shared_ptr<const block::Model<T>> model_;
    Policy policy_;
    Gate<T> gate_;
    Cache<T> cache_;
    std::vector<std::vector<T>> last_states_;  // a row each, empty where there is none: where its last token left
    Layers<T> layers_;
    Matrix<T> signal_, state_, image_, own_state_, closed_;
    size_t n_room_ = 0;  // tokens that these have room for
    std::unique_ptr<block::Team> team_;
    size_t team_asked_ = 0;
    long team_process_ = 0;
    mutable std::mutex mutex_;
};

extern template class Session<float>;
extern template class Session<double>;

}  // namespace looped::decode
