// What is done to each token by itself: norm, injection, and the sums of squares that exit rules read.
#pragma once

#include <cmath>

#include "block/kernels.hpp"
#include "simd/inline.hpp"

namespace looped::block {

// body(first lane, lanes, vector loaded by `load(j, n)`) over `width` numbers, the last vector partly.
template <class V, class Body>
LOOPED_INLINE void for_vectors(size_t width, Body&& body) {
    size_t j = 0;
    for (; j + V::width <= width; j += V::width) body(j, std::integral_constant<int, V::width>{});
    if (j < width) body(j, int(width - j));
}

template <class V>
LOOPED_INLINE V load_lanes(const typename V::Scalar* p, int n) {
    return n == V::width ? V::load(p) : V::load_n(p, n);
}

template <class V>
LOOPED_INLINE void store_lanes(V x, typename V::Scalar* p, int n) {
    n == V::width ? x.store(p) : x.store_n(p, n);
}

// n_rows rows at a time: one row is a chain of dependent sums, and several fill the time it waits.
template <class V, Norm how, int n_rows>
LOOPED_INLINE void normalize_rows(Rows<const typename V::Scalar> x, Rows<typename V::Scalar> out, typename V::Scalar eps,
                                  const typename V::Scalar* gain, const typename V::Scalar* shift) {
    using T = typename V::Scalar;
    using simd::static_for;
    const T width = T(x.width);
    constexpr bool is_centred = how == Norm::layernorm;
    V mean[n_rows], squares[n_rows], scale[n_rows];
    static_for<n_rows>([&](auto r) __attribute__((always_inline)) { mean[r] = squares[r] = V::zero(); });
    if constexpr (is_centred) {
        V sum[n_rows];
        static_for<n_rows>([&](auto r) __attribute__((always_inline)) { sum[r] = V::zero(); });
        for_vectors<V>(x.width, [&](size_t j, auto n) __attribute__((always_inline)) {
            static_for<n_rows>([&](auto r) __attribute__((always_inline)) { sum[r] = sum[r] + load_lanes<V>(x.row(r) + j, n); });
        });
        static_for<n_rows>([&](auto r) __attribute__((always_inline)) { mean[r] = V::broadcast(V::sum(sum[r]) / width); });
    }
    const auto apart = [&](size_t j, auto n, auto r) __attribute__((always_inline)) {
        V value = load_lanes<V>(x.row(r) + j, n);
        return is_centred ? value - mean[r] : value;
    };
    for_vectors<V>(x.width, [&](size_t j, auto n) __attribute__((always_inline)) {
        static_for<n_rows>([&](auto r) __attribute__((always_inline)) {
            V value = apart(j, n, r);
            if (is_centred && n != V::width) value = V::first_n(value, n, V::zero());
            squares[r] = V::fma(value, value, squares[r]);
        });
    });
    static_for<n_rows>([&](auto r) __attribute__((always_inline)) {
        scale[r] = V::broadcast(T(1) / std::sqrt(V::sum(squares[r]) / width + eps));
    });
    for_vectors<V>(x.width, [&](size_t j, auto n) __attribute__((always_inline)) {
        static_for<n_rows>([&](auto r) __attribute__((always_inline)) {
            V y = apart(j, n, r) * scale[r];
            if (shift) {
                y = V::fma(y, load_lanes<V>(gain + j, n), load_lanes<V>(shift + j, n));
            } else if (gain) {
                y = y * load_lanes<V>(gain + j, n);
            }
            store_lanes<V>(y, out.row(r) + j, n);
        });
    });
}

template <class V, Norm how>
void normalize_all(Rows<const typename V::Scalar> x, Rows<typename V::Scalar> out, typename V::Scalar eps,
                   const typename V::Scalar* gain, const typename V::Scalar* shift) noexcept {
    constexpr size_t together = 4;
    size_t i = 0;
    for (; i + together <= x.n_rows; i += together) normalize_rows<V, how, together>(x.from_row(i), out.from_row(i), eps, gain, shift);
    for (; i < x.n_rows; ++i) normalize_rows<V, how, 1>(x.from_row(i), out.from_row(i), eps, gain, shift);
}

template <class V>
void normalize(Norm how, Rows<const typename V::Scalar> x, Rows<typename V::Scalar> out, typename V::Scalar eps,
               const typename V::Scalar* gain, const typename V::Scalar* shift) noexcept {
    how == Norm::rms ? normalize_all<V, Norm::rms>(x, out, eps, gain, shift)
                     : normalize_all<V, Norm::layernorm>(x, out, eps, gain, shift);
}

template <class V>
void inject(Inject how, Rows<const typename V::Scalar> state, Rows<const typename V::Scalar> signal,
            Rows<const typename V::Scalar> positions, Rows<typename V::Scalar> x) noexcept {
    for (size_t i = 0; i < x.n_rows; ++i) {
        const auto *y = state.row(i), *p = signal.row(i);
        const auto* place = positions.first ? positions.row(i) : nullptr;
        auto* to = x.row(i);
        for_vectors<V>(x.width, [&](size_t j, auto n) __attribute__((always_inline)) {
            V sum = load_lanes<V>(y + j, n);
            if (how == Inject::add) sum = sum + load_lanes<V>(p + j, n);
            if (how == Inject::mul) sum = sum * load_lanes<V>(p + j, n);
            if (place) sum = sum + load_lanes<V>(place + j, n);
            sum.store(to + j);  // a whole vector: the lanes beyond are zero, and the stride has room for them
        });
    }
}

template <class V>
void squares(Rows<const typename V::Scalar> a, Rows<const typename V::Scalar> b, double* of_difference, double* of_a) noexcept {
    for (size_t i = 0; i < a.n_rows; ++i) {
        const auto *x = a.row(i), *y = b.row(i);
        typename V::Squares difference, own;
        for_vectors<V>(a.width, [&](size_t j, auto n) __attribute__((always_inline)) {
            V now = load_lanes<V>(x + j, n);
            V::add_squares(difference, now - load_lanes<V>(y + j, n));
            V::add_squares(own, now);
        });
        of_difference[i] = V::total(difference);
        of_a[i] = V::total(own);
    }
}

}  // namespace looped::block
