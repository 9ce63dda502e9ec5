#include "batch/run.hpp"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <limits>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

namespace looped::batch {
namespace {

constexpr auto wake_up_time = std::chrono::milliseconds(50);

// The queue that the workers draw from, and what they report.
class Progress {
public:
    explicit Progress(std::vector<size_t> order, size_t n_workers) : order_(std::move(order)), n_running_(n_workers) {}

    std::optional<size_t> next() {
        const size_t place = next_.fetch_add(1, std::memory_order_relaxed);
        if (place >= order_.size() || cancelled.load(std::memory_order_relaxed)) return std::nullopt;
        return order_[place];
    }
    void finish_prompt() { n_finished_.fetch_add(1, std::memory_order_relaxed); }

    // Takes no memory: the lack of it may be what failed.
    void fail(size_t prompt, const char* what) noexcept {
        std::lock_guard lock(mutex_);
        if (!failed_ || prompt < *failed_) {
            failed_ = prompt;
            std::snprintf(what_, sizeof(what_), "%s", what);
        }
        cancelled = true;
    }
    void leave() {
        // Notified under the lock: the caller may destroy this object as soon as it sees the last worker leave.
        std::lock_guard lock(mutex_);
        n_running_ -= 1;
        all_left_.notify_all();
    }
    void wait(const std::function<bool(size_t)>& keeps_going) {
        std::unique_lock lock(mutex_);
        while (!all_left_.wait_for(lock, wake_up_time, [&] { return n_running_ == 0; })) {
            if (cancelled || !keeps_going) continue;
            lock.unlock();
            const bool goes_on = keeps_going(n_finished_.load(std::memory_order_relaxed));
            lock.lock();
            if (!goes_on) was_stopped_ = cancelled = true;
        }
    }
    std::optional<PromptError> error() const { return failed_ ? std::optional<PromptError>({*failed_, what_}) : std::nullopt; }
    bool was_stopped() const { return was_stopped_; }

