// The product of few rows, which is as fast as its weights are read: several panels at once, so that one row too has enough sums on
// the way. The sums of an element are those of `product`, in its order: the same bits.
#pragma once

#include <algorithm>

#include "block/tile.hpp"

namespace looped::block {

struct FetchNothing {
    void operator()(size_t) const {}
};

// sum[r][2 p + c] = sum over k of a[r][k] times column c of panel p. A panel is [depth, 2 width]. fetch_at(k) may fetch what comes
// next.
template <class V, int n_rows, int n_panels, class Fetch = FetchNothing>
LOOPED_INLINE void multiply_panels(const typename V::Scalar* a, size_t a_stride, const typename V::Scalar* const (&panels)[n_panels],
                                   size_t depth, V (&sum)[n_rows][2 * n_panels], const Fetch& fetch_at = {}) {
    using T = typename V::Scalar;
    constexpr size_t panel = 2 * V::width;
    simd::static_for<n_rows>([&](auto r) __attribute__((always_inline)) {
        simd::static_for<2 * n_panels>([&](auto c) __attribute__((always_inline)) { sum[r][c] = V::zero(); });
    });
    for (size_t k = 0; k < depth; ++k) {
        fetch_at(k);
        V x[n_rows];
        simd::static_for<n_rows>([&](auto r) __attribute__((always_inline)) { x[r] = V::broadcast(a[size_t(r) * a_stride + k]); });
        simd::static_for<n_panels>([&](auto p) __attribute__((always_inline)) {
            const T* b = panels[p] + k * panel;
            simd::static_for<2>([&](auto c) __attribute__((always_inline)) {
                V column = V::load(b + c * V::width);
                simd::static_for<n_rows>([&](auto r) __attribute__((always_inline)) {
                    sum[r][2 * p + c] = V::fma(x[r], column, sum[r][2 * p + c]);
                });
            });
        });
    }
}

// On lines that are still in L1; not inlined into every product.
template <class V>
void finish_panels(const Product<typename V::Scalar>& job, size_t first, size_t last) noexcept {
    for (size_t r = 0; r < job.a.n_rows; ++r) {
        for (size_t column = first; column < last; column += V::width) {
            auto* at = job.out.row(r) + column;
            V x = V::load(at);
            if (job.activation == Activation::gelu_tanh) x = simd::gelu_tanh(x);
            if (job.activation == Activation::gelu) x = simd::gelu(x);
            if (job.activation == Activation::relu) x = simd::relu(x);
            x.store(at);
        }
    }
}

// n_panels panels of the job from `column` on.
template <class V, int n_rows, int n_panels>
LOOPED_INLINE void product_of_panels(const Product<typename V::Scalar>& job, size_t column) {
    using T = typename V::Scalar;
    constexpr size_t panel = 2 * V::width;
    const T* panels[n_panels];
    simd::static_for<n_panels>([&](auto p)
                                   __attribute__((always_inline)) { panels[p] = job.panels + (column + p * panel) * job.a.width; });
    V sum[n_rows][2 * n_panels];
    multiply_panels<V, n_rows, n_panels>(job.a.first, job.a.stride, panels, job.a.width, sum);
    const bool is_gated = job.activation == Activation::silu_gated;
    alignas(64) T gates_and_units[n_rows * n_panels * panel];
    simd::static_for<n_rows>([&](auto r) __attribute__((always_inline)) {
        T* out = is_gated ? gates_and_units + r * n_panels * panel : job.out.row(r) + column;
        simd::static_for<2 * n_panels>([&](auto c) __attribute__((always_inline)) {
            V x = sum[r][c] + V::load(job.bias + column + c * V::width);
            if (job.adds_to_out) x = x + V::load(out + c * V::width);
            x.store(out + c * V::width);
        });
    });
    if (is_gated) {
        const Rows<const T> all{gates_and_units, n_rows, panel, n_panels * panel};
        for (size_t p = 0; p < n_panels; ++p) gate_units<V>(all.from_column(p * panel), job.out.from_column(column / 2 + p * V::width));
    } else if (job.activation != Activation::none) {
        finish_panels<V>(job, column, column + n_panels * panel);
    }
}

// Panels at once: as many as the registers of a tile hold sums for, and no more streams of memory than are fetched ahead well.
template <class V>
inline constexpr int panels_at_once(int n_rows) {
    return std::clamp(V::tile_rows / n_rows, 1, 4);
}

template <class V, int n_rows>
void product_of_rows(const Product<typename V::Scalar>& job) noexcept {
    constexpr size_t panel = 2 * V::width;
    constexpr int together = panels_at_once<V>(n_rows);
    Lookout lookout(job.stop);
    size_t column = 0;
    for (; column + (together - 1) * panel < job.n_columns; column += together * panel) {
        product_of_panels<V, n_rows, together>(job, column);
        if (lookout.sees_stop_after(n_rows * job.a.width * together * panel)) return;
    }
    for (; column < job.n_columns; column += panel) product_of_panels<V, n_rows, 1>(job, column);
}

template <class V>
inline constexpr int most_few_rows = V::tile_rows / 2;

template <class V>
inline constexpr auto product_of_few = []<int... I>(std::integer_sequence<int, I...>) {
    using Function = void (*)(const Product<typename V::Scalar>&) noexcept;
    return std::array<Function, sizeof...(I)>{&product_of_rows<V, I + 1>...};
}(std::make_integer_sequence<int, most_few_rows<V>>{});

template <class V>
void product_by_columns(const Product<typename V::Scalar>& job) noexcept {
    const size_t n = job.a.n_rows;
    if (n == 0) return;
    n <= size_t(most_few_rows<V>) ? product_of_few<V>[n - 1](job) : product<V, true>(job);
}

// The sum of n numbers, a whole number of vectors: as fast as this thread reads.
template <class V>
double read_memory(const typename V::Scalar* numbers, size_t n) noexcept {
    constexpr int n_sums = 8;
    V sum[n_sums];
    simd::static_for<n_sums>([&](auto i) __attribute__((always_inline)) { sum[i] = V::zero(); });
    size_t j = 0;
    for (; j + n_sums * V::width <= n; j += n_sums * V::width) {
        simd::static_for<n_sums>([&](auto i) __attribute__((always_inline)) { sum[i] = sum[i] + V::load(numbers + j + i * V::width); });
    }
    V all = V::zero();
    for (; j + V::width <= n; j += V::width) all = all + V::load(numbers + j);
    simd::static_for<n_sums>([&](auto i) __attribute__((always_inline)) { all = all + sum[i]; });
    return double(V::sum(all));
}

}  // namespace looped::block
