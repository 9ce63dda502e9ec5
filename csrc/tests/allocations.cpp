#include "tests/allocations.hpp"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <new>
#include <thread>

namespace looped::tests {
namespace {

std::atomic<bool> is_armed{false}, watches_workers{false};
std::atomic<std::int64_t> n_left{0}, n_to_fail{0};
std::atomic<std::thread::id> owner{};

void count_allocation() {
    if (!is_armed.load()) return;
    if ((std::this_thread::get_id() == owner.load()) == watches_workers.load()) return;
    const std::int64_t before = n_left.fetch_sub(1);
    if (before <= 0 && before > -n_to_fail.load()) throw std::bad_alloc();
}

void* allocate(std::size_t n, std::size_t alignment) {
    count_allocation();
    void* p = nullptr;
    if (::posix_memalign(&p, alignment, n ? n : 1) != 0) throw std::bad_alloc();
    return p;
}

}  // namespace

FailingAllocations::FailingAllocations(Where where, std::size_t first, std::size_t count) {
    owner = std::this_thread::get_id();
    watches_workers = where == Where::worker_threads;
    n_left = std::int64_t(first);
    n_to_fail = std::int64_t(count);
    is_armed = true;
}

FailingAllocations::~FailingAllocations() { is_armed = false; }

bool FailingAllocations::has_failed() const { return n_left.load() < 0; }

}  // namespace looped::tests

void* operator new(std::size_t n) { return looped::tests::allocate(n, alignof(std::max_align_t)); }
void* operator new(std::size_t n, std::align_val_t alignment) { return looped::tests::allocate(n, std::size_t(alignment)); }
void* operator new(std::size_t n, const std::nothrow_t&) noexcept {
    try {
        return operator new(n);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }
