#include "block/fingerprint.hpp"

#include <array>
#include <bit>
#include <cstring>

namespace looped::block {
namespace {

constexpr std::uint64_t odd = 0x9e3779b97f4a7c15;  // 2^64 divided by the golden ratio

// One to one in `sum` and in `word`, so that a change of one word is never lost.
std::uint64_t mix(std::uint64_t sum, std::uint64_t word) noexcept { return std::rotl((sum ^ word) * odd, 29); }

}  // namespace

std::uint64_t fingerprint(std::span<const std::byte> bytes, std::uint64_t before) noexcept {
    constexpr std::size_t n_lanes = 8;  // a lane waits for its product, the others do not
    std::array<std::uint64_t, n_lanes> sums{}, words{};
    sums[0] = before;
    const auto add = [&](std::size_t first, std::size_t n) {
        std::memcpy(words.data(), bytes.data() + first, n);
        for (std::size_t lane = 0; lane < n_lanes; ++lane) sums[lane] = mix(sums[lane], words[lane]);
    };
    const std::size_t n_whole = bytes.size() / sizeof words * sizeof words;
    for (std::size_t i = 0; i < n_whole; i += sizeof words) add(i, sizeof words);
    words.fill(0);
    add(n_whole, bytes.size() - n_whole);
    std::uint64_t all = bytes.size();
    for (std::uint64_t sum : sums) all = mix(all, sum);
    return all;
}

}  // namespace looped::block
