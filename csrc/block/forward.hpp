// One pass over one prompt: the embedding, M(Y), and the read-out.
#pragma once

#include "block/weights.hpp"

namespace looped::block {

// Rows that leave room for a panel beyond the width, an odd number of cache lines apart: with a power of two, all rows of a tile
// would share one set of L1.
template <class T>
struct Matrix {
    Matrix() = default;
    Matrix(size_t n_rows, size_t width)
        : width(width),
          stride(((checked_product(width + widest_panel, sizeof(T)) + 63) / 64 | 1) * 64 / sizeof(T)),
          memory(checked_product(n_rows, stride)) {}

    Rows<T> rows(size_t n_rows) const { return {memory.data(), n_rows, width, stride}; }

    size_t width = 0, stride = 0;
    AlignedArray<T> memory;
};

// Scratch memory of one worker, for prompts of at most n_tokens.
template <class T>
class Forward {
public:
    // keeps_keys: queries, keys and values of every core layer outlive a pass, so that a frozen prefix is seen by later loops.
    Forward(const Model<T>& model, size_t n_tokens, bool keeps_keys);

    // The injected signal P of a prompt's own tokens, which are `features` [T, n_dims] (or [T, C] for an input of states), or `ids`.
    void embed(Rows<const T> features, std::span<const std::int64_t> ids, Rows<T> signal);

    // image = M(state) for the tokens from `first` on. Those before must have been passed by this object, or given to
    // `keys` and `values`. The rows of `positions` and `signal` are counted from token 0.
    void pass(Rows<const T> state, Rows<const T> signal, Rows<T> image, size_t first);

    // The predictions of a state: [n_read, read_width], row after row.
    void read(Rows<const T> state, std::span<T> prediction);

    Rows<T> keys(size_t layer, size_t n_tokens) const;
    Rows<T> values(size_t layer, size_t n_tokens) const;

private:
    void multiply(Rows<const T> a, const PackedMatrix<T>& w, Rows<T> out, bool adds_to_out = false,
                  Activation activation = Activation::none) const;
    void run_layer(const Layer<T>& layer, Rows<T> x, size_t first, Rows<T> qkv);

    const Model<T>& model_;
    std::vector<Matrix<T>> kept_qkv_;  // one a core layer where they are kept, else one
    Matrix<T> qkv_, normed_, attended_, hidden_, keys_, scores_, closed_, read_;
};

extern template class Forward<float>;
extern template class Forward<double>;

}  // namespace looped::block
