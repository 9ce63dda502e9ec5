// Packing: every prompt once, nothing over anything else, and a place in a tile that does not depend on the neighbours' lengths.
#include <doctest.h>

#include <algorithm>
#include <random>
#include <set>
#include <stdexcept>

#include "batch/pack.hpp"

using namespace looped::batch;

TEST_CASE("a prompt takes the rows that its length and the tile say") {
    CHECK(slot_rows(0, 64) == 16);
    CHECK(slot_rows(1, 64) == 16);
    CHECK(slot_rows(16, 64) == 16);
    CHECK(slot_rows(17, 64) == 32);
    CHECK(slot_rows(41, 64) == 64);
    CHECK(slot_rows(64, 64) == 64);
    CHECK(slot_rows(65, 64) == 128);
    CHECK(slot_rows(129, 64) == 192);
    CHECK(slot_rows(17, 16) == 32);
}

TEST_CASE("longest first, equal ones as they came, and several short ones in a tile") {
    const std::vector<std::int64_t> lengths = {5, 41, 16, 82, 20, 5, 0, 16, 130, 30};
    const std::vector<Group> groups = pack(lengths, 64);
    REQUIRE(groups.size() == 5);
    CHECK(groups[0].slot_rows == 192);
    CHECK(groups[1].slot_rows == 128);
    CHECK(groups[2].order == std::vector<std::int32_t>{1});
    CHECK(groups[3].order == std::vector<std::int32_t>{9, 4});
    CHECK(groups[4].order == std::vector<std::int32_t>{2, 7, 0, 5, 6});
    CHECK(groups[3].place(1) == Place{0, 32});
    CHECK(groups[4].place(3) == Place{0, 48});
    CHECK(groups[4].place(4) == Place{1, 0});
    CHECK(groups[0].place(1) == Place{3, 0});
}

TEST_CASE("random batches: every prompt once, aligned, in its tiles, and over no other") {
    std::mt19937 random(7);
    for (int round = 0; round < 200; ++round) {
        const std::int64_t tile_rows = 16 << random() % 4;
        std::vector<std::int64_t> lengths(random() % 40);
        for (std::int64_t& length : lengths) length = random() % 257;
        std::vector<int> seen(lengths.size());
        std::int64_t last_rows = 1 << 20;
        for (const Group& group : pack(lengths, tile_rows)) {
            CHECK(group.slot_rows < last_rows);
            last_rows = group.slot_rows;
            std::set<std::int64_t> taken;
            std::int64_t longest = 1 << 20;
            for (size_t k = 0; k < group.order.size(); ++k) {
                const auto prompt = size_t(group.order[k]);
                ++seen[prompt];
                CHECK(lengths[prompt] <= longest);
                longest = lengths[prompt];
                const Place place = group.place(k);
                CHECK(place.row % 16 == 0);
                CHECK((group.slot_rows > tile_rows || place.row + group.slot_rows <= tile_rows));
                for (std::int64_t row = 0; row < group.slot_rows; ++row) {
                    CHECK(taken.insert(place.tile * tile_rows + place.row + row).second);
                }
            }
        }
        CHECK(std::ranges::all_of(seen, [](int n) { return n == 1; }));
    }
}

TEST_CASE("what cannot be packed is refused") {
    const std::vector<std::int64_t> good = {3}, bad = {3, -1};
    CHECK(pack({}, 64).empty());
    CHECK_THROWS_WITH_AS(pack(bad, 64), doctest::Contains("prompt 1 has length -1"), std::invalid_argument);
    for (const std::int64_t rows : {0, 8, 48, -64}) {
        CHECK_THROWS_WITH_AS(pack(good, rows), doctest::Contains("power of two"), std::invalid_argument);
    }
}
