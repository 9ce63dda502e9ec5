// Runs the tests on the instruction set that LOOPED_ISA names; leaves with 4 where this machine does not have it.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "simd/isa.hpp"

int main(int argc, char** argv) {
    try {
        std::printf("instruction set: %s\n", looped::simd::kernels<float>().isa);
    } catch (const std::runtime_error& error) {
        std::printf("%s\n", error.what());
        return 4;
    }
    return doctest::Context(argc, argv).run();
}

TEST_CASE("the instruction set asked for is the one that runs, in both precisions") {
    const std::string single = looped::simd::kernels<float>().isa, twice = looped::simd::kernels<double>().isa;
    CHECK(single == twice);
    const char* asked = std::getenv("LOOPED_ISA");
    if (asked) CHECK(single == asked);
}
