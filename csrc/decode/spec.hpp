// How a call loops: the exit rules of looped.exits and looped.lm.exits with one token as the unit, under the same names.
#pragma once

#include <cstdint>

namespace looped::decode {

enum class Rule : std::uint8_t { fixed, exact, absolute, relative, contraction, readout, entropy, kl, argmax, gate };

struct Spec {
    std::int64_t n_loops = 1;
    Rule rule = Rule::fixed;
    double tol = 0.0;
    double phi = 0.0;  // the rounding level of the arithmetic
    std::int64_t check_every = 1;
    std::int64_t min_loops = 0;
    std::int64_t patience = 1;  // of readout and argmax
    double threshold = 0.5;     // of gate
    bool warm_start = false;

    bool has_tolerance() const { return rule >= Rule::absolute && rule <= Rule::readout; }
    // Never passes: all loops run.
    bool is_fixed() const { return rule == Rule::fixed || (has_tolerance() && tol == 0.0); }
    bool reads_logits() const { return !is_fixed() && rule >= Rule::readout && rule <= Rule::argmax; }
    std::int64_t passes_needed() const {
        if (rule == Rule::contraction) return 2;
        return rule == Rule::readout ? patience : 1;
    }
};

}  // namespace looped::decode
