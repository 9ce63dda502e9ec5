// How ragged prompts share the tiles of a GPU kernel. Nothing is moved: a kernel reads and writes a prompt's own rows by its number,
// so results come in the prompts' order whatever the order they ran in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace looped::batch {

constexpr std::int64_t least_rows = 16;  // what a matrix instruction takes

// Rows that a prompt takes, by its length and the tile alone: the power of two, of at least 16 rows, that holds it; or, of a prompt
// that is longer than a tile, whole tiles of its own.
std::int64_t slot_rows(std::int64_t length, std::int64_t tile_rows);

// Where a prompt begins.
struct Place {
    std::int64_t tile;  // the first one, of a prompt of several
    std::int64_t row;   // a multiple of 16
    bool operator==(const Place&) const = default;
};

// Prompts that take equally many rows: one launch.
struct Group {
    std::int64_t slot_rows;
    std::int64_t tile_rows;
    std::vector<std::int32_t> order;  // prompts, longest first; equally long ones in their own order

    // Of the k-th of `order` while all wait: a kernel gives a slot that becomes free to the next of the order.
    Place place(std::size_t k) const;
};

// Every prompt in one group, groups of most rows first. Throws std::invalid_argument where tile_rows is not a power of two of at
// least 16, a length is negative, or there are more prompts than a 32-bit number counts.
std::vector<Group> pack(std::span<const std::int64_t> lengths, std::int64_t tile_rows);

}  // namespace looped::batch
