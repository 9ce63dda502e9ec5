// Which instruction set runs: the widest that the processor has, or the one that the environment variable LOOPED_ISA names.
#pragma once

#include "block/kernels.hpp"

namespace looped::simd {

// The kernels of this process, chosen at the first call. Throws std::runtime_error where LOOPED_ISA names an instruction set that
// this build or this processor does not have.
template <class T>
const block::Kernels<T>& kernels();

}  // namespace looped::simd
