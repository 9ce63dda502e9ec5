// Counts what every rule needs counted: rates between checks, passes in a row, stalls; and asks the rule.
#pragma once

#include "loop/memory.hpp"

namespace looped::loop {

// One unit's loop: g = |F - Y|, n = |F|, s = |Y' - Y|.
struct Step {
    double g, n, s;
    bool is_same = false;          // no bit of F differs from Y (asked for by `exact` only)
    bool readout_is_still = false;  // its predictions changed by at most tol of their norm since a check before
};

class Watch {
public:
    Watch(const Spec& spec, Counters counters) : spec_(spec), counters_(counters) {}

    bool is_due() const { return counters_.t % spec_.check_every == 0; }

    // Whether a unit has passed often enough, at a check of this loop. To be called once a unit and loop.
    bool has_passed_enough(size_t unit, const Step& step);

    // Whether the prompt has gone stall_window checks without progress: a g below 0.9 of its best, or a check that everything that
    // still moves has passed. To be called once a loop.
    bool is_stalled(double g, bool passes);

    // The next check has no rate: a step of another kind was taken.
    void forget_rate();
    // All counters as at the start.
    void reset();

private:
    bool passes(const Step& step, double rho) const;

    const Spec& spec_;
    Counters counters_;
};

}  // namespace looped::loop
