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

TEST_CASE_TEMPLATE("a prompt on a team of any size has the bits that it has on one thread", T, float, double) {
    block::Shape shape = small_shape();
    shape.d_model = 64;  // a few tokens of it are worth a thread
    shape.n_heads = 4;
    shape.head_dim = 16;
    shape.d_ff = 256;
    shape.n_core = 3;
    shape.n_prelude = shape.n_coda = 1;
    shape.loop_norm = block::LoopNorm::once;
    for (bool is_causal : {true, false}) {
        shape.is_causal = is_causal;
        const PlainModel plain(shape, 0.05);
        const block::Model<T> model = plain.packed<T>();
        for (const Way& way : all_ways()) {
            if (way.spec.is_prefix && !is_causal) continue;
            CAPTURE(way.name);
            for (std::int64_t length : {5, 33}) {
                const Prompts<T> prompts(model, {length});
                Run<T> alone(model, prompts, way.spec);
                alone(6);
                for (size_t n_threads : {2, 5}) {
                    Run<T> together(model, prompts, way.spec);
                    together(6, n_threads);
                    CHECK(together.bits(0) == alone.bits(0));
                }
            }
        }
    }
}

TEST_CASE("every share of a piece of work is done once, whoever does it") {
    for (size_t n_members : {1, 2, 3, 8, 64, 100}) {
        block::Team team(n_members);
        CHECK(team.size() == std::min<size_t>(n_members, 64));
        for (size_t n_rows : {0, 1, 7, 200}) {
            std::vector<int> n_done(n_rows);
            for (size_t repeat = 0; repeat < 20; ++repeat) {
                team.split(n_rows / 3, n_rows, [&](block::Share share, size_t member) noexcept {
                    if (member >= n_members) return;
                    for (size_t i = share.begin; i < share.end; ++i) ++n_done[i];
                });
            }
            for (size_t i = 0; i < n_rows; ++i) CHECK(n_done[i] == (i < n_rows / 3 ? 0 : 20));
        }
    }
}
