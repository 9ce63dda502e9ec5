// Each kernel against plain loops in double, on odd sizes, with NaN wherever it must not look.
#include <doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "block/forward.hpp"
#include "simd/isa.hpp"
#include "tests/plain_model.hpp"

using namespace looped;
using block::Activation, block::Inject, block::Matrix, block::Norm, block::Rows;
using std::size_t;
using tests::Dice, tests::Numbers;

namespace {

template <class T>
constexpr double rounding = sizeof(T) == 4 ? 3e-6 : 1e-14;

template <class T>
constexpr T unset = std::numeric_limits<T>::quiet_NaN();

// Random rows; all that the stride leaves beyond the width is NaN.
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

template <class T>
block::AlignedArray<T> packed(const Numbers& w, size_t n_out, size_t n_in, size_t panel) {
    block::AlignedArray<T> panels((n_out + panel - 1) / panel * panel * n_in);
    for (size_t n = 0; n < n_out; ++n) {
        for (size_t k = 0; k < n_in; ++k) panels.data()[n / panel * panel * n_in + k * panel + n % panel] = T(w[n * n_in + k]);
    }
    return panels;
}

double activated(double x, Activation activation) {
    if (activation == Activation::relu) return std::max(x, 0.0);
    if (activation == Activation::gelu) return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    if (activation == Activation::gelu_tanh) return 0.5 * x * (1 + std::tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
    return x;
}

}  // namespace

TEST_CASE_TEMPLATE("products with bias, activation and residual", T, float, double) {
    const block::Kernels<T>& kernels = simd::kernels<T>();
    for (size_t K : {1, 3, 8, 17, 48}) {
        for (size_t N : {1, 5, 8, 15, 16, 17, 31, 33, 64}) {
            for (size_t M : {size_t(1), size_t(3), kernels.tile_rows, kernels.tile_rows + 1, 2 * kernels.tile_rows + 3}) {
                Dice dice(K + 100 * N);
                const Numbers w = dice.rolls(N * K);
                const auto panels = packed<T>(w, N, K, kernels.panel);
                block::AlignedArray<T> bias((N + kernels.panel - 1) / kernels.panel * kernels.panel);
                for (size_t n = 0; n < N; ++n) bias.data()[n] = T(dice.roll());
                const Matrix<T> a = random_rows<T>(M, K, M);
                for (auto [adds, activation] : {std::pair{false, Activation::none},
                                                {true, Activation::none},
                                                {false, Activation::relu},
                                                {false, Activation::gelu_tanh},
                                                {false, Activation::gelu}}) {
                    const Matrix<T> out = random_rows<T>(M, N, 7), before = random_rows<T>(M, N, 7);
                    kernels.product({.a = a.rows(M),
                                     .panels = panels.data(),
                                     .bias = bias.data(),
                                     .n_columns = N,
                                     .out = out.rows(M),
                                     .adds_to_out = adds,
                                     .activation = activation});
                    for (size_t i = 0; i < M; ++i) {
                        for (size_t n = 0; n < N; ++n) {
                            double want = double(bias.data()[n]) + (adds ? double(before.rows(M).row(i)[n]) : 0.0);
                            for (size_t k = 0; k < K; ++k) want += double(a.rows(M).row(i)[k]) * double(T(w[n * K + k]));
                            REQUIRE(std::abs(double(out.rows(M).row(i)[n]) - activated(want, activation)) <=
                                    double(K + 4) * rounding<T>);
                        }
                        for (size_t n = (N + kernels.panel - 1) / kernels.panel * kernels.panel; n < out.stride; ++n) {
                            REQUIRE(std::isnan(out.rows(M).row(i)[n]));  // nothing beyond the panel is written
                        }
                    }
                }
            }
        }
    }
}

TEST_CASE_TEMPLATE("a row's bits do not depend on the tile it falls into", T, float, double) {
    const block::Kernels<T>& kernels = simd::kernels<T>();
    const size_t K = 29, N = 37, M = 2 * kernels.tile_rows + 1;
    const auto panels = packed<T>(Dice(1).rolls(N * K), N, K, kernels.panel);
    const block::AlignedArray<T> bias(2 * N + kernels.panel);
    const Matrix<T> a = random_rows<T>(M, K, 2), together(M, N), alone(1, N);
    const auto multiply = [&](Rows<const T> rows, Rows<T> out) {
        kernels.product({.a = rows,
                         .panels = panels.data(),
                         .bias = bias.data(),
                         .n_columns = N,
                         .out = out,
                         .adds_to_out = false,
                         .activation = Activation::gelu_tanh});
    };
    multiply(a.rows(M), together.rows(M));
    for (size_t i = 0; i < M; ++i) {
        multiply({a.rows(M).row(i), 1, K, a.stride}, alone.rows(1));
        CHECK(std::memcmp(alone.rows(1).row(0), together.rows(M).row(i), N * sizeof(T)) == 0);
    }
}

TEST_CASE_TEMPLATE("weights that are mostly zero give the bits of all their rows", T, float, double) {
    const block::Kernels<T>& kernels = simd::kernels<T>();
    const size_t K = 50, M = kernels.tile_rows + 3;
    for (size_t N : {size_t(3), kernels.panel, 2 * kernels.panel + 5}) {
        for (int share : {0, 20, 45, 100}) {  // percent of the weights that are not zero
            Dice dice(N + size_t(share));
            std::vector<T> w(N * K), b(N);
            for (size_t n = 0; n < N; ++n) {
                b[n] = T(dice.roll());
                for (size_t k = 0; k < K; ++k) w[n * K + k] = int(k * 37 % 100) < share ? T(dice.roll()) : T(0);
            }
            const auto packed_rows = block::pack<T>({.weight = w, .bias = b, .n_in = K, .n_out = N, .gain = {}, .shift = {}},
                                                    kernels.panel);
            CHECK(packed_rows.used_ends.empty() == (share == 100));
            const Matrix<T> a = random_rows<T>(M, K, 3), all(M, N), used(M, N);
            for (bool skips : {false, true}) {
                kernels.product({.a = a.rows(M),
                                 .panels = packed_rows.panels.data(),
                                 .bias = packed_rows.bias.data(),
                                 .n_columns = N,
                                 .out = (skips ? used : all).rows(M),
                                 .adds_to_out = false,
                                 .activation = Activation::relu,
                                 .used = skips && share < 100 ? packed_rows.used_rows() : nullptr,
                                 .used_ends = packed_rows.used_ends.data()});
            }
            for (size_t i = 0; i < M; ++i) CHECK(std::memcmp(all.rows(M).row(i), used.rows(M).row(i), N * sizeof(T)) == 0);
        }
    }
}

TEST_CASE_TEMPLATE("attention, causal and full, of any tokens", T, float, double) {
    const block::Kernels<T>& kernels = simd::kernels<T>();
    for (size_t d : {1, 3, 5, 8, 16, 17, 48}) {
        for (size_t n_tokens : {size_t(1), size_t(2), kernels.tile_rows + 1, size_t(33), size_t(45)}) {
            for (const auto& [first, end] :
                 {std::pair(size_t(0), n_tokens), {n_tokens / 2, n_tokens}, {n_tokens / 3, n_tokens / 2 + 1}}) {
                for (bool is_causal : {true, false}) {
                    const size_t H = 3, A = H * d, n_keys = (n_tokens + kernels.panel - 1) / kernels.panel * kernels.panel;
                    const Matrix<T> qkv = random_rows<T>(n_tokens, 3 * A, d), out(n_tokens, A);
                    const Matrix<T> keys = random_rows<T>(d, n_keys, 1), scores = random_rows<T>(kernels.tile_rows, n_keys, 2);
                    std::ranges::fill(keys.memory.span(), unset<T>);
                    std::ranges::fill(scores.memory.span(), unset<T>);
                    std::ranges::fill(out.memory.span(), unset<T>);
                    kernels.attend({.qkv = qkv.rows(n_tokens),
                                    .first = first,
                                    .end = end,
                                    .n_heads = H,
                                    .head_dim = d,
                                    .is_causal = is_causal,
                                    .out = out.rows(n_tokens),
                                    .keys = keys.rows(d),
                                    .scores = scores.rows(kernels.tile_rows)});
                    const auto at = [&](size_t i, size_t column) { return double(qkv.rows(n_tokens).row(i)[column]); };
                    for (size_t i = 0; i < n_tokens; ++i) {
                        for (size_t c = 0; c < A; ++c) {
                            const size_t head = c / d * d;
                            double sum = 0, weighted = 0;
                            for (size_t j = 0; j < (is_causal ? i + 1 : n_tokens); ++j) {
                                double score = 0;
                                for (size_t k = head; k < head + d; ++k) score += at(i, k) * at(j, A + k);
                                sum += std::exp2(score);
                                weighted += std::exp2(score) * at(j, 2 * A + c);
                            }
                            const double got = double(out.rows(n_tokens).row(i)[c]);
                            if (i < first || i >= end) REQUIRE(std::isnan(got));
                            if (i >= first && i < end) REQUIRE(std::abs(got - weighted / sum) <= 40 * rounding<T>);
                        }
                    }
                }
            }
        }
    }
}

TEST_CASE_TEMPLATE("scores beyond the exponent range, and those that are not numbers", T, float, double) {
    const block::Kernels<T>& kernels = simd::kernels<T>();
    const size_t n_tokens = 21, n_keys = (n_tokens + kernels.panel - 1) / kernels.panel * kernels.panel;
    const Matrix<T> keys(1, n_keys), scores(kernels.tile_rows, n_keys);
    const auto attended = [&](T bad_key, size_t place) {
        Matrix<T> qkv(n_tokens, 3), out(n_tokens, 1);
        for (size_t i = 0; i < n_tokens; ++i) {
            T* row = qkv.rows(n_tokens).row(i);
            row[0] = T(1);
            row[1] = i == place ? bad_key : T(0);
            row[2] = T(i == place ? 5 : 3);
        }
        kernels.attend({.qkv = qkv.rows(n_tokens),
                        .first = 0,
                        .end = n_tokens,
                        .n_heads = 1,
                        .head_dim = 1,
                        .is_causal = false,
                        .out = out.rows(n_tokens),
                        .keys = keys.rows(1),
                        .scores = scores.rows(kernels.tile_rows)});
        return out.rows(n_tokens).row(7)[0];
    };
    for (size_t place : {size_t(0), size_t(3), n_tokens - 1}) {
        CHECK(attended(T(1e5), place) == T(5));
        CHECK(attended(T(-1e5), place) == T(3));
        CHECK(std::isnan(attended(unset<T>, place)));
        CHECK(std::isnan(attended(std::numeric_limits<T>::infinity(), place)));
    }
}

TEST_CASE_TEMPLATE("activations at the ends of the range", T, float, double) {
    const block::Kernels<T>& kernels = simd::kernels<T>();
    const T huge = std::numeric_limits<T>::max(), infinity = std::numeric_limits<T>::infinity();
    const Matrix<T> a(8, 1), out(8, 1);
    const T inputs[] = {T(0), T(-1e4), T(1e4), T(-300), huge, infinity, unset<T>, T(1e-30)};
    for (size_t i = 0; i < 8; ++i) a.rows(8).row(i)[0] = inputs[i];
    const auto panels = packed<T>({1.0}, 1, 1, kernels.panel);
    const block::AlignedArray<T> bias(kernels.panel);
    for (auto activation : {Activation::gelu_tanh, Activation::relu}) {
        kernels.product({.a = a.rows(8),
                         .panels = panels.data(),
                         .bias = bias.data(),
                         .n_columns = 1,
                         .out = out.rows(8),
                         .adds_to_out = false,
                         .activation = activation});
        const auto got = [&](size_t i) { return out.rows(8).row(i)[0]; };
        CHECK(got(0) == T(0));
        CHECK(std::abs(got(1)) <= T(1e-30));
        CHECK(got(2) == T(1e4));
        CHECK(std::abs(got(3)) <= T(1e-30));
        CHECK(got(4) == huge);
        CHECK(got(5) == infinity);
        CHECK(std::isnan(got(6)));
        CHECK(std::abs(got(7)) <= T(1e-30));
    }
}

TEST_CASE_TEMPLATE("norms, with and without an affine map, into another place or their own", T, float, double) {
    const block::Kernels<T>& kernels = simd::kernels<T>();
    for (size_t width : {1, 3, 16, 17, 20, 48, 96}) {
        for (size_t n_rows : {1, 3, 4, 5, 11}) {
            const Matrix<T> x = random_rows<T>(n_rows, width, width), out = random_rows<T>(n_rows, width, 1);
            const Matrix<T> affine = random_rows<T>(2, width, 3);
            for (size_t i = 0; i < n_rows; ++i) {
                for (size_t j = 0; j < width; ++j) x.rows(n_rows).row(i)[j] += T(2);
            }
            const T eps = T(1e-5);
            for (auto [norm, has_affine] :
                 {std::pair{Norm::layernorm, false}, {Norm::layernorm, true}, {Norm::rms, true}, {Norm::rms, false}}) {
                const bool is_centred = norm == Norm::layernorm;
                const T *gain = has_affine ? affine.rows(2).row(0) : nullptr,
                        *shift = has_affine && is_centred ? affine.rows(2).row(1) : nullptr;
                kernels.normalize(norm, x.rows(n_rows), out.rows(n_rows), eps, gain, shift);
                for (size_t i = 0; i < n_rows; ++i) {
                    const auto own = x.rows(n_rows).row_span(i);
                    double mean = 0, variance = 0;
                    for (T number : own) mean += is_centred ? double(number) / double(width) : 0.0;
                    for (T number : own) variance += (double(number) - mean) * (double(number) - mean) / double(width);
                    for (size_t j = 0; j < width; ++j) {
                        double want = (double(own[j]) - mean) / std::sqrt(variance + 1e-5);
                        if (has_affine) want = want * double(gain[j]) + (shift ? double(shift[j]) : 0.0);
                        REQUIRE(std::abs(double(out.rows(n_rows).row(i)[j]) - want) <= (width == 1 ? 1e-3 : 30 * rounding<T>));
                    }
                    for (size_t j = width; j < out.stride; ++j) REQUIRE(std::isnan(out.rows(n_rows).row(i)[j]));
                }
            }
            kernels.normalize(Norm::rms, x.rows(n_rows), out.rows(n_rows), eps, affine.rows(2).row(0), nullptr);
            kernels.normalize(Norm::rms, x.rows(n_rows), x.rows(n_rows), eps, affine.rows(2).row(0), nullptr);
            for (size_t i = 0; i < n_rows; ++i) {
                CHECK(std::memcmp(x.rows(n_rows).row(i), out.rows(n_rows).row(i), width * sizeof(T)) == 0);
            }
        }
    }
}

TEST_CASE_TEMPLATE("injection, positions, and sums of squares", T, float, double) {
    const block::Kernels<T>& kernels = simd::kernels<T>();
    for (size_t width : {1, 3, 8, 17, 33}) {
        const size_t n_rows = 4;
        const Matrix<T> y = random_rows<T>(n_rows, width, 1), p = random_rows<T>(n_rows, width, 2);
        const Matrix<T> place = random_rows<T>(n_rows, width, 3), x = random_rows<T>(n_rows, width, 4);
        for (Inject how : {Inject::add, Inject::mul, Inject::none}) {
            for (bool has_positions : {false, true}) {
                kernels.inject(how, y.rows(n_rows), p.rows(n_rows), has_positions ? place.rows(n_rows) : Rows<T>{}, x.rows(n_rows));
                for (size_t i = 0; i < n_rows; ++i) {
                    for (size_t j = 0; j < width; ++j) {
                        T want = y.rows(n_rows).row(i)[j];
                        if (how == Inject::add) want += p.rows(n_rows).row(i)[j];
                        if (how == Inject::mul) want *= p.rows(n_rows).row(i)[j];
                        if (has_positions) want += place.rows(n_rows).row(i)[j];
                        REQUIRE(x.rows(n_rows).row(i)[j] == want);
                    }
                }
            }
        }
        double of_difference[n_rows], of_y[n_rows];
        kernels.squares(y.rows(n_rows), p.rows(n_rows), of_difference, of_y);
        for (size_t i = 0; i < n_rows; ++i) {
            double difference = 0, own = 0;
            for (size_t j = 0; j < width; ++j) {
                const T a = y.rows(n_rows).row(i)[j], b = p.rows(n_rows).row(i)[j];
                difference += double(a - b) * double(a - b);
                own += double(a) * double(a);
            }
            CHECK(std::abs(of_difference[i] - difference) <= 1e-13 * difference);
            CHECK(std::abs(of_y[i] - own) <= 1e-13 * own);
        }
    }
    CHECK(kernels.fma_rounds(3) > 0);
}
