// What a rule means, by hand (docs/exits.md); and what holds for every way to loop.
#include <doctest.h>

#include <cmath>

#include "tests/ways.hpp"

using namespace looped;
using namespace looped::tests;
using loop::OnStall;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity(), not_a_number = std::numeric_limits<double>::quiet_NaN();

struct End {
    std::int64_t used;
    Status status;
    double y;
    bool operator==(const End&) const = default;
};

// One prompt of one token on Y <- a (Y + P).
End end_of(double a, double P, const Spec& spec, std::int64_t n_loops) {
    const PlainModel plain = scalar_map(a);
    const block::Model<double> model = plain.packed<double>();
    Run<double> run(model, Prompts<double>(model, std::vector<Numbers>{{P}}, 1), spec);
    run(n_loops);
    return {run.t[0], run.ended(0), run.y[0]};
}

}  // namespace

TEST_CASE("relative and absolute are not confused, nor strict") {
    CHECK(end_of(0.5, 2, with(Rule::relative, 0.05), 50).used == 5);
    CHECK(end_of(0.5, 2, with(Rule::absolute, 0.05), 50).used == 6);
    CHECK(end_of(0.5, 2, with(Rule::absolute, 0.0625), 50).used == 5);
}

TEST_CASE("the contraction rule bounds what is still to go, twice in a row") {
    CHECK(end_of(0.5, 2, with(Rule::contraction, 0.05), 50).used == 6);
    Spec late = with(Rule::contraction, 0.05);
    late.min_loops = 20;
    CHECK(end_of(0.5, 2, late, 50).used == 20);
    CHECK(end_of(0.0, 1, with(Rule::contraction), 50).used == 1);  // g = 0
}

TEST_CASE("a growing state is not converged") {
    CHECK(end_of(1, 1, with(Rule::relative, 0.049), 50) == End{21, Status::converged, 21});  // 1 / 21 = 0.0476
    CHECK(end_of(1, 1, with(Rule::contraction, 0.049), 50) == End{50, Status::stalled, 50});
}

TEST_CASE("no tolerance runs all loops, any tolerance runs one") {
    for (Rule rule : {Rule::absolute, Rule::relative, Rule::contraction, Rule::readout}) {
        Spec spec = with(rule, 0.0);
        spec.stall_window = 1;
        CHECK(end_of(1, 1, spec, 30).used == 30);
        CHECK(end_of(1, 1, spec, 30).status == Status::max_loops);
    }
    for (Rule rule : {Rule::absolute, Rule::relative}) CHECK(end_of(1, 1, with(rule, infinity), 30).used == 1);
    CHECK(end_of(1, 1, with(Rule::fixed), 0) == End{0, Status::max_loops, 0});
}

TEST_CASE("a cycle stalls, leaves where asked, and rests when damped") {
    Spec spec = with(Rule::contraction);
    CHECK(end_of(-1, 3, spec, 60) == End{60, Status::stalled, 0});
    spec.on_stall = OnStall::exit;
    CHECK(end_of(-1, 3, spec, 60).used == 17);
    spec.check_every = 3;
    spec.stall_window = 4;  // the check at 3 sets the best; 6, 9, 12, 15 gain nothing
    CHECK(end_of(-1, 3, spec, 60).used == 15);
    spec = with(Rule::contraction);
    spec.on_stall = OnStall::damp;
    CHECK(end_of(-1, 3, spec, 60) == End{19, Status::converged, -1.5});
    CHECK(end_of(-5, 3, with(Rule::relative), 2000).status == Status::nonfinite);
    Spec twice = with(Rule::contraction, 1e-3);
    twice.on_stall = OnStall::damp;
    twice.stall_window = 4;
    CHECK(end_of(-4, 3, twice, 60).status == Status::stalled);  // damped with 0.5 it still grows: the second stall is an end
}

TEST_CASE("exact compares bits") {
    const End end = end_of(0.5, 2, with(Rule::exact), 200);
    CHECK(end.status == Status::converged);
    CHECK(end.y == 2.0);
    CHECK(end_of(0.5, 2, with(Rule::fixed), end.used - 2).y != 2.0);
}

TEST_CASE("anderson takes a slow linear map to its end in a few loops") {
    Spec spec = with(Rule::contraction, 1e-8);
    CHECK(end_of(0.95, 1, spec, 1000).used > 100);
    for (int depth : {1, 2, 3}) {
        spec.anderson_depth = depth;
        const End end = end_of(0.95, 1, spec, 1000);
        CHECK(end.used < 12);
        CHECK(std::abs(end.y - 19.0) < 1e-6);
    }
}

TEST_CASE_TEMPLATE("a state of zeros rests at once", T, float, double) {
    const PlainModel plain(small_shape(), 0.0);
    const block::Model<T> model = plain.packed<T>();
    Prompts<T> prompts(model, {5, 0, 1});
    std::ranges::fill(prompts.features(), T(0));
    for (const Way& way : all_ways()) {
        if (way.spec.is_fixed()) continue;
        Run<T> run(model, prompts, way.spec);
        run(50);
        for (size_t i = 0; i < prompts.size(); ++i) {
            CAPTURE(way.name);
            CHECK(run.t[i] == std::max<std::int64_t>(way.spec.check_every, way.spec.min_loops));
            CHECK(run.ended(i) == Status::converged);
            CHECK(run.residual[i] == 0.0);
        }
    }
}

