"""`LoopedTransformer` against transformers' GPT-2, and its configuration."""

import math
import pickle

import numpy as np
import pytest
import torch
from models import icl_model, random_weights
from tolerances import FP64
from torch import nn
from transformers import GPT2Config, GPT2Model, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

import looped
from looped.model import loop_count
from looped.suggestion import suggestion


def gpt2_twin(model):
    """A transformers GPT2Model with the same block weights (Conv1D: transposed), in float64."""
    config = model.config
    twin = GPT2Model(
        GPT2Config(
            vocab_size=1,
            n_positions=config.n_positions,
            n_embd=config.d_model,
            n_layer=config.n_core,
            n_head=config.n_heads,
            activation_function={"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}[config.activation],
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            attn_implementation="eager",
        )
    ).double()
    twin.eval()
    with torch.no_grad():
        twin.wpe.weight.copy_(model.positions.weight)
        for theirs, ours in zip(twin.h, model.core, strict=True):
            pairs = [(theirs.attn.c_attn, ours.attn.qkv), (theirs.attn.c_proj, ours.attn.proj)]
            pairs += [(theirs.mlp.c_fc, ours.mlp.fc), (theirs.mlp.c_proj, ours.mlp.proj)]
            for conv, linear in pairs:
                conv.weight.copy_(linear.weight.T)
                conv.bias.copy_(linear.bias)
            theirs.ln_1.load_state_dict(ours.norm_1.state_dict())
            theirs.ln_2.load_state_dict(ours.norm_2.state_dict())
        twin.ln_f.load_state_dict(model.final_norm.state_dict())
    return twin


@pytest.mark.parametrize("n_core", [1, 2])
@pytest.mark.parametrize("n_loops", [1, 2, 20])
@pytest.mark.parametrize("inject", ["add", "mul", "none"])
@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "relu"])
def test_looping_gpt2_over_state_and_embeddings(n_core, n_loops, inject, activation):
    init = {"add": "zeros", "mul": "ones", "none": "embedding"}[inject]
    model = icl_model(std=0.2, n_core=n_core, inject=inject, state_init=init, activation=activation)
    twin = gpt2_twin(model)
    x = torch.randn(3, 9, 3, dtype=torch.float64)
    with torch.no_grad():
        embeds = x @ model.read_in.weight.T + model.read_in.bias
        state = {"zeros": torch.zeros_like(embeds), "ones": torch.ones_like(embeds), "embedding": embeds}[init]
        for _ in range(n_loops):
            fed = {"add": state + embeds, "mul": state * embeds, "none": state}[inject]
            state = twin(inputs_embeds=fed).last_hidden_state
        expected = (state[:, ::2] @ model.read_out.weight.T + model.read_out.bias).squeeze(-1)
    result = looped.solve(model, x, n_loops=n_loops)
    torch.testing.assert_close(result.y, state, rtol=FP64, atol=FP64)
    torch.testing.assert_close(result.prediction, expected, rtol=FP64, atol=FP64)
    torch.testing.assert_close(model(x, n_loops=n_loops).detach(), expected, rtol=FP64, atol=FP64)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("loop_norm", ["each", "once"])
def test_rms_norm_and_gated_mlp_are_llamas(bias, loop_norm):
    model = icl_model(
        std=0.2, norm_kind="rms", norm_eps=0.1, activation="silu_gated", d_ff=20, n_core=2, bias=bias, loop_norm=loop_norm
    )
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, intermediate_size=20, hidden_act="silu", mlp_bias=bias)

    def norm(gain):
        layer = nn.RMSNorm(16, eps=0.1).double()
        layer.load_state_dict({"weight": gain.weight})
        return layer

    def mlp(ours):
        layer = LlamaMLP(config).double()
        kinds = ("weight", "bias") if bias else ("weight",)
        state = {f"gate_proj.{kind}": getattr(ours.fc, kind)[:20] for kind in kinds}
        state |= {f"up_proj.{kind}": getattr(ours.fc, kind)[20:] for kind in kinds}
        layer.load_state_dict(state | {f"down_proj.{kind}": getattr(ours.proj, kind) for kind in kinds})
        return layer

    x = torch.randn(3, 9, 3, dtype=torch.float64)
    with torch.no_grad():
        embeds = model.read_in(x)
        state = torch.zeros_like(embeds)
        for _ in range(3):
            state = state + embeds + model.positions.weight[:9]
            for block in model.core:
                state = state + block.attn(norm(block.norm_1)(state))
                state = state + mlp(block.mlp)(norm(block.norm_2)(state))
            if loop_norm == "each":
                state = norm(model.final_norm)(state)
        read = state if loop_norm == "each" else norm(model.final_norm)(state)
    result = looped.solve(model, x, n_loops=3, backend="eager")
    torch.testing.assert_close(result.y, state, rtol=FP64, atol=FP64)
    torch.testing.assert_close(result.prediction, model.read_out(read)[:, ::2, 0].detach(), rtol=FP64, atol=FP64)


