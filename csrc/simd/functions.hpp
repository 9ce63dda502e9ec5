// exp2 and the activations on any vector type. One source for every instruction set; no table, no branch. An activation keeps NaN,
// and far out, infinities included, it is x or 0.
#pragma once

#include <cstddef>

#include "simd/inline.hpp"

namespace looped::simd {

// Constants of 2^x = 2^n 2^r with n = round(x), |r| <= 1/2.
template <class T>
struct Exp2;

// Minimax in the relative error with value 1 at 0 (2e-9, so about 0.9 units in the last place after rounding).
template <>
struct Exp2<float> {
    static constexpr int degree = 6;
    static constexpr float coefficient[degree] = {0x1.62e430af272eap-1f, 0x1.ebfbdc3c2fe50p-3f,  0x1.c6aee88e75dbep-5f,
                                                  0x1.3b2d4cf210277p-7f, 0x1.5f3e52fe3dac6p-10f, 0x1.41fbbbe004df3p-13f};
    static constexpr float lowest = -126.0f, highest = 128.0f;  // 2^128 is infinity
};

// Taylor, ln(2)^k / k!: the first term left out is below 3e-18.
template <>
struct Exp2<double> {
    static constexpr int degree = 13;
    static constexpr double coefficient[degree] = {
        0x1.62e42fefa39efp-1,  0x1.ebfbdff82c58fp-3,  0x1.c6b08d704a0c0p-5,  0x1.3b2ab6fba4e77p-7,  0x1.5d87fe78a6731p-10,
        0x1.430912f86c787p-13, 0x1.ffcbfc588b0c7p-17, 0x1.62c0223a5c824p-20, 0x1.b5253d395e7c4p-24, 0x1.e4cf5158b8ecap-28,
        0x1.e8cac7351bb25p-32, 0x1.c3bd650fc2986p-36, 0x1.816193166d0f9p-40};
    static constexpr double lowest = -1022.0, highest = 1024.0;
};

// c[0] + c[1] x + c[2] x^2 + ...
template <class V, std::size_t n>
LOOPED_INLINE V polynomial(V x, const typename V::Scalar (&c)[n]) {
    V y = V::broadcast(c[n - 1]);
    static_for<int(n) - 1>([&](auto k) __attribute__((always_inline)) { y = V::fma(y, x, V::broadcast(c[n - 2 - k])); });
    return y;
}

// 2^r, |r| <= 1/2.
template <class V>
LOOPED_INLINE V exp2_of_fraction(V r) {
    using T = typename V::Scalar;
    return V::fma(polynomial(r, Exp2<T>::coefficient), r, V::broadcast(T(1)));
}

// 2^x of a finite x; NaN stays NaN. Infinity from 2^127.5 (2^1023.5) on; below the exponent range it saturates, or is 0 where the
// vector scales so.
template <class V>
LOOPED_INLINE V exp2(V x) {
    using C = Exp2<typename V::Scalar>;
    if constexpr (!V::scales_all) x = V::min(V::broadcast(C::highest), V::max(V::broadcast(C::lowest), x));
    V n = V::round(x);
    return V::scale(exp2_of_fraction(x - n), n);
}

template <class V>
struct Exponent {
    V n, r;
};

// exp(a + b) = 2^n 2^r for a small b. No digit of `a` is lost, whatever the instruction set: n high is exact, and so is a - n high.
// Rounded first, the power would be off by as many units as the exponent is large.
template <class V>
LOOPED_INLINE Exponent<V> exponent_of(V a, V b) {
    using T = typename V::Scalar;
    constexpr T log2_e = T(1.44269504088896340736);
    constexpr T high = T(sizeof(T) == 4 ? 0x1.63p-1 : 0x1.62e4p-1);  // of ln(2): times n it is exact
    constexpr T low = T(sizeof(T) == 4 ? -0x1.bd0105c610ca8p-13 : 0x1.7f7d1cf79abcap-20);
    V n = V::round((a + b) * V::broadcast(log2_e));
    V rest = V::fma(n, V::broadcast(-low), V::fma(n, V::broadcast(-high), a)) + b;
    return {n, rest * V::broadcast(log2_e)};
}

// The tanh form, written as a sigmoid so that nothing cancels:
// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
template <class V>
LOOPED_INLINE V gelu_tanh(V x) {
    using T = typename V::Scalar;
    constexpr double linear = -2.0 * 0.79788456080286535588 * 1.44269504088896340736;  // -2 sqrt(2 / pi) log2(e)
    constexpr T last = 32;  // beyond it the sigmoid is 0 or 1
    x = V::max(V::broadcast(-last), x);
    V u = x;
    if constexpr (V::scales_all) u = V::min(V::broadcast(last), x);  // exp2 of an infinity would be NaN
    V power = u * V::fma(u * u, V::broadcast(T(linear * 0.044715)), V::broadcast(T(linear)));
    return x / (V::broadcast(T(1)) + exp2(power));
}

// t P(X > t) exp(t^2 / 2) of a normal X, 0 <= t <= last, as z p(2 z - 1) with z = t / (t + knee), which keeps every sum
// well-conditioned. Beyond `last`, t P(X > t) is 0 in the type.
template <class T>
struct NormalTail;

// Minimax in the relative error, 9e-10.
template <>
struct NormalTail<float> {
    static constexpr float last = 16.0f, knee = 3.0f;
    static constexpr float coefficient[] = {0x1.754a76p-1f,   -0x1.04c72ap-1f, 0x1.d71384p-3f,  -0x1.832d0cp-5f,
                                            -0x1.56d5dep-7f,  0x1.c8bdf4p-8f,  0x1.0ca0cep-10f, -0x1.0eb370p-10f,
                                            -0x1.009deep-12f, 0x1.139848p-13f, 0x1.c975e4p-15f};
};

// Likewise, 2e-17.
template <>
struct NormalTail<double> {
    static constexpr double last = 40.0, knee = 4.0;
    static constexpr double coefficient[] = {
        0x1.82b4bb8c94dcep-1,   -0x1.373e3a893c28ap-1,  0x1.8c6dbf2cfc310p-2,   -0x1.7dff2bff68412p-3,  0x1.eec4cc3e43624p-5,
        -0x1.ee27610458eb7p-8,  -0x1.c81719c854315p-9,  0x1.ab825fb825f58p-10,  0x1.17a4a55c0043cp-13,  -0x1.e4a423aaf74c6p-13,
        -0x1.001035396bc54p-19, 0x1.26d08afec2d6ap-15,  0x1.7fcf8debb629ep-21,  -0x1.8d4cf6db7b8f8p-18, -0x1.4f9a22baffa34p-21,
        0x1.126d7d8858a97p-20,  0x1.1b8c92357fdccp-22,  -0x1.5186860d3c188p-23, -0x1.4bdd79ba3f5a2p-24, 0x1.1b08bac6a1ab4p-26,
        0x1.fa8fc321a345dp-27,  -0x1.fa4f534a0b4d6p-32, -0x1.5865ac79ceb7ep-30};
};

// The exact form, x P(X < x) = max(x, 0) - |x| P(X > |x|): the tail keeps its digits on both sides of 0. Off by at most 3.8 units in
// the last place in float and 3.5 in double, 0.5 on average, as long as the result is a normal number.
template <class V>
LOOPED_INLINE V gelu(V x) {
    using T = typename V::Scalar;
    using C = NormalTail<T>;
    constexpr T steps = 256;
    V t = V::min(V::broadcast(C::last), V::max(x, V::zero() - x));
    V head = V::round(t * V::broadcast(steps)) * V::broadcast(1 / steps);  // so few bits that its square is exact
    V half = V::broadcast(T(-0.5));
    auto [n, r] = exponent_of(head * head * half, (t - head) * (t + head) * half);
    V z = t / (t + V::broadcast(C::knee));
    V tail = z * polynomial(V::fma(z, V::broadcast(T(2)), V::broadcast(T(-1))), C::coefficient);
    tail = V::fma(tail, r * polynomial(r, Exp2<T>::coefficient), tail);  // times 2^r
    if constexpr (V::scales_all) {
        tail = V::scale(tail, n);
    } else {
        V part = V::round(n * V::broadcast(T(0.5)));
        tail = V::scale(V::scale(tail, part), n - part);
    }
    return V::max(V::zero(), x) - tail;
}

// x / (1 + exp(-x)), and 0 where exp(-x) overflows. Off by at most 2.4 units in the last place.
template <class V>
LOOPED_INLINE V silu(V x) {
    using T = typename V::Scalar;
    constexpr double ln_2 = 0.69314718055994530942;
    constexpr T first = T((Exp2<T>::highest + 0.25) * -ln_2), last = T(Exp2<T>::lowest * -ln_2);  // beyond: 0 and x
    x = V::max(V::broadcast(first), x);
    auto [n, r] = exponent_of(V::max(V::broadcast(-last), V::zero() - x), V::zero());
    return x / (V::broadcast(T(1)) + V::scale(exp2_of_fraction(r), n));
}

template <class V>
LOOPED_INLINE V relu(V x) {
    return V::max(V::zero(), x);  // the second argument where it is NaN
}

}  // namespace looped::simd
