#include "block/team.hpp"

#include <algorithm>
#include <cfenv>
#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace looped::block {
namespace {

void pause() noexcept {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// How often a thread looks before it sleeps. Where it had to sleep all the same, the one it waits for was not running: it looks
// half as often next time, so that on a busy machine the core goes to those that have work.
constexpr int fewest_looks = 32, most_looks = 1 << 13;
thread_local int n_looks = most_looks;

void wait_while_equal(const std::atomic<std::uint32_t>& value, std::uint32_t old) noexcept {
    for (int i = 0; i < n_looks; ++i) {
        if (value.load(std::memory_order_acquire) != old) {
            n_looks = std::min(2 * n_looks, most_looks);
            return;
        }
        pause();
    }
    n_looks = std::max(n_looks / 2, fewest_looks);
    value.wait(old, std::memory_order_acquire);
}

}  // namespace

Team::Team(size_t n_members) {
    threads_.reserve(n_members);
    for (size_t rank = 1; rank < n_members; ++rank) {
        try {
            threads_.emplace_back([this, rank] { serve(rank); });
        } catch (const std::system_error&) {
            break;
        }
    }
    size_.store(threads_.size() + 1, std::memory_order_relaxed);
    is_complete_.store(true, std::memory_order_release);
    is_complete_.notify_all();
}

Team::~Team() {
    if (size() == 1) return;
    call_ = nullptr;
    meet();
}

void Team::serve(size_t rank) noexcept {
    std::fesetenv(FE_DFL_ENV);
    is_complete_.wait(false, std::memory_order_acquire);
    while (true) {
        meet();
        if (!call_) return;
        call_(context_, rank);
        meet();
    }
}

void Team::meet() noexcept {
    if (size() == 1) return;
    const std::uint32_t meeting = meetings_.load(std::memory_order_relaxed);
    if (n_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
        n_arrived_.store(0, std::memory_order_relaxed);
        meetings_.store(meeting + 1, std::memory_order_release);
        meetings_.notify_all();
    } else {
        wait_while_equal(meetings_, meeting);
    }
}

Share Team::share(size_t rank, size_t first, size_t n_rows) const noexcept {
    const size_t n = n_rows - std::min(first, n_rows), members = size();
    return {n_rows - n + n * rank / members, n_rows - n + n * (rank + 1) / members};
}

}  // namespace looped::block
