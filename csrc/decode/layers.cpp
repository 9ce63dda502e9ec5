#include "decode/layers.hpp"

#include <algorithm>
#include <numeric>

namespace looped::decode {

using block::Activation, block::Norm;

template <class T>
void Layers<T>::prepare(block::Team& team, block::StopRequest& stop, size_t n_tokens, size_t n_keys) {
    const block::Shape& shape = model_.shape;
    const block::Kernels<T>& kernels = *model_.kernels;
    team_ = &team;
    stop_ = &stop;
    if (n_tokens > n_tokens_ || (n_tokens > 0 && n_tokens < n_tokens_ / 4)) {  // a long prompt's memory is not kept
        n_tokens_ = 0;
        qkv_ = Matrix<T>(n_tokens, 3 * shape.attention_width());
        attended_ = Matrix<T>(n_tokens, shape.attention_width());
        hidden_ = Matrix<T>(n_tokens, shape.d_ff);
        normed_ = Matrix<T>(n_tokens, shape.d_model);
        n_tokens_ = n_tokens;
    }
    if (n_keys > n_keys_ || team.size() > n_members_) {
        n_keys_ = n_members_ = 0;
        const size_t room = (n_keys + n_keys / 2 + kernels.panel) / kernels.panel * kernels.panel;
        scores_.clear(), normed_by_.clear(), tails_.clear();
        for (size_t i = 0; i < team.size(); ++i) {
            scores_.emplace_back(kernels.tile_rows, room);
            normed_by_.emplace_back(most_by_columns, shape.d_model);
            tails_.emplace_back(most_by_columns, kernels.panel);
        }
        n_keys_ = room;
        n_members_ = team.size();
    }
}

// input(share of the rows, member, whether the share is all rows of a small number) gives the rows that are multiplied.
template <class T>
template <class Input>
void Layers<T>::multiply(size_t n, const PackedMatrix<T>& w, Rows<T> out, bool adds_to_out, Activation activation, const Input& input) {
    const size_t panel = model_.kernels->panel, n_panels = (w.n_out + panel - 1) / panel;
    const double operations = double(n) * double(w.n_in) * double(w.n_out);
    const bool is_gated = activation == Activation::silu_gated;
    block::Product<T> all{.a = {},
                          .panels = w.panels.data(),
                          .bias = w.bias.data(),
                          .n_columns = w.n_out,
                          .out = out,
                          .adds_to_out = adds_to_out,
                          .activation = activation,
                          .stop = stop_};
    if (n > most_by_columns) {
        split(n, operations, [&](Share share, size_t member) noexcept {
            block::Product<T> own = all;
            own.a = input(share, member);
            own.out = out.between(share.begin, share.end);
            model_.kernels->product(own);
        });
        return;
    }
    split(n_panels, operations, [&](Share share, size_t member) noexcept {
        if (share.begin == share.end) return;
        const size_t first = share.begin * panel;
        block::Product<T> own = all;
        own.a = input(Share{0, n}, member);
        own.panels += first * w.n_in;
        own.bias += first;
        own.n_columns = std::min(w.n_out, share.end * panel) - first;
        own.out = out.from_column(is_gated ? first / 2 : first);
        model_.kernels->product_by_columns(own);
    });
}

template <class T>
void Layers<T>::write(Rows<const T> qkv, std::span<const Token> tokens, T* const* pages, size_t head, size_t keys,
                      size_t values) const noexcept {
    const size_t panel = model_.kernels->panel, d = model_.shape.head_dim, A = model_.shape.attention_width();
    for (size_t i = 0; i < tokens.size(); ++i) {
        T* page = pages[tokens[i].place / panel];
        const size_t lane = tokens[i].place % panel;
        const T* own = qkv.row(i) + A + head * d;
        T* to = page + keys + head * d * panel + lane;
        for (size_t c = 0; c < d; ++c) to[c * panel] = own[c];
        std::copy_n(own + A, d, page + values + (head * panel + lane) * d);
    }
}

// The tokens of each row, and how many keys each token sees. Returns the multiply-adds of their attention.
template <class T>
double Layers<T>::take_segments(std::span<const Token> tokens) {
    segments_.clear();
    n_seen_.resize(tokens.size());
    double operations = 0;
    for (size_t i = 0; i < tokens.size(); ++i) {
        n_seen_[i] = tokens[i].place + 1;
        operations += 2.0 * double(n_seen_[i] * model_.shape.attention_width());
        if (i == 0 || tokens[i].row != tokens[i - 1].row) segments_.emplace_back(i, i);
        segments_.back().second = i + 1;
    }
    return operations;
}

// order(0) ... order(n - 1), one after the other.
template <class T>
template <class Order>
void Layers<T>::attend_all(const Attending& job, size_t n, const Order& order, size_t member) const noexcept {
    for (size_t i = 0; i < n; ++i) attend(job, order(i), order(std::min(i + 1, n - 1)), member);
}

// One head of one row: its new keys and values into the cache, and its attention. `next` is what the member attends to after it.
template <class T>
void Layers<T>::attend(const Attending& job, HeadOfRow own_place, HeadOfRow next, size_t member) const noexcept {
    const size_t d = model_.shape.head_dim, panel = model_.kernels->panel, tile = model_.kernels->tile_rows;
    const size_t head = own_place.head;
    const auto [begin, end] = segments_[own_place.segment];
    const Token& next_token = job.tokens[segments_[next.segment].first];
    const std::span<const T* const> next_pages(job.cache.pages(next_token.row), next_token.place / panel + 1);
    T* const* pages = job.cache.pages(job.tokens[begin].row);
    write(job.qkv.between(begin, end), job.tokens.subspan(begin, end - begin), pages, head, job.keys, job.values);
    for (size_t first = begin; first < end && !stop_->is_made(); first += tile) {
        const size_t last = std::min(end, first + tile);
        Rows<const T> queries = job.qkv.between(first, last).from_column(head * d);
        queries.width = d;
        Rows<T> own = job.out.between(first, last).from_column(head * d);
        own.width = d;
        model_.kernels->attend_pages({.queries = queries,
                                      .n_seen = n_seen_.data() + first,
                                      .pages = pages,
                                      .keys = job.keys + head * d * panel,
                                      .values = job.values + head * d * panel,
                                      .out = own,
                                      .scores = scores_[member].rows(tile),
                                      .next_pages = next_pages,
                                      .next_keys = job.keys + next.head * d * panel});
    }
}

// Queries, keys, values and attention. Where heads end with panels, and there are enough for all members, a member goes on with those
// whose queries it has just made.
template <class T>
template <class Input>
void Layers<T>::mix(const PackedMatrix<T>& w, const Attending& job, const Input& input) {
    const size_t n = job.qkv.n_rows, H = model_.shape.n_heads, d = model_.shape.head_dim, A = model_.shape.attention_width();
    const size_t panel = model_.kernels->panel, unit = std::lcm(d, panel), n_units = A / unit;
    const double attention = take_segments(job.tokens);
    if (n > most_by_columns || A % unit != 0 || n_units % team_->size() != 0) {
        multiply(n, w, job.qkv, false, Activation::none, input);
        split(segments_.size() * H, attention, [&](Share share, size_t member) noexcept {
            const auto order = [&](size_t i) { return HeadOfRow{(share.begin + i) / H, (share.begin + i) % H}; };
            attend_all(job, share.end - share.begin, order, member);
        });
        return;
    }
    split(n_units, attention + double(n) * double(w.n_in) * double(w.n_out), [&](Share share, size_t member) noexcept {
        const Rows<const T> a = input(Share{0, n}, member);
        for (size_t part = 0; part < 3; ++part) {
            const size_t first = part * A + share.begin * unit;
            model_.kernels->product_by_columns({.a = a,
                                                .panels = w.panels.data() + first * w.n_in,
                                                .bias = w.bias.data() + first,
                                                .n_columns = (share.end - share.begin) * unit,
                                                .out = job.qkv.from_column(first),
                                                .adds_to_out = false,
                                                .activation = Activation::none,
                                                .stop = stop_});
        }
        const size_t n_segments = segments_.size(), first_head = share.begin * unit / d, n_heads = (share.end - share.begin) * unit / d;
        const auto order = [&](size_t i) { return HeadOfRow{i % n_segments, first_head + i / n_segments}; };
        attend_all(job, n_segments * n_heads, order, member);
    });
}

template <class T>
bool Layers<T>::run(const block::Layer<T>& layer, Rows<T> x, std::span<const Token> tokens, const Cache<T>& cache, Part part,
                    size_t slot, size_t index) {
    const block::Shape& shape = model_.shape;
    const size_t n = x.n_rows;
    const auto normed = [&](Share share, size_t member) -> Rows<const T> {
        const Rows<T> own = x.between(share.begin, share.end);
        if (shape.norm == Norm::none) return own;
        const Rows<T> to = n > most_by_columns ? normed_.rows(n).between(share.begin, share.end) : normed_by_[member].rows(n);
        model_.kernels->normalize(shape.norm, own, to, T(shape.norm_eps), nullptr, nullptr);
        return to;
    };
    const auto rows_of = [](Rows<T> all) {
        return [all](Share share, size_t) -> Rows<const T> { return all.between(share.begin, share.end); };
    };
    const Rows<T> qkv = qkv_.rows(n), attended = attended_.rows(n), hidden = hidden_.rows(n);
    mix(layer.qkv, {qkv, attended, tokens, cache, cache.keys(part, slot, index), cache.values(part, slot, index)}, normed);
    multiply(n, layer.proj, x, true, Activation::none, rows_of(attended));
    multiply(n, layer.fc, hidden, false, shape.activation, normed);
    multiply(n, layer.down, x, true, Activation::none, rows_of(hidden));
    return !stop_->look();
}

template <class T>
void Layers<T>::multiply_exactly(Rows<const T> a, const PackedMatrix<T>& w, Rows<T> out) {
    const size_t panel = model_.kernels->panel, n_panels = (w.n_out + panel - 1) / panel;
    for (size_t first = 0; first < a.n_rows; first += most_by_columns) {
        const size_t n = std::min(most_by_columns, a.n_rows - first);
        split(n_panels, double(n) * double(w.n_in) * double(w.n_out), [&](Share share, size_t member) noexcept {
            const size_t whole = std::min(share.end, w.n_out / panel);
            const auto product = [&](size_t from, size_t to, Rows<T> into) {
                model_.kernels->product_by_columns({.a = a.between(first, first + n),
                                                    .panels = w.panels.data() + from * panel * w.n_in,
                                                    .bias = w.bias.data() + from * panel,
                                                    .n_columns = (to - from) * panel,
                                                    .out = into,
                                                    .adds_to_out = false,
                                                    .activation = Activation::none,
                                                    .stop = stop_});
            };
            const Rows<T> own = out.between(first, first + n);
            if (share.begin < whole) product(share.begin, whole, own.from_column(share.begin * panel));
            if (share.end <= whole || share.begin == share.end) return;
            const Rows<T> tail = tails_[member].rows(n);  // a panel that reaches beyond the last column
            product(whole, whole + 1, tail);
            for (size_t i = 0; i < n; ++i) std::copy_n(tail.row(i), w.n_out - whole * panel, own.row(i) + whole * panel);
        });
        if (stop_->look()) return;
    }
}

template class Layers<float>;
template class Layers<double>;

}  // namespace looped::decode
