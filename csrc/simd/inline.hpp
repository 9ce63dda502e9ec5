// Everything in simd/ and in the kernels is inlined without exception: a function that were emitted out of line in an object built
// for AVX-512 could be the copy the linker keeps for all.
#pragma once

#include <type_traits>
#include <utility>

#define LOOPED_INLINE [[gnu::always_inline]] inline

namespace looped::simd {

// body(0), ..., body(N - 1) with the index as a compile-time constant, so that arrays of vectors stay in registers.
template <int N, class Body>
LOOPED_INLINE void static_for(Body&& body) {
    [&]<int... I>(std::integer_sequence<int, I...>)
        __attribute__((always_inline)) { (body(std::integral_constant<int, I>{}), ...); }(std::make_integer_sequence<int, N>{});
}

}  // namespace looped::simd
