// 16 bytes: NEON on AArch64. The operations are described in portable.hpp.
#pragma once

#include <arm_neon.h>

#include "simd/inline.hpp"
#include "simd/transpose.hpp"

namespace looped::simd {

template <class T>
struct Neon;

template <>
struct Neon<float> {
    using Scalar = float;
    static constexpr int width = 4;
    static constexpr int tile_rows = 12;  // 24 accumulators, two columns, one broadcast: 27 of 32 registers

    float32x4_t v;

    struct Squares {
        float64x2_t low = vdupq_n_f64(0), high = vdupq_n_f64(0);
    };

    LOOPED_INLINE static uint32x4_t lanes(int n) {
        const int32x4_t place = {0, 1, 2, 3};
        return vcltq_s32(place, vdupq_n_s32(n));
    }
    LOOPED_INLINE static Neon broadcast(float x) { return {vdupq_n_f32(x)}; }
    LOOPED_INLINE static Neon zero() { return {vdupq_n_f32(0)}; }
    LOOPED_INLINE static Neon load(const float* p) { return {vld1q_f32(p)}; }
    LOOPED_INLINE static Neon load_n(const float* p, int n) {
        float part[width] = {};
        for (int i = 0; i < n; ++i) part[i] = p[i];
        return load(part);
    }
    LOOPED_INLINE void store(float* p) const { vst1q_f32(p, v); }
    LOOPED_INLINE void store_n(float* p, int n) const {
        float part[width];
        store(part);
        for (int i = 0; i < n; ++i) p[i] = part[i];
    }
    LOOPED_INLINE friend Neon operator+(Neon a, Neon b) { return {vaddq_f32(a.v, b.v)}; }
    LOOPED_INLINE friend Neon operator-(Neon a, Neon b) { return {vsubq_f32(a.v, b.v)}; }
    LOOPED_INLINE friend Neon operator*(Neon a, Neon b) { return {vmulq_f32(a.v, b.v)}; }
    LOOPED_INLINE friend Neon operator/(Neon a, Neon b) { return {vdivq_f32(a.v, b.v)}; }
    LOOPED_INLINE static Neon fma(Neon a, Neon b, Neon c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
    LOOPED_INLINE static Neon max(Neon a, Neon b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }
    LOOPED_INLINE static Neon min(Neon a, Neon b) { return {vbslq_f32(vcltq_f32(a.v, b.v), a.v, b.v)}; }
    LOOPED_INLINE static Neon first_n(Neon x, int n, Neon other) { return {vbslq_f32(lanes(n), x.v, other.v)}; }
    LOOPED_INLINE static float sum(Neon x) {
        float32x2_t two = vadd_f32(vget_low_f32(x.v), vget_high_f32(x.v));
        return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
    }
    LOOPED_INLINE static float maximum(Neon x) { return vmaxvq_f32(x.v); }
    static constexpr bool scales_all = false;
    static constexpr float whole = 12582912.0f;  // 1.5 * 2^23
    LOOPED_INLINE static Neon round(Neon x) { return (x + broadcast(whole)) - broadcast(whole); }
    LOOPED_INLINE static Neon scale(Neon x, Neon n) {
        const auto bits = vaddq_s32(vreinterpretq_s32_f32(vaddq_f32(n.v, vdupq_n_f32(whole))), vdupq_n_s32(127));
        return {vmulq_f32(x.v, vreinterpretq_f32_s32(vshlq_n_s32(bits, 23)))};
    }
    LOOPED_INLINE static void add_squares(Squares& sums, Neon x) {
        float64x2_t low = vcvt_f64_f32(vget_low_f32(x.v)), high = vcvt_high_f64_f32(x.v);
        sums.low = vfmaq_f64(sums.low, low, low);
        sums.high = vfmaq_f64(sums.high, high, high);
    }
    LOOPED_INLINE static double total(const Squares& sums) {
        float64x2_t pair = vaddq_f64(sums.low, sums.high);
        return vgetq_lane_f64(pair, 0) + vgetq_lane_f64(pair, 1);
    }
    LOOPED_INLINE static void transpose_block(const float* in, std::size_t in_stride, float* out, std::size_t out_stride) {
        transpose_portable(in, in_stride, out, out_stride);
    }
};

template <>
struct Neon<double> {
    using Scalar = double;
    static constexpr int width = 2;
    static constexpr int tile_rows = 12;