def test_rms_norm_divides_by_the_root_of_the_mean_square_and_eps():
    model = icl_model(norm_kind="rms", norm_eps=0.5)
    norm, x = model.core[0].norm_1, torch.randn(5, 16, dtype=torch.float64)
    expected = x / (x.square().mean(dim=1, keepdim=True) + 0.5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=FP64, atol=FP64)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


def test_prelude_core_and_coda_are_layers_of_one_stack():
    """With one loop and no injection, where a layer stands makes no difference."""
    changes = dict(pos_when="once", inject="none", state_init="embedding", loop_norm="once", n_loops=1)
    stacked = icl_model(n_core=4, **changes)
    split = icl_model(n_prelude=1, n_core=2, n_coda=1, **changes)
    names = {"core.0": "prelude.0", "core.1": "core.0", "core.2": "core.1", "core.3": "coda.0"}
    split.load_state_dict({names.get(k[:6], k[:6]) + k[6:]: v for k, v in stacked.state_dict().items()})
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(split(x), stacked(x), rtol=FP64, atol=FP64)


@pytest.mark.parametrize("head_dim", [5, 48])
@pytest.mark.parametrize("mask_kind", ["causal", "full"])
def test_attention_is_softmax_of_scaled_products(head_dim, mask_kind):
    model = icl_model(d_model=12, n_heads=3, head_dim=head_dim, mask_kind=mask_kind)
    attention, x = model.core[0].attn, torch.randn(2, 5, 12, dtype=torch.float64)
    q, k, v = (part.reshape(2, 5, 3, head_dim) for part in attention.qkv(x).split(3 * head_dim, dim=-1))
    mixed = torch.zeros(2, 5, 3, head_dim, dtype=torch.float64)
    for b in range(2):
        for h in range(3):
            for i in range(5):
                seen = range(i + 1) if mask_kind == "causal" else range(5)
                scores = torch.stack([q[b, i, h] @ k[b, j, h] for j in seen]) / math.sqrt(head_dim)
                mixed[b, i, h] = sum(w * v[b, j, h] for w, j in zip(scores.softmax(0), seen, strict=True))
    expected = mixed.reshape(2, 5, -1) @ attention.proj.weight.T + attention.proj.bias
    torch.testing.assert_close(attention(x), expected, rtol=FP64, atol=FP64)


def test_predictions_after_every_loop_and_the_gradient_window():
    model = icl_model(std=0.2)
    x = torch.randn(2, 7, 3, dtype=torch.float64)
    every = model(x, n_loops=5, return_predictions=True)
    assert every.shape == (2, 5, 4)
    for t in range(1, 6):
        torch.testing.assert_close(every[:, t - 1], model(x, n_loops=t))
    window = model(x, n_loops=5, n_loop_start=3, return_predictions=True)
    torch.testing.assert_close(window, every[:, 3:])
    # The loops before the window carry no gradient: the same as starting from their state.
    window.square().sum().backward()
    truncated = model.core[0].mlp.fc.weight.grad.clone()
    model.zero_grad()
    P = model.embed(x)
    Y = looped.solve(model, x, n_loops=3).y
    loss = 0.0
    for _ in range(2):
        Y = model.step(Y, P)
        loss = loss + model.read(Y).square().sum()
    loss.backward()
    torch.testing.assert_close(model.core[0].mlp.fc.weight.grad, truncated, rtol=FP64, atol=FP64)
    assert model(x, n_loops=0, return_predictions=True).shape == (2, 0, 4)


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        (dict(readout="scalar", read_stride=2), (2, 3)),
        (dict(readout="classes", n_classes=4, read_stride=2), (2, 3, 4)),
        (dict(readout="classes", n_classes=4, read_stride=1), (2, 5, 4)),
        (dict(readout="vocabulary", vocab_size=7, read_stride=1), (2, 5, 7)),
        (dict(readout="none"), (2, 5, 16)),
    ],
)
def test_read_outs(changes, shape):
    model = icl_model(**changes)
    result = looped.solve(model, torch.randn(2, 5, 3), n_loops=3, return_predictions=True)
    assert result.prediction.shape == shape
    assert result.predictions.shape == (2, 3, *shape[1:])
    torch.testing.assert_close(result.predictions[:, -1], result.prediction)


