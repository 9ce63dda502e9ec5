#include "block/fingerprint.hpp"

#include <array>
#include <cstring>

namespace looped::block {
namespace {

// SplitMix64's second half (Steele et al., 2014). One to one in `sum` and in `word`, so that a change of one word is never lost.
// One product alone would take bit 63 of a word to one bit of the sum for certain, where another word could take it back.
std::uint64_t mix(std::uint64_t sum, std::uint64_t word) noexcept {
    std::uint64_t x = (sum ^ word) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 29) * 0x94d049bb133111eb;
    return x ^ x >> 32;
}

}  // namespace

std::uint64_t fingerprint(std::span<const std::byte> bytes, std::uint64_t before) noexcept {
    constexpr std::size_t n_lanes = 8;  // a lane waits for its product, the others do not
    std::array<std::uint64_t, n_lanes> sums{}, words{};
    for (std::size_t lane = 0; lane < n_lanes; ++lane) sums[lane] = mix(before, lane);
    const auto add = [&](std::size_t first, std::size_t n) {
        std::memcpy(words.data(), bytes.data() + first, n);
        for (std::size_t lane = 0; lane < n_lanes; ++lane) sums[lane] = mix(sums[lane], words[lane]);
    };
    const std::size_t n_whole = bytes.size() / sizeof words * sizeof words;
    for (std::size_t i = 0; i < n_whole; i += sizeof words) add(i, sizeof words);
    words.fill(0);
    if (n_whole < bytes.size()) add(n_whole, bytes.size() - n_whole);
    std::uint64_t all = bytes.size();
    for (std::uint64_t sum : sums) all = mix(all, sum);
    return all;
}

}  // namespace looped::block