    float64x2_t v;

    struct Squares {
        float64x2_t lane = vdupq_n_f64(0);
    };

    LOOPED_INLINE static uint64x2_t lanes(int n) {
        const int64x2_t place = {0, 1};
        return vcltq_s64(place, vdupq_n_s64(n));
    }
    LOOPED_INLINE static Neon broadcast(double x) { return {vdupq_n_f64(x)}; }
    LOOPED_INLINE static Neon zero() { return {vdupq_n_f64(0)}; }
    LOOPED_INLINE static Neon load(const double* p) { return {vld1q_f64(p)}; }
    LOOPED_INLINE static Neon load_n(const double* p, int n) {
        double part[width] = {};
        for (int i = 0; i < n; ++i) part[i] = p[i];
        return load(part);
    }
    LOOPED_INLINE void store(double* p) const { vst1q_f64(p, v); }
    LOOPED_INLINE void store_n(double* p, int n) const {
        double part[width];
        store(part);
        for (int i = 0; i < n; ++i) p[i] = part[i];
    }
    LOOPED_INLINE friend Neon operator+(Neon a, Neon b) { return {vaddq_f64(a.v, b.v)}; }
    LOOPED_INLINE friend Neon operator-(Neon a, Neon b) { return {vsubq_f64(a.v, b.v)}; }
    LOOPED_INLINE friend Neon operator*(Neon a, Neon b) { return {vmulq_f64(a.v, b.v)}; }
    LOOPED_INLINE friend Neon operator/(Neon a, Neon b) { return {vdivq_f64(a.v, b.v)}; }
    LOOPED_INLINE static Neon fma(Neon a, Neon b, Neon c) { return {vfmaq_f64(c.v, a.v, b.v)}; }
    LOOPED_INLINE static Neon max(Neon a, Neon b) { return {vbslq_f64(vcgtq_f64(a.v, b.v), a.v, b.v)}; }
    LOOPED_INLINE static Neon min(Neon a, Neon b) { return {vbslq_f64(vcltq_f64(a.v, b.v), a.v, b.v)}; }
    LOOPED_INLINE static Neon first_n(Neon x, int n, Neon other) { return {vbslq_f64(lanes(n), x.v, other.v)}; }
    LOOPED_INLINE static double sum(Neon x) { return vgetq_lane_f64(x.v, 0) + vgetq_lane_f64(x.v, 1); }
    LOOPED_INLINE static double maximum(Neon x) { return vmaxvq_f64(x.v); }
    static constexpr bool scales_all = false;
    static constexpr double whole = 6755399441055744.0;  // 1.5 * 2^52
    LOOPED_INLINE static Neon round(Neon x) { return (x + broadcast(whole)) - broadcast(whole); }
    LOOPED_INLINE static Neon scale(Neon x, Neon n) {
        const auto bits = vaddq_s64(vreinterpretq_s64_f64(vaddq_f64(n.v, vdupq_n_f64(whole))), vdupq_n_s64(1023));
        return {vmulq_f64(x.v, vreinterpretq_f64_s64(vshlq_n_s64(bits, 52)))};
    }
    LOOPED_INLINE static void add_squares(Squares& sums, Neon x) { sums.lane = vfmaq_f64(sums.lane, x.v, x.v); }
    LOOPED_INLINE static double total(const Squares& sums) { return vgetq_lane_f64(sums.lane, 0) + vgetq_lane_f64(sums.lane, 1); }
    LOOPED_INLINE static void transpose_block(const double* in, std::size_t in_stride, double* out, std::size_t out_stride) {
        transpose_portable(in, in_stride, out, out_stride);
    }
};

}  // namespace looped::simd
