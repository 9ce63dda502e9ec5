#include "block/kernel_table.hpp"
#include "simd/portable.hpp"

namespace looped::block {

template <>
const Kernels<float>& portable_kernels<float>() {
    static constexpr Kernels<float> table = kernels_of<simd::Portable<float>>("portable");
    return table;
}

template <>
const Kernels<double>& portable_kernels<double>() {
    static constexpr Kernels<double> table = kernels_of<simd::Portable<double>>("portable");
    return table;
}

}  // namespace looped::block
