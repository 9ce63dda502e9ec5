// The threads that share one prompt. Its leader calls them for each piece of work that is split.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace looped::block {

using std::size_t;

// Rows [begin, end).
struct Share {
    size_t begin = 0, end = 0;
};

// A share that its member does not come to in time, because the machine gave the processor to somebody else, is taken by another: a
// busy machine makes a team slower, but not slower than its leader alone.
class Team {
public:
    static constexpr size_t most_members = 64;

    // A leader and up to n_members - 1 threads of its own, which end with this object. Fewer where no more are to be had.
    explicit Team(size_t n_members = 1);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    size_t size() const noexcept { return size_; }

    // job(share, member) for the rows [first, n_rows) in as many shares as there are members; `member` is who does it. Called by the
    // leader; returns when all is done, and seen by all. A job does not throw.
    template <class Job>
    void split(size_t first, size_t n_rows, const Job& job) {
        static_assert(std::is_nothrow_invocable_v<const Job&, Share, size_t>, "a job of a team cannot throw");
        if (size_ == 1) {
            job(Share{first, n_rows}, 0);
            return;
        }
        job_ = &job;
        invoke_ = [](const void* job, Share share, size_t member) noexcept { (*static_cast<const Job*>(job))(share, member); };
        first_ = first;
        n_rows_ = n_rows;
        run();
    }

private:
    static constexpr std::uint64_t all_taken = ~std::uint64_t(0);

    void run() noexcept;
    void serve(size_t member) noexcept;
    void take_shares(size_t member) noexcept;

    size_t size_ = 1;
    // Of the piece of work at hand: written by the leader before it clears bits of `taken_`, and read by whoever takes a share.
    const void* job_ = nullptr;
    void (*invoke_)(const void*, Share, size_t) noexcept = nullptr;
    size_t first_ = 0, n_rows_ = 0;

    alignas(64) std::atomic<std::uint64_t> taken_{all_taken};  // a bit a share
    alignas(64) std::atomic<std::uint32_t> n_done_{0};
    alignas(64) std::atomic<std::uint32_t> n_calls_{0};
    std::atomic<bool> is_over_{false};
    int leaders_processor_ = -1;
    std::vector<std::jthread> threads_;
};

}  // namespace looped::block
