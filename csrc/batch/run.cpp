#include "batch/run.hpp"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <cstdio>
#include <limits>
#include <mutex>
#include <new>
#include <optional>
#include <thread>

#include "block/float_mode.hpp"

namespace looped::batch {
namespace {

// A prompt, and how many threads work on it.
struct Item {
    size_t prompt, n_members;
};

// The queue that the workers draw from, and what they report.
class Progress {
public:
    Progress(std::vector<Item> queue, size_t n_workers, const Controls& controls)
        : stop([this, &controls] {
              return !controls.keeps_going || controls.keeps_going(n_finished_.load(std::memory_order_relaxed));
          }),
          queue_(std::move(queue)),
          n_running_(n_workers) {}

    std::optional<Item> next() {
        const size_t place = next_.fetch_add(1, std::memory_order_relaxed);
        if (place >= queue_.size() || stop.is_made()) return std::nullopt;
        return queue_[place];
    }
    void finish_prompt() { n_finished_.fetch_add(1, std::memory_order_relaxed); }

    // Takes no memory: the lack of it may be what failed.
    void fail(size_t prompt, const char* what, bool lacks_memory = false) noexcept {
        std::lock_guard lock(mutex_);
        if (!failed_ || prompt < *failed_) {
            failed_ = prompt;
            std::snprintf(what_, sizeof(what_), "%s", what);
            lacks_memory_ = lacks_memory;
        }
        stop.make();
    }
    void leave() {
        // Notified under the lock: the caller may destroy this object as soon as it sees the last worker leave.
        std::lock_guard lock(mutex_);
        n_running_ -= 1;
        all_left_.notify_all();
    }
    void wait() {
        std::unique_lock lock(mutex_);
        while (!all_left_.wait_for(lock, block::StopRequest::period, [&] { return n_running_ == 0; })) {
            lock.unlock();
            stop.look();
            lock.lock();
        }
    }
    std::optional<PromptError> error() const {
        return failed_ ? std::optional<PromptError>({*failed_, what_, lacks_memory_}) : std::nullopt;
    }

