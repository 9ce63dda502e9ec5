// exp2 and the activations on any vector type. One source for every instruction set; no table, no branch.
#pragma once

#include "simd/inline.hpp"

namespace looped::simd {

// Constants of 2^x = 2^n 2^r with n = round(x), |r| <= 1/2.
template <class T>
struct Exp2;

// Minimax in the relative error with value 1 at 0 (2e-9, so about 0.9 units in the last place after rounding).
template <>
struct Exp2<float> {
    static constexpr int degree = 6;
    static constexpr float coefficient[degree] = {0x1.62e430af272eap-1f, 0x1.ebfbdc3c2fe50p-3f, 0x1.c6aee88e75dbep-5f,
                                                  0x1.3b2d4cf210277p-7f, 0x1.5f3e52fe3dac6p-10f, 0x1.41fbbbe004df3p-13f};
    static constexpr float lowest = -126.0f, highest = 127.0f;
};

// Taylor, ln(2)^k / k!: the first term left out is below 3e-18.
template <>
struct Exp2<double> {
    static constexpr int degree = 13;
    static constexpr double coefficient[degree] = {
        0x1.62e42fefa39efp-1,  0x1.ebfbdff82c58fp-3,  0x1.c6b08d704a0c0p-5,  0x1.3b2ab6fba4e77p-7,  0x1.5d87fe78a6731p-10,
        0x1.430912f86c787p-13, 0x1.ffcbfc588b0c7p-17, 0x1.62c0223a5c824p-20, 0x1.b5253d395e7c4p-24, 0x1.e4cf5158b8ecap-28,
        0x1.e8cac7351bb25p-32, 0x1.c3bd650fc2986p-36, 0x1.816193166d0f9p-40};
    static constexpr double lowest = -1022.0, highest = 1023.0;
};

// 2^x of a finite x; NaN stays NaN. Beyond the exponent range it saturates, or is 0 and infinity where the vector scales so.
template <class V>
LOOPED_INLINE V exp2(V x) {
    using T = typename V::Scalar;
    using C = Exp2<T>;
    if constexpr (!V::scales_all) x = V::min(V::broadcast(C::highest), V::max(V::broadcast(C::lowest), x));
    V n = V::round(x);
    V r = x - n;
    V p = V::broadcast(C::coefficient[C::degree - 1]);
    static_for<C::degree - 1>([&](auto k) __attribute__((always_inline)) {
        p = V::fma(p, r, V::broadcast(C::coefficient[C::degree - 2 - k]));
    });
    return V::scale(V::fma(p, r, V::broadcast(T(1))), n);
}

// The tanh form, written as a sigmoid so that nothing cancels:
// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3).
template <class V>
LOOPED_INLINE V gelu_tanh(V x) {
    using T = typename V::Scalar;
    constexpr double linear = -2.0 * 0.79788456080286535588 * 1.44269504088896340736;  // -2 sqrt(2 / pi) log2(e)
    V square = x * x;
    if constexpr (V::scales_all) square = V::min(V::broadcast(T(1e4)), square);  // exp2 of an infinity would be NaN
    V power = x * V::fma(square, V::broadcast(T(linear * 0.044715)), V::broadcast(T(linear)));
    return x / (V::broadcast(T(1)) + exp2(power));
}

template <class V>
LOOPED_INLINE V relu(V x) {
    return V::max(V::zero(), x);  // the second argument where it is NaN
}

}  // namespace looped::simd
