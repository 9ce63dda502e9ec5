// 16 bytes of plain C++: the baseline that every other vector type is tested against.
//
// What a vector type V offers, here and in avx2.hpp, avx512.hpp, neon.hpp:
//   Scalar, width (lanes), tile_rows (rows of a register tile that is two vectors wide)
//   load, store, load_n, store_n (the first n lanes; nothing beyond is touched), broadcast, zero
//   + - * /, fma(a, b, c) = a b + c
//   max, min: the second argument where either is NaN
//   first_n(x, n, other): lanes below n of x, the others of `other`
//   sum, maximum: over the lanes, in a fixed tree
//   scales_all: whether scale takes any n, infinities included; else n must lie in the exponent range
//   round(x): to whole numbers; scale(x, n): x 2^n for whole numbers n; NaN stays NaN in both
//   transpose_block: transpose.hpp
//   Squares, add_squares, total: sums of squares in double
#pragma once

#include <bit>
#include <cstdint>

#include "simd/inline.hpp"
#include "simd/transpose.hpp"

namespace looped::simd {

template <class T>
struct Portable {
    using Scalar = T;
    static constexpr int width = 16 / sizeof(T);
    static constexpr int tile_rows = 4;

    T lane[width];

    struct Squares {
        double lane[width] = {};
    };

    LOOPED_INLINE static Portable broadcast(T x) {
        Portable y;
        for (int i = 0; i < width; ++i) y.lane[i] = x;
        return y;
    }
    LOOPED_INLINE static Portable zero() { return broadcast(T(0)); }
    LOOPED_INLINE static Portable load(const T* p) {
        Portable y;
        for (int i = 0; i < width; ++i) y.lane[i] = p[i];
        return y;
    }
    LOOPED_INLINE static Portable load_n(const T* p, int n) {
        Portable y = zero();
        for (int i = 0; i < n; ++i) y.lane[i] = p[i];
        return y;
    }
    LOOPED_INLINE void store(T* p) const {
        for (int i = 0; i < width; ++i) p[i] = lane[i];
    }
    LOOPED_INLINE void store_n(T* p, int n) const {
        for (int i = 0; i < n; ++i) p[i] = lane[i];
    }
    template <class F>
    LOOPED_INLINE static Portable map(const Portable& a, const Portable& b, F f) {
        Portable y;
        for (int i = 0; i < width; ++i) y.lane[i] = f(a.lane[i], b.lane[i]);
        return y;
    }
    LOOPED_INLINE friend Portable operator+(const Portable& a, const Portable& b) {
        return map(a, b, [](T x, T y) { return x + y; });
    }
    LOOPED_INLINE friend Portable operator-(const Portable& a, const Portable& b) {
        return map(a, b, [](T x, T y) { return x - y; });
    }
    LOOPED_INLINE friend Portable operator*(const Portable& a, const Portable& b) {
        return map(a, b, [](T x, T y) { return x * y; });
    }
    LOOPED_INLINE friend Portable operator/(const Portable& a, const Portable& b) {
        return map(a, b, [](T x, T y) { return x / y; });
    }
    // Not fused: the baseline has no such instruction, and libm's is a hundred times slower.
    LOOPED_INLINE static Portable fma(const Portable& a, const Portable& b, const Portable& c) { return a * b + c; }
    LOOPED_INLINE static Portable max(const Portable& a, const Portable& b) {
        return map(a, b, [](T x, T y) { return x > y ? x : y; });
    }
    LOOPED_INLINE static Portable min(const Portable& a, const Portable& b) {
        return map(a, b, [](T x, T y) { return x < y ? x : y; });
    }
    LOOPED_INLINE static Portable first_n(const Portable& x, int n, const Portable& other) {
        Portable y;
        for (int i = 0; i < width; ++i) y.lane[i] = i < n ? x.lane[i] : other.lane[i];
        return y;
    }
    LOOPED_INLINE static T sum(const Portable& x) {
        T part[width];
        for (int i = 0; i < width; ++i) part[i] = x.lane[i];
        for (int half = width / 2; half > 0; half /= 2) {
            for (int i = 0; i < half; ++i) part[i] += part[i + half];
        }
        return part[0];
    }
    LOOPED_INLINE static T maximum(const Portable& x) {
        T most = x.lane[0];
        for (int i = 1; i < width; ++i) most = x.lane[i] > most ? x.lane[i] : most;
        return most;
    }
    static constexpr bool scales_all = false;
    static constexpr T whole = sizeof(T) == 4 ? T(12582912.0) : T(6755399441055744.0);  // 1.5 * 2^23 or 2^52
    LOOPED_INLINE static Portable round(const Portable& x) { return (x + broadcast(whole)) - broadcast(whole); }
    LOOPED_INLINE static Portable scale(const Portable& x, const Portable& n) {
        Portable y;
        for (int i = 0; i < width; ++i) {  // adding `whole` leaves n in the low bits: no conversion, which NaN would not survive
            if constexpr (sizeof(T) == 4) {
                y.lane[i] = x.lane[i] * std::bit_cast<float>((std::bit_cast<std::uint32_t>(n.lane[i] + whole) + 127u) << 23);
            } else {
                y.lane[i] = x.lane[i] * std::bit_cast<double>((std::bit_cast<std::uint64_t>(n.lane[i] + whole) + 1023u) << 52);
            }
        }
        return y;
    }
    LOOPED_INLINE static void add_squares(Squares& sums, const Portable& x) {
        for (int i = 0; i < width; ++i) sums.lane[i] += double(x.lane[i]) * double(x.lane[i]);
    }
    LOOPED_INLINE static double total(const Squares& sums) {
        double part = 0;
        for (int i = 0; i < width; ++i) part += sums.lane[i];
        return part;
    }
    LOOPED_INLINE static void transpose_block(const T* in, std::size_t in_stride, T* out, std::size_t out_stride) {
        transpose_portable(in, in_stride, out, out_stride);
    }
};

}  // namespace looped::simd
