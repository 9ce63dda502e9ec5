#include "block/forward.hpp"

#include <algorithm>

namespace looped::block {

template <class T>
Forward<T>::Forward(const Model<T>& model, Team& team, StopRequest& stop, size_t n_tokens, bool keeps_keys)
    : model_(model), team_(team), stop_(stop) {
    const Shape& shape = model.shape;
    const size_t panel = model.kernels->panel, n_keys = (n_tokens + panel - 1) / panel * panel;
    for (size_t i = 0; keeps_keys && i < shape.n_core; ++i) kept_qkv_.emplace_back(n_tokens, 3 * shape.attention_width());
    for (size_t i = 0; i < (team.size() > 1 ? 2 : 1); ++i) qkv_[i] = Matrix<T>(n_tokens, 3 * shape.attention_width());
    normed_ = Matrix<T>(n_tokens, shape.d_model);
    attended_ = Matrix<T>(n_tokens, shape.attention_width());
    hidden_ = Matrix<T>(n_tokens, shape.d_ff);
    for (size_t i = 0; i < team.size(); ++i) {
        keys_.emplace_back(shape.head_dim, n_keys);
        scores_.emplace_back(model.kernels->tile_rows, n_keys);
    }
    closed_ = Matrix<T>(n_tokens, shape.d_model);
    read_ = Matrix<T>(shape.readout_width ? shape.n_read(n_tokens) : 0, shape.readout_width);
}

template <class T>
Rows<T> Forward<T>::keys(size_t layer, size_t n_tokens) const {
    Rows<T> rows = kept_qkv_[layer].rows(n_tokens).from_column(model_.shape.attention_width());
    rows.width = model_.shape.attention_width();
    return rows;
}

template <class T>
Rows<T> Forward<T>::values(size_t layer, size_t n_tokens) const {
    return kept_qkv_[layer].rows(n_tokens).from_column(2 * model_.shape.attention_width());
}

template <class T>
void Forward<T>::multiply(Rows<const T> a, const PackedMatrix<T>& w, Rows<T> out, bool adds_to_out,
                          Activation activation) const noexcept {
    model_.kernels->product({.a = a,
                             .panels = w.panels.data(),
                             .bias = w.bias.data(),
                             .n_columns = w.n_out,
                             .out = out,
                             .adds_to_out = adds_to_out,
                             .activation = activation,
                             .stop = &stop_,
                             .used = w.used_ends.empty() ? nullptr : w.used_rows(),
                             .used_ends = w.used_ends.data()});
}

template <class T>
Rows<const T> Forward<T>::normed(Rows<T> x, Share share) const noexcept {
    const Rows<T> own = x.between(share.begin, share.end);
    if (model_.shape.norm == Norm::none) return own;
    const Rows<T> out = normed_.rows(x.n_rows).between(share.begin, share.end);
    model_.kernels->normalize(model_.shape.norm, own, out, T(model_.shape.norm_eps), nullptr, nullptr);
    return out;
}

template <class T>
void Forward<T>::make_queries(const Layer<T>& layer, Rows<T> x, Share share, Rows<T> qkv) const noexcept {
    if (layer.n_working) multiply(normed(x, share), layer.qkv, qkv.between(share.begin, share.end));
}

template <class T>
void Forward<T>::finish_layer(const Layer<T>& layer, Rows<T> x, Share share, Rows<T> qkv, size_t member) const noexcept {
    const Shape& shape = model_.shape;
    const auto own = [&](const Matrix<T>& all) { return all.rows(x.n_rows).between(share.begin, share.end); };
    const Rows<T> moving = x.between(share.begin, share.end);
    if (layer.n_working) {
        model_.kernels->attend({.qkv = qkv,
                                .first = share.begin,
                                .end = share.end,
                                .n_heads = shape.n_heads,
                                .head_dim = shape.head_dim,
                                .n_working = layer.n_working,
                                .is_causal = shape.is_causal,
                                .out = attended_.rows(x.n_rows),
                                .keys = keys_[member].rows(shape.head_dim),
                                .scores = scores_[member].rows(model_.kernels->tile_rows),
                                .stop = &stop_});
    }
    multiply(own(attended_), layer.proj, moving, true);
    multiply(normed(x, share), layer.fc, own(hidden_), false, shape.activation);
    multiply(own(hidden_), layer.down, moving, true);
}

template <class T>
void Forward<T>::embed(Rows<const T> features, std::span<const std::int64_t> ids, Rows<T> signal) {
    const Shape& shape = model_.shape;
    const Rows<T> all = closed_.rows(signal.n_rows);
    if (all.n_rows == 0) return;
    const auto read_in = [&](Share share) noexcept {
        const Rows<T> x = all.between(share.begin, share.end);
        if (shape.input_kind == InputKind::features) {
            multiply(features.between(share.begin, share.end), model_.read_in, x);
        } else {
            const Rows<const T> table{model_.embedding.data(), shape.vocab_size, shape.d_model, shape.d_model};
            for (size_t i = share.begin; i < share.end; ++i) {
                std::ranges::copy(shape.input_kind == InputKind::tokens ? table.row_span(size_t(ids[i])) : features.row_span(i),
                                  all.row(i));
            }
        }
        if (shape.has_positions && shape.adds_positions_once) {
            model_.kernels->inject(Inject::none, x, x, model_.position_rows().from_row(share.begin), x);
        }
    };
    run_layers(model_.prelude, all, 0, false, read_in, [&](Share share) noexcept {
        for (size_t i = share.begin; i < share.end; ++i) std::ranges::copy(all.row_span(i), signal.row(i));
    });
}

template <class T>
void Forward<T>::inject(Rows<const T> state, Rows<const T> signal, Rows<T> image, Share share) const noexcept {
    const Rows<const T> positions = model_.shape.adds_positions_each_loop() ? model_.position_rows().from_row(share.begin)
                                                                            : Rows<const T>{};
    model_.kernels->inject(model_.shape.inject, state.from_row(share.begin), signal.from_row(share.begin), positions,
                           image.between(share.begin, share.end));
}

template <class T>
void Forward<T>::normalize_image(Rows<T> image, Share share) const noexcept {
    if (model_.shape.loop_norm != LoopNorm::each) return;
    const Rows<T> own = image.between(share.begin, share.end);
    model_.kernels->normalize(model_.shape.norm, own, own, T(model_.shape.norm_eps), model_.final_gain.data(),
                              model_.final_shift.data());
}

template <class T>
void Forward<T>::read(Rows<const T> state, std::span<T> prediction) {
    if (state.n_rows == 0) return;
    if (!model_.coda.empty()) {
        const Rows<T> closed = closed_.rows(state.n_rows);
        const auto copy = [&](Share share) noexcept {
            for (size_t i = share.begin; i < share.end; ++i) std::ranges::copy(state.row_span(i), closed.row(i));
        };
        run_layers(model_.coda, closed, 0, false, copy, [](Share) noexcept {});
        state = closed;
    }
    team_.split(0, model_.shape.n_read(state.n_rows), [&](Share share, size_t) noexcept { read_rows(state, prediction, share); });
}

// `share` of the places that are read.
template <class T>
void Forward<T>::read_rows(Rows<const T> state, std::span<T> prediction, Share share) const noexcept {
    const Shape& shape = model_.shape;
    const size_t n_read = shape.n_read(state.n_rows);
    Rows<const T> places = Rows<const T>{state.first, n_read, state.width, state.stride * shape.read_stride}.between(share.begin,
                                                                                                                     share.end);
    if (shape.loop_norm == LoopNorm::once) {
        const Rows<T> out = normed_.rows(n_read).between(share.begin, share.end);
        model_.kernels->normalize(shape.norm, places, out, T(shape.norm_eps), model_.final_gain.data(), model_.final_shift.data());
        places = out;
    }
    if (shape.readout_width) {
        const Rows<T> out = read_.rows(n_read).between(share.begin, share.end);
        multiply(places, model_.read_out, out);
        places = out;
    }
    T* to = prediction.data() + share.begin * places.width;
    for (size_t i = 0; i < places.n_rows; ++i) std::ranges::copy(places.row_span(i), to + i * places.width);
}

template class Forward<float>;
template class Forward<double>;

}  // namespace looped::block
