// A model's shape and its weights, packed once for the kernels.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "block/kernels.hpp"

namespace looped::block {

enum class LoopNorm : std::uint8_t { each, once, none };
enum class StateInit : std::uint8_t { zeros, ones, embedding, given };
enum class InputKind : std::uint8_t { features, tokens, states };

// The fields of LoopedConfig that the engine needs, under the same names.
struct Shape {
    size_t d_model = 0, n_heads = 0, head_dim = 0, d_ff = 0;
    size_t n_prelude = 0, n_core = 1, n_coda = 0;
    InputKind input_kind = InputKind::states;
    size_t n_dims = 0, vocab_size = 0;
    Activation activation = Activation::gelu_tanh;
    Norm norm = Norm::layernorm;
    double norm_eps = 1e-5;
    bool has_bias = true;
    bool is_causal = true;
    bool has_positions = false;
    bool adds_positions_once = false;  // to the embedding, and not in every loop
    size_t n_positions = 0;
    Inject inject = Inject::add;
    StateInit state_init = StateInit::zeros;  // read by decode alone: a loop is given its first state
    LoopNorm loop_norm = LoopNorm::each;
    size_t readout_width = 0;  // 0: the closed state itself is what is read
    bool readout_has_bias = true;
    bool tie_readout = false;
    size_t read_stride = 1;

    bool adds_positions_each_loop() const { return has_positions && !adds_positions_once; }
    bool is_gated() const { return activation == Activation::silu_gated; }
    bool has_shift() const { return norm == Norm::layernorm; }
    size_t attention_width() const { return n_heads * head_dim; }
    size_t read_width() const { return readout_width ? readout_width : d_model; }
    double operations_per_token(size_t n_layers) const {  // of the matrix products
        return 2.0 * double(n_layers) * double(d_model) * double(4 * attention_width() + (is_gated() ? 3 : 2) * d_ff);
    }
    size_t n_read(size_t n_tokens) const { return (n_tokens + read_stride - 1) / read_stride; }
};

// A weight by its name in the model's state dict, row-major [rows, columns]. Throws std::invalid_argument if it has another shape.
template <class T>
using WeightSource = std::function<std::span<const T>(const std::string& name, size_t rows, size_t columns)>;

// Panels of `panel` output columns, each [n_in, panel], zeros beyond the last column; and the bias, as wide.
template <class T>
struct PackedMatrix {
    size_t n_in = 0, n_out = 0;
    AlignedArray<T> panels, bias;
    // Where at most half of the rows of all panels hold anything, as in a machine built by hand: which these are. A zero times a
    // number is 0, so the sums are the same to the bit; times NaN it is NaN, which other features of the token still tell.
    std::vector<std::uint32_t> used;
    std::vector<size_t> used_ends;

    // Never null: of weights that are all zero there is a list of no rows.
    const std::uint32_t* used_rows() const {
        static constexpr std::uint32_t none = 0;
        return used.empty() ? &none : used.data();
    }
};

// What is packed: y = scale (W (gain * x + shift) + b), with `scale` for the first n_scaled outputs and 1 for the others.
template <class T>
struct Linear {
    std::span<const T> weight;  // [n_out, n_in]
    std::span<const T> bias;    // [n_out] or empty
    size_t n_in, n_out;
    std::span<const T> gain, shift;  // of the norm before it, [n_in], or empty
    size_t n_scaled = 0;
    double scale = 1.0;
    size_t n_gated = 0;  // the first rows are as many gates, the next ones what these let through: half panels in turns
};

template <class T>
PackedMatrix<T> pack(const Linear<T>& linear, size_t panel);

template <class T>
struct Layer {
    PackedMatrix<T> qkv, proj, fc, down;  // the norms' affine maps are folded into qkv and fc, the softmax's scale into the queries
    size_t n_working = 0;                 // heads up to the last whose output counts; all, where masks or dense weights want them
};

template <class T>
struct Model {
    // Reads and packs everything. The kernels are those of this process.
    Model(const Shape& shape, const WeightSource<T>& source);

    Shape shape;
    const Kernels<T>* kernels;
    std::vector<Layer<T>> prelude, core, coda;
    PackedMatrix<T> read_in;                  // of features
    AlignedArray<T> embedding;                // of tokens, [vocab_size, C]
    AlignedArray<T> positions;                // [n_positions, C]
    AlignedArray<T> final_gain, final_shift;  // [C], where there is a final norm and it has them
    PackedMatrix<T> read_out;

    Rows<const T> position_rows() const { return {positions.data(), shape.n_positions, shape.d_model, shape.d_model}; }
};

extern template PackedMatrix<float> pack(const Linear<float>&, size_t);
extern template PackedMatrix<double> pack(const Linear<double>&, size_t);
extern template struct Model<float>;
extern template struct Model<double>;

}  // namespace looped::block
