// Embedding, M(Y) and read-out of every kind of model against the plain one.
#include <doctest.h>

#include <cmath>

#include "tests/prompts.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#endif

using namespace looped;
using namespace looped::tests;
using block::Activation, block::Inject, block::InputKind, block::LoopNorm, block::Norm, block::Shape;

namespace {

struct Variant {
    const char* name;
    void (*change)(Shape&);
};

const Variant variants[] = {
    {"as it is", [](Shape&) {}},
    {"mul", [](Shape& s) { s.inject = Inject::mul; }},
    {"no injection", [](Shape& s) { s.inject = Inject::none; }},
    {"full mask", [](Shape& s) { s.is_causal = false; }},
    {"relu", [](Shape& s) { s.activation = Activation::relu; }},
    {"no norm", [](Shape& s) { s.norm = Norm::none, s.loop_norm = LoopNorm::none; }},
    {"exact gelu", [](Shape& s) { s.activation = Activation::gelu; }},
    {"gated", [](Shape& s) { s.activation = Activation::silu_gated; }},
    {"gated, odd", [](Shape& s) { s.activation = Activation::silu_gated, s.d_ff = 37, s.has_bias = false; }},
    {"root mean square", [](Shape& s) { s.norm = Norm::rms; }},
    {"root mean square, once", [](Shape& s) { s.norm = Norm::rms, s.loop_norm = LoopNorm::once; }},
    {"no bias", [](Shape& s) { s.has_bias = false; }},
    {"norm once", [](Shape& s) { s.loop_norm = LoopNorm::once; }},
    {"deep", [](Shape& s) { s.n_prelude = 1, s.n_core = 3, s.n_coda = 2, s.loop_norm = LoopNorm::once; }},
    {"positions once", [](Shape& s) { s.adds_positions_once = true; }},
    {"no positions", [](Shape& s) { s.has_positions = false, s.n_positions = 0; }},
    {"classes", [](Shape& s) { s.readout_width = 5, s.read_stride = 3; }},
    {"closed state", [](Shape& s) { s.readout_width = 0, s.read_stride = 1, s.loop_norm = LoopNorm::once, s.n_coda = 1; }},
    {"states", [](Shape& s) { s.input_kind = InputKind::states, s.n_prelude = 1; }},
    {"odd heads", [](Shape& s) { s.d_model = 20, s.n_heads = 3, s.head_dim = 5, s.d_ff = 19; }},
    {"wide heads", [](Shape& s) { s.d_model = 33, s.n_heads = 2, s.head_dim = 48, s.d_ff = 65; }},
    {"width one", [](Shape& s) { s.d_model = s.n_heads = s.head_dim = s.d_ff = 1, s.norm = Norm::none, s.loop_norm = LoopNorm::none; }},
    {"tied vocabulary",
     [](Shape& s) { s.input_kind = InputKind::tokens, s.vocab_size = s.readout_width = 37, s.tie_readout = true, s.read_stride = 1; }},
    {"own vocabulary",
     [](Shape& s) {
         s.input_kind = InputKind::tokens, s.vocab_size = s.readout_width = 11, s.readout_has_bias = false,
         s.adds_positions_once = true;
     }},
};

template <class T>
void require_near(std::span<const T> got, const Numbers& want, double tolerance) {
    REQUIRE(got.size() >= want.size());
    double most = 1;
    for (double x : want) most = std::max(most, std::abs(x));
    for (size_t k = 0; k < want.size(); ++k) REQUIRE(std::abs(double(got[k]) - want[k]) <= tolerance * most);
}

}  // namespace

TEST_CASE_TEMPLATE("every kind of model agrees with the plain one, over three loops", T, float, double) {
    const double tolerance = sizeof(T) == 4 ? 2e-5 : 1e-12;
    for (const Variant& variant : variants) {
        CAPTURE(variant.name);
        Shape shape = small_shape();
        variant.change(shape);
        const PlainModel plain(shape, 0.2);
        const block::Model<T> model = plain.packed<T>();
        const size_t C = shape.d_model, L = 41;
        const std::vector<std::int64_t> lengths{41, 1, 0, 16, 33};
        const Prompts<T> prompts(model, lengths);
        std::vector<std::int64_t> ids(lengths.size() * L);
        for (size_t k = 0; k < ids.size(); ++k) ids[k] = shape.vocab_size ? std::int64_t(k * 7 % shape.vocab_size) : 0;

        Run<T> run(model, prompts, with(Rule::fixed));
        if (shape.input_kind == InputKind::tokens) {
            for (size_t i = 0; i < lengths.size(); ++i) {  // ids of padding are no rows of the embedding
                for (size_t k = size_t(lengths[i]); k < L; ++k) ids[i * L + k] = -1;
            }
            const batch::RawPrompts<T> raw{.n_tokens = L, .lengths = lengths, .features = {}, .ids = ids};
            batch::embed<T>(model, raw, run.signal, {.n_threads = 2, .keeps_going = {}});
        }
        run(3);
        for (size_t i = 0; i < lengths.size(); ++i) {
            const size_t own = size_t(lengths[i]);
            const auto own_ids = std::span(ids).subspan(i * L, own);
            Numbers contents;
            if (shape.input_kind != InputKind::tokens) contents = prompts.contents(i);
            if (sizeof(T) == 4) std::ranges::transform(contents, contents.begin(), [](double x) { return double(float(x)); });
            const Numbers P = plain.embed(contents, {own_ids.begin(), own_ids.end()});
            require_near<T>(std::span(run.signal).subspan(i * L * C, own * C), P, tolerance);
            Numbers Y(own * C, 0.0);
            for (int loop = 0; loop < 3; ++loop) Y = plain.step(Y, P);
            require_near<T>(run.own_y(i), Y, tolerance);
            const size_t size = shape.n_read(L) * shape.read_width();
            require_near<T>(std::span(run.prediction).subspan(i * size, size), plain.read(Y), tolerance);
            CHECK(run.t[i] == 3);
        }
    }
}

#if defined(__linux__)
TEST_CASE("offsets beyond 32 bits") {
    constexpr size_t stride = 40000, row = 70000;  // 2.8e9 numbers apart; the memory is asked for and never touched
    const size_t bytes = (row + 1) * stride * sizeof(float);
    void* memory = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return;
    const std::span<float> all(static_cast<float*>(memory), bytes / sizeof(float));
    CHECK(block::Rows<float>{all.data(), row + 1, stride, stride}.row(row) - all.data() == 2'800'000'000);
    loop::BatchMemory<float> batch;
    batch.n_tokens = row / 2;
    batch.shape.d_model = stride;
    const std::vector<std::int64_t> lengths(3, 1);
    batch.lengths = lengths;
    CHECK(batch.token_rows(all, 2).first - all.data() == 2'800'000'000);
    batch.signal = all;
    CHECK(batch.signal_rows(2).first - all.data() == 2'800'000'000);
    ::munmap(memory, bytes);
}
#endif

TEST_CASE("sizes that no memory holds are refused, not wrapped") {
    const size_t half = std::numeric_limits<size_t>::max() / 2;
    CHECK_THROWS_AS(block::AlignedArray<float>{half}, std::bad_alloc);
    CHECK_THROWS_AS(block::AlignedArray<double>(half / 4 + 2), std::bad_alloc);
    CHECK_THROWS_AS(block::Matrix<float>(half / 4, 48), std::bad_alloc);
    CHECK_THROWS_AS(block::Matrix<double>(3, half), std::bad_alloc);
    CHECK(block::AlignedArray<float>(0).data() == nullptr);
}