def test_tokens_and_states_in():
    config = looped.gpt2_config(vocab_size=61, n_positions=16, d_model=32, n_heads=4, n_layers=2)
    model = random_weights(looped.LoopedTransformer(config))
    ids = torch.randint(61, (2, 7))
    result = looped.solve(model, ids)
    assert result.prediction.shape == (2, 7, 61)
    states = looped.LoopedConfig(input_kind="states", readout="none", d_model=8, n_heads=2, pos_kind="none", state_init="given")
    model = random_weights(looped.LoopedTransformer(states))
    x, y0 = torch.randn(2, 2, 5, 8, dtype=torch.float64)
    result = looped.solve(model, x, state=y0, n_loops=3)
    P, Y = x, y0
    for _ in range(3):
        Y = model.step(Y, P)
    torch.testing.assert_close(result.y, Y.detach())
    ragged = looped.solve(model, [x[0, :3], x[1]], state=[y0[0, :3], y0[1]], n_loops=3)
    torch.testing.assert_close(ragged.y[1], Y[1].detach())
    with pytest.raises(ValueError, match="needs a state"):
        looped.solve(model, x)
    with pytest.raises(ValueError, match="takes no state"):
        looped.solve(icl_model(), torch.randn(2, 5, 3), state=torch.zeros(2, 5, 16))


def test_initial_weights_follow_gpt2():
    torch.manual_seed(0)
    model = looped.LoopedTransformer(looped.icl_config(n_core=8))
    assert model.core[3].attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert model.core[3].mlp.proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert not model.core[0].mlp.fc.bias.any()
    assert model.read_in.weight.abs().max().item() == pytest.approx(1 / math.sqrt(20), rel=0.02)
    gated = looped.LoopedTransformer(looped.icl_config(norm_kind="rms", activation="silu_gated")).core[0]
    assert gated.mlp.fc.weight.shape == (2048, 256)
    for rows in gated.mlp.fc.weight.split(1024):
        assert rows.std().item() == pytest.approx(0.02, rel=0.02)
    assert not gated.mlp.fc.bias.any()
    assert (gated.norm_2.weight == 1).all()
    one = looped.LoopedTransformer(looped.icl_config())
    assert sum(p.numel() for p in one.parameters()) == 847_873  # the published model


def test_configuration_errors_name_the_way_out():
    cases = [
        (dict(inject="ad"), "inject='ad' is not one of add, mul, none"),
        (dict(activation="silu"), "activation='silu' is not one of gelu_tanh, gelu, relu, silu_gated"),
        (dict(norm_kind="rmsnorm"), "norm_kind='rmsnorm' is not one of layernorm, rms, none"),
        (dict(n_heads=5), "give head_dim"),
        (dict(n_dims=None), "needs n_dims"),
        (dict(readout="classes"), "needs n_classes"),
        (dict(n_positions=0), "needs n_positions"),
        (dict(n_core=0), "n_core=0 must be an integer of at least 1"),
        (dict(n_coda=1), "n_coda must be 0"),
        (dict(norm_kind="none"), 'set loop_norm="none"'),
        (dict(inject="none"), "never sees its prompt"),
        (dict(n_heads="8"), "n_heads='8' must be an integer"),
        (dict(norm_eps=math.nan), "norm_eps"),
        (dict(n_dims=2.5), "n_dims=2.5"),
        (dict(tie_readout=True), "tie_readout needs"),
    ]
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            looped.icl_config(**changes)
    with pytest.raises(ValueError, match="unknown key 'n_head'; did you mean 'n_heads'"):
        looped.LoopedConfig.from_dict({"n_head": 4})
    with pytest.raises(ValueError, match="unknown key 'n_embd'; did you mean 'd_model'"):
        looped.icl_config(n_embd=4)
    with pytest.raises(ValueError, match=r"unknown key 'zzz'; choose from input_kind, n_dims, .*, loop_norm, n_loops$"):
        looped.icl_config(zzz=4)
    config = looped.icl_config()
    assert looped.LoopedConfig.from_dict(config.to_dict()) == config
    assert config.replace(n_loops=7).n_loops == 7
    wider = config.replace(d_model=512)
    assert (wider.head_dim, wider.d_ff) == (64, 2048)


