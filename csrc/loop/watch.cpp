#include "loop/watch.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace looped::loop {
namespace {

constexpr double stall_gain = 0.9;  // a check is progress when g falls below this share of its best
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

}  // namespace

bool Watch::passes(const Step& step, double rho) const {
    const double limit = std::isinf(spec_.tol) ? infinity : spec_.tol * step.n;  // inf * 0 is NaN
    switch (spec_.rule) {
        case Rule::fixed: return false;
        case Rule::exact: return step.is_same;
        case Rule::absolute: return step.g <= spec_.tol;
        case Rule::relative: return std::isinf(spec_.tol) || step.g <= limit;
        case Rule::readout: return step.readout_is_still || step.g == 0;
        case Rule::contraction: {
            if (step.g == 0) return true;
            const double to_go = step.s * rho / (1 - rho);
            const bool contracts = rho < 1 && step.g <= limit && to_go <= limit;
            return step.g <= limit && (step.g <= spec_.phi * step.n || contracts);
        }
    }
    return false;
}

bool Watch::has_passed_enough(size_t unit, const Step& step) {
    if (!is_due()) return false;
    auto &passes_in_row = counters_.passes[unit], &t_prev = counters_.t_prev[unit];
    auto& s_prev = counters_.s_prev[unit];
    const double rho = std::pow(step.s / s_prev, 1.0 / double(counters_.t - t_prev));
    const bool passed = passes(step, rho);
    passes_in_row = passed ? passes_in_row + 1 : 0;
    s_prev = step.s;
    t_prev = counters_.t;
    if (spec_.is_fixed()) return false;
    return passed && (passes_in_row >= spec_.passes_needed() || step.g == 0) && counters_.t >= spec_.min_loops;
}

bool Watch::is_stalled(double g, bool passes) {
    if (spec_.is_fixed() || spec_.rule == Rule::exact) return false;
    if (is_due()) {
        const bool gains = g < stall_gain * counters_.best_g;
        if (gains) counters_.best_g = g;
        counters_.checks_without_gain = gains || passes ? 0 : counters_.checks_without_gain + 1;
    }
    const std::int64_t last_check = counters_.t - counters_.t % spec_.check_every;
    return counters_.checks_without_gain >= spec_.stall_window && last_check >= spec_.min_loops;
}

void Watch::forget_rate() { std::ranges::fill(counters_.s_prev, nan); }

void Watch::reset() {
    forget_rate();
    std::ranges::fill(counters_.passes, 0);
    counters_.best_g = infinity;
    counters_.checks_without_gain = 0;
}

}  // namespace looped::loop
