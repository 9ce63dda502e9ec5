// The register tile: up to V::tile_rows rows by one or two vectors of columns, accumulated over K in one order.
#pragma once

#include <array>

#include "block/kernels.hpp"
#include "simd/functions.hpp"

namespace looped::block {

template <class T>
struct Tile {
    const T* a;  // first row; the value of row r at k is a[r a_stride + k]
    size_t a_stride;
    const T* b;  // b[k b_stride + column]
    size_t b_stride;
    size_t depth;  // K
    T* out;
    size_t out_stride;
    const T* bias = nullptr;       // added to every row
    const T* row_scale = nullptr;  // or: multiplies row r
    bool adds_to_out = false;
    Activation activation = Activation::none;  // silu_gated is left to `product`
    const std::uint32_t* used = nullptr;       // where it skips zeros: the `depth` values of k that count
    const T* next = nullptr;                   // where it fetches: the lines that last_next + 1 rows of b begin with, into L2
    size_t last_next = 0;
};

template <class V, Activation activation>
LOOPED_INLINE V activated(V x) {
    if constexpr (activation == Activation::relu) return simd::relu(x);
    if constexpr (activation == Activation::gelu_tanh) return simd::gelu_tanh(x);
    if constexpr (activation == Activation::gelu) return simd::gelu(x);
}

template <class V, int n_rows, int n_vectors, Activation activation>
LOOPED_INLINE void activate(const Tile<typename V::Scalar>& tile) {
    // After the store, on lines that are still in L1: 28 inlined copies of GELU would not fit the instruction cache.
    for (int r = 0; r < n_rows; ++r) {
        auto* out = tile.out + r * tile.out_stride;
        simd::static_for<n_vectors>([&](auto c) __attribute__((always_inline)) {
            activated<V, activation>(V::load(out + c * V::width)).store(out + c * V::width);
        });
    }
}

// How a tile goes over K.
enum class Walk : std::uint8_t { plain, skips_zeros, fetches_next };

template <class V, int n_rows, int n_vectors, Walk walk>
void compute_tile(const Tile<typename V::Scalar>& tile) noexcept {
    using T = typename V::Scalar;
    constexpr int group = 3;  // rows that share a base address: base, base + stride, base + 2 stride are free on x86
    constexpr int n_groups = (n_rows + group - 1) / group;
    V sum[n_rows][n_vectors];
    simd::static_for<n_rows>([&](auto r) __attribute__((always_inline)) {
        simd::static_for<n_vectors>([&](auto c) __attribute__((always_inline)) { sum[r][c] = V::zero(); });
    });
    const T* a[n_groups];
    simd::static_for<n_groups>([&](auto i) __attribute__((always_inline)) { a[i] = tile.a + i * group * tile.a_stride; });
    const T* b = tile.b;
    const size_t stride = tile.a_stride, b_stride = tile.b_stride;

    for (size_t i = 0; i < tile.depth; ++i) {
        size_t k = i;
        if constexpr (walk == Walk::skips_zeros) {
            k = tile.used[i];
            b = tile.b + k * b_stride;
        }
        if constexpr (walk == Walk::fetches_next) __builtin_prefetch(tile.next + std::min(i, tile.last_next) * b_stride, 0, 2);
        V column[n_vectors];
        simd::static_for<n_vectors>([&](auto c) __attribute__((always_inline)) { column[c] = V::load(b + c * V::width); });
        simd::static_for<n_rows>([&](auto r) __attribute__((always_inline)) {
            V x = V::broadcast(a[r / group][size_t(r % group) * stride + k]);
            simd::static_for<n_vectors>([&](auto c) __attribute__((always_inline)) { sum[r][c] = V::fma(x, column[c], sum[r][c]); });
        });
        if constexpr (walk != Walk::skips_zeros) b += b_stride;
    }

    const auto store = [&](auto finish) __attribute__((always_inline)) {
        simd::static_for<n_rows>([&](auto r) __attribute__((always_inline)) {
            T* out = tile.out + r * tile.out_stride;
            simd::static_for<n_vectors>([&](auto c) __attribute__((always_inline)) {
                finish(sum[r][c], r, c, out + c * V::width).store(out + c * V::width);
            });
        });
    };
    if (tile.row_scale) {
        store([&](V x, auto r, auto, const T*) __attribute__((always_inline)) { return x * V::broadcast(tile.row_scale[r]); });
    } else if (!tile.bias) {
        store([&](V x, auto, auto, const T*) __attribute__((always_inline)) { return x; });
    } else {
        V bias[n_vectors];
        simd::static_for<n_vectors>([&](auto c) __attribute__((always_inline)) { bias[c] = V::load(tile.bias + c * V::width); });
        if (tile.adds_to_out) {
            store([&](V x, auto, auto c, const T* out) __attribute__((always_inline)) { return (x + bias[c]) + V::load(out); });
        } else {
            store([&](V x, auto, auto c, const T*) __attribute__((always_inline)) { return x + bias[c]; });
            if (tile.activation == Activation::gelu_tanh) activate<V, n_rows, n_vectors, Activation::gelu_tanh>(tile);
            if (tile.activation == Activation::gelu) activate<V, n_rows, n_vectors, Activation::gelu>(tile);
            if (tile.activation == Activation::relu) activate<V, n_rows, n_vectors, Activation::relu>(tile);
        }
    }
}

// compute_tile for a number of rows that is known at run time: tile_of<V, n_vectors>[n_rows - 1].
template <class V, int n_vectors, Walk walk = Walk::plain>
inline constexpr auto tile_of = []<int... I>(std::integer_sequence<int, I...>) {
    using Function = void (*)(const Tile<typename V::Scalar>&) noexcept;
    return std::array<Function, sizeof...(I)>{&compute_tile<V, I + 1, n_vectors, walk>...};
}(std::make_integer_sequence<int, V::tile_rows>{});

// Rows in tiles of nearly one size, so that the last is not thin: body(first row, rows of the tile).
template <class V, class Body>
LOOPED_INLINE void for_row_tiles(size_t n_rows, Body&& body) {
    const size_t n_tiles = (n_rows + V::tile_rows - 1) / V::tile_rows;
    size_t first = 0;
    for (size_t i = 0; i < n_tiles; ++i) {
        size_t rows = n_rows / n_tiles + (i < n_rows % n_tiles ? 1 : 0);
        body(first, rows);
        first += rows;
    }
}

// Two columns to one, from a tile that is still in L1.
template <class V>
void gate_units(Rows<const typename V::Scalar> gates_and_units, Rows<typename V::Scalar> out) noexcept {
    for (size_t r = 0; r < gates_and_units.n_rows; ++r) {
        const auto* gate = gates_and_units.row(r);
        (simd::silu(V::load(gate)) * V::load(gate + V::width)).store(out.row(r));
    }
}

// fetches_next: for rows of one or two tiles, whose weights would come from memory while the first tile waits and not while the second
// is multiplied.
template <class V, bool fetches_next = false>
void product(const Product<typename V::Scalar>& job) noexcept {
    using T = typename V::Scalar;
    constexpr size_t panel = 2 * V::width;
    const size_t depth = job.a.width;
    constexpr size_t most_lines = 131072 / sizeof(T) / panel;  // of a deep panel, what L2 has room for beside this one
    constexpr Walk walk = fetches_next ? Walk::fetches_next : Walk::plain;
    Lookout lookout(job.stop);
    const bool is_gated = job.activation == Activation::silu_gated;
    alignas(64) T gates_and_units[V::tile_rows * panel];
    for (size_t column = 0; column < job.n_columns; column += panel) {
        const bool is_narrow = job.n_columns - column <= size_t(V::width);
        const size_t p = column / panel, used_begin = job.used && p ? job.used_ends[p - 1] : 0;
        const size_t n_used = job.used ? job.used_ends[p] - used_begin : depth;
        const bool is_last = job.n_columns - column <= panel;
        const T* next = job.panels + (is_last ? column : column + panel) * depth;
        for_row_tiles<V>(job.a.n_rows, [&](size_t first, size_t rows) __attribute__((always_inline)) {
            const Rows<T> out = is_gated ? Rows<T>{gates_and_units, rows, panel, panel}
                                         : Rows<T>{job.out.row(first) + column, rows, panel, job.out.stride};
            const Tile<T> tile{
                .a = job.a.row(first),
                .a_stride = job.a.stride,
                .b = job.panels + column * depth,
                .b_stride = panel,
                .depth = n_used,
                .out = out.first,
                .out_stride = out.stride,
                .bias = job.bias + column,
                .adds_to_out = job.adds_to_out,
                .activation = job.activation,
                .used = job.used + used_begin,
                .next = first == 0 ? next : next + V::width,
                .last_next = std::min(depth, most_lines) - 1,
            };
            if (job.used) {
                is_narrow ? tile_of<V, 1, Walk::skips_zeros>[rows - 1](tile) : tile_of<V, 2, Walk::skips_zeros>[rows - 1](tile);
            } else {
                is_narrow ? tile_of<V, 1, walk>[rows - 1](tile) : tile_of<V, 2, walk>[rows - 1](tile);
            }
            if (is_gated) gate_units<V>(out, job.out.from_row(first).from_column(column / 2));
        });
        if (lookout.sees_stop_after(job.a.n_rows * (n_used + 1) * panel)) return;
    }
}

}  // namespace looped::block
