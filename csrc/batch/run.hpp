// Ragged batches: one work item is one prompt with all its loops, on one thread, or on a team where there are more threads than
// prompts.
#pragma once

#include <functional>
#include <stdexcept>

#include "loop/iterate.hpp"

namespace looped::batch {

using std::size_t;

// What went wrong with a prompt.
class PromptError : public std::runtime_error {
public:
    PromptError(size_t prompt, const std::string& what, bool lacks_memory)
        : std::runtime_error(what), prompt(prompt), lacks_memory(lacks_memory) {}
    size_t prompt;
    bool lacks_memory;
};

struct Controls {
    size_t n_threads = 1;
    // Called on the calling thread, which is one of those that work, about every 50 ms with the number of prompts that have finished;
    // false cancels.
    std::function<bool(size_t n_finished)> keeps_going;
};

// The threads of a call live as long as it does, so that there is nothing to mend after a fork, and calls from several threads do
// not meet. Both functions throw PromptError, for the first prompt that failed, and return false where they were cancelled.

// Runs all prompts of the batch to their exits, in place. Where it is cancelled, prompts that have not finished are in the memory as
// their last complete loop left them, and go on from there in another run.
template <class T>
bool run(const block::Model<T>& model, const loop::Spec& spec, const loop::BatchMemory<T>& batch, const Controls& controls);

// Prompts before their embedding: float [B, T, width], or token ids [B, T].
template <class T>
struct RawPrompts {
    size_t n_tokens = 0;
    std::span<const std::int64_t> lengths;
    std::span<const T> features;
    std::span<const std::int64_t> ids;
};

// The injected signals [B, T, C]; rows of padding are left as they are.
template <class T>
bool embed(const block::Model<T>& model, const RawPrompts<T>& prompts, std::span<T> signal, const Controls& controls);

extern template bool run<float>(const block::Model<float>&, const loop::Spec&, const loop::BatchMemory<float>&, const Controls&);
extern template bool run<double>(const block::Model<double>&, const loop::Spec&, const loop::BatchMemory<double>&, const Controls&);
extern template bool embed<float>(const block::Model<float>&, const RawPrompts<float>&, std::span<float>, const Controls&);
extern template bool embed<double>(const block::Model<double>&, const RawPrompts<double>&, std::span<double>, const Controls&);

}  // namespace looped::batch
