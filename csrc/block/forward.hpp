// One pass over one prompt: the embedding, M(Y), and the read-out.
#pragma once

#include "block/team.hpp"
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

// Scratch memory of one prompt at a time, of at most n_tokens, and the team that works on it. A layer is split by rows; attention
// alone needs those of others, their keys and values, and so a layer is cut before it. No sum is split: a team of any size gives the
// same bits.
template <class T>
class Forward {
public:
    // keeps_keys: queries, keys and values of every core layer outlive a pass, so that a frozen prefix is seen by later loops.
    Forward(const Model<T>& model, Team& team, StopRequest& stop, size_t n_tokens, bool keeps_keys);

    // What each of the three writes is unfinished, to be thrown away, where a stop was asked for meanwhile.

    // The injected signal P of a prompt's own tokens, which are `features` [T, n_dims] (or [T, C] for an input of states), or `ids`.
    void embed(Rows<const T> features, std::span<const std::int64_t> ids, Rows<T> signal);

    // image = M(state) for the tokens from `first` on. Those before must have been passed by this object, or given to
    // `keys` and `values`. The rows of `positions` and `signal` are counted from token 0. Then after(share) for the rows that the
    // same thread has just written.
    template <class After>
    void pass(Rows<const T> state, Rows<const T> signal, Rows<T> image, size_t first, const After& after) {
        if (first >= state.n_rows) return;
        run_layers(
            model_.core, image, first, !kept_qkv_.empty(), [&](Share share) noexcept { inject(state, signal, image, share); },
            [&](Share share) noexcept {
                normalize_image(image, share);
                after(share);
            });
    }

    // The predictions of a state: [n_read, read_width], row after row.
    void read(Rows<const T> state, std::span<T> prediction);

    Rows<T> keys(size_t layer, size_t n_tokens) const;
    Rows<T> values(size_t layer, size_t n_tokens) const;

private:
    void multiply(Rows<const T> a, const PackedMatrix<T>& w, Rows<T> out, bool adds_to_out = false,
                  Activation activation = Activation::none) const noexcept;
    // before(share), the layers on the rows of x from `first` on, after(share).
    template <class Before, class After>
    void run_layers(const std::vector<Layer<T>>& layers, Rows<T> x, size_t first, bool keeps_keys, const Before& before,
                    const After& after);
    void make_queries(const Layer<T>& layer, Rows<T> x, Share share, Rows<T> qkv) const noexcept;
    void finish_layer(const Layer<T>& layer, Rows<T> x, Share share, Rows<T> qkv, size_t member) const noexcept;
    Rows<const T> normed(Rows<T> x, Share share) const noexcept;
    void inject(Rows<const T> state, Rows<const T> signal, Rows<T> image, Share share) const noexcept;
    void normalize_image(Rows<T> image, Share share) const noexcept;
    void read_rows(Rows<const T> state, std::span<T> prediction, Share share) const noexcept;

    const Model<T>& model_;
    Team& team_;
    StopRequest& stop_;
    std::vector<Matrix<T>> kept_qkv_;         // one a core layer where they are kept
    Matrix<T> qkv_[2];                        // in turns: one is written while another member may still read the other
    std::vector<Matrix<T>> keys_, scores_;    // one a member
    Matrix<T> normed_, attended_, hidden_, closed_, read_;
};

template <class T>
template <class Before, class After>
void Forward<T>::run_layers(const std::vector<Layer<T>>& layers, Rows<T> x, size_t first, bool keeps_keys, const Before& before,
                            const After& after) {
    const auto qkv = [&](size_t i) { return (keeps_keys ? kept_qkv_[i] : qkv_[team_.size() > 1 ? i % 2 : 0]).rows(x.n_rows); };
    team_.split(first, x.n_rows, [&](Share share, size_t) noexcept {
        before(share);
        if (layers.empty()) return after(share);
        make_queries(layers[0], x, share, qkv(0));
    });
    for (size_t i = 0; i < layers.size(); ++i) {
        team_.split(first, x.n_rows, [&](Share share, size_t member) noexcept {
            finish_layer(layers[i], x, share, qkv(i), member);
            if (i + 1 == layers.size()) return after(share);
            make_queries(layers[i + 1], x, share, qkv(i + 1));
        });
    }
}

extern template class Forward<float>;
extern template class Forward<double>;

}  // namespace looped::block
