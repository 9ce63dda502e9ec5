// How a call that runs is told to stop.
#pragma once

#include <atomic>
#include <cfenv>
#include <chrono>
#include <exception>
#include <functional>
#include <thread>

namespace looped::block {

// Long work looks at it every few hundred microseconds, and leaves the rest undone once it is made: whoever started the work throws the
// result away.
class StopRequest {
public:
    static constexpr auto period = std::chrono::milliseconds(50);

    // keeps_going() is asked about once a period, on the thread that makes this object, while it looks. False is a request to stop, and
    // so is an exception, which error() keeps.
    explicit StopRequest(std::function<bool()> keeps_going = {});

    void make() noexcept { is_made_.store(true, std::memory_order_relaxed); }
    bool is_made() const noexcept { return is_made_.load(std::memory_order_relaxed); }

    // Whether it is made, having asked where that is due.
    bool look() noexcept;

    const std::exception_ptr& error() const noexcept { return error_; }

private:
    using Clock = std::chrono::steady_clock;

    std::atomic<bool> is_made_{false};
    std::function<bool()> keeps_going_;
    std::thread::id asker_ = std::this_thread::get_id();
    std::fenv_t float_mode_;  // of the asker, as it was when it called
    Clock::time_point due_;
    std::exception_ptr error_;
};

// Counts work in multiply-adds, and looks once it is enough to have taken a while.
class Lookout {
public:
    explicit Lookout(StopRequest* stop) noexcept : stop_(stop) {}

    bool sees_stop_after(std::size_t n_multiply_adds) noexcept {
        work_ += n_multiply_adds;
        if (work_ < enough) return false;
        work_ = 0;
        return stop_ && stop_->look();
    }

private:
    static constexpr std::size_t enough = 1 << 22;
    StopRequest* stop_;
    std::size_t work_ = 0;
};

}  // namespace looped::block
