#include "block/kernel_table.hpp"
#include "simd/avx2.hpp"

namespace looped::block {

template <>
const Kernels<float>& avx2_kernels<float>() {
    static constexpr Kernels<float> table = kernels_of<simd::Avx2<float>>("avx2");
    return table;
}

template <>
const Kernels<double>& avx2_kernels<double>() {
    static constexpr Kernels<double> table = kernels_of<simd::Avx2<double>>("avx2");
    return table;
}

}  // namespace looped::block
