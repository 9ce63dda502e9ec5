// Decoding: its kernels bit for bit against those of whole prompts, sessions against the plain model, and what cuts them short.
#include <doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "decode/session.hpp"
#include "simd/isa.hpp"
#include "tests/allocations.hpp"
#include "tests/plain_model.hpp"

using namespace looped;
using block::Activation, block::Inject, block::InputKind, block::LoopNorm, block::Matrix, block::Norm, block::Rows, block::Shape,
    block::StateInit;
using decode::Policy, decode::Rule;
using std::size_t;
using tests::Dice, tests::Numbers, tests::PlainModel;

namespace {

template <class T>
constexpr T unset = std::numeric_limits<T>::quiet_NaN();

template <class T>
bool has_same_bits(std::span<const T> a, std::span<const T> b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

template <class T>
Matrix<T> random_rows(size_t n_rows, size_t width, std::uint64_t seed) {
    Matrix<T> matrix(n_rows, width);
    std::ranges::fill(matrix.memory.span(), unset<T>);
    Dice dice(seed);
    for (size_t i = 0; i < n_rows; ++i) {
        for (size_t j = 0; j < width; ++j) matrix.rows(n_rows).row(i)[j] = T(dice.roll());
    }
    return matrix;
}

Shape text_shape() {
    Shape shape = tests::small_shape();
    shape.input_kind = InputKind::states;
    shape.n_dims = 0;
    shape.readout_width = 37;
    shape.readout_has_bias = false;
    shape.read_stride = 1;
    return shape;
}

struct Variant {
    const char* name;
    void (*change)(Shape&);
};

const Variant variants[] = {
    {"as it is", [](Shape&) {}},
    {"mul from ones", [](Shape& s) { s.inject = Inject::mul, s.state_init = StateInit::ones; }},
    {"GPT-2",
     [](Shape& s) {
         s.inject = Inject::none, s.state_init = StateInit::embedding, s.loop_norm = LoopNorm::once, s.adds_positions_once = true;
         s.n_core = 2;
     }},
    {"deep", [](Shape& s) { s.n_prelude = 1, s.n_core = 2, s.n_coda = 2, s.loop_norm = LoopNorm::once; }},
    {"gated, odd", [](Shape& s) { s.activation = Activation::silu_gated, s.d_ff = 37, s.has_bias = false, s.norm = Norm::rms; }},
    {"no norm", [](Shape& s) { s.norm = Norm::none, s.loop_norm = LoopNorm::none, s.activation = Activation::relu; }},
    {"odd heads", [](Shape& s) { s.d_model = 20, s.n_heads = 3, s.head_dim = 5, s.d_ff = 19; }},
    {"wide heads", [](Shape& s) { s.d_model = 33, s.n_heads = 2, s.head_dim = 48, s.activation = Activation::gelu; }},
};

// A session, and what was put into it.
template <class T>
struct Decoding {
    explicit Decoding(const PlainModel& plain, Policy policy = {})
        : session(std::make_shared<const block::Model<T>>(plain.packed<T>()), policy, {}) {}

    // Appends rows [lengths[i], C] of embeddings; gives hidden states packed like them.
    bool extend(const std::vector<size_t>& lengths, const std::vector<T>& embeds, std::int64_t n_loops, size_t n_threads = 1,
                std::function<bool()> keeps_going = {}, Rule rule = Rule::fixed) {
        const size_t C = session.model().shape.d_model, n = embeds.size() / C;
        hidden.assign(n * C, unset<T>);
        n_loops_used.assign(n, -1);
        decode::Spec spec;
        spec.n_loops = n_loops;
        spec.rule = rule;
        spec.tol = 0.3;
        return session.extend({.lengths = lengths,
                               .embeds = {embeds.data(), n, C, C},
                               .positions = {},
                               .hidden = {hidden.data(), n, C, C},
                               .n_loops = n_loops_used,
                               .states = {}},
                              spec, {.n_threads = n_threads, .keeps_going = std::move(keeps_going)});
    }

    decode::Session<T> session;
    std::vector<T> hidden;
    std::vector<std::int64_t> n_loops_used;
};

template <class T>
std::vector<T> embeddings(size_t n_tokens, size_t C, std::uint64_t seed) {
    Dice dice(seed);
    const Numbers drawn = dice.rolls(n_tokens * C);
    std::vector<T> typed;
    for (double x : drawn) typed.push_back(T(float(x)));
    return typed;
}

template <class T>
std::vector<T> part(const std::vector<T>& all, size_t first, size_t last, size_t C) {
    return {all.begin() + std::ptrdiff_t(first * C), all.begin() + std::ptrdiff_t(last * C)};
}

}  // namespace

TEST_CASE_TEMPLATE("few rows have the bits of many", T, float, double) {
    const block::Kernels<T>& kernels = simd::kernels<T>();
    const size_t panel = kernels.panel;
    for (Activation activation :
         {Activation::none, Activation::relu, Activation::gelu_tanh, Activation::gelu, Activation::silu_gated}) {
        for (size_t K : {1, 7, 48}) {
            for (size_t N : {size_t(1), size_t(17), 2 * panel + 3, 5 * panel, 9 * panel}) {
                if (activation == Activation::silu_gated) N = (N + panel - 1) / panel * panel;
                const size_t M = kernels.tile_rows + 3;
                const Matrix<T> a = random_rows<T>(M, K, 1);
                const Matrix<T> w = random_rows<T>((N + panel - 1) / panel * K, panel, 2);
                block::AlignedArray<T> panels((N + panel - 1) / panel * K * panel), bias((N + panel - 1) / panel * panel);
                for (size_t i = 0; i < panels.size(); ++i) panels.data()[i] = w.rows(1).row(i / panel)[i % panel];
                for (size_t i = 0; i < bias.size(); ++i) bias.data()[i] = T(0.1) * T(i % 7);
                for (bool adds : {false, true}) {
                    if (adds && activation != Activation::none) continue;
                    const auto run = [&](auto kernel, size_t n) {
                        Matrix<T> out = random_rows<T>(M, N, 3);
                        kernel(block::Product<T>{.a = a.rows(n),
                                                 .panels = panels.data(),
                                                 .bias = bias.data(),
                                                 .n_columns = N,
                                                 .out = out.rows(n),
                                                 .adds_to_out = adds,
                                                 .activation = activation});
                        return out;
                    };
                    const size_t width = activation == Activation::silu_gated ? N / 2 : N;
                    const Matrix<T> want = run(kernels.product, M);
                    for (size_t n = 1; n <= M; ++n) {
                        const Matrix<T> got = run(kernels.product_by_columns, n);
                        for (size_t i = 0; i < n; ++i) {
                            REQUIRE(has_same_bits<T>({got.rows(M).row(i), width}, {want.rows(M).row(i), width}));
                        }
                    }
                }
            }
        }
    }
}

TEST_CASE_TEMPLATE("attention over pages", T, float, double) {
    const block::Kernels<T>& kernels = simd::kernels<T>();
    const size_t panel = kernels.panel;
    for (size_t d : {size_t(1), size_t(5), size_t(48), panel, 3 * panel + 1}) {
        for (size_t n_tokens : {size_t(1), panel - 1, panel, 3 * panel + 2}) {
            const size_t keys = 3, values = keys + d * panel, size = values + d * panel;
            const size_t n_pages = (n_tokens + panel - 1) / panel;
            const Matrix<T> q = random_rows<T>(n_tokens, d, 1), k = random_rows<T>(n_tokens, d, 2), v = random_rows<T>(n_tokens, d, 3);
            std::vector<block::AlignedArray<T>> pages;
            std::vector<T*> addresses;
            for (size_t p = 0; p < n_pages; ++p) {
                addresses.push_back(pages.emplace_back(size + 2 * block::widest_panel).data());
                std::ranges::fill(pages.back().span(), unset<T>);
            }
            for (size_t j = 0; j < n_tokens; ++j) {
                for (size_t c = 0; c < d; ++c) {
                    addresses[j / panel][keys + c * panel + j % panel] = k.rows(n_tokens).row(j)[c];
                    addresses[j / panel][values + j % panel * d + c] = v.rows(n_tokens).row(j)[c];
                }
            }
            Matrix<T> alone(n_tokens, d), together(n_tokens, d), scores(kernels.tile_rows, n_pages * panel);
            std::vector<size_t> n_seen(n_tokens);
            std::iota(n_seen.begin(), n_seen.end(), size_t(1));
            const auto attend = [&](size_t first, size_t last, const Matrix<T>& out) {
                std::ranges::fill(scores.memory.span(), unset<T>);
                kernels.attend_pages({.queries = q.rows(n_tokens).between(first, last),
                                      .n_seen = n_seen.data() + first,
                                      .pages = addresses.data(),
                                      .keys = keys,
                                      .values = values,
                                      .out = out.rows(n_tokens).between(first, last),
                                      .scores = scores.rows(kernels.tile_rows)});
            };
            for (size_t i = 0; i < n_tokens; ++i) attend(i, i + 1, alone);
            for (size_t rows : {size_t(2), size_t(3), kernels.tile_rows}) {
                if (rows > kernels.tile_rows) continue;
                std::ranges::fill(together.memory.span(), T(77));
                for (size_t i = 0; i < n_tokens; i += rows) attend(i, std::min(n_tokens, i + rows), together);
                for (size_t i = 0; i < n_tokens; ++i) {
                    REQUIRE(has_same_bits<T>(alone.rows(n_tokens).row_span(i), together.rows(n_tokens).row_span(i)));
                    REQUIRE(together.rows(n_tokens).row(i)[d] == T(77));  // nothing beyond the head is written
                }
            }
            for (size_t i = 0; i < n_tokens; ++i) {
                Numbers share(i + 1);
                double most = -1e300, sum = 0;
                for (size_t j = 0; j <= i; ++j) {
                    for (size_t c = 0; c < d; ++c) share[j] += double(q.rows(n_tokens).row(i)[c]) * double(k.rows(n_tokens).row(j)[c]);
                    most = std::max(most, share[j]);
                }
                for (double& s : share) sum += s = std::exp2(s - most);
                for (size_t c = 0; c < d; ++c) {
                    double want = 0;
                    for (size_t j = 0; j <= i; ++j) want += share[j] / sum * double(v.rows(n_tokens).row(j)[c]);
                    REQUIRE(std::abs(double(alone.rows(n_tokens).row(i)[c]) - want) < (sizeof(T) == 4 ? 2e-5 : 1e-13));
                }
            }
        }
    }
}

TEST_CASE_TEMPLATE("a session agrees with the plain model, however the rows come", T, float, double) {
    const double tolerance = sizeof(T) == 4 ? 3e-5 : 1e-12;
    for (const Variant& variant : variants) {
        CAPTURE(variant.name);
        Shape shape = text_shape();
        variant.change(shape);
        const PlainModel plain(shape, 0.2);
        const size_t C = shape.d_model, L = 45;
        const std::vector<T> row = embeddings<T>(L, C, 5), other = embeddings<T>(7, C, 6);
        const Numbers P = plain.embed(Numbers(row.begin(), row.end()), {});
        const double start = shape.state_init == StateInit::ones ? 1.0 : 0.0;
        Numbers Y = shape.state_init == StateInit::embedding ? P : Numbers(P.size(), start);
        for (int t = 0; t < 3; ++t) Y = plain.step(Y, P);
        const Numbers logits = plain.read(Y);

        Decoding<T> whole(plain);
        std::vector<T> both = row;
        both.insert(both.end(), other.begin(), other.end());
        REQUIRE(whole.extend({L, 7}, both, 3, 2));
        Matrix<T> got(L, shape.readout_width);
        std::vector<T> exact(L * shape.readout_width, unset<T>);
        REQUIRE(whole.session.read({whole.hidden.data(), L, C, C}, {exact.data(), L, shape.readout_width, shape.readout_width},
                                   {.n_threads = 2, .keeps_going = {}}));
        double most = 1;
        for (double x : logits) most = std::max(most, std::abs(x));
        for (size_t i = 0; i < logits.size(); ++i) REQUIRE(std::abs(double(exact[i]) - logits[i]) <= tolerance * most);

        for (size_t n_threads : {1, 3}) {
            Decoding<T> steps(plain);
            for (size_t i = 0; i < L; ++i) {
                const bool has_other = i >= 10 && i < 17;
                std::vector<T> next = part(row, i, i + 1, C);
                if (has_other) {
                    const std::vector<T> more = part(other, i - 10, i - 9, C);
                    next.insert(next.end(), more.begin(), more.end());
                }
                REQUIRE(steps.extend({1, has_other ? size_t(1) : size_t(0)}, next, 3, n_threads));
                REQUIRE(has_same_bits<T>({steps.hidden.data(), C}, {whole.hidden.data() + i * C, C}));
                if (has_other) REQUIRE(has_same_bits<T>({steps.hidden.data() + C, C}, {whole.hidden.data() + (L + i - 10) * C, C}));
            }
        }
    }
}

TEST_CASE("tokens that leave early keep their keys for later loops") {
    Shape shape = text_shape();
    shape.n_coda = 1;
    shape.loop_norm = LoopNorm::once;
    const PlainModel plain(shape, 0.1);
    const std::vector<float> row = embeddings<float>(40, shape.d_model, 7);
    for (Rule rule : {Rule::relative, Rule::argmax, Rule::entropy, Rule::kl, Rule::readout}) {
        Decoding<float> whole(plain), steps(plain);
        REQUIRE(whole.extend({40}, row, 8, 1, {}, rule));
        std::vector<std::int64_t> used;
        std::vector<float> hidden;
        for (size_t i = 0; i < 40; ++i) {
            REQUIRE(steps.extend({1}, part(row, i, i + 1, shape.d_model), 8, 2, {}, rule));
            used.push_back(steps.n_loops_used[0]);
            hidden.insert(hidden.end(), steps.hidden.begin(), steps.hidden.end());
        }
        CHECK(used == whole.n_loops_used);
        CHECK(has_same_bits<float>(hidden, whole.hidden));
        CAPTURE(int(rule));
        CHECK(std::ranges::min(used) < 8);
    }
}

TEST_CASE("rows that were one share their tokens until they part") {
    const Shape shape = text_shape();
    const PlainModel plain(shape, 0.2);
    const size_t C = shape.d_model;
    const std::vector<float> row = embeddings<float>(40, C, 1), a = embeddings<float>(5, C, 2), b = embeddings<float>(5, C, 3);
    Decoding<float> decoding(plain);
    decoding.extend({40}, row, 2);
    decoding.session.select({0, 0});
    std::vector<float> both;
    for (size_t i = 0; i < 5; ++i) {  // what one row writes, the other must not read at the next token
        std::vector<float> next = part(a, i, i + 1, C);
        const std::vector<float> other = part(b, i, i + 1, C);
        next.insert(next.end(), other.begin(), other.end());
        decoding.extend({1, 1}, next, 2);
        both.insert(both.begin() + std::ptrdiff_t(i * C), decoding.hidden.begin(), decoding.hidden.begin() + std::ptrdiff_t(C));
        both.insert(both.end(), decoding.hidden.begin() + std::ptrdiff_t(C), decoding.hidden.end());
    }
    for (const auto& [more, at] : {std::pair{&a, size_t(0)}, std::pair{&b, size_t(5)}}) {
        Decoding<float> alone(plain);
        std::vector<float> all = row;
        all.insert(all.end(), more->begin(), more->end());
        alone.extend({45}, all, 2);
        CHECK(has_same_bits<float>({both.data() + at * C, 5 * C}, {alone.hidden.data() + 40 * C, 5 * C}));
    }
    const auto copy = decoding.session.copy();
    decoding.session.crop(0, 40);
    decoding.extend({5, 0}, b, 2);
    CHECK(copy->n_tokens(0) == 45);
    CHECK(decoding.session.n_tokens(0) == 45);
    CHECK(copy->n_tokens(1) == 45);
}

TEST_CASE("a call that is cancelled, or finds no memory, leaves the session as it was") {
    const Shape shape = text_shape();
    const PlainModel plain(shape, 0.2);
    const size_t C = shape.d_model;
    const std::vector<float> row = embeddings<float>(60, C, 1);
    Decoding<float> want(plain);
    want.extend({60}, row, 4);
    const std::vector<float> last = part(want.hidden, 30, 60, C);

    Decoding<float> cancelled(plain, {Policy::Kind::last_only, 1});
    CHECK_FALSE(cancelled.extend({30}, part(row, 0, 30, C), 100'000'000, 1, [] { return false; }));
    CHECK(cancelled.session.n_rows() == 0);
    cancelled.extend({30}, part(row, 0, 30, C), 4);
    const auto raise = []() -> bool { throw std::runtime_error("no"); };
    CHECK_THROWS_AS(cancelled.extend({30}, part(row, 30, 60, C), 100'000'000, 2, raise), std::runtime_error);
    CHECK(cancelled.session.n_tokens(0) == 30);

    Decoding<float> decoding(plain);
    decoding.extend({30}, part(row, 0, 30, C), 4);

    bool has_failed = true;
    for (size_t first = 0; has_failed; ++first) {
        const auto copy = decoding.session.copy();
        std::vector<float> hidden(30 * C);
        std::vector<std::int64_t> used(30);
        const std::vector<size_t> lengths{30};
        const std::vector<float> more = part(row, 30, 60, C);
        decode::Spec spec;
        spec.n_loops = 4;
        spec.rule = Rule::kl;
        spec.tol = 1e-30;
        const auto extend = [&] {
            copy->extend({.lengths = lengths,
                          .embeds = {more.data(), 30, C, C},
                          .positions = {},
                          .hidden = {hidden.data(), 30, C, C},
                          .n_loops = used,
                          .states = {}},
                         spec, {.n_threads = 1, .keeps_going = {}});
        };
        {
            tests::FailingAllocations failing(tests::Where::this_thread, first);
            try {
                extend();
            } catch (const std::bad_alloc&) {}
            has_failed = failing.has_failed();
        }
        if (has_failed) {
            REQUIRE(copy->n_tokens(0) == 30);
            extend();
        }
        REQUIRE(has_same_bits<float>(hidden, last));
    }
}
