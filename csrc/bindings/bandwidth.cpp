#include "bindings/bandwidth.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "bindings/arrays.hpp"
#include "block/weights.hpp"
#include "simd/isa.hpp"

namespace looped {
namespace {

using std::size_t;

// GB/s that all threads together read of memory of their own, `bytes` in all, over and over for some time.
double read_bandwidth(size_t n_threads, size_t bytes, double seconds) {
    using Clock = std::chrono::steady_clock;
    if (n_threads < 1) refuse("read_bandwidth: n_threads must be at least 1");
    if (!(seconds > 0 && seconds <= 60))
        refuse("read_bandwidth: seconds must lie above 0 and be at most 60, got " + std::to_string(seconds));
    const size_t numbers = bytes / sizeof(float) / n_threads / 1024 * 1024;
    if (numbers == 0) refuse("read_bandwidth: bytes must be at least 4096 a thread, got " + std::to_string(bytes));
    const auto read = simd::kernels<float>().read_memory;
    const py::gil_scoped_release release;
    const block::AlignedArray<float> memory(block::checked_product(numbers, n_threads));
    struct alignas(64) Work {
        double read = 0;
        Clock::time_point ended;
    };
    std::vector<Work> work(n_threads);
    std::atomic<size_t> n_ready{0};
    std::atomic<bool> is_cancelled{false};
    Clock::time_point start;
    {
        std::vector<std::jthread> threads;
        try {
            for (size_t i = 0; i < n_threads; ++i) {
                threads.emplace_back([&, i] {
                    const float* own = memory.data() + i * numbers;
                    volatile double keep = read(own, numbers);  // once for nothing
                    if (n_ready.fetch_add(1) + 1 == n_threads) start = Clock::now(), n_ready.store(n_threads + 1);
                    while (n_ready.load() <= n_threads && !is_cancelled) std::this_thread::yield();
                    const auto end = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
                    while (!is_cancelled && (work[i].ended = Clock::now()) < end) {
                        keep = read(own, numbers);
                        work[i].read += double(numbers) * sizeof(float);
                    }
                    (void)keep;
                });
            }
        } catch (...) {
            is_cancelled = true;
            throw;
        }
    }
    double all = 0;
    for (const Work& own : work) all += own.read;
    const auto last = std::ranges::max(work, {}, &Work::ended).ended;
    return all / std::chrono::duration<double>(last - start).count() * 1e-9;
}

}  // namespace

void add_bandwidth(py::module_& module) {
    module.def("read_bandwidth", &read_bandwidth, py::arg("n_threads") = 1, py::arg("bytes") = size_t(1) << 28,
               py::arg("seconds") = 0.2, "GB/s that all threads together read: the ceiling of decoding.");
}

}  // namespace looped
