#include "block/weights.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "simd/isa.hpp"

namespace looped::block {

// Where a row of the weight stands among the columns of all panels.
template <class T>
size_t column_of(const Linear<T>& linear, size_t row, size_t panel) {
    if (!linear.n_gated) return row;
    const size_t half = panel / 2, unit = row % linear.n_gated, is_gate = row < linear.n_gated;
    return unit / half * panel + (is_gate ? 0 : half) + unit % half;
}

template <class T>
void note_used_rows(PackedMatrix<T>& packed, size_t panel) {
    const size_t size = panel * packed.n_in, n_panels = size ? packed.panels.size() / size : 0;
    for (size_t p = 0; p < n_panels; ++p) {
        for (size_t k = 0; k < packed.n_in; ++k) {
            const T* row = packed.panels.data() + p * size + k * panel;
            if (std::any_of(row, row + panel, [](T value) { return value != T(0); })) packed.used.push_back(std::uint32_t(k));
        }
        packed.used_ends.push_back(packed.used.size());
    }
    if (2 * packed.used.size() > n_panels * packed.n_in) {
        packed.used = {};
        packed.used_ends = {};
    }
}

// (scale W gain) x + scale (W shift + b), folded in double before rounding.
template <class T>
PackedMatrix<T> pack(const Linear<T>& linear, size_t panel) {
    const size_t n_columns = column_of(linear, linear.n_out - 1, panel) + 1, n_panels = (n_columns + panel - 1) / panel;
    PackedMatrix<T> packed{linear.n_in,
                           linear.n_gated ? n_panels * panel : linear.n_out,
                           AlignedArray<T>(n_panels * panel * linear.n_in),
                           AlignedArray<T>(n_panels * panel),
                           {},
                           {}};
    for (size_t n = 0; n < linear.n_out; ++n) {
        const double scale = n < linear.n_scaled ? linear.scale : 1.0;
        const auto row = linear.weight.subspan(n * linear.n_in, linear.n_in);
        const size_t place = column_of(linear, n, panel);
        T* column = packed.panels.data() + place / panel * panel * linear.n_in + place % panel;
        double bias = linear.bias.empty() ? 0.0 : double(linear.bias[n]);
        for (size_t k = 0; k < linear.n_in; ++k) {
            const double gain = linear.gain.empty() ? 1.0 : double(linear.gain[k]);
            if (!linear.shift.empty()) bias += double(row[k]) * double(linear.shift[k]);
            column[k * panel] = T(double(row[k]) * gain * scale);
        }
        packed.bias.data()[place] = T(bias * scale);
    }
    note_used_rows(packed, panel);
    return packed;
}

namespace {

template <class T>
AlignedArray<T> copy(std::span<const T> values) {
    AlignedArray<T> own(values.size());
    std::copy(values.begin(), values.end(), own.data());
    return own;
}

template <class T>
Layer<T> pack_layer(const Shape& shape, const std::string& prefix, const WeightSource<T>& source, size_t panel) {
    const size_t C = shape.d_model, A = shape.attention_width();
    const auto linear = [&](const std::string& name, size_t n_in, size_t n_out, const std::string& norm) {
        Linear<T> map{.weight = source(prefix + name + ".weight", n_out, n_in),
                      .bias = shape.has_bias ? source(prefix + name + ".bias", n_out, 1) : std::span<const T>{},
                      .n_in = n_in,
                      .n_out = n_out,
                      .gain = {},
                      .shift = {}};
        if (shape.norm != Norm::none && !norm.empty()) map.gain = source(prefix + norm + ".weight", n_in, 1);
        if (shape.has_shift() && !norm.empty()) map.shift = source(prefix + norm + ".bias", n_in, 1);
        return map;
    };
    Linear<T> qkv = linear("attn.qkv", C, 3 * A, "norm_1");
    qkv.n_scaled = A;
    qkv.scale = std::numbers::log2e / std::sqrt(double(shape.head_dim));
    Linear<T> fc = linear("mlp.fc", C, (shape.is_gated() ? 2 : 1) * shape.d_ff, "norm_2");
    fc.n_gated = shape.is_gated() ? shape.d_ff : 0;
    Layer<T> layer{pack(qkv, panel), pack(linear("attn.proj", A, C, ""), panel), pack(fc, panel),
                   pack(linear("mlp.proj", shape.d_ff, C, ""), panel), shape.n_heads};
    if (!shape.is_causal && !layer.proj.used_ends.empty()) {
        const auto& used = layer.proj.used;
        layer.n_working = used.empty() ? 0 : std::ranges::max(used) / shape.head_dim + 1;
    }
    return layer;
}

}  // namespace

template <class T>
Model<T>::Model(const Shape& shape, const WeightSource<T>& source) : shape(shape), kernels(&simd::kernels<T>()) {
    const size_t C = shape.d_model;
    const auto layers = [&](const std::string& name, size_t n) {
        std::vector<Layer<T>> packed;
        for (size_t i = 0; i < n; ++i)
            packed.push_back(pack_layer<T>(shape, name + "." + std::to_string(i) + ".", source, kernels->panel));
        return packed;
    };
    prelude = layers("prelude", shape.n_prelude);
    core = layers("core", shape.n_core);
    coda = layers("coda", shape.n_coda);
    if (shape.input_kind == InputKind::features) {
        read_in = pack<T>({.weight = source("read_in.weight", C, shape.n_dims),
                           .bias = source("read_in.bias", C, 1),
                           .n_in = shape.n_dims,
                           .n_out = C,
                           .gain = {},
                           .shift = {}},
                          kernels->panel);
        // Of a prompt every number is read, because nothing else would tell that it is not finite.
        read_in.used = {};
        read_in.used_ends = {};
    }
    if (shape.input_kind == InputKind::tokens) embedding = copy(source("embedding.weight", shape.vocab_size, C));
    if (shape.has_positions) positions = copy(source("positions.weight", shape.n_positions, C));
    if (shape.loop_norm != LoopNorm::none) {
        final_gain = copy(source("final_norm.weight", C, 1));
        if (shape.has_shift()) final_shift = copy(source("final_norm.bias", C, 1));
    }
    if (shape.readout_width) {
        const size_t n_out = shape.readout_width;
        const bool has_bias = shape.readout_has_bias && !shape.tie_readout;
        read_out = pack<T>({.weight = source(shape.tie_readout ? "embedding.weight" : "read_out.weight", n_out, C),
                            .bias = has_bias ? source("read_out.bias", n_out, 1) : std::span<const T>{},
                            .n_in = C,
                            .n_out = n_out,
                            .gain = {},
                            .shift = {}},
                           kernels->panel);
    }
}

template PackedMatrix<float> pack(const Linear<float>&, size_t);
template PackedMatrix<double> pack(const Linear<double>&, size_t);
template struct Model<float>;
template struct Model<double>;

}  // namespace looped::block
