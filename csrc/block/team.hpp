// The threads that share one prompt. Its leader runs the loop and calls the others for what is split; all meet at barriers.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace looped::block {

using std::size_t;

// Rows [begin, end).
struct Share {
    size_t begin = 0, end = 0;
    size_t size() const noexcept { return end - begin; }
};

class Team {
public:
    // A leader and up to n_members - 1 threads of its own, which end with this object. Fewer where no more are to be had.
    explicit Team(size_t n_members = 1);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    size_t size() const noexcept { return size_.load(std::memory_order_relaxed); }

    // Called by the leader: job(rank) on every member, 0 being the leader. Returns when all have finished. A job does not throw.
    template <class Job>
    void all(const Job& job) {
        static_assert(std::is_nothrow_invocable_v<const Job&, size_t>, "a job on a team cannot throw");
        if (size() == 1) {
            job(0);
            return;
        }
        context_ = &job;
        call_ = [](const void* context, size_t rank) noexcept { (*static_cast<const Job*>(context))(rank); };
        meet();
        job(0);
        meet();
    }

    // Called by every member inside a job: waits for the others. What they wrote before is seen after.
    void meet() noexcept;

    // The rank's part of the rows [first, n_rows).
    Share share(size_t rank, size_t first, size_t n_rows) const noexcept;

private:
    void serve(size_t rank) noexcept;

    std::atomic<size_t> size_{1};
    std::atomic<bool> is_complete_{false};
    const void* context_ = nullptr;
    void (*call_)(const void*, size_t) noexcept = nullptr;  // null: go home
    alignas(64) std::atomic<size_t> n_arrived_{0};
    alignas(64) std::atomic<std::uint32_t> meetings_{0};
    std::vector<std::jthread> threads_;
};

}  // namespace looped::block
