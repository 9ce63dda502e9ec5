// Attention of some queries of one head over keys and values in pages. Every sum runs over the keys in their order, so that a query's
// result depends neither on the other queries nor on when its keys were written.
#pragma once

#include "block/attention.hpp"
#include "block/few_rows.hpp"

namespace looped::block {

// Pages of one head that are fetched ahead of their use: a quarter of L2 or so, beside which those in use have room.
template <class T>
size_t pages_ahead(size_t n_pages, size_t page_size) {
    constexpr size_t room = 262144 / sizeof(T);
    return std::min(n_pages, room / page_size);
}

// n_vectors vectors into L2, of which some share a line.
template <class V, int n_vectors>
LOOPED_INLINE void fetch(const typename V::Scalar* from) {
    constexpr int line = 64;
    simd::static_for<n_vectors>([&](auto c) __attribute__((always_inline)) {
        if constexpr (int(c) * int(sizeof(V)) % line == 0) __builtin_prefetch(from + c * V::width, 0, 2);
    });
}

// scores[r][j] = queries[r] key[j] for the pages of the first n_keys keys. The values come from memory meanwhile: alone, the keys of a
// page are too short a stream for the memory's speed.
template <class V, int n_rows>
void score_pages(const PagedAttention<typename V::Scalar>& job, size_t n_keys) noexcept {
    using T = typename V::Scalar;
    constexpr size_t panel = 2 * V::width;
    constexpr int together = panels_at_once<V>(n_rows);
    const size_t n_pages = (n_keys + panel - 1) / panel, n_ahead = pages_ahead<T>(n_pages, panel * job.queries.width);
    const auto score = [&]<int n_panels>(size_t page, std::integral_constant<int, n_panels>) __attribute__((always_inline)) {
        const T *panels[n_panels], *values[n_panels];
        simd::static_for<n_panels>([&](auto p) __attribute__((always_inline)) {
            panels[p] = job.pages[page + p] + job.keys;
            values[p] = page + p < n_ahead ? job.pages[page + p] + job.values : panels[p];
        });
        V sum[n_rows][2 * n_panels];
        multiply_panels<V, n_rows, n_panels>(
            job.queries.first, job.queries.stride, panels, job.queries.width, sum, [&](size_t k) __attribute__((always_inline)) {
                simd::static_for<n_panels>([&](auto p) __attribute__((always_inline)) { fetch<V, 2>(values[p] + k * panel); });
            });
        simd::static_for<n_rows>([&](auto r) __attribute__((always_inline)) {
            simd::static_for<2 * n_panels>([&](auto c) __attribute__((always_inline)) {
                sum[r][c].store(job.scores.row(r) + page * panel + c * V::width);
            });
        });
    };
    size_t page = 0;
    for (; page + together <= n_pages; page += together) score(page, std::integral_constant<int, together>{});
    if constexpr (together > 2) {
        for (; page + 2 <= n_pages; page += 2) score(page, std::integral_constant<int, 2>{});
    }
    for (; page < n_pages; ++page) score(page, std::integral_constant<int, 1>{});
}

// The numbers of x that lie below `width`, scaled, to out[column], ...
template <class V>
LOOPED_INLINE void store_scaled(V x, typename V::Scalar scale, typename V::Scalar* out, size_t column, size_t width) {
    x = x * V::broadcast(scale);
    if (column + V::width <= width) {
        x.store(out + column);
    } else if (column < width) {
        x.store_n(out + column, int(width - column));
    }
}

// sum[r][c] over all pages of the sum within each: column c of the values, `n_vectors` vectors from `column` on, weighed with scores.
template <class V, int n_rows, int n_vectors>
LOOPED_INLINE void weigh_columns(const PagedAttention<typename V::Scalar>& job, size_t n_keys, size_t column,
                                 const typename V::Scalar* scale) {
    using T = typename V::Scalar;
    constexpr size_t panel = 2 * V::width;
    const size_t n_ahead = pages_ahead<T>(job.next_pages.size(), panel * job.queries.width);
    V all[n_rows][n_vectors];
    simd::static_for<n_rows>([&](auto r) __attribute__((always_inline)) {
        simd::static_for<n_vectors>([&](auto c) __attribute__((always_inline)) { all[r][c] = V::zero(); });
    });
    for (size_t first = 0; first < n_keys; first += panel) {
        const size_t n = std::min(panel, n_keys - first);
        const T* value = job.pages[first / panel] + job.values + column;
        const T* weight = job.scores.first + first;
        const T* next = first / panel < n_ahead ? job.next_pages[first / panel] + job.next_keys + column * panel : value;
        V sum[n_rows][n_vectors];
        simd::static_for<n_rows>([&](auto r) __attribute__((always_inline)) {
            simd::static_for<n_vectors>([&](auto c) __attribute__((always_inline)) { sum[r][c] = V::zero(); });
        });
        for (size_t j = 0; j < n; ++j, value += job.queries.width) {
            fetch<V, n_vectors>(next + j * n_vectors * V::width);
            V own[n_vectors];
            simd::static_for<n_vectors>([&](auto c) __attribute__((always_inline)) { own[c] = V::load(value + c * V::width); });
            simd::static_for<n_rows>([&](auto r) __attribute__((always_inline)) {
                V x = V::broadcast(weight[size_t(r) * job.scores.stride + j]);
                simd::static_for<n_vectors>([&](auto c) __attribute__((always_inline)) { sum[r][c] = V::fma(x, own[c], sum[r][c]); });
            });
        }
        simd::static_for<n_rows>([&](auto r) __attribute__((always_inline)) {
            simd::static_for<n_vectors>([&](auto c) __attribute__((always_inline)) {
                all[r][c] = first == 0 ? sum[r][c] : sum[r][c] + all[r][c];
            });
        });
    }
    simd::static_for<n_rows>([&](auto r) __attribute__((always_inline)) {
        simd::static_for<n_vectors>([&](auto c) __attribute__((always_inline)) {
            store_scaled<V>(all[r][c], scale[r], job.out.row(r), column + c * V::width, job.queries.width);
        });
    });
}

template <class V, int n_rows>
void weigh_pages(const PagedAttention<typename V::Scalar>& job, size_t n_keys, const typename V::Scalar* scale) noexcept {
    constexpr int together = std::clamp(V::tile_rows / n_rows, 1, 4);
    size_t column = 0;
    const size_t width = job.queries.width;
    for (; column + V::width < width; column += together * V::width) weigh_columns<V, n_rows, together>(job, n_keys, column, scale);
    if (column < width) weigh_columns<V, n_rows, 1>(job, n_keys, column, scale);
}

template <class V>
struct PagedKernels {
    using T = typename V::Scalar;
    void (*score)(const PagedAttention<T>&, size_t n_keys) noexcept;
    void (*weigh)(const PagedAttention<T>&, size_t n_keys, const T* scale) noexcept;
};

template <class V>
inline constexpr auto paged_kernels_of = []<int... I>(std::integer_sequence<int, I...>) {
    return std::array<PagedKernels<V>, sizeof...(I)>{PagedKernels<V>{&score_pages<V, I + 1>, &weigh_pages<V, I + 1>}...};
}(std::make_integer_sequence<int, most_few_rows<V>>{});

// The same two for as many rows as a tile has.
template <class V>
void score_tile(const PagedAttention<typename V::Scalar>& job, size_t n_keys) noexcept {
    using T = typename V::Scalar;
    constexpr size_t panel = 2 * V::width;
    for (size_t first = 0; first < n_keys; first += panel) {
        tile_of<V, 2>[job.queries.n_rows - 1](Tile<T>{.a = job.queries.first,
                                                      .a_stride = job.queries.stride,
                                                      .b = job.pages[first / panel] + job.keys,
                                                      .b_stride = panel,
                                                      .depth = job.queries.width,
                                                      .out = job.scores.first + first,
                                                      .out_stride = job.scores.stride});
    }
}

template <class V>
void weigh_tile(const PagedAttention<typename V::Scalar>& job, size_t n_keys, const typename V::Scalar* scale) noexcept {
    using T = typename V::Scalar;
    constexpr size_t panel = 2 * V::width;
    alignas(64) T all[V::tile_rows * panel];
    alignas(64) T zeros[panel] = {};
    for (size_t column = 0; column < job.queries.width; column += panel) {
        for (size_t first = 0; first < n_keys; first += panel) {
            tile_of<V, 2>[job.queries.n_rows - 1](Tile<T>{.a = job.scores.first + first,
                                                          .a_stride = job.scores.stride,
                                                          .b = job.pages[first / panel] + job.values + column,
                                                          .b_stride = job.queries.width,
                                                          .depth = std::min(panel, n_keys - first),
                                                          .out = all,
                                                          .out_stride = panel,
                                                          .bias = first == 0 ? nullptr : zeros,
                                                          .adds_to_out = first > 0});
        }
        for (size_t r = 0; r < job.queries.n_rows; ++r) {
            for (size_t c = 0; c < panel; c += V::width) {
                store_scaled<V>(V::load(all + r * panel + c), scale[r], job.out.row(r), column + c, job.queries.width);
            }
        }
    }
}

template <class V>
void attend_pages(const PagedAttention<typename V::Scalar>& job) noexcept {
    using T = typename V::Scalar;
    const size_t n = job.queries.n_rows;
    if (n == 0) return;
    const size_t n_keys = job.n_seen[n - 1];
    const PagedKernels<V> kernels = n <= size_t(most_few_rows<V>) ? paged_kernels_of<V>[n - 1]
                                                                  : PagedKernels<V>{&score_tile<V>, &weigh_tile<V>};
    kernels.score(job, n_keys);
    T scale[V::tile_rows];
    for (size_t r = 0; r < n; ++r) scale[r] = exponentials<V>(job.scores.row(r), job.n_seen[r], n_keys);
    kernels.weigh(job, n_keys, scale);
    if (n > 1 && !all_finite<V>({job.out.first, n, job.queries.width, job.out.stride})) {
        // A weight of 0 times a later value that is not finite: each row by itself, over what it attends to.
        for (size_t r = 0; r < n; ++r) {
            PagedAttention<T> row = job;
            row.queries = job.queries.between(r, r + 1);
            row.out = job.out.between(r, r + 1);
            row.scores = job.scores.between(r, r + 1);
            paged_kernels_of<V>[0].weigh(row, job.n_seen[r], scale + r);
        }
    }
}

}  // namespace looped::block
