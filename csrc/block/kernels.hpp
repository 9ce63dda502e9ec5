// The operations that are compiled once per instruction set, as a table of functions. The rest of the engine is built for the
// baseline and calls them through the table that the processor allows (simd/isa.hpp).
//
// What every kernel promises: a row's result depends on that row's numbers alone, and never on how many rows there are or on which
// tile the row falls into. Sums run in one order.
#pragma once

#include <cstdint>

#include "block/rows.hpp"
#include "block/stop.hpp"

namespace looped::block {

// silu_gated takes two columns to one, silu(gate) up; the others act on each.
enum class Activation : std::uint8_t { none, relu, gelu_tanh, gelu, silu_gated };
enum class Norm : std::uint8_t { none, layernorm, rms };
enum class Inject : std::uint8_t { add, mul, none };

// Columns that a kernel may write, or read, beyond the last one: strides leave room for them.
constexpr size_t widest_panel = 32;

// out = activation(a W' + bias), or out += a W' + bias. For silu_gated each panel is half a panel of gates and then, in their order,
// the columns that these let through: half as many columns of `out`.
template <class T>
struct Product {
    Rows<const T> a;         // [M, K]
    const T* panels;         // W in panels of `panel` columns, each [K, panel], zeros beyond the last column
    const T* bias;           // zeros beyond the last column
    size_t n_columns;        // N, whole panels for silu_gated
    Rows<T> out;             // [M, N]; the columns up to the panel's end are written too
    bool adds_to_out;
    Activation activation;
    StopRequest* stop = nullptr;
    // Of weights that are mostly zero: the rows of each panel that are not, those of panel p from used[used_ends[p - 1]] on.
    const std::uint32_t* used = nullptr;
    const size_t* used_ends = nullptr;
};

// Attention of the tokens from `first` up to `end` over all tokens, or over those up to their own where `is_causal`. The queries
// are scaled so that the softmax is a power of two: log2(e) / sqrt(head_dim) is in their weights.
template <class T>
struct Attention {
    Rows<const T> qkv;  // [T, 3 H head_dim]
    size_t first, end;
    size_t n_heads;
    size_t head_dim;
    size_t n_working = size_t(-1);  // heads that attend, the first ones; what the others would write is left as it was
    bool is_causal;
    Rows<T> out;         // [T, H head_dim]; rows from `first` up to `end` are written
    Rows<T> keys;        // scratch [head_dim, T rounded up to panels]: keys of one head, transposed
    Rows<T> scores;      // scratch [tile_rows, as wide]
    StopRequest* stop = nullptr;
};

// Attention of one head's queries over keys and values in pages of `panel` tokens each.
template <class T>
struct PagedAttention {
    Rows<const T> queries;     // [n, head_dim], scaled as above; n is at most tile_rows
    const size_t* n_seen;      // a query each, at least 1 and never falling: it attends to the first n_seen tokens
    const T* const* pages;     // one after the other
    size_t keys, values;  // where in every page this head's begin: [head_dim, panel] and [panel, head_dim], and room for a panel
    Rows<T> out;  // [n, head_dim]; nothing beyond is written
    Rows<T> scores;  // scratch [tile_rows, whole pages]
    // What this thread attends to next, whose keys are fetched meanwhile: its pages, and where in them the keys begin.
    std::span<const T* const> next_pages = {};
    size_t next_keys = 0;
};

template <class T>
struct Kernels {
    const char* isa;
    size_t panel;  // columns of a packed panel
    size_t tile_rows;  // most rows of a register tile

    void (*product)(const Product<T>&) noexcept;
    void (*attend)(const Attention<T>&) noexcept;

    // The same product, and for few rows at the speed at which the weights are read.
    void (*product_by_columns)(const Product<T>&) noexcept;
    void (*attend_pages)(const PagedAttention<T>&) noexcept;

    // layernorm: out = (x - mean) / sqrt(variance + eps), in two passes. rms: out = x / sqrt(mean of squares + eps). Then * gain
    // and + shift, each where it is given.
    void (*normalize)(Norm how, Rows<const T> x, Rows<T> out, T eps, const T* gain, const T* shift) noexcept;

    // x = inject(state, signal) + positions; columns beyond the width are zero. `positions` may be empty.
    void (*inject)(Inject how, Rows<const T> state, Rows<const T> signal, Rows<const T> positions, Rows<T> x) noexcept;

    // Per row: the sums of squares of a - b and of a, in double.
    void (*squares)(Rows<const T> a, Rows<const T> b, double* of_difference, double* of_a) noexcept;

    // Fused multiply-adds on registers alone, `n` rounds. Returns the floating-point operations done.
    double (*fma_rounds)(std::int64_t n) noexcept;

    // The sum of n numbers, read as fast as they come.
    double (*read_memory)(const T* numbers, size_t n) noexcept;
};

// Defined in kernels_<isa>.cpp; only those of the platform exist.
template <class T> const Kernels<T>& portable_kernels();
template <class T> const Kernels<T>& avx2_kernels();
template <class T> const Kernels<T>& avx512_kernels();
template <class T> const Kernels<T>& neon_kernels();

}  // namespace looped::block