def test_integers_of_numpy_and_of_tensors_are_integers():
    config = looped.icl_config(
        n_dims=np.int64(3), n_points=5, d_model=np.int32(16), n_heads=torch.tensor(2), n_loops=np.uint8(4)
    )
    assert config == looped.icl_config(n_dims=3, n_points=5, d_model=16, n_heads=2, n_loops=4)
    assert all(type(value) in (int, float, str, bool, type(None)) for value in config.to_dict().values())
    with pytest.raises(ValueError, match=r"n_loops=.*True.* must be an integer"):
        looped.icl_config(n_dims=3, n_points=5, n_loops=np.bool_(True))


def test_a_name_is_suggested_only_where_one_is_alike():
    names = ["relative", "contraction", "linear_regression"]
    assert suggestion("relative_", names) == "; did you mean 'relative'?"
    assert suggestion("linear", names, listed=True) == f"; did you mean 'linear_regression'? (of {', '.join(names)})"
    for unlike in ("kl", "l", "", None, 7):
        assert suggestion(unlike, names) == suggestion(unlike, names, listed=True) == f"; choose from {', '.join(names)}"
    assert suggestion("RELATIVE", names) == "; did you mean 'relative'?"
    assert suggestion("kl", []) == ""
    many = [f"{letter}{letter}" for letter in "abcdefghijklmnopqrstuvwxyzABCDEFGH"]
    assert suggestion("kl", many).endswith("yy, zz, AA, BB, CC, DD and 4 more")
    assert looped.icl_config(head_dim=5, n_heads=3).replace(d_model=32).head_dim == 5
    assert loop_count(4) == 4


def test_wrong_prompts_are_named():
    model = icl_model()
    tokens = random_weights(looped.LoopedTransformer(looped.gpt2_config(61, 16, 32, 4, 1)))
    cases = [
        (model, torch.randn(2, 5, 4), ValueError, r"features \[B, T, 3\], got \[2, 5, 4\]"),
        (model, torch.randn(5, 3), ValueError, r"features \[B, T, 3\], got \[5, 3\]"),
        (model, [torch.randn(5, 3), torch.randn(5, 2)], ValueError, r"\[T, 3\], got \[5, 2\]"),
        (model, torch.randn(1, 18, 3), ValueError, "prompt 0 has 18 tokens but the model has 17 positions"),
        (model, [torch.randn(2, 3), torch.randn(18, 3)], ValueError, "prompt 1 has 18 tokens"),
        (model, ["abc"], TypeError, "a prompt or a state must be a tensor"),
        (tokens, torch.randn(2, 5), TypeError, "must hold integers"),
        (tokens, torch.tensor([[1, 2], [3, 61]]), ValueError, "prompt 1 holds token id 61 at position 1"),
        (tokens, torch.tensor([[1, -1]]), ValueError, "token id -1"),
    ]
    for on, prompts, kind, message in cases:
        with pytest.raises(kind, match=message):
            looped.solve(on, prompts)
    with pytest.raises(ValueError, match="18 tokens but the model has 17"):
        model(torch.randn(1, 18, 3, dtype=torch.float64))
    wrong_kind = r"lengths must be integers \[2\], one for each prompt"
    for lengths, message in (([6, 1], "prompt 0 has length 6"), ([1], wrong_kind), ([1.0, 2.0], wrong_kind)):
        with pytest.raises(ValueError, match=message):
            looped.solve(model, torch.randn(2, 5, 3), lengths=lengths)
    # More padding than positions is no error: padding is not read.
    assert looped.solve(model, torch.randn(2, 30, 3), lengths=[17, 2]).y.shape == (2, 30, 16)