    std::atomic<bool> cancelled{false};

private:
    std::vector<size_t> order_;
    std::atomic<size_t> next_{0}, n_finished_{0};
    std::mutex mutex_;
    std::condition_variable all_left_;
    size_t n_running_;
    std::optional<size_t> failed_;  // the first prompt that did
    char what_[256] = "";
    bool was_stopped_ = false;
};

// Tells the workers to stop when it goes: an exception on the calling thread must not wait for all their loops.
struct StopAtEnd {
    std::atomic<bool>& cancelled;
    ~StopAtEnd() { cancelled = true; }
};

// make_worker() gives what one thread does with a prompt, worker(prompt); its memory is allocated by the thread that uses it.
template <class MakeWorker>
void work(const MakeWorker& make_worker, Progress& progress) {
    // A thread inherits the caller's float mode, and a caller that flushes denormals would see other bits than its neighbour.
    std::fesetenv(FE_DFL_ENV);
    std::optional<size_t> prompt = progress.next();
    try {
        if (prompt) {
            auto worker = make_worker();
            for (; prompt; prompt = progress.next()) {
                worker(*prompt);
                progress.finish_prompt();
            }
        }
    } catch (const std::exception& error) {
        progress.fail(*prompt, error.what());
    } catch (...) {
        progress.fail(*prompt, "unknown error");
    }
    progress.leave();
}

// The longest first, so that none is left alone at the end.
std::vector<size_t> longest_first(std::span<const std::int64_t> lengths) {
    std::vector<size_t> order(lengths.size());
    std::iota(order.begin(), order.end(), size_t(0));
    std::ranges::stable_sort(order, std::ranges::greater{}, [&](size_t i) { return lengths[i]; });
    return order;
}

// make_worker(cancelled) as above. Returns false where `controls` cancelled.
template <class MakeWorker>
bool for_each_prompt(std::span<const std::int64_t> lengths, const Controls& controls, const MakeWorker& make_worker) {
    if (lengths.empty()) return true;
    const size_t n_workers = std::clamp<size_t>(controls.n_threads, 1, lengths.size());
    Progress progress(longest_first(lengths), n_workers);
    {
        std::vector<std::jthread> workers;
        const StopAtEnd stop{progress.cancelled};  // before the workers are joined
        for (size_t i = 0; i < n_workers; ++i) {
            try {
                workers.emplace_back([&] { work([&] { return make_worker(progress.cancelled); }, progress); });
            } catch (const std::system_error&) {  // no more threads to be had: the others do the work
                progress.leave();
                if (workers.empty() && i + 1 == n_workers) throw;
            }
        }
        progress.wait(controls.keeps_going);
    }
    if (progress.error()) throw *progress.error();
    return !progress.was_stopped();
}

size_t longest_of(std::span<const std::int64_t> lengths) { return lengths.empty() ? 0 : size_t(std::ranges::max(lengths)); }

// Entries of `predictions` after a prompt's exit hold its last one; those before its first loop here are NaN.
template <class T>
void fill_predictions(const loop::Spec& spec, const loop::BatchMemory<T>& batch, std::span<const std::int64_t> first_t) {
    const size_t size = batch.prediction_size(), n_kept = size_t(spec.n_loops - batch.first_loop);
    for (size_t i = 0; i < batch.n_prompts; ++i) {
        const auto last = batch.prediction.subspan(i * size, size);
        for (size_t k = 0; k < n_kept; ++k) {
            const std::int64_t loop = batch.first_loop + std::int64_t(k);
            const auto entry = batch.predictions.subspan((i * n_kept + k) * size, size);
            if (loop < first_t[i]) {
                std::ranges::fill(entry, std::numeric_limits<T>::quiet_NaN());
            } else if (loop >= batch.t[i]) {
                std::ranges::copy(last, entry.begin());
            }
        }
    }
}

}  // namespace

template <class T>
bool run(const block::Model<T>& model, const loop::Spec& spec, const loop::BatchMemory<T>& batch, const Controls& controls) {
    const std::vector<std::int64_t> first_t(batch.t.begin(), batch.t.end());
    const size_t longest = longest_of(batch.lengths);
    const bool is_complete = for_each_prompt(batch.lengths, controls, [&](const std::atomic<bool>& cancelled) {
        auto loop = std::make_unique<loop::PromptLoop<T>>(model, spec, longest);
        return [&, loop = std::move(loop)](size_t prompt) { loop->run(batch, prompt, cancelled); };
    });
    if (!is_complete) return false;
    if (spec.return_predictions && spec.n_loops > batch.first_loop) fill_predictions(spec, batch, first_t);
    return true;
}

template <class T>
bool embed(const block::Model<T>& model, const RawPrompts<T>& prompts, std::span<T> signal, const Controls& controls) {
    const size_t width = model.shape.input_kind == block::InputKind::features ? model.shape.n_dims : model.shape.d_model;
    const size_t C = model.shape.d_model, n_tokens = prompts.n_tokens, longest = longest_of(prompts.lengths);
    return for_each_prompt(prompts.lengths, controls, [&](const std::atomic<bool>&) {
        auto forward = std::make_unique<block::Forward<T>>(model, longest, false);
        return [&, width, C, n_tokens, forward = std::move(forward)](size_t prompt) {
            const size_t own = size_t(prompts.lengths[prompt]);
            const auto ids = prompts.ids.empty() ? prompts.ids : prompts.ids.subspan(prompt * n_tokens, own);
            forward->embed({prompts.features.data() + (prompts.features.empty() ? 0 : prompt * n_tokens * width), own, width, width}, ids,
                           {signal.data() + prompt * n_tokens * C, own, C, C});
        };
    });
}

template bool run<float>(const block::Model<float>&, const loop::Spec&, const loop::BatchMemory<float>&, const Controls&);
template bool run<double>(const block::Model<double>&, const loop::Spec&, const loop::BatchMemory<double>&, const Controls&);
template bool embed<float>(const block::Model<float>&, const RawPrompts<float>&, std::span<float>, const Controls&);
template bool embed<double>(const block::Model<double>&, const RawPrompts<double>&, std::span<double>, const Controls&);

}  // namespace looped::batch
