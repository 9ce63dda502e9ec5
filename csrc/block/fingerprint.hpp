// A number that tells whether bytes have changed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace looped::block {

// Another value, order or length gives another number: one changed 8-byte word for certain, anything else but for a chance that is
// small (2^-64 for changes without design; who looks for two equal ones finds them). At the speed of memory; not for keeping, since
// it depends on the byte order of the machine. `before` chains pieces.
std::uint64_t fingerprint(std::span<const std::byte> bytes, std::uint64_t before = 0) noexcept;

}  // namespace looped::block
