// Which tokens leave the loop: the rules of Spec, and what they remember of every token of a call.
#pragma once

#include "decode/layers.hpp"
#include "decode/spec.hpp"

namespace looped::decode {

// The exit gate of a model, a linear map from C to 1.
template <class T>
struct Gate {
    std::vector<T> weight;
    T bias = 0;
};

template <class T>
class Judge {
public:
    Judge(const block::Model<T>& model, const Spec& spec, const Gate<T>& gate, size_t n_tokens);

    bool is_due(std::int64_t t) const { return !spec_.is_fixed() && t % spec_.check_every == 0; }

    // After loop t, a multiple of check_every: row k of the image F and of the state Y are of token moving[k] of the call, and so is
    // row k of `closed`, which the head reads, where Spec::reads_logits. leaves[k] tells whether it has passed often enough.
    void ask(std::int64_t t, Rows<const T> image, Rows<const T> state, Rows<const T> closed, std::span<const size_t> moving,
             Layers<T>& layers, std::vector<char>& leaves);

private:
    bool passes(size_t token, std::int64_t t, double g, double n, std::span<const T> image, std::span<const T> state);
    void compare_logits(Rows<const T> logits, std::span<const size_t> tokens, Layers<T>& layers);
    bool is_still(size_t token, std::span<const T> logits) noexcept;

    const block::Model<T>& model_;
    const Spec& spec_;
    const Gate<T>& gate_;
    // A token each.
    std::vector<std::int64_t> passes_, t_prev_, number_;  // number_: the likeliest next token, and how often it was (argmax)
    std::vector<std::int64_t> same_;
    std::vector<double> s_prev_, value_;  // value_: entropy, the logarithm of the sum (kl), the chance to stay (gate)
    std::vector<char> has_before_, is_still_;
    std::vector<T> before_;  // logits of the check before [n_tokens, V] (readout, kl)
    Matrix<T> logits_;
    std::vector<double> squares_of_difference_, squares_;
};

extern template class Judge<float>;
extern template class Judge<double>;

}  // namespace looped::decode
