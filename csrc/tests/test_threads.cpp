// Calls that meet: from several threads, after a fork, and under another float mode.
#include <doctest.h>

#include <cfenv>
#include <thread>

#include "tests/ways.hpp"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif
#if defined(__unix__)
#include <sys/wait.h>
#include <unistd.h>
#endif

using namespace looped;
using namespace looped::tests;

TEST_CASE_TEMPLATE("one model serves calls from many threads at once", T, float, double) {
    const PlainModel plain(small_shape(), 0.2);
    const block::Model<T> model = plain.packed<T>();
    const std::vector<Way> ways = all_ways();
    const Prompts<T> prompts(model, {33, 2, 17});
    std::vector<std::vector<std::byte>> want(ways.size());
    std::vector<char> is_right(4 * ways.size());
    const auto bits_of = [&](size_t way, size_t n_threads) {
        Run<T> run(model, prompts, ways[way].spec);
        run(12, n_threads);
        return run.bits(0);
    };
    for (size_t way = 0; way < ways.size(); ++way) want[way] = bits_of(way, 1);
    {
        std::vector<std::jthread> callers;
        for (size_t caller = 0; caller < 4; ++caller) {
            callers.emplace_back([&, caller] {
                for (size_t k = 0; k < ways.size(); ++k) {
                    const size_t way = (k + 3 * caller) % ways.size();
                    is_right[caller * ways.size() + k] = bits_of(way, 2) == want[way];
                }
            });
        }
    }
    CHECK(std::ranges::all_of(is_right, [](char right) { return right; }));
}

#if defined(__x86_64__)
TEST_CASE("a caller that flushes denormals gets the same bits, and keeps its mode") {
    const PlainModel plain = scalar_map(0.5);
    const block::Model<float> model = plain.packed<float>();
    const Prompts<float> prompts(model, std::vector<Numbers>{{1e-42}, {-3e-44}}, 1);
    Run<float> want(model, prompts, with(Rule::fixed)), flushed(model, prompts, with(Rule::fixed));
    REQUIRE(want.signal[0] != 0.0f);
    want(3, 2);
    REQUIRE(want.y[0] != 0.0f);
    const unsigned usual = _mm_getcsr();
    _mm_setcsr(usual | 0x8040);  // flush to zero, denormals are zero
    const unsigned before = _mm_getcsr();
    flushed(3, 2);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(usual);
    CHECK((before & 0xffc0) == (after & 0xffc0));  // the lowest bits are flags that arithmetic sets
    for (size_t i = 0; i < prompts.size(); ++i) CHECK(flushed.bits(i) == want.bits(i));
}
#endif

#if defined(__unix__) && !defined(__SANITIZE_THREAD__)  // ThreadSanitizer takes no threads in a child
TEST_CASE("a child runs after its parent has") {
    const PlainModel plain(small_shape(), 0.2);
    const block::Model<double> model = plain.packed<double>();
    const Prompts<double> prompts(model, {33, 2, 17});
    Run<double> parent(model, prompts, with(Rule::contraction));
    parent(9, 3);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        Run<double> run(model, prompts, with(Rule::contraction));
        const bool is_same = run(9, 3) && run.bits(0) == parent.bits(0) && run.bits(2) == parent.bits(2);
        _exit(is_same ? 0 : 1);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
}
#endif
