#include "tests/plain_model.hpp"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace looped::tests {

using block::Activation, block::Inject, block::InputKind, block::LoopNorm, block::Norm;

double Dice::roll() {
    state_ ^= state_ << 13;  // xorshift64
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return double(std::int64_t(state_ >> 41) - (1 << 22)) / (1 << 22);
}

Numbers Dice::rolls(size_t n) {
    Numbers drawn(n);
    for (double& x : drawn) x = roll();
    return drawn;
}

PlainModel::PlainModel(const block::Shape& shape, double size, std::uint64_t seed) : shape(shape), size_(size), seed_(seed) {}

Numbers& PlainModel::weight(const std::string& name, size_t n) const {
    const auto known = weights_.find(name);
    if (known != weights_.end()) return known->second;
    std::uint64_t seed = seed_;
    for (char letter : name) seed = seed * 31 + std::uint64_t(letter);
    Dice dice(seed);
    Numbers drawn = dice.rolls(n);
    const bool is_gain = name.find("norm") != std::string::npos && name.ends_with("weight");
    for (double& x : drawn) x = double(float(is_gain ? 1 + 0.1 * x : size_ * x));
    return weights_[name] = drawn;
}

Numbers PlainModel::linear(const std::string& name, const Numbers& x, size_t n_in, size_t n_out, bool has_bias) const {
    const Numbers& w = weight(name + ".weight", n_in * n_out);
    const size_t n_rows = x.size() / n_in;
    Numbers y(n_rows * n_out);
    for (size_t i = 0; i < n_rows; ++i) {
        for (size_t o = 0; o < n_out; ++o) {
            double sum = has_bias ? weight(name + ".bias", n_out)[o] : 0.0;
            for (size_t k = 0; k < n_in; ++k) sum += w[o * n_in + k] * x[i * n_in + k];
            y[i * n_out + o] = sum;
        }
    }
    return y;
}

Numbers PlainModel::norm(const std::string& name, const Numbers& x) const {
    const size_t C = shape.d_model;
    const bool is_centred = shape.norm == Norm::layernorm;
    const Numbers& gain = weight(name + ".weight", C);
    const Numbers shift = is_centred ? weight(name + ".bias", C) : Numbers(C);
    Numbers y(x.size());
    for (size_t i = 0; i < x.size(); i += C) {
        double mean = 0, variance = 0;
        for (size_t c = 0; is_centred && c < C; ++c) mean += x[i + c] / double(C);
        for (size_t c = 0; c < C; ++c) variance += (x[i + c] - mean) * (x[i + c] - mean) / double(C);
        for (size_t c = 0; c < C; ++c) y[i + c] = (x[i + c] - mean) / std::sqrt(variance + shape.norm_eps) * gain[c] + shift[c];
    }
    return y;
}

Numbers PlainModel::attend(const Numbers& qkv) const {
    const size_t A = shape.attention_width(), d = shape.head_dim, T = qkv.size() / (3 * A);
    Numbers out(T * A);
    for (size_t head = 0; head < shape.n_heads; ++head) {
        for (size_t i = 0; i < T; ++i) {
            const size_t n_seen = shape.is_causal ? i + 1 : T;
            Numbers share(n_seen);
            for (size_t j = 0; j < n_seen; ++j) {
                for (size_t k = 0; k < d; ++k) share[j] += qkv[i * 3 * A + head * d + k] * qkv[j * 3 * A + A + head * d + k];
                share[j] /= std::sqrt(double(d));
            }
            const double most = *std::ranges::max_element(share);
            double sum = 0;
            for (double& s : share) sum += s = std::exp(s - most);
            for (size_t j = 0; j < n_seen; ++j) {
                for (size_t k = 0; k < d; ++k) out[i * A + head * d + k] += share[j] / sum * qkv[j * 3 * A + 2 * A + head * d + k];
            }
        }
    }
    return out;
}

