// 64 bytes: AVX-512F with DQ. The operations are described in portable.hpp.
#pragma once

#include <immintrin.h>

#include "simd/inline.hpp"
#include "simd/transpose.hpp"

namespace looped::simd {

template <class T>
struct Avx512;

template <>
struct Avx512<float> {
    using Scalar = float;
    static constexpr int width = 16;
    static constexpr int tile_rows = 14;  // 28 accumulators, two columns, one broadcast: 31 of 32 registers

    __m512 v;

    struct Squares {
        __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    };

    LOOPED_INLINE static __mmask16 lanes(int n) { return __mmask16((1u << n) - 1u); }
    LOOPED_INLINE static Avx512 broadcast(float x) { return {_mm512_set1_ps(x)}; }
    LOOPED_INLINE static Avx512 zero() { return {_mm512_setzero_ps()}; }
    LOOPED_INLINE static Avx512 load(const float* p) { return {_mm512_loadu_ps(p)}; }
    LOOPED_INLINE static Avx512 load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps(lanes(n), p)}; }
    LOOPED_INLINE void store(float* p) const { _mm512_storeu_ps(p, v); }
    LOOPED_INLINE void store_n(float* p, int n) const { _mm512_mask_storeu_ps(p, lanes(n), v); }
    LOOPED_INLINE friend Avx512 operator+(Avx512 a, Avx512 b) { return {_mm512_add_ps(a.v, b.v)}; }
    LOOPED_INLINE friend Avx512 operator-(Avx512 a, Avx512 b) { return {_mm512_sub_ps(a.v, b.v)}; }
    LOOPED_INLINE friend Avx512 operator*(Avx512 a, Avx512 b) { return {_mm512_mul_ps(a.v, b.v)}; }
    LOOPED_INLINE friend Avx512 operator/(Avx512 a, Avx512 b) { return {_mm512_div_ps(a.v, b.v)}; }
    LOOPED_INLINE static Avx512 fma(Avx512 a, Avx512 b, Avx512 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
    LOOPED_INLINE static Avx512 max(Avx512 a, Avx512 b) { return {_mm512_max_ps(a.v, b.v)}; }
    LOOPED_INLINE static Avx512 min(Avx512 a, Avx512 b) { return {_mm512_min_ps(a.v, b.v)}; }
    LOOPED_INLINE static Avx512 first_n(Avx512 x, int n, Avx512 other) { return {_mm512_mask_blend_ps(lanes(n), other.v, x.v)}; }
    LOOPED_INLINE static float sum(Avx512 x) { return _mm512_reduce_add_ps(x.v); }
    LOOPED_INLINE static float maximum(Avx512 x) { return _mm512_reduce_max_ps(x.v); }
    static constexpr bool scales_all = true;
    LOOPED_INLINE static Avx512 round(Avx512 x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    LOOPED_INLINE static Avx512 scale(Avx512 x, Avx512 n) { return {_mm512_scalef_ps(x.v, n.v)}; }
    LOOPED_INLINE static void add_squares(Squares& sums, Avx512 x) {
        __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x.v));
        __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1));
        sums.low = _mm512_fmadd_pd(low, low, sums.low);
        sums.high = _mm512_fmadd_pd(high, high, sums.high);
    }
    LOOPED_INLINE static double total(const Squares& sums) { return _mm512_reduce_add_pd(_mm512_add_pd(sums.low, sums.high)); }
    LOOPED_INLINE static void transpose_block(const float* in, std::size_t in_stride, float* out, std::size_t out_stride) {
        transpose_x86(in, in_stride, out, out_stride);
    }
};

template <>
struct Avx512<double> {
    using Scalar = double;
    static constexpr int width = 8;
    static constexpr int tile_rows = 14;

    __m512d v;

    struct Squares {
        __m512d lane = _mm512_setzero_pd();
    };

    LOOPED_INLINE static __mmask8 lanes(int n) { return __mmask8((1u << n) - 1u); }
    LOOPED_INLINE static Avx512 broadcast(double x) { return {_mm512_set1_pd(x)}; }
    LOOPED_INLINE static Avx512 zero() { return {_mm512_setzero_pd()}; }
    LOOPED_INLINE static Avx512 load(const double* p) { return {_mm512_loadu_pd(p)}; }
    LOOPED_INLINE static Avx512 load_n(const double* p, int n) { return {_mm512_maskz_loadu_pd(lanes(n), p)}; }
    LOOPED_INLINE void store(double* p) const { _mm512_storeu_pd(p, v); }
    LOOPED_INLINE void store_n(double* p, int n) const { _mm512_mask_storeu_pd(p, lanes(n), v); }
    LOOPED_INLINE friend Avx512 operator+(Avx512 a, Avx512 b) { return {_mm512_add_pd(a.v, b.v)}; }
    LOOPED_INLINE friend Avx512 operator-(Avx512 a, Avx512 b) { return {_mm512_sub_pd(a.v, b.v)}; }
    LOOPED_INLINE friend Avx512 operator*(Avx512 a, Avx512 b) { return {_mm512_mul_pd(a.v, b.v)}; }
    LOOPED_INLINE friend Avx512 operator/(Avx512 a, Avx512 b) { return {_mm512_div_pd(a.v, b.v)}; }
    LOOPED_INLINE static Avx512 fma(Avx512 a, Avx512 b, Avx512 c) { return {_mm512_fmadd_pd(a.v, b.v, c.v)}; }
    LOOPED_INLINE static Avx512 max(Avx512 a, Avx512 b) { return {_mm512_max_pd(a.v, b.v)}; }
    LOOPED_INLINE static Avx512 min(Avx512 a, Avx512 b) { return {_mm512_min_pd(a.v, b.v)}; }
    LOOPED_INLINE static Avx512 first_n(Avx512 x, int n, Avx512 other) { return {_mm512_mask_blend_pd(lanes(n), other.v, x.v)}; }
    LOOPED_INLINE static double sum(Avx512 x) { return _mm512_reduce_add_pd(x.v); }
    LOOPED_INLINE static double maximum(Avx512 x) { return _mm512_reduce_max_pd(x.v); }
    static constexpr bool scales_all = true;
    LOOPED_INLINE static Avx512 round(Avx512 x) { return {_mm512_roundscale_pd(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
    LOOPED_INLINE static Avx512 scale(Avx512 x, Avx512 n) { return {_mm512_scalef_pd(x.v, n.v)}; }
    LOOPED_INLINE static void add_squares(Squares& sums, Avx512 x) { sums.lane = _mm512_fmadd_pd(x.v, x.v, sums.lane); }
    LOOPED_INLINE static double total(const Squares& sums) { return _mm512_reduce_add_pd(sums.lane); }
    LOOPED_INLINE static void transpose_block(const double* in, std::size_t in_stride, double* out, std::size_t out_stride) {
        transpose_x86(in, in_stride, out, out_stride);
    }
};

}  // namespace looped::simd
