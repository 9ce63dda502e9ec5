// Every bit, its place, the tail, and the order of pieces count.
#include <doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "block/fingerprint.hpp"

using looped::block::fingerprint;

namespace {

std::vector<std::byte> noise(std::size_t n) {
    std::mt19937_64 random(n);
    std::vector<std::byte> bytes(n);
    for (auto& byte : bytes) byte = static_cast<std::byte>(random());
    return bytes;
}

void flip(std::vector<std::byte>& bytes, std::size_t bit) { bytes[bit / 8] ^= std::byte{1} << bit % 8; }

}  // namespace

TEST_CASE("every single bit counts, in whole blocks and in every tail") {
    for (std::size_t n : {1, 7, 8, 9, 63, 64, 65, 127, 128, 200}) {
        auto bytes = noise(n);
        std::set<std::uint64_t> seen{fingerprint(bytes)};
        for (std::size_t bit = 0; bit < 8 * n; ++bit) {
            flip(bytes, bit);
            seen.insert(fingerprint(bytes));
            flip(bytes, bit);
        }
        CHECK(seen.size() == 8 * n + 1);
    }
}

TEST_CASE("lengths of zeros count") {
    const std::vector<std::byte> zeros(200);
    std::set<std::uint64_t> seen;
    for (std::size_t n = 0; n <= zeros.size(); ++n) seen.insert(fingerprint(std::span(zeros).first(n)));
    CHECK(seen.size() == zeros.size() + 1);
}

TEST_CASE("a flipped bit is not taken back by one or two of the lane's next word") {
    auto bytes = noise(128);
    const auto before = fingerprint(bytes);
    for (std::size_t first : {63, 62, 31, 0}) {
        flip(bytes, first);
        for (std::size_t one = 0; one < 64; ++one) {
            for (std::size_t two = one; two < 64; ++two) {
                flip(bytes, 8 * 64 + one);  // word 8 follows word 0 in its lane
                if (two != one) flip(bytes, 8 * 64 + two);
                REQUIRE(fingerprint(bytes) != before);
                flip(bytes, 8 * 64 + one);
                if (two != one) flip(bytes, 8 * 64 + two);
            }
        }
        flip(bytes, first);
    }
}

TEST_CASE("the order of words, lanes and pieces counts") {
    const auto bytes = noise(192);
    for (std::size_t distance : {1, 8, 9}) {
        auto moved = bytes;
        std::swap_ranges(moved.begin(), moved.begin() + 8, moved.begin() + static_cast<std::ptrdiff_t>(8 * distance));
        CHECK(fingerprint(moved) != fingerprint(bytes));
    }
    const auto all = std::span(bytes);
    std::set<std::uint64_t> seen{fingerprint(all)};
    for (std::size_t cut : {0, 1, 64, 100, 128}) {
        seen.insert(fingerprint(all.subspan(cut), fingerprint(all.first(cut))));
        seen.insert(fingerprint(all.first(cut), fingerprint(all.subspan(cut))));
    }
    CHECK(seen.size() == 11);
    const std::vector<std::byte> zeros(64);
    CHECK(fingerprint(zeros, 0) != fingerprint(zeros, 1));
}
