#include "block/kernel_table.hpp"
#include "simd/avx512.hpp"

namespace looped::block {

template <>
const Kernels<float>& avx512_kernels<float>() {
    static constexpr Kernels<float> table = kernels_of<simd::Avx512<float>>("avx512");
    return table;
}

template <>
const Kernels<double>& avx512_kernels<double>() {
    static constexpr Kernels<double> table = kernels_of<simd::Avx512<double>>("avx512");
    return table;
}

}  // namespace looped::block
