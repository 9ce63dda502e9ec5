// 32 bytes: AVX2 with FMA. The operations are described in portable.hpp.
#pragma once

#include <immintrin.h>

#include "simd/inline.hpp"
#include "simd/transpose.hpp"

namespace looped::simd {

template <class T>
struct Avx2;

LOOPED_INLINE double sum_of_four(__m256d x) {
    __m128d pair = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
    return _mm_cvtsd_f64(_mm_add_sd(pair, _mm_unpackhi_pd(pair, pair)));
}

template <>
struct Avx2<float> {
    using Scalar = float;
    static constexpr int width = 8;
    static constexpr int tile_rows = 6;  // 12 accumulators, two columns, one broadcast: 15 of 16 registers

    __m256 v;

    struct Squares {
        __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    };

    LOOPED_INLINE static __m256i lanes(int n) {
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
    LOOPED_INLINE static Avx2 broadcast(float x) { return {_mm256_set1_ps(x)}; }
    LOOPED_INLINE static Avx2 zero() { return {_mm256_setzero_ps()}; }
    LOOPED_INLINE static Avx2 load(const float* p) { return {_mm256_loadu_ps(p)}; }
    LOOPED_INLINE static Avx2 load_n(const float* p, int n) { return {_mm256_maskload_ps(p, lanes(n))}; }
    LOOPED_INLINE void store(float* p) const { _mm256_storeu_ps(p, v); }
    LOOPED_INLINE void store_n(float* p, int n) const { _mm256_maskstore_ps(p, lanes(n), v); }
    LOOPED_INLINE friend Avx2 operator+(Avx2 a, Avx2 b) { return {_mm256_add_ps(a.v, b.v)}; }
    LOOPED_INLINE friend Avx2 operator-(Avx2 a, Avx2 b) { return {_mm256_sub_ps(a.v, b.v)}; }
    LOOPED_INLINE friend Avx2 operator*(Avx2 a, Avx2 b) { return {_mm256_mul_ps(a.v, b.v)}; }
    LOOPED_INLINE friend Avx2 operator/(Avx2 a, Avx2 b) { return {_mm256_div_ps(a.v, b.v)}; }
    LOOPED_INLINE static Avx2 fma(Avx2 a, Avx2 b, Avx2 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
    LOOPED_INLINE static Avx2 max(Avx2 a, Avx2 b) { return {_mm256_max_ps(a.v, b.v)}; }
    LOOPED_INLINE static Avx2 min(Avx2 a, Avx2 b) { return {_mm256_min_ps(a.v, b.v)}; }
    LOOPED_INLINE static Avx2 first_n(Avx2 x, int n, Avx2 other) {
        return {_mm256_blendv_ps(other.v, x.v, _mm256_castsi256_ps(lanes(n)))};
    }
    LOOPED_INLINE static float sum(Avx2 x) {
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
        __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
    LOOPED_INLINE static float maximum(Avx2 x) {
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
        __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
    }
    static constexpr bool scales_all = false;
    static constexpr float whole = 12582912.0f;  // 1.5 * 2^23
    LOOPED_INLINE static Avx2 round(Avx2 x) { return (x + broadcast(whole)) - broadcast(whole); }
    LOOPED_INLINE static Avx2 scale(Avx2 x, Avx2 n) {
        __m256i bits = _mm256_castps_si256(_mm256_add_ps(n.v, _mm256_set1_ps(whole)));  // n in the low bits
        bits = _mm256_slli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(127)), 23);
        return {_mm256_mul_ps(x.v, _mm256_castsi256_ps(bits))};
    }
    LOOPED_INLINE static void add_squares(Squares& sums, Avx2 x) {
        __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x.v));
        __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x.v, 1));
        sums.low = _mm256_fmadd_pd(low, low, sums.low);
        sums.high = _mm256_fmadd_pd(high, high, sums.high);
    }
    LOOPED_INLINE static double total(const Squares& sums) { return sum_of_four(_mm256_add_pd(sums.low, sums.high)); }
    LOOPED_INLINE static void transpose_block(const float* in, std::size_t in_stride, float* out, std::size_t out_stride) {
        transpose_x86(in, in_stride, out, out_stride);
    }
};

