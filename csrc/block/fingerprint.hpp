// A number that tells whether bytes have changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace looped::block {

// Another value or another order gives another number, but for one chance in 2^64. At the speed of memory; not for keeping, since
// it depends on the byte order of the machine. `before` chains pieces.
std::uint64_t fingerprint(std::span<const std::byte> bytes, std::uint64_t before = 0) noexcept;

}  // namespace looped::block
