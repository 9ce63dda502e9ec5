// Makes the table of kernels for one vector type. Included by kernels_<isa>.cpp and by nothing else.
#pragma once

#include "block/attention.hpp"
#include "block/few_rows.hpp"
#include "block/paged_attention.hpp"
#include "block/tile.hpp"
#include "block/token_wise.hpp"

namespace looped::block {

template <class V>
double fma_rounds(std::int64_t n) noexcept {
    constexpr int n_sums = 2 * V::tile_rows > 16 ? 16 : 2 * V::tile_rows - 2;  // more than latency times units, and all in registers
    const V shrink = V::broadcast(typename V::Scalar(0.999)), add = V::broadcast(typename V::Scalar(0.001));
    V sum[n_sums];
    simd::static_for<n_sums>([&](auto i) __attribute__((always_inline)) { sum[i] = V::broadcast(typename V::Scalar(int(i))); });
    for (std::int64_t round = 0; round < n; ++round) {
        simd::static_for<n_sums>([&](auto i) __attribute__((always_inline)) { sum[i] = V::fma(sum[i], shrink, add); });
    }
    V all = V::zero();
    simd::static_for<n_sums>([&](auto i) __attribute__((always_inline)) { all = all + sum[i]; });
    volatile typename V::Scalar keep = V::sum(all);  // so that the rounds are not removed
    (void)keep;
    return 2.0 * V::width * n_sums * double(n);
}

template <class V>
constexpr Kernels<typename V::Scalar> kernels_of(const char* isa) {
    static_assert(2 * V::width <= widest_panel);
    return {
        .isa = isa,
        .panel = 2 * V::width,
        .tile_rows = V::tile_rows,
        .product = &product<V>,
        .attend = &attend<V>,
        .product_by_columns = &product_by_columns<V>,
        .attend_pages = &attend_pages<V>,
        .normalize = &normalize<V>,
        .inject = &inject<V>,
        .squares = &squares<V>,
        .fma_rounds = &fma_rounds<V>,
        .read_memory = &read_memory<V>,
    };
}

}  // namespace looped::block