void PlainModel::run_layer(const std::string& prefix, Numbers& x) const {
    const size_t C = shape.d_model, A = shape.attention_width();
    const auto normed = [&](const char* name) { return shape.norm == Norm::none ? x : norm(prefix + name, x); };
    const auto add = [&](const Numbers& more) { std::ranges::transform(x, more, x.begin(), std::plus{}); };
    const Numbers qkv = linear(prefix + "attn.qkv", normed("norm_1"), C, 3 * A, shape.has_bias);
    add(linear(prefix + "attn.proj", attend(qkv), A, C, shape.has_bias));
    Numbers hidden = linear(prefix + "mlp.fc", normed("norm_2"), C, (shape.is_gated() ? 2 : 1) * shape.d_ff, shape.has_bias);
    if (shape.is_gated()) {
        Numbers passed;
        for (size_t i = 0; i < hidden.size(); i += 2 * shape.d_ff) {
            for (size_t k = i; k < i + shape.d_ff; ++k)
                passed.push_back(hidden[k] / (1 + std::exp(-hidden[k])) * hidden[k + shape.d_ff]);
        }
        hidden = passed;
    }
    for (double& h : hidden) {
        if (shape.activation == Activation::gelu) h = 0.5 * h * std::erfc(-h / std::numbers::sqrt2);
        if (shape.activation == Activation::relu) h = std::max(h, 0.0);
        if (shape.activation == Activation::gelu_tanh) {
            h = 0.5 * h * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (h + 0.044715 * h * h * h)));
        }
    }
    add(linear(prefix + "mlp.proj", hidden, shape.d_ff, C, shape.has_bias));
}

Numbers PlainModel::embed(const Numbers& features, const std::vector<std::int64_t>& ids) const {
    const size_t C = shape.d_model;
    Numbers x = features;
    if (shape.input_kind == InputKind::features) x = linear("read_in", features, shape.n_dims, C, true);
    if (shape.input_kind == InputKind::tokens) {
        x.clear();
        const Numbers& table = weight("embedding.weight", shape.vocab_size * C);
        for (std::int64_t id : ids) x.insert(x.end(), table.begin() + id * std::int64_t(C), table.begin() + (id + 1) * std::int64_t(C));
    }
    if (shape.has_positions && shape.adds_positions_once) {
        const Numbers& place = weight("positions.weight", shape.n_positions * C);
        for (size_t i = 0; i < x.size(); ++i) x[i] += place[i];
    }
    for (size_t i = 0; i < shape.n_prelude; ++i) run_layer("prelude." + std::to_string(i) + ".", x);
    return x;
}

Numbers PlainModel::step(const Numbers& state, const Numbers& signal) const {
    Numbers x = state;
    for (size_t i = 0; i < x.size(); ++i) {
        if (shape.inject == Inject::add) x[i] += signal[i];
        if (shape.inject == Inject::mul) x[i] *= signal[i];
        if (shape.adds_positions_each_loop()) x[i] += weight("positions.weight", shape.n_positions * shape.d_model)[i];
    }
    for (size_t i = 0; i < shape.n_core; ++i) run_layer("core." + std::to_string(i) + ".", x);
    return shape.loop_norm == LoopNorm::each ? norm("final_norm", x) : x;
}

Numbers PlainModel::read(const Numbers& state) const {
    const size_t C = shape.d_model;
    Numbers x = state;
    for (size_t i = 0; i < shape.n_coda; ++i) run_layer("coda." + std::to_string(i) + ".", x);
    if (shape.loop_norm == LoopNorm::once) x = norm("final_norm", x);
    Numbers places;
    for (size_t i = 0; i < x.size(); i += C * shape.read_stride) {
        places.insert(places.end(), x.begin() + std::ptrdiff_t(i), x.begin() + std::ptrdiff_t(i + C));
    }
    if (!shape.readout_width) return places;
    if (!shape.tie_readout) return linear("read_out", places, C, shape.readout_width, shape.readout_has_bias);
    const Numbers& table = weight("embedding.weight", shape.vocab_size * C);
    Numbers logits(places.size() / C * shape.vocab_size);
    for (size_t i = 0; i < logits.size(); ++i) {
        for (size_t c = 0; c < C; ++c) logits[i] += places[i / shape.vocab_size * C + c] * table[i % shape.vocab_size * C + c];
    }
    return logits;
}

block::Shape small_shape() {
    block::Shape shape;
    shape.d_model = 16;
    shape.n_heads = 2;
    shape.head_dim = 8;
    shape.d_ff = 64;
    shape.input_kind = InputKind::features;
    shape.n_dims = 3;
    shape.has_positions = true;
    shape.n_positions = 70;
    shape.readout_width = 1;
    shape.read_stride = 2;
    return shape;
}

PlainModel scalar_map(double a) {
    block::Shape shape;
    shape.d_model = shape.n_heads = shape.head_dim = shape.d_ff = 1;
    shape.norm = Norm::none;
    shape.loop_norm = LoopNorm::none;
    PlainModel model(shape, 0.0);
    model.weight("core.0.attn.qkv.weight", 3) = {0, 0, 1};
    model.weight("core.0.attn.proj.weight", 1) = {a - 1};
    return model;
}

}  // namespace looped::tests
