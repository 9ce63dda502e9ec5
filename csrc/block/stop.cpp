#include "block/stop.hpp"

namespace looped::block {

StopRequest::StopRequest(std::function<bool()> keeps_going) : keeps_going_(std::move(keeps_going)), due_(Clock::now() + period) {
    std::fegetenv(&float_mode_);
}

bool StopRequest::look() noexcept {
    if (is_made()) return true;
    if (!keeps_going_ || std::this_thread::get_id() != asker_ || Clock::now() < due_) return false;
    std::fenv_t own;
    std::fegetenv(&own);
    std::fesetenv(&float_mode_);
    bool goes_on = false;
    try {
        goes_on = keeps_going_();
    } catch (...) {
        error_ = std::current_exception();
    }
    std::fesetenv(&own);
    due_ = Clock::now() + period;
    if (!goes_on) make();
    return !goes_on;
}

}  // namespace looped::block
