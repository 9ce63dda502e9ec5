// One prompt's loop, from its first step to its exit.
#pragma once

#include <vector>

#include "block/forward.hpp"
#include "loop/memory.hpp"
#include "loop/watch.hpp"

namespace looped::loop {

// A team's memory and the loop itself; its size does not depend on the number of prompts or of loops.
template <class T>
class PromptLoop {
public:
    PromptLoop(const block::Model<T>& model, const Spec& spec, block::Team& team, block::StopRequest& stop, size_t n_tokens);

    // Runs prompt i of the batch to its exit, and reads its prediction. Returns false where it was told to stop: without a prediction,
    // and in the memory as its last complete loop left it.
    bool run(const BatchMemory<T>& batch, size_t i);

private:
    enum class Turn { more, last, abandoned };

    void start(const BatchMemory<T>& batch, size_t i);
    void save(const BatchMemory<T>& batch, size_t i, Rows<const T> image, Rows<const T> next);
    Turn once(const BatchMemory<T>& batch, size_t i);  // one loop; an abandoned one leaves no trace
    // Whether loop t needs the predictions of its F.
    bool reads_at(std::int64_t t) const {
        return spec_.return_predictions || (spec_.rule == Rule::readout && t % spec_.check_every == 0);
    }

    void measure(block::Share share) noexcept;
    double norm_of(Rows<const T> a, Rows<const T> b);
    bool next_state(const BatchMemory<T>& batch, size_t i, Counters& counters, double g);
    bool pass_prompt(const BatchMemory<T>& batch, size_t i, Watch& watch, double g, double n, double s);
    bool has_all_moving_passed(const Counters& counters) const;
    bool pass_tokens(const BatchMemory<T>& batch, size_t i, Watch& watch);
    bool is_within(double change, double size) const { return size == 0 ? change == 0 : change <= spec_.tol * size; }
    void compare_predictions(const BatchMemory<T>& batch, size_t i, bool has_prediction);

    const block::Model<T>& model_;
    const Spec& spec_;
    block::StopRequest& stop_;
    block::Forward<T> forward_;
    block::Matrix<T> buffers_[4];
    Rows<T> state_, image_, next_;  // Y, F, Y' of the prompt that runs
    Rows<T> last_image_;            // F of the loop before, where it is not Y
    size_t first_ = 0;              // tokens before it are frozen

    std::vector<double> g_, n_;  // a token each: squares at first, then norms
    std::vector<double> scratch_;
    std::vector<T> prediction_;     // of this loop's F, where the loop needs it
    double change_ = 0, size_ = 0;  // of the whole prediction since the check before
    std::vector<char> is_still_;    // a token each, where a prediction is read
};

extern template class PromptLoop<float>;
extern template class PromptLoop<double>;

}  // namespace looped::loop
