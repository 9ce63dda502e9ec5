// The ways to loop that the tests go through: every rule, and every option that a rule may be joined with.
#pragma once

#include "tests/prompts.hpp"

namespace looped::tests {

struct Way {
    std::string name;
    Spec spec;
};

inline std::vector<Way> all_ways() {
    std::vector<Way> ways;
    const auto add = [&](const std::string& name, Rule rule, double tol, auto change) {
        Spec spec = with(rule, tol);
        change(spec);
        ways.push_back({name, spec});
    };
    const auto plain = [](Spec&) {};
    const auto prefix = [](Spec& spec) { spec.is_prefix = true; };
    add("fixed", Rule::fixed, 0, plain);
    add("exact", Rule::exact, 0, plain);
    add("absolute", Rule::absolute, 1e-1, plain);
    add("relative every 3", Rule::relative, 1e-2, [](Spec& spec) { spec.check_every = 3; });
    add("contraction", Rule::contraction, 1e-2, plain);
    add("contraction, late", Rule::contraction, 1e-1, [](Spec& spec) { spec.min_loops = 9; });
    add("readout", Rule::readout, 1e-2, plain);
    add("prefix", Rule::contraction, 1e-2, prefix);
    add("prefix exact", Rule::exact, 0, prefix);
    add("prefix readout every 2", Rule::readout, 1e-1, [](Spec& spec) { spec.is_prefix = true, spec.check_every = 2; });
    add("prefix, leaves", Rule::relative, 1e-12,
        [](Spec& spec) { spec.is_prefix = true, spec.on_stall = loop::OnStall::exit, spec.stall_window = 2; });
    for (int depth : {1, 2, 3}) {
        add("anderson " + std::to_string(depth), Rule::contraction, 1e-3, [depth](Spec& spec) { spec.anderson_depth = depth; });
    }
    add("damped", Rule::contraction, 1e-9, [](Spec& spec) { spec.on_stall = loop::OnStall::damp, spec.stall_window = 2; });
    add("damped readout", Rule::readout, 1e-9, [](Spec& spec) { spec.on_stall = loop::OnStall::damp, spec.stall_window = 1; });
    add("anderson, damped", Rule::contraction, 1e-9,
        [](Spec& spec) { spec.anderson_depth = 2, spec.on_stall = loop::OnStall::damp, spec.stall_window = 2; });
    return ways;
}

}  // namespace looped::tests