def test_empty_batches_and_empty_prompts():
    model = icl_model()
    assert looped.solve(model, []).y == []
    empty = looped.solve(model, torch.zeros(0, 4, 3), return_predictions=True)
    assert (empty.y.shape, empty.prediction.shape, empty.predictions.shape) == ((0, 4, 16), (0, 2), (0, 6, 2))
    none = looped.solve(model, torch.zeros(2, 0, 3), exit="contraction")
    assert (none.y.shape, none.prediction.shape, none.n_loops.tolist()) == ((2, 0, 16), (2, 0), [1, 1])
    ragged = looped.solve(model, [torch.zeros(n, 3) for n in (0, 1, 0, 3)], exit=looped.exits.Contraction(scope="prefix"))
    assert [len(y) for y in ragged.y] == [0, 1, 0, 3]


def test_inputs_are_left_alone_and_strides_do_not_matter():
    model = icl_model()
    wide = torch.randn(5, 2, 7, dtype=torch.float64)
    view = wide.permute(1, 0, 2)[..., ::2][..., :3]
    before = view.clone()
    result = looped.solve(model, view, n_loops=4, lengths=[5, 3])
    expected = looped.solve(model, view.contiguous(), n_loops=4, lengths=[5, 3])
    assert torch.equal(view, before)
    assert torch.equal(result.y, expected.y)
    for odd in (before.numpy()[:, ::-1], before.numpy().astype(">f8")):
        assert looped.solve(model, odd, n_loops=4).y.shape == expected.y.shape
    array = before.numpy().copy()
    array.flags.writeable = False
    assert torch.equal(looped.solve(model, array, n_loops=4, lengths=[5, 3]).y, result.y)


def test_dtype_is_where_the_loop_runs():
    model = icl_model(std=0.1, dtype=torch.float32)
    x = torch.randn(2, 7, 3)
    single, double = looped.solve(model, x, n_loops=9), looped.solve(model, x, n_loops=9, dtype=torch.float64)
    assert (single.y.dtype, double.y.dtype) == (torch.float32, torch.float64)
    assert next(model.parameters()).dtype == torch.float32
    torch.testing.assert_close(single.y.double(), double.y, rtol=1e-4, atol=1e-5)
    assert looped.solve(model, x, n_loops=9, dtype=torch.bfloat16).y.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="is not one of"):
        looped.solve(model, x, dtype=torch.float16)


def test_solve_iter_is_solve_in_order_with_bounded_memory():
    model = icl_model(std=0.15)
    prompts = [torch.randn(1 + i % 9, 3, dtype=torch.float64) for i in range(23)]
    asked = 0

    def stream():
        nonlocal asked
        for prompt in prompts:
            asked += 1
            yield prompt

    results = looped.solve_iter(model, stream(), batch_size=5, exit="contraction", n_loops=50)
    first = next(results)
    assert asked == 5
    whole = looped.solve(model, prompts, exit="contraction", n_loops=50)
    for i, result in enumerate([first, *results]):
        assert result.n_loops == whole[i].n_loops
        torch.testing.assert_close(result.prediction, whole.prediction[i], rtol=1e-6, atol=1e-6)
    assert list(looped.solve_iter(model, [])) == []
    for options in (dict(exit="contract"), dict(n_loops=-1), dict(batch_size=0), dict(backend="gpu")):
        with pytest.raises(ValueError):  # at once, not at the first result
            looped.solve_iter(model, prompts, **options)
    with pytest.raises(ValueError, match="counted from 10"):
        list(looped.solve_iter(model, [*prompts[:12], torch.zeros(3, 99)], batch_size=10))


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "relu", "silu_gated"])
def test_a_model_can_be_pickled(activation):
    model, x = icl_model(activation=activation), torch.randn(2, 9, 3, dtype=torch.float64)
    again = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    assert again.why_not_as_configured() is None
