#include "block/kernel_table.hpp"
#include "simd/neon.hpp"

namespace looped::block {

template <>
const Kernels<float>& neon_kernels<float>() {
    static constexpr Kernels<float> table = kernels_of<simd::Neon<float>>("neon");
    return table;
}

template <>
const Kernels<double>& neon_kernels<double>() {
    static constexpr Kernels<double> table = kernels_of<simd::Neon<double>>("neon");
    return table;
}

}  // namespace looped::block