template <>
struct Avx2<double> {
    using Scalar = double;
    static constexpr int width = 4;
    static constexpr int tile_rows = 6;

    __m256d v;

    struct Squares {
        __m256d lane = _mm256_setzero_pd();
    };

    LOOPED_INLINE static __m256i lanes(int n) { return _mm256_cmpgt_epi64(_mm256_set1_epi64x(n), _mm256_setr_epi64x(0, 1, 2, 3)); }
    LOOPED_INLINE static Avx2 broadcast(double x) { return {_mm256_set1_pd(x)}; }
    LOOPED_INLINE static Avx2 zero() { return {_mm256_setzero_pd()}; }
    LOOPED_INLINE static Avx2 load(const double* p) { return {_mm256_loadu_pd(p)}; }
    LOOPED_INLINE static Avx2 load_n(const double* p, int n) { return {_mm256_maskload_pd(p, lanes(n))}; }
    LOOPED_INLINE void store(double* p) const { _mm256_storeu_pd(p, v); }
    LOOPED_INLINE void store_n(double* p, int n) const { _mm256_maskstore_pd(p, lanes(n), v); }
    LOOPED_INLINE friend Avx2 operator+(Avx2 a, Avx2 b) { return {_mm256_add_pd(a.v, b.v)}; }
    LOOPED_INLINE friend Avx2 operator-(Avx2 a, Avx2 b) { return {_mm256_sub_pd(a.v, b.v)}; }
    LOOPED_INLINE friend Avx2 operator*(Avx2 a, Avx2 b) { return {_mm256_mul_pd(a.v, b.v)}; }
    LOOPED_INLINE friend Avx2 operator/(Avx2 a, Avx2 b) { return {_mm256_div_pd(a.v, b.v)}; }
    LOOPED_INLINE static Avx2 fma(Avx2 a, Avx2 b, Avx2 c) { return {_mm256_fmadd_pd(a.v, b.v, c.v)}; }
    LOOPED_INLINE static Avx2 max(Avx2 a, Avx2 b) { return {_mm256_max_pd(a.v, b.v)}; }
    LOOPED_INLINE static Avx2 min(Avx2 a, Avx2 b) { return {_mm256_min_pd(a.v, b.v)}; }
    LOOPED_INLINE static Avx2 first_n(Avx2 x, int n, Avx2 other) {
        return {_mm256_blendv_pd(other.v, x.v, _mm256_castsi256_pd(lanes(n)))};
    }
    LOOPED_INLINE static double sum(Avx2 x) { return sum_of_four(x.v); }
    LOOPED_INLINE static double maximum(Avx2 x) {
        __m128d pair = _mm_max_pd(_mm256_castpd256_pd128(x.v), _mm256_extractf128_pd(x.v, 1));
        return _mm_cvtsd_f64(_mm_max_sd(pair, _mm_unpackhi_pd(pair, pair)));
    }
    static constexpr bool scales_all = false;
    static constexpr double whole = 6755399441055744.0;  // 1.5 * 2^52
    LOOPED_INLINE static Avx2 round(Avx2 x) { return (x + broadcast(whole)) - broadcast(whole); }
    LOOPED_INLINE static Avx2 scale(Avx2 x, Avx2 n) {
        __m256i bits = _mm256_castpd_si256(_mm256_add_pd(n.v, _mm256_set1_pd(whole)));  // n in the low bits
        bits = _mm256_slli_epi64(_mm256_add_epi64(bits, _mm256_set1_epi64x(1023)), 52);
        return {_mm256_mul_pd(x.v, _mm256_castsi256_pd(bits))};
    }
    LOOPED_INLINE static void add_squares(Squares& sums, Avx2 x) { sums.lane = _mm256_fmadd_pd(x.v, x.v, sums.lane); }
    LOOPED_INLINE static double total(const Squares& sums) { return sum_of_four(sums.lane); }
    LOOPED_INLINE static void transpose_block(const double* in, std::size_t in_stride, double* out, std::size_t out_stride) {
        transpose_x86(in, in_stride, out, out_stride);
    }
};

}  // namespace looped::simd
