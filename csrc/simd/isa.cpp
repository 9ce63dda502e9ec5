#include "simd/isa.hpp"

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace looped::simd {
namespace {

struct Choice {
    std::string_view name;
    bool is_supported;
    const block::Kernels<float>& (*of_float)();
    const block::Kernels<double>& (*of_double)();
};

// Best first. AVX-512 needs the operating system to keep its registers, which __builtin_cpu_supports looks at too.
std::vector<Choice> choices() {
    std::vector<Choice> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vl");
    found.push_back({"avx512", has_avx512, &block::avx512_kernels<float>, &block::avx512_kernels<double>});
    found.push_back({"avx2", has_avx2, &block::avx2_kernels<float>, &block::avx2_kernels<double>});
#elif defined(__aarch64__)
    found.push_back({"neon", true, &block::neon_kernels<float>, &block::neon_kernels<double>});
#endif
    found.push_back({"portable", true, &block::portable_kernels<float>, &block::portable_kernels<double>});
    return found;
}

Choice choose() {
    const char* asked = std::getenv("LOOPED_ISA");
    const auto all = choices();
    std::string allowed;
    for (const Choice& choice : all) {
        if (!choice.is_supported) continue;
        if (!asked || !*asked || choice.name == asked) return choice;
        allowed += (allowed.empty() ? "" : ", ") + std::string(choice.name);
    }
    throw std::runtime_error("looped: LOOPED_ISA=" + std::string(asked) + " is not an instruction set of this machine; allowed are " +
                             allowed + ", or leave it unset");
}

const Choice& chosen() {
    static const Choice choice = choose();
    return choice;
}

}  // namespace

template <>
const block::Kernels<float>& kernels<float>() {
    return chosen().of_float();
}

template <>
const block::Kernels<double>& kernels<double>() {
    return chosen().of_double();
}

}  // namespace looped::simd