TEST_CASE_TEMPLATE("resuming gives the same bits, whatever the way", T, float, double) {
    const PlainModel plain(small_shape(), 0.25);
    const block::Model<T> model = plain.packed<T>();
    const Prompts<T> prompts(model, {33, 4, 0, 7, 18});
    for (const Way& way : all_ways()) {
        CAPTURE(way.name);
        Run<T> whole(model, prompts, way.spec);
        whole(16);
        for (std::int64_t k : {0, 1, 7, 16}) {
            Run<T> part(model, prompts, way.spec);
            part(k, 2);
            part(16, 3);
            for (size_t i = 0; i < prompts.size(); ++i) CHECK(part.bits(i) == whole.bits(i));
        }
    }
}

TEST_CASE_TEMPLATE("a prompt's bits do not depend on its batch or on the threads", T, float, double) {
    block::Shape shape = small_shape();
    shape.d_model = 24;
    shape.n_heads = 3;
    shape.n_core = 2;
    const PlainModel plain(shape, 0.2);
    const block::Model<T> model = plain.packed<T>();
    const std::vector<std::int64_t> lengths{7, 1, 33, 2, 0, 33, 14};
    const Prompts<T> prompts(model, lengths);
    for (const Way& way : all_ways()) {
        CAPTURE(way.name);
        std::vector<std::vector<std::byte>> alone;
        for (size_t i = 0; i < lengths.size(); ++i) {
            Run<T> run(model,
                       Prompts<T>(model, std::vector<Numbers>{prompts.contents(i)}, size_t(std::max<std::int64_t>(1, lengths[i]))),
                       way.spec);
            run(10);
            alone.push_back(run.bits(0));
        }
        for (size_t n_threads : {1, 2, 5, 16}) {
            Run<T> together(model, prompts, way.spec);
            CHECK(together(10, n_threads));
            for (size_t i = 0; i < lengths.size(); ++i) CHECK(together.bits(i) == alone[i]);
        }
    }
}

TEST_CASE_TEMPLATE("a frozen prefix at no tolerance is plain iteration, and else skips work", T, float, double) {
    const PlainModel plain(small_shape(), 0.2);
    const block::Model<T> model = plain.packed<T>();
    const Prompts<T> prompts(model, {40, 9, 1});
    Spec spec = with(Rule::fixed);
    Run<T> fixed(model, prompts, spec);
    spec.is_prefix = true;
    Run<T> prefix(model, prompts, spec);
    fixed(12);
    prefix(12);
    for (size_t i = 0; i < prompts.size(); ++i) CHECK(prefix.own_y(i) == fixed.own_y(i));
    Spec rule = with(Rule::contraction, 1e-2);
    rule.is_prefix = true;
    Run<T> frozen(model, prompts, rule);
    frozen(300);
    CHECK(frozen.ended(0) == Status::converged);
    CHECK(frozen.token_loops[0] < frozen.token_loops[39]);
    for (size_t k = 1; k < 40; ++k) CHECK(frozen.token_loops[k] >= frozen.token_loops[k - 1]);
}

TEST_CASE_TEMPLATE("a prompt that is not finite ends alone", T, float, double) {
    const PlainModel plain(small_shape(), 0.2);
    const block::Model<T> model = plain.packed<T>();
    const Prompts<T> clean(model, {9, 9, 9});
    for (T bad : {T(not_a_number), T(infinity), T(-infinity)}) {
        for (const Way& way : all_ways()) {
            CAPTURE(way.name);
            Run<T> want(model, clean, way.spec);
            want(20);
            Prompts<T> prompts = clean;
            prompts.features()[9 * 3] = bad;  // the first token of prompt 1
            Run<T> run(model, prompts, way.spec);
            run(20, 2);
            CHECK(run.ended(1) == Status::nonfinite);
            CHECK(run.t[1] == 1);
            for (size_t i : {0, 2}) CHECK(run.bits(i) == want.bits(i));
        }
    }
}

TEST_CASE_TEMPLATE("predictions after every loop hold after the exit", T, float, double) {
    const PlainModel plain(small_shape(), 0.2);
    const block::Model<T> model = plain.packed<T>();
    const Prompts<T> prompts(model, {9, 4, 0});
    for (const Way& way : all_ways()) {
        CAPTURE(way.name);
        Spec spec = way.spec;
        spec.return_predictions = true;
        Run<T> run(model, prompts, spec);
        run(15, 2);
        const size_t size = model.shape.n_read(9) * model.shape.read_width();
        for (size_t i = 0; i < prompts.size(); ++i) {
            const size_t own = model.shape.n_read(size_t(prompts.lengths()[i]));
            const auto entry = [&](size_t loop) { return std::span(run.predictions).subspan((i * 15 + loop) * size, own); };
            const auto last = std::span(run.prediction).subspan(i * size, own);
            for (size_t loop = size_t(run.t[i]) - 1; loop < 15; ++loop) CHECK(std::ranges::equal(entry(loop), last));
        }
        Run<T> rest(model, prompts, spec);
        rest.spec.return_predictions = false;
        rest(4);
        rest.t[0] = std::max<std::int64_t>(rest.t[0], 3);
        rest.spec.return_predictions = true;
        rest(15);
        for (size_t i = 0; i < prompts.size(); ++i) CHECK(rest.bits(i) == run.bits(i));
    }
}
