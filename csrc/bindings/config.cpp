#include "bindings/config.hpp"

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "bindings/arrays.hpp"

namespace looped {
namespace {

// A value of a dictionary by its name in a table of names.
template <class Value>
Value choice(const py::dict& values, const char* key, std::initializer_list<std::pair<const char*, Value>> table) {
    const auto name = values[key].cast<std::string>();
    std::string allowed;
    for (const auto& [known, value] : table) {
        if (name == known) return value;
        allowed += (allowed.empty() ? "" : ", ") + std::string(known);
    }
    refuse(std::string(key) + "='" + name + "' is not one of " + allowed);
}

}  // namespace

block::Shape shape_of(const py::dict& config) {
    using block::Activation, block::Inject, block::InputKind, block::LoopNorm, block::Norm, block::StateInit;
    const auto size = [&](const char* key) { return config[key].cast<size_t>(); };
    block::Shape shape;
    shape.d_model = size("d_model");
    shape.n_heads = size("n_heads");
    shape.head_dim = size("head_dim");
    shape.d_ff = size("d_ff");
    shape.n_prelude = size("n_prelude");
    shape.n_core = size("n_core");
    shape.n_coda = size("n_coda");
    shape.activation = choice<Activation>(config, "activation",
                                          {{"gelu_tanh", Activation::gelu_tanh},
                                           {"gelu", Activation::gelu},
                                           {"relu", Activation::relu},
                                           {"silu_gated", Activation::silu_gated}});
    shape.norm = choice<Norm>(config, "norm_kind", {{"layernorm", Norm::layernorm}, {"rms", Norm::rms}, {"none", Norm::none}});
    shape.norm_eps = config["norm_eps"].cast<double>();
    shape.has_bias = config["bias"].cast<bool>();
    shape.is_causal = choice<bool>(config, "mask_kind", {{"causal", true}, {"full", false}});
    shape.has_positions = choice<bool>(config, "pos_kind", {{"learned", true}, {"none", false}});
    shape.adds_positions_once = choice<bool>(config, "pos_when", {{"once", true}, {"each_loop", false}});
    shape.n_positions = shape.has_positions ? size("n_positions") : 0;
    shape.input_kind = choice<InputKind>(
        config, "input_kind", {{"features", InputKind::features}, {"tokens", InputKind::tokens}, {"states", InputKind::states}});
    if (shape.input_kind == InputKind::features) shape.n_dims = size("n_dims");
    if (shape.input_kind == InputKind::tokens) shape.vocab_size = size("vocab_size");
    shape.inject = choice<Inject>(config, "inject", {{"add", Inject::add}, {"mul", Inject::mul}, {"none", Inject::none}});
    shape.loop_norm = choice<LoopNorm>(config, "loop_norm",
                                       {{"each", LoopNorm::each}, {"once", LoopNorm::once}, {"none", LoopNorm::none}});
    shape.state_init = choice<StateInit>(
        config, "state_init",
        {{"zeros", StateInit::zeros}, {"ones", StateInit::ones}, {"embedding", StateInit::embedding}, {"given", StateInit::given}});
    const auto readout = config["readout"].cast<std::string>();
    shape.readout_width = readout == "scalar"       ? 1
                          : readout == "classes"    ? size("n_classes")
                          : readout == "vocabulary" ? size("vocab_size")
                                                    : 0;
    shape.readout_has_bias = readout != "vocabulary";
    shape.tie_readout = config["tie_readout"].cast<bool>();
    shape.read_stride = readout == "none" ? 1 : size("read_stride");
    if (!shape.d_model || !shape.n_heads || !shape.head_dim || !shape.d_ff || !shape.n_core || !shape.read_stride) {
        refuse("Engine: d_model, n_heads, head_dim, d_ff, n_core and read_stride must be at least 1");
    }
    constexpr size_t most = size_t(1) << 31;  // so that no product of two wraps
    for (size_t own : {shape.d_model, shape.n_heads, shape.head_dim, shape.d_ff, shape.n_positions, shape.n_dims, shape.vocab_size,
                       shape.readout_width, shape.read_stride, shape.attention_width()}) {
        if (own >= most) refuse("Engine: the config has a size of " + std::to_string(own) + "; all must be below 2^31");
    }
    return shape;
}

loop::Spec spec_of(const py::dict& values, bool is_causal) {
    using loop::OnStall, loop::Rule;
    loop::Spec spec;
    const auto number = [&](const char* key) { return values[key].cast<std::int64_t>(); };
    spec.n_loops = number("n_loops");
    spec.rule = choice<Rule>(values, "rule",
                             {{"fixed", Rule::fixed},
                              {"exact", Rule::exact},
                              {"absolute", Rule::absolute},
                              {"relative", Rule::relative},
                              {"contraction", Rule::contraction},
                              {"readout", Rule::readout}});
    if (spec.rule != Rule::fixed && spec.rule != Rule::exact) spec.tol = values["tol"].cast<double>();
    if (spec.rule == Rule::contraction) spec.phi = values["phi"].cast<double>();
    if (spec.rule == Rule::readout) spec.patience = number("patience");
    spec.check_every = number("check_every");
    spec.min_loops = number("min_loops");
    spec.stall_window = number("stall_window");
    spec.is_prefix = choice<bool>(values, "scope", {{"prompt", false}, {"prefix", true}});
    spec.on_stall = choice<OnStall>(values, "on_stall",
                                    {{"ignore", OnStall::ignore}, {"exit", OnStall::exit}, {"damp", OnStall::damp}});
    spec.anderson_depth = values["depth"].cast<int>();
    spec.return_predictions = values["return_predictions"].cast<bool>();
    if (spec.n_loops < 0) refuse("run: n_loops must be 0 or more, got " + std::to_string(spec.n_loops));
    if (spec.check_every < 1 || spec.stall_window < 1 || spec.patience < 1) {
        refuse("run: check_every, stall_window and patience must be at least 1");
    }
    if (spec.anderson_depth < 0 || spec.anderson_depth > 3) refuse("run: depth must lie in 0 .. 3");
    if (!(spec.tol >= 0)) refuse("run: tol must be a number of at least 0");
    if (spec.rule == Rule::exact && spec.anderson_depth) refuse("run: rule='exact' is for programs, which are never accelerated");
    if (spec.is_prefix && (!spec.is_plain() || !is_causal)) {
        refuse("run: scope='prefix' needs a causal mask and plain iteration; drop depth and on_stall='damp', or use scope='prompt'");
    }
    return spec;
}

}  // namespace looped
