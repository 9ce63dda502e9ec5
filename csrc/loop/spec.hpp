// How to loop (docs/exits.md): the fields of LoopSpec and of its exit rule, under the same names.
#pragma once

#include <cstdint>

namespace looped::loop {

enum class Rule : std::uint8_t { fixed, exact, absolute, relative, contraction, readout };
enum class OnStall : std::uint8_t { ignore, exit, damp };
enum class Status : std::int64_t { max_loops = 0, converged = 1, stalled = 2, nonfinite = 3 };

struct Spec {
    std::int64_t n_loops = 0;
    Rule rule = Rule::fixed;
    double tol = 0.0;
    double phi = 0.0;  // the rounding level of the arithmetic
    std::int64_t check_every = 1;
    std::int64_t min_loops = 0;
    std::int64_t stall_window = 16;
    std::int64_t patience = 3;
    bool is_prefix = false;
    OnStall on_stall = OnStall::ignore;
    int anderson_depth = 0;  // 0: plain
    bool return_predictions = false;

    // Never passes: all loops run, and nothing counts as a stall.
    bool is_fixed() const { return rule == Rule::fixed || (rule != Rule::exact && tol == 0.0); }
    bool is_plain() const { return anderson_depth == 0 && on_stall != OnStall::damp; }
    std::int64_t passes_needed() const {
        if (rule == Rule::contraction) return 2;
        return rule == Rule::readout ? patience : 1;
    }
};

}  // namespace looped::loop
