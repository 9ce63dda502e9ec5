#include "batch/pack.hpp"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace looped::batch {

using std::int32_t;
using std::int64_t;
using std::size_t;

int64_t slot_rows(int64_t length, int64_t tile_rows) {
    if (length > tile_rows) return (length + tile_rows - 1) / tile_rows * tile_rows;
    return std::max(least_rows, int64_t(std::bit_ceil(std::uint64_t(length))));
}

Place Group::place(size_t k) const {
    const int64_t i = int64_t(k);
    if (slot_rows > tile_rows) return {i * (slot_rows / tile_rows), 0};
    const int64_t slots = tile_rows / slot_rows;
    return {i / slots, i % slots * slot_rows};
}

std::vector<Group> pack(std::span<const int64_t> lengths, int64_t tile_rows) {
    if (tile_rows < least_rows || !std::has_single_bit(std::uint64_t(tile_rows))) {
        throw std::invalid_argument("pack: tile_rows must be a power of two of at least 16, got " + std::to_string(tile_rows));
    }
    if (lengths.size() > size_t(std::numeric_limits<int32_t>::max())) {
        throw std::invalid_argument("pack: " + std::to_string(lengths.size()) + " prompts are more than 2147483647; split the batch");
    }
    for (size_t i = 0; i < lengths.size(); ++i) {
        if (lengths[i] < 0) {
            throw std::invalid_argument("pack: prompt " + std::to_string(i) + " has length " + std::to_string(lengths[i]) +
                                        ", which must be 0 or more");
        }
    }
    std::vector<int32_t> all(lengths.size());
    std::iota(all.begin(), all.end(), 0);
    std::ranges::stable_sort(all, std::ranges::greater{}, [&](int32_t i) { return lengths[size_t(i)]; });
    std::vector<Group> groups;
    for (const int32_t i : all) {  // longest first, so a group ends before the next begins
        const int64_t rows = slot_rows(lengths[size_t(i)], tile_rows);
        if (groups.empty() || groups.back().slot_rows != rows) groups.push_back({rows, tile_rows, {}});
        groups.back().order.push_back(i);
    }
    return groups;
}

}  // namespace looped::batch
