#include "block/team.hpp"

#include <algorithm>
#include <cfenv>

#if defined(__linux__)
#include <sched.h>
#endif
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

// How often a thread looks before it sleeps: some hundred microseconds. Where it had to sleep all the same, the one it waits for was
// not running: it looks half as often next time, so that on a busy machine the processor goes to those that have work.
constexpr int fewest_looks = 32, most_looks = 1 << 13;

class Patience {
public:
    // Returns once `value` is no longer `old`.
    void wait(const std::atomic<std::uint32_t>& value, std::uint32_t old) noexcept {
        for (int i = 0; i < n_looks_; ++i) {
            if (value.load(std::memory_order_acquire) != old) {
                n_looks_ = std::min(2 * n_looks_, most_looks);
                return;
            }
            pause();
        }
        n_looks_ = std::max(n_looks_ / 2, fewest_looks);
        value.wait(old, std::memory_order_acquire);
    }

private:
    int n_looks_ = most_looks;
};

// The processor that the calling thread runs on, or -1 where nobody tells.
int own_processor() noexcept {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
}

// A new thread may start on the processor of the one that made it, and the two would take turns there until the scheduler parts them,
// which takes longer than a short call.
void leave_processor(int processor) noexcept {
#if defined(__linux__)
    if (processor < 0 || own_processor() != processor) return;
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
    cpu_set_t others = allowed;
    CPU_CLR(processor, &others);
    if (sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof allowed, &allowed);
#else
    (void)processor;
#endif
}

}  // namespace

Team::Team(size_t n_members) {
    n_members = std::min(n_members, most_members);
    if (n_members > 1) leaders_processor_ = own_processor();
    threads_.reserve(std::max<size_t>(n_members, 1) - 1);
    for (size_t member = 1; member < n_members; ++member) {
        try {
            threads_.emplace_back([this, member] { serve(member); });
        } catch (...) {  // an exception would leave those that serve already without an end
            break;
        }
    }
    size_ = threads_.size() + 1;
}

Team::~Team() {
    is_over_.store(true, std::memory_order_relaxed);
    n_calls_.fetch_add(1, std::memory_order_release);
    n_calls_.notify_all();
}

void Team::run() noexcept {
    static thread_local Patience patience;
    n_done_.store(0, std::memory_order_relaxed);
    taken_.store(size_ == most_members ? 0 : all_taken << size_, std::memory_order_release);
    n_calls_.fetch_add(1, std::memory_order_release);
    n_calls_.notify_all();
    take_shares(0);
    for (std::uint32_t done = n_done_.load(std::memory_order_acquire); done < size_; done = n_done_.load(std::memory_order_acquire)) {
        patience.wait(n_done_, done);
    }
}

void Team::serve(size_t member) noexcept {
    std::fesetenv(FE_DFL_ENV);
    leave_processor(leaders_processor_);
    Patience patience;
    for (std::uint32_t seen = 0; !is_over_.load(std::memory_order_relaxed); seen = n_calls_.load(std::memory_order_acquire)) {
        take_shares(member);
        patience.wait(n_calls_, seen);
    }
}

// Its own share first: its rows are in the cache of this processor.
void Team::take_shares(size_t member) noexcept {
    if (taken_.load(std::memory_order_acquire) == all_taken) return;
    const size_t n_shares = size_;
    for (size_t i = 0; i < n_shares; ++i) {
        const size_t share = (member + i) % n_shares;
        const std::uint64_t bit = std::uint64_t(1) << share;
        if (taken_.load(std::memory_order_relaxed) & bit) continue;
        if (taken_.fetch_or(bit, std::memory_order_acquire) & bit) continue;
        const size_t n = n_rows_ - std::min(first_, n_rows_), begin = n_rows_ - n;
        invoke_(job_, {begin + n * share / n_shares, begin + n * (share + 1) / n_shares}, member);
        n_done_.fetch_add(1, std::memory_order_release);
        n_done_.notify_all();
    }
}

}  // namespace looped::block
