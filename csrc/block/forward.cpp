#include "block/forward.hpp"

#include <algorithm>

namespace looped::block {

template <class T>
Forward<T>::Forward(const Model<T>& model, size_t n_tokens, bool keeps_keys) : model_(model) {
    const Shape& shape = model.shape;
    const size_t panel = model.kernels->panel, n_keys = (n_tokens + panel - 1) / panel * panel;
    for (size_t i = 0; keeps_keys && i < shape.n_core; ++i) kept_qkv_.emplace_back(n_tokens, 3 * shape.attention_width());
    qkv_ = Matrix<T>(n_tokens, 3 * shape.attention_width());
    normed_ = Matrix<T>(n_tokens, shape.d_model);
    attended_ = Matrix<T>(n_tokens, shape.attention_width());
    hidden_ = Matrix<T>(n_tokens, shape.d_ff);
    keys_ = Matrix<T>(shape.head_dim, n_keys);
    scores_ = Matrix<T>(model.kernels->tile_rows, n_keys);
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
void Forward<T>::multiply(Rows<const T> a, const PackedMatrix<T>& w, Rows<T> out, bool adds_to_out, Activation activation) const {
    model_.kernels->product({.a = a,
                             .panels = w.panels.data(),
                             .bias = w.bias.data(),
                             .n_columns = w.n_out,
                             .out = out,
                             .adds_to_out = adds_to_out,
                             .activation = activation});
}

template <class T>
void Forward<T>::run_layer(const Layer<T>& layer, Rows<T> x, size_t first, Rows<T> qkv) {
    const Shape& shape = model_.shape;
    const Kernels<T>& kernels = *model_.kernels;
    const Rows<T> moving = x.from_row(first);
    const auto normed = [&]() -> Rows<const T> {
        if (shape.norm == Norm::none) return moving;
        kernels.normalize(shape.norm, moving, normed_.rows(moving.n_rows), T(shape.norm_eps), nullptr, nullptr);
        return normed_.rows(moving.n_rows);
    };
    multiply(normed(), layer.qkv, qkv.from_row(first));
    kernels.attend({.qkv = qkv,
                    .first = first,
                    .n_heads = shape.n_heads,
                    .head_dim = shape.head_dim,
                    .is_causal = shape.is_causal,
                    .out = attended_.rows(x.n_rows),
                    .keys = keys_.rows(shape.head_dim),
                    .scores = scores_.rows(kernels.tile_rows)});
    multiply(attended_.rows(x.n_rows).from_row(first), layer.proj, moving, true);
    multiply(normed(), layer.fc, hidden_.rows(moving.n_rows), false, shape.activation);
    multiply(hidden_.rows(moving.n_rows), layer.down, moving, true);
}

template <class T>
void Forward<T>::embed(Rows<const T> features, std::span<const std::int64_t> ids, Rows<T> signal) {
    const Shape& shape = model_.shape;
    const Rows<T> x = closed_.rows(signal.n_rows);
    if (x.n_rows == 0) return;
    if (shape.input_kind == InputKind::features) {
        multiply(features, model_.read_in, x);
    } else {
        const Rows<const T> table{model_.embedding.data(), shape.vocab_size, shape.d_model, shape.d_model};
        for (size_t i = 0; i < x.n_rows; ++i) {
            std::ranges::copy(shape.input_kind == InputKind::tokens ? table.row_span(size_t(ids[i])) : features.row_span(i), x.row(i));
        }
    }
    if (shape.has_positions && shape.adds_positions_once) {
        model_.kernels->inject(Inject::none, x, x, model_.position_rows(), x);
    }
    for (const Layer<T>& layer : model_.prelude) run_layer(layer, x, 0, qkv_.rows(x.n_rows));
    for (size_t i = 0; i < x.n_rows; ++i) std::ranges::copy(x.row_span(i), signal.row(i));
}

template <class T>
void Forward<T>::pass(Rows<const T> state, Rows<const T> signal, Rows<T> image, size_t first) {
    if (first >= state.n_rows) return;
    const Shape& shape = model_.shape;
    const Rows<T> moving = image.from_row(first);
    const Rows<const T> positions =
        shape.adds_positions_each_loop() ? model_.position_rows().from_row(first) : Rows<const T>{};
    model_.kernels->inject(shape.inject, state.from_row(first), signal.from_row(first), positions, moving);
    for (size_t i = 0; i < model_.core.size(); ++i) {
        run_layer(model_.core[i], image, first, (kept_qkv_.empty() ? qkv_ : kept_qkv_[i]).rows(state.n_rows));
    }
    if (shape.loop_norm == LoopNorm::each) {
        model_.kernels->normalize(shape.norm, moving, moving, T(shape.norm_eps), model_.final_gain.data(), model_.final_shift.data());
    }
}

template <class T>
void Forward<T>::read(Rows<const T> state, std::span<T> prediction) {
    if (state.n_rows == 0) return;
    const Shape& shape = model_.shape;
    if (!model_.coda.empty()) {
        const Rows<T> closed = closed_.rows(state.n_rows);
        for (size_t i = 0; i < state.n_rows; ++i) std::ranges::copy(state.row_span(i), closed.row(i));
        for (const Layer<T>& layer : model_.coda) run_layer(layer, closed, 0, qkv_.rows(state.n_rows));
        state = closed;
    }
    const size_t n_read = shape.n_read(state.n_rows);
    Rows<const T> places{state.first, n_read, state.width, state.stride * shape.read_stride};
    if (shape.loop_norm == LoopNorm::once) {
        const Rows<T> normed = normed_.rows(n_read);
        model_.kernels->normalize(shape.norm, places, normed, T(shape.norm_eps), model_.final_gain.data(), model_.final_shift.data());
        places = normed;
    }
    if (shape.readout_width) {
        const Rows<T> out = read_.rows(n_read);
        multiply(places, model_.read_out, out);
        places = out;
    }
    for (size_t i = 0; i < n_read; ++i) std::ranges::copy(places.row_span(i), prediction.begin() + std::ptrdiff_t(i * places.width));
}

template class Forward<float>;
template class Forward<double>;

}  // namespace looped::block
