// The Python module looped._engine. This file and those of bindings/ are the only ones that know Python and handle raw addresses.
#include <pybind11/stl.h>

#include <cstdint>

#include "bindings/arrays.hpp"
#include "bindings/bandwidth.hpp"
#include "bindings/decode.hpp"
#include "bindings/engine.hpp"
#include "bindings/fma_peak.hpp"
#include "bindings/kernels.hpp"
#include "bindings/packing.hpp"
#include "block/fingerprint.hpp"
#include "simd/isa.hpp"

namespace looped {
namespace {

// Of pieces of memory, each (address, bytes), that the caller keeps alive.
std::uint64_t fingerprint(const std::vector<std::pair<std::uintptr_t, size_t>>& pieces) {
    const py::gil_scoped_release release;
    std::uint64_t all = 0;
    for (const auto& [address, n] : pieces) all = block::fingerprint({reinterpret_cast<const std::byte*>(address), n}, all);
    return all;
}

}  // namespace
}  // namespace looped

PYBIND11_MODULE(_engine, module) {
    using namespace looped;
    module.doc() = "The CPU engine of looped: prompts looped to rest, one prompt a thread, or several threads on one.";
    module.attr("version") = LOOPED_VERSION;
    module.def(
        "isa", [] { return std::string(simd::kernels<float>().isa); },
        "The instruction set in use: portable, avx2, avx512 or neon. LOOPED_ISA in the environment forces one.");
    module.def("fingerprint", &fingerprint, py::arg("pieces"), "A number that tells whether the memory of any piece has changed.");
    add_engine(module);
    add_decode(module);
    add_bandwidth(module);
    add_fma_peak(module);
    add_packing(module);
    add_kernels(module.def_submodule("kernels", "The kernels of this processor one by one, for tests and benchmarks."));
}
