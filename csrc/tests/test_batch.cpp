// Batches: their ends, what stops them, and what goes wrong inside a worker.
#include <doctest.h>

#include <chrono>
#include <system_error>
#include <thread>

#include "tests/allocations.hpp"
#include "tests/ways.hpp"

#if defined(__linux__)
#include <pthread.h>
#endif

using namespace looped;
using namespace looped::tests;
using batch::PromptError;

namespace {

constexpr std::int64_t endless = 1'000'000'000;

}  // namespace

TEST_CASE_TEMPLATE("no prompts, and prompts of no tokens", T, float, double) {
    const PlainModel plain(small_shape(), 0.2);
    const block::Model<T> model = plain.packed<T>();
    for (const Way& way : all_ways()) {
        CAPTURE(way.name);
        Spec spec = way.spec;
        spec.return_predictions = true;
        Run<T> none(model, Prompts<T>(model, std::vector<std::int64_t>{}), spec);
        CHECK(none(5, 4));
        Run<T> empty(model, Prompts<T>(model, std::vector<std::int64_t>{0, 0}), spec);
        CHECK(empty(5, 4));
        CHECK(empty.residual == std::vector<double>{0.0, 0.0});
    }
}

TEST_CASE_TEMPLATE("more threads than prompts, and more prompts than threads", T, float, double) {
    const PlainModel plain(small_shape(), 0.2);
    const block::Model<T> model = plain.packed<T>();
    for (size_t n_prompts : {1, 2, 3, 100}) {
        std::vector<std::int64_t> lengths;
        for (size_t i = 0; i < n_prompts; ++i) lengths.push_back(std::int64_t(i * 7 % 20));
        const Prompts<T> prompts(model, lengths);
        CHECK(prompts.embedded(1).size() == prompts.embedded(9).size());
        Run<T> one(model, prompts, with(Rule::contraction)), many(model, prompts, with(Rule::contraction));
        CHECK(one(9, 1));
        CHECK(many(9, 9));
        for (size_t i = 0; i < n_prompts; ++i) CHECK(one.bits(i) == many.bits(i));
    }
}

TEST_CASE("a caller that says no stops the run, and the next one is right") {
    const PlainModel plain(small_shape(), 0.2);
    const block::Model<double> model = plain.packed<double>();
    const Prompts<double> prompts(model, {64, 64, 64, 64, 3});
    Run<double> want(model, prompts, with(Rule::fixed));
    want(5);
    for (size_t n_threads : {1, 2, 8}) {
        size_t n_calls = 0;
        Run<double> stopped(model, prompts, with(Rule::fixed));
        CHECK_FALSE(stopped(endless, n_threads, [&](size_t n_finished) {
            CHECK(n_finished == 0);
            return ++n_calls < 3;
        }));
        CHECK(n_calls == 3);
        Run<double> again(model, prompts, with(Rule::fixed));
        CHECK(again(5, n_threads, [](size_t) { return true; }));
        for (size_t i = 0; i < prompts.size(); ++i) CHECK(again.bits(i) == want.bits(i));
    }
}

TEST_CASE("a caller that throws stops the run, and its exception comes out") {
    const PlainModel plain(small_shape(), 0.2);
    const block::Model<double> model = plain.packed<double>();
    Run<double> run(model, Prompts<double>(model, {64, 64, 64}), with(Rule::fixed));
    CHECK_THROWS_AS(run(endless, 2, [](size_t) -> bool { throw std::domain_error("enough"); }), std::domain_error);
}

// Every allocation that a worker makes is let fail once: the call ends with an error that names a prompt, and harms no later call.
TEST_CASE_TEMPLATE("an exception inside a worker comes back, naming its prompt", T, float, double) {
    const PlainModel plain(small_shape(), 0.2);
    const block::Model<T> model = plain.packed<T>();
    const Prompts<T> prompts(model, {9, 4, 33, 7});
    const auto signal = prompts.embedded();
    Spec spec = with(Rule::contraction);
    spec.anderson_depth = 2;  // it allocates in its loops
    Run<T> want(model, prompts, spec);
    want(6);
    for (size_t n_threads : {1, 3}) {
        const Where where = n_threads == 1 ? Where::this_thread : Where::worker_threads;  // the caller is a worker, too
        size_t n_named = 0;
        for (size_t count : {size_t(1), size_t(1) << 40}) {  // one that fails, and no memory from there on
            bool has_failed = true;
            for (size_t first = 0; has_failed; ++first) {
                Run<T> run(model, prompts, spec);
                bool has_thrown = false;
                {
                    FailingAllocations failing(where, first, count);
                    try {
                        run(6, n_threads);
                    } catch (const PromptError& error) {
                        has_thrown = true;
                        n_named += error.prompt < prompts.size();
                        CHECK(error.lacks_memory);
                    } catch (const std::bad_alloc&) {  // before there are prompts
                        has_thrown = true;
                        CHECK(where == Where::this_thread);
                    }
                    has_failed = failing.has_failed();
                }
                CHECK(has_thrown <= has_failed);  // sorting makes do without
                REQUIRE(first < 1000);
            }
        }
        CHECK((n_named > 0 || where == Where::worker_threads));  // the caller may do all the work before another comes to it
        Run<T> again(model, prompts, spec);
        again(6, n_threads);
        for (size_t i = 0; i < prompts.size(); ++i) CHECK(again.bits(i) == want.bits(i));
    }
}

TEST_CASE("an exception stops the other workers, however long they would have run") {
    const PlainModel plain(small_shape(), 0.2);
    const block::Model<double> model = plain.packed<double>();
    Run<double> run(model, Prompts<double>(model, {64, 64, 64, 64}), with(Rule::fixed));
    FailingAllocations failing(Where::worker_threads, 0);
    CHECK_THROWS_AS(run(endless, 4), PromptError);
}

TEST_CASE("a call whose own thread runs out of memory leaves nothing behind") {
    const PlainModel plain(small_shape(), 0.2);
    const block::Model<double> model = plain.packed<double>();
    const Prompts<double> prompts(model, {9, 4, 33, 7});
    Run<double> want(model, prompts, with(Rule::fixed));
    want(5);
    bool has_failed = true;
    for (size_t first = 0; has_failed; ++first) {
        Run<double> run(model, prompts, with(Rule::fixed));
        bool is_whole = false;
        {
            FailingAllocations failing(Where::this_thread, first);
            try {
                is_whole = run(5, 3);
            } catch (const std::bad_alloc&) {
            } catch (const PromptError&) {}
            has_failed = failing.has_failed();
        }
        CHECK((is_whole || has_failed));
        for (size_t i = 0; is_whole && i < prompts.size(); ++i) CHECK(run.bits(i) == want.bits(i));
        REQUIRE(first < 1000);
    }
}

#if defined(__GLIBC__)
TEST_CASE("where no threads are to be had the caller does the work") {
    const PlainModel plain(small_shape(), 0.2);
    const block::Model<double> model = plain.packed<double>();
    Run<double> run(model, Prompts<double>(model, {9, 4, 33, 7}), with(Rule::fixed));
    pthread_attr_t usual, greedy;
    REQUIRE(pthread_getattr_default_np(&usual) == 0);
    pthread_attr_init(&greedy);
    if (pthread_attr_setstacksize(&greedy, size_t(1) << 46) != 0 || pthread_setattr_default_np(&greedy) != 0) return;
    CHECK(run(3, 3));
    pthread_setattr_default_np(&usual);
    CHECK(run(5, 3));
    CHECK(run.t == std::vector<std::int64_t>{5, 5, 5, 5});
}
#endif
