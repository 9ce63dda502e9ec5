// Attention of one prompt, head by head: scores of a tile of queries, softmax in place, weighted values.
#pragma once

#include <algorithm>

#include "block/tile.hpp"
#include "block/token_wise.hpp"
#include "simd/transpose.hpp"

namespace looped::block {

// Softmax of the first n_seen scores, times its own sum (which is returned inverted): the weights are scaled after the product.
// Scores up to n_zeroed become zero.
template <class V>
LOOPED_INLINE typename V::Scalar exponentials(typename V::Scalar* scores, size_t n_seen, size_t n_zeroed) {
    using T = typename V::Scalar;
    constexpr size_t width = V::width;
    const size_t n_whole = n_seen / width * width;
    const int n_tail = int(n_seen - n_whole);
    V most = V::broadcast(scores[0]);
    for (size_t j = 0; j < n_whole; j += width) most = V::max(V::load(scores + j), most);
    if (n_tail) most = V::max(V::first_n(V::load(scores + n_whole), n_tail, most), most);
    const V top = V::broadcast(V::maximum(most));  // a NaN that a maximum skips comes back in exp2

    V sum = V::zero();
    for (size_t j = 0; j < n_whole; j += width) {
        V e = simd::exp2(V::load(scores + j) - top);
        e.store(scores + j);
        sum = sum + e;
    }
    size_t end = n_whole;
    if (n_tail) {
        V e = V::first_n(simd::exp2(V::load(scores + n_whole) - top), n_tail, V::zero());
        e.store(scores + n_whole);
        sum = sum + e;
        end += width;
    }
    for (size_t j = end; j < n_zeroed; j += width) V::zero().store(scores + j);
    return T(1) / V::sum(sum);
}

// keys[d][j] = source[j][d]
template <class V>
LOOPED_INLINE void transpose(Rows<const typename V::Scalar> source, Rows<typename V::Scalar> keys) {
    constexpr size_t block = simd::transposed_block;
    const size_t whole_rows = source.n_rows / block * block, whole_columns = source.width / block * block;
    for (size_t j = 0; j < whole_rows; j += block) {
        for (size_t d = 0; d < whole_columns; d += block)
            V::transpose_block(source.row(j) + d, source.stride, keys.row(d) + j, keys.stride);
        for (size_t d = whole_columns; d < source.width; ++d) {
            for (size_t i = j; i < j + block; ++i) keys.row(d)[i] = source.row(i)[d];
        }
    }
    for (size_t j = whole_rows; j < source.n_rows; ++j) {
        for (size_t d = 0; d < source.width; ++d) keys.row(d)[j] = source.row(j)[d];
    }
}

// 0 times a number is 0 if it is finite, and else NaN.
template <class V>
LOOPED_INLINE bool all_finite(Rows<const typename V::Scalar> x) {
    V sum = V::zero();
    for (size_t i = 0; i < x.n_rows; ++i) {
        for_vectors<V>(x.width, [&](size_t j, auto n)
                                    __attribute__((always_inline)) { sum = V::fma(load_lanes<V>(x.row(i) + j, n), V::zero(), sum); });
    }
    return V::sum(sum) == typename V::Scalar(0);
}

template <class V>
void attend(const Attention<typename V::Scalar>& job) noexcept {
    using T = typename V::Scalar;
    constexpr size_t width = V::width, panel = 2 * V::width;
    const size_t n_tokens = job.is_causal ? job.end : job.qkv.n_rows;  // that are attended to
    const size_t d = job.head_dim, all_heads = job.n_heads * d;
    Lookout lookout(job.stop);
    bool is_stopped = false;
    for (size_t head = 0; head < std::min(job.n_heads, job.n_working) && !is_stopped; ++head) {
        const Rows<const T> queries = job.qkv.from_column(head * d);
        Rows<const T> keys = job.qkv.between(0, n_tokens).from_column(all_heads + head * d);
        keys.width = d;
        const Rows<const T> values = job.qkv.from_column(2 * all_heads + head * d);
        transpose<V>(keys, job.keys);

        for_row_tiles<V>(job.end - job.first, [&](size_t tile_first, size_t rows) __attribute__((always_inline)) {
            if (is_stopped) return;
            const size_t first = job.first + tile_first;
            const size_t n_keys = job.is_causal ? first + rows : n_tokens;
            for (size_t j = 0; j < n_keys; j += panel) {
                const Tile<T> tile{.a = queries.row(first),
                                   .a_stride = queries.stride,
                                   .b = job.keys.first + j,
                                   .b_stride = job.keys.stride,
                                   .depth = d,
                                   .out = job.scores.first + j,
                                   .out_stride = job.scores.stride};
                n_keys - j <= width ? tile_of<V, 1>[rows - 1](tile) : tile_of<V, 2>[rows - 1](tile);
            }
            T scale[V::tile_rows];
            for (size_t r = 0; r < rows; ++r) {
                scale[r] = exponentials<V>(job.scores.row(r), job.is_causal ? first + r + 1 : n_tokens, n_keys);
            }
            // A panel may reach into the columns of the next head, which are written after this one, and beyond the last one.
            const auto weigh_values = [&](size_t r, size_t n_rows, size_t n_weighed) {
                for (size_t c = 0; c < d; c += panel) {
                    const Tile<T> tile{.a = job.scores.row(r),
                                       .a_stride = job.scores.stride,
                                       .b = values.first + c,
                                       .b_stride = values.stride,
                                       .depth = n_weighed,
                                       .out = job.out.row(first + r) + head * d + c,
                                       .out_stride = job.out.stride,
                                       .row_scale = scale + r};
                    d - c <= width ? tile_of<V, 1>[n_rows - 1](tile) : tile_of<V, 2>[n_rows - 1](tile);
                }
            };
            weigh_values(0, rows, n_keys);
            const Rows<T> own = job.out.between(first, first + rows).from_column(head * d);
            if (job.is_causal && !all_finite<V>({own.first, rows, d, own.stride})) {
                // A weight of 0 times a later value that is not finite: each row by itself, over what it attends to.
                for (size_t r = 0; r < rows; ++r) weigh_values(r, 1, first + r + 1);
            }
            is_stopped = lookout.sees_stop_after(2 * rows * n_keys * d);
        });
    }
}

}  // namespace looped::block