    block::StopRequest stop;

private:
    std::vector<Item> queue_;
    std::atomic<size_t> next_{0}, n_finished_{0};
    std::mutex mutex_;
    std::condition_variable all_left_;
    size_t n_running_;
    std::optional<size_t> failed_;  // the first prompt that did
    char what_[256] = "";
    bool lacks_memory_ = false;
};

// make_worker(team) gives what one thread, the leader of the team, does with a prompt: worker(prompt), which returns whether it has
// finished. Its memory and its team are made by the thread that uses them.
template <class MakeWorker>
void work(const MakeWorker& make_worker, Progress& progress) {
    // A thread inherits the caller's float mode, and a caller that flushes denormals would see other bits than its neighbour.
    std::fesetenv(FE_DFL_ENV);
    std::optional<Item> item = progress.next();
    try {
        if (item) {
            block::Team team(item->n_members);
            auto worker = make_worker(team);
            for (; item; item = progress.next()) {
                if (worker(item->prompt)) progress.finish_prompt();
            }
        }
    } catch (const std::bad_alloc&) {
        progress.fail(item->prompt, "not enough memory; run fewer threads or shorter prompts", true);
    } catch (const std::exception& error) {
        progress.fail(item->prompt, error.what());
    } catch (...) {
        progress.fail(item->prompt, "unknown error");
    }
    progress.leave();
}

// A thread of a team is worth waking for this much of a loop: a few microseconds, of at least a thin tile.
constexpr double fewest_operations = 2e5;
constexpr size_t fewest_rows = 4;

size_t members_worth_waking(size_t n_tokens, double operations_per_token) {
    const double by_work = double(n_tokens) * operations_per_token / fewest_operations;
    return std::max<size_t>(1, std::min(size_t(by_work), n_tokens / fewest_rows));
}

// The longest first, so that none is left alone at the end. Where there are fewer prompts than threads, the threads share them.
std::vector<Item> queue_of(std::span<const std::int64_t> lengths, size_t n_threads, double operations_per_token) {
    std::vector<Item> queue;
    for (size_t i = 0; i < lengths.size(); ++i) queue.push_back({i, 1});
    std::ranges::stable_sort(queue, std::ranges::greater{}, [&](const Item& item) { return lengths[item.prompt]; });
    for (size_t i = 0; i < queue.size() && queue.size() < n_threads; ++i) {
        const size_t n_members = n_threads / queue.size() + (i < n_threads % queue.size());
        queue[i].n_members = std::min(n_members, members_worth_waking(size_t(lengths[queue[i].prompt]), operations_per_token));
    }
    return queue;
}

// make_worker(team, stop) as above; `operations_per_token` are those of one loop. The calling thread is one of the workers. Returns
// false where a stop was asked for first.
template <class MakeWorker>
bool for_each_prompt(std::span<const std::int64_t> lengths, double operations_per_token, const Controls& controls,
                     const MakeWorker& make_worker) {
    if (lengths.empty()) return true;
    const size_t n_workers = std::clamp<size_t>(controls.n_threads, 1, lengths.size());
    Progress progress(queue_of(lengths, controls.n_threads, operations_per_token), n_workers, controls);
    const auto work_here = [&] { work([&](block::Team& team) { return make_worker(team, progress.stop); }, progress); };
    {
        std::vector<std::jthread> workers;
        workers.reserve(n_workers);
        for (size_t i = 1; i < n_workers; ++i) {
            try {
                workers.emplace_back(work_here);
            } catch (...) {  // no more threads to be had, or no memory for one: the others do the work
                progress.leave();
            }
        }
        const block::FloatMode callers;
        work_here();
        progress.wait();
    }
    if (progress.error()) throw *progress.error();
    if (progress.stop.error()) std::rethrow_exception(progress.stop.error());
    return !progress.stop.is_made();
}

size_t longest_of(std::span<const std::int64_t> lengths) { return lengths.empty() ? 0 : size_t(std::ranges::max(lengths)); }

// Entries of `predictions` after a prompt's exit hold its last one; those before its first loop here are NaN, and so is all that a
// prompt which was told to stop has not come to.
template <class T>
void fill_predictions(const loop::Spec& spec, const loop::BatchMemory<T>& batch, std::span<const std::int64_t> first_t) {
    const size_t size = batch.prediction_size();
    const size_t n_kept = spec.return_predictions ? size_t(std::max<std::int64_t>(0, spec.n_loops - batch.first_loop)) : 0;
    for (size_t i = 0; i < batch.n_prompts; ++i) {
        const auto last = batch.prediction.subspan(i * size, size);
        if (!batch.finished[i]) std::ranges::fill(last, std::numeric_limits<T>::quiet_NaN());
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
    const double operations = model.shape.operations_per_token(model.core.size());
    const bool is_complete = for_each_prompt(batch.lengths, operations, controls, [&](block::Team& team, block::StopRequest& stop) {
        auto loop = std::make_unique<loop::PromptLoop<T>>(model, spec, team, stop, longest);
        return [&, loop = std::move(loop)](size_t prompt) { return batch.finished[prompt] = loop->run(batch, prompt); };
    });
    fill_predictions(spec, batch, first_t);
    return is_complete;
}

template <class T>
bool embed(const block::Model<T>& model, const RawPrompts<T>& prompts, std::span<T> signal, const Controls& controls) {
    const size_t width = model.shape.input_kind == block::InputKind::features ? model.shape.n_dims : model.shape.d_model;
    const size_t C = model.shape.d_model, n_tokens = prompts.n_tokens, longest = longest_of(prompts.lengths);
    const double operations = model.shape.operations_per_token(model.prelude.size());
    return for_each_prompt(prompts.lengths, operations, controls, [&](block::Team& team, block::StopRequest& stop) {
        auto forward = std::make_unique<block::Forward<T>>(model, team, stop, longest, false);
        return [&, width, C, n_tokens, forward = std::move(forward)](size_t prompt) {
            const size_t own = size_t(prompts.lengths[prompt]);
            const auto ids = prompts.ids.empty() ? prompts.ids : prompts.ids.subspan(prompt * n_tokens, own);
            forward->embed({prompts.features.data() + (prompts.features.empty() ? 0 : prompt * n_tokens * width), own, width, width},
                           ids, {signal.data() + prompt * n_tokens * C, own, C, C});
            return !stop.is_made();
        };
    });
}

template bool run<float>(const block::Model<float>&, const loop::Spec&, const loop::BatchMemory<float>&, const Controls&);
template bool run<double>(const block::Model<double>&, const loop::Spec&, const loop::BatchMemory<double>&, const Controls&);
template bool embed<float>(const block::Model<float>&, const RawPrompts<float>&, std::span<float>, const Controls&);
template bool embed<double>(const block::Model<double>&, const RawPrompts<double>&, std::span<double>, const Controls&);

}  // namespace looped::batch
