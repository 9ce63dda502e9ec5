#include "bindings/fma_peak.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "bindings/arrays.hpp"
#include "simd/isa.hpp"

namespace looped {
namespace {

// GFLOP/s of fused multiply-adds on registers, all threads together: what they did from their common start until the last has ended.
// Threads that take turns on a core do not count its time twice.
double fma_peak(size_t n_threads, double seconds, bool is_double) {
    using Clock = std::chrono::steady_clock;
    constexpr double most_seconds = 60;  // no signal is looked at meanwhile
    if (n_threads < 1) refuse("fma_peak: n_threads must be at least 1");
    if (!(seconds > 0 && seconds <= most_seconds)) {
        refuse("fma_peak: seconds must lie above 0 and be at most 60, got " + std::to_string(seconds));
    }
    const auto rounds = is_double ? simd::kernels<double>().fma_rounds : simd::kernels<float>().fma_rounds;
    const py::gil_scoped_release release;
    struct Work {
        double done = 0;
        Clock::time_point ended;
    };
    std::vector<Work> work(n_threads);
    std::atomic<bool> has_started{false};
    Clock::time_point start, end;
    const auto start_all = [&](double for_seconds) {
        start = Clock::now();
        end = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(for_seconds));
        has_started = true;
        has_started.notify_all();
    };
    {
        std::vector<std::jthread> threads;
        try {
            for (Work& own : work) {
                threads.emplace_back([&, rounds] {
                    has_started.wait(false);
                    while ((own.ended = Clock::now()) < end) own.done += rounds(100000);
                });
            }
        } catch (...) {
            start_all(0);  // those that are there wait
            throw;
        }
        start_all(seconds);
    }
    double done = 0;
    for (const Work& own : work) done += own.done;
    const auto last = std::ranges::max(work, {}, &Work::ended).ended;
    return done / std::chrono::duration<double>(last - start).count() * 1e-9;
}

}  // namespace

void add_fma_peak(py::module_& module) {
    module.def("fma_peak", &fma_peak, py::arg("n_threads") = 1, py::arg("seconds") = 0.1, py::arg("double") = false,
               "GFLOP/s of fused multiply-adds on registers, all threads together: the ceiling of every figure of this engine.");
}

}  // namespace looped
