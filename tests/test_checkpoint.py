"""Reading and writing models, against transformers' GPT-2 as the oracle of what a file computes."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

import looped
from looped.checkpoint import (
    load_checkpoint,
    load_model,
    load_training_state,
    save_model,
    write_atomically,
    write_training_state,
)
from looped.config import LoopedConfig, gpt2_config, icl_config
from looped.model import LoopedTransformer

D_MODEL, N_HEADS, N_DIMS, N_POSITIONS, VOCAB_SIZE = 32, 4, 5, 16, 11
IDS = torch.tensor([[9, 8, 7, 6, 5]])
TOLERANCE = 1e-5  # two fp32 orders of summation; logits are of size 1
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


# The oracles and their files, in each author's own keys and shapes ------------------------------------------------


def randomise(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        mean = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
        nn.init.normal_(parameter, mean, 0.3, generator=generator)


def hf_gpt2(n_layers: int, seed: int = 0, **changes: Any) -> GPT2LMHeadModel:
    sizes = dict(vocab_size=VOCAB_SIZE, n_positions=N_POSITIONS, n_embd=D_MODEL, n_layer=n_layers, n_head=N_HEADS)
    model = GPT2LMHeadModel(GPT2Config(**sizes | changes)).eval()
    randomise(model, seed)
    return model


class InContextOracle(nn.Module):
    """Garg et al.'s model; looped as Yang et al. do it, on the same backbone."""

    def __init__(self, n_layers: int, n_out: int = 1, seed: int = 1) -> None:
        super().__init__()
        self._read_in = nn.Linear(N_DIMS, D_MODEL)
        config = GPT2Config(n_positions=N_POSITIONS, n_embd=D_MODEL, n_layer=n_layers, n_head=N_HEADS, vocab_size=VOCAB_SIZE)
        self._backbone = GPT2Model(config)
        self._read_out = nn.Linear(D_MODEL, n_out)
        randomise(self.eval(), seed)

    @torch.no_grad()
    def forward(self, xs: Tensor, ys: Tensor, n_loops: int = 1, inject: str = "none") -> Tensor:
        ys_wide = torch.cat([ys[..., None], torch.zeros(*ys.shape, N_DIMS - 1)], dim=2)
        embeds = self._read_in(torch.stack([xs, ys_wide], dim=2).flatten(1, 2))
        state = {"add": torch.zeros_like(embeds), "mul": torch.ones_like(embeds), "none": embeds}[inject]
        for _ in range(n_loops):
            seen = {"add": state + embeds, "mul": state * embeds, "none": state}[inject]
            state = self._backbone(inputs_embeds=seen).last_hidden_state
        return self._read_out(state)[:, ::2].squeeze(-1)


def as_linear(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.T.contiguous() if key.endswith(CONV1D) else tensor for key, tensor in state.items()}


def with_old_buffers(state: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    """What transformers 4 and torch 1 wrote beside the parameters."""
    buffers = {"bias": torch.ones(1, 1, N_POSITIONS, N_POSITIONS, dtype=torch.uint8).tril(), "masked_bias": torch.tensor(-1e4)}
    layers = [key.removesuffix("ln_1.weight") for key in state if key.endswith("ln_1.weight")]
    return state | {f"{layer}attn.{name}": buffers[name] for layer in layers for name in names}


def looped_icl(model: InContextOracle) -> dict[str, Tensor]:
    state = {key: tensor for key, tensor in as_linear(model.state_dict()).items() if "wte" not in key}
    state = {key.replace("_backbone.", "_backbone.transformer."): tensor for key, tensor in state.items()}
    return with_old_buffers(state, "bias")


@dataclass
class Case:
    """A state dict, what must be told beside it, and what its own code predicts."""

    state: dict[str, Tensor]
    prompts: Tensor
    expected: Tensor
    fields: dict[str, Any] = field(default_factory=dict)


def language_case(name: str) -> Case:
    model = hf_gpt2(2)
    state, fields = model.state_dict(), {"n_heads": N_HEADS}
    if name == "gpt2_no_head":
        state = with_old_buffers(model.transformer.state_dict(), "bias", "masked_bias")
    elif name == "gpt2_untied":
        state["lm_head.weight"] = state["lm_head.weight"].roll(1, 0)
    elif name.startswith("nanogpt"):
        state, fields = as_linear(state), fields | {"activation": "gelu_tanh"}
    if name == "nanogpt_no_bias":
        for key, tensor in model.state_dict().items():
            if key.endswith("bias"):
                tensor.zero_()
        state = {key: tensor for key, tensor in state.items() if not key.endswith("bias")}
    with torch.no_grad():
        logits = model(IDS).logits
    return Case(state, IDS, logits.roll(1, -1) if name == "gpt2_untied" else logits, fields)


def icl_case(name: str) -> Case:
    n_layers, n_out, n_loops, inject = {
        "garg": (3, 1, 1, "none"),
        "looped_icl_plain": (3, 1, 1, "none"),
        "looped_icl_add": (1, 1, 7, "add"),
        "looped_icl_mul": (1, 1, 3, "mul"),
        "looped_icl_tied": (1, 1, 4, "none"),
        "looped_icl_classes": (2, 2, 3, "add"),
    }[name]
    model = InContextOracle(n_layers, n_out)
    generator = torch.Generator().manual_seed(2)
    xs, ys = torch.randn(3, 7, N_DIMS, generator=generator), torch.randn(3, 7, generator=generator)
    prompts = torch.zeros(3, 14, N_DIMS)
    prompts[:, ::2], prompts[:, 1::2, 0] = xs, ys
    fields: dict[str, Any] = {"n_heads": N_HEADS}
    if name != "garg":
        fields["n_loops"] = n_loops
    if n_loops > 1:
        fields["inject"] = inject
    state = with_old_buffers(model.state_dict(), "bias", "masked_bias") if name == "garg" else looped_icl(model)
    return Case(state, prompts, model(xs, ys, n_loops, inject), fields)


LANGUAGE = ("gpt2", "gpt2_no_head", "gpt2_untied", "nanogpt", "nanogpt_no_bias")
IN_CONTEXT = ("garg", "looped_icl_plain", "looped_icl_add", "looped_icl_mul", "looped_icl_tied", "looped_icl_classes")


@pytest.fixture(scope="module")
def make_case() -> Callable[[str], Case]:
    cases: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name not in cases:
            cases[name] = language_case(name) if name in LANGUAGE else icl_case(name)
        return cases[name]

    return make


@pytest.fixture(params=LANGUAGE + IN_CONTEXT)
def case(request: pytest.FixtureRequest, make_case: Callable[[str], Case]) -> Case:
    return make_case(request.param)


@pytest.fixture
def gpt2(make_case: Callable[[str], Case]) -> Case:
    return make_case("gpt2")


@torch.no_grad()
def error_of(model: LoopedTransformer, case: Case) -> float:
    predictions = model(case.prompts, backend="eager")
    assert predictions.shape == case.expected.shape
    return float((predictions - case.expected).abs().max())


# The layouts ------------------------------------------------------------------------------------------------------


def test_a_loaded_model_predicts_otherwise_than_its_authors_code(case: Case) -> None:
    assert error_of(load_checkpoint(case.state, **case.fields), case) < TOLERANCE


@pytest.mark.parametrize("n_layers", [2, 12])
def test_gpt2_weights_go_to_the_wrong_layer(n_layers: int) -> None:
    model = hf_gpt2(n_layers, seed=n_layers)
    with torch.no_grad():
        case = Case(model.state_dict(), IDS, model(IDS).logits)
    assert error_of(load_checkpoint(case.state, n_heads=N_HEADS), case) < TOLERANCE


def test_a_transposed_square_projection_goes_unnoticed(case: Case) -> None:
    state = {key: tensor.T if key.endswith("attn.c_proj.weight") else tensor for key, tensor in case.state.items()}
    assert error_of(load_checkpoint(state, **case.fields), case) > 1e-2


def test_a_loaded_model_has_another_configuration_than_ours(make_case: Callable[[str], Case]) -> None:
    language = gpt2_config(VOCAB_SIZE, N_POSITIONS, D_MODEL, N_HEADS, 2)
    sizes = dict(n_dims=N_DIMS, d_model=D_MODEL, n_heads=N_HEADS, n_positions=N_POSITIONS)
    expected = {
        "gpt2": language,
        "gpt2_no_head": language,
        "gpt2_untied": language.replace(tie_readout=False),
        "nanogpt_no_bias": language.replace(bias=False),
        "garg": icl_config(**sizes, n_core=3, n_loops=1, inject="none", state_init="embedding"),
        "looped_icl_add": icl_config(**sizes, n_loops=7),
        "looped_icl_mul": icl_config(**sizes, n_loops=3, inject="mul", state_init="ones"),
        "looped_icl_tied": icl_config(**sizes, n_loops=4, inject="none", state_init="embedding"),
        "looped_icl_classes": icl_config(**sizes, n_loops=3, n_core=2, readout="classes", n_classes=2),
    }
    for name, config in expected.items():
        case = make_case(name)
        assert load_checkpoint(case.state, **case.fields).config == config, name


def test_a_file_with_only_one_of_two_tied_tensors_is_refused(gpt2: Case, make_case: Callable[[str], Case]) -> None:
    nanogpt = make_case("nanogpt")
    for case in (gpt2, nanogpt):
        for dropped in ("transformer.wte.weight", "lm_head.weight"):
            state = {key: tensor for key, tensor in case.state.items() if key != dropped}
            assert error_of(load_checkpoint(state, **case.fields), case) < TOLERANCE


def test_the_middle_of_gpt2_loops_otherwise_than_the_unrolled_layers() -> None:
    shallow, deep = hf_gpt2(4), hf_gpt2(6)
    state = shallow.state_dict()
    for place, layer in enumerate([0, 1, 2, 1, 2, 3]):
        deep.transformer.h[place].load_state_dict(shallow.transformer.h[layer].state_dict())
    rest = {key: tensor for key, tensor in state.items() if ".h." not in key}
    deep.load_state_dict(deep.state_dict() | rest)
    with torch.no_grad():
        case = Case(state, IDS, deep(IDS).logits)
    model = load_checkpoint(state, n_heads=N_HEADS, n_prelude=1, n_coda=1, n_loops=2)
    assert error_of(model, case) < TOLERANCE
    with pytest.raises(ValueError, match="4 layers; n_prelude=2 and n_coda=2 leave none"):
        load_checkpoint(state, n_heads=N_HEADS, n_prelude=2, n_coda=2)


def test_loading_shares_memory_draws_random_numbers_or_changes_the_dtype(case: Case) -> None:
    state = {key: tensor.double() if tensor.is_floating_point() else tensor for key, tensor in case.state.items()}
    before, random_state = {key: tensor.clone() for key, tensor in state.items()}, torch.get_rng_state()
    model = load_checkpoint(state, **case.fields)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.dtype == torch.float64 and p.requires_grad and p.is_contiguous() for p in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    assert all(torch.equal(state[key], before[key]) for key in before)


# Prefixes, wrappers, files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "module.module."])
def test_prefixes_of_compile_and_ddp_are_taken_for_names(case: Case, prefix: str) -> None:
    plain = load_checkpoint(case.state, **case.fields)
    prefixed = load_checkpoint({prefix + key: tensor for key, tensor in case.state.items()}, **case.fields)
    with torch.no_grad():
        assert torch.equal(plain(case.prompts), prefixed(case.prompts))


@pytest.mark.parametrize("wrapper", ["model", "model_state_dict", "state_dict"])
def test_wrapper_dicts_are_taken_for_state_dicts(case: Case, wrapper: str) -> None:
    for content in ({wrapper: case.state, "train_step": 7}, {"state_dict": {wrapper: case.state}}):
        assert error_of(load_checkpoint(content, **case.fields), case) < TOLERANCE


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_a_file_loses_something_on_its_way_through_our_layout(case: Case, suffix: str, tmp_path: Any) -> None:
    path = tmp_path / f"weights.{suffix}"
    if suffix == "pt":
        optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])
        torch.save({"model_state_dict": case.state, "optimizer_state_dict": optimizer.state_dict(), "train_step": 7}, path)
    else:
        safetensors.torch.save_file({key: tensor.contiguous().clone() for key, tensor in case.state.items()}, path)
    save_model(load_checkpoint(path, **case.fields), tmp_path / "ours")
    for model in (load_model(tmp_path / "ours"), load_checkpoint(tmp_path / "ours")):
        assert error_of(model, case) < TOLERANCE


def test_another_checkpoint_than_the_one_asked_for_is_loaded(tmp_path: Any) -> None:
    oracles = [InContextOracle(2, seed=seed) for seed in (3, 4)]
    paths = [tmp_path / "model_100.pt", tmp_path / "model_200.pt"]
    for oracle, path in zip(oracles, paths, strict=True):
        torch.save(oracle.state_dict(), path)
    for oracle, path in zip(oracles, paths, strict=True):
        assert torch.equal(load_checkpoint(str(path), n_heads=N_HEADS).read_in.weight, oracle._read_in.weight)
    with pytest.raises(FileNotFoundError, match=r"model_100\.pt, model_200\.pt.*pass the file"):
        load_checkpoint(tmp_path, n_heads=N_HEADS)
    with pytest.raises(FileNotFoundError, match=r"no file .*model_300\.pt"):
        load_checkpoint(tmp_path / "model_300.pt")


# The folder of transformers ---------------------------------------------------------------------------------------


def edit_json(path: Any, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_transformers_folder_is_read_without_its_config(tmp_path: Any, weights: str) -> None:
    oracle = hf_gpt2(2, layer_norm_epsilon=0.1, activation_function="relu", n_inner=48)
    oracle.save_pretrained(tmp_path)
    if weights == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
        torch.save(oracle.state_dict(), tmp_path / weights)
    model = load_checkpoint(tmp_path)
    with torch.no_grad():
        assert error_of(model, Case({}, IDS, oracle(IDS).logits)) < TOLERANCE
    assert (model.config.n_heads, model.config.norm_eps, model.config.activation) == (N_HEADS, 0.1, "relu")
    (tmp_path / weights).unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama'"),
        ({"n_layer": 3}, "n_layer=3, but its tensors or this library allow only 2"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ({"scale_attn_weights": False}, "scale_attn_weights"),
        ({"n_head": 5}, "does not divide by n_heads 5"),
        ({"activation_function": "silu"}, r"the activation silu, .*gelu_tanh, gelu, relu, silu_gated; pass activation="),
    ],
)
def test_a_transformers_config_that_we_do_not_compute_is_ignored(tmp_path: Any, declared: dict[str, Any], message: str) -> None:
    hf_gpt2(2).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **declared)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path)


def test_an_untied_model_without_its_head_is_tied(tmp_path: Any) -> None:
    hf_gpt2(2).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        load_checkpoint(tmp_path)


# nanoGPT ----------------------------------------------------------------------------------------------------------


def nanogpt_file(case: Case, path: Any, **changes: Any) -> None:
    args = dict(
        n_layer=2, n_head=N_HEADS, n_embd=D_MODEL, block_size=N_POSITIONS, bias=True, vocab_size=VOCAB_SIZE, dropout=0.0
    )
    content = {"model": case.state, "model_args": args | changes, "iter_num": 7, "config": {"dataset": "owt", "lr": 6e-4}}
    torch.save(content, path)


def test_a_nanogpt_file_is_refused_or_its_arguments_ignored(tmp_path: Any, make_case: Callable[[str], Case]) -> None:
    case, path = make_case("nanogpt"), tmp_path / "ckpt.pt"
    nanogpt_file(case, path)
    assert error_of(load_checkpoint(path, activation="gelu_tanh"), case) < TOLERANCE
    with pytest.raises(ValueError, match="n_heads=4, not the 8 asked for"):
        load_checkpoint(path, activation="gelu_tanh", n_heads=8)
    for changes in ({"n_layer": 6}, {"block_size": 1024}, {"vocab_size": 50304}, {"bias": False}):
        nanogpt_file(case, path, **changes)
        name, value = next(iter(changes.items()))
        with pytest.raises(ValueError, match=f"declares {name}={value}"):
            load_checkpoint(path, activation="gelu_tanh")


def test_nanogpt_activation_is_guessed(tmp_path: Any, make_case: Callable[[str], Case]) -> None:
    nanogpt_file(make_case("nanogpt"), tmp_path / "ckpt.pt")
    with pytest.raises(ValueError, match=r'no record of its activation; pass activation=.*"gelu" for .*"gelu_tanh" for'):
        load_checkpoint(tmp_path / "ckpt.pt")


def test_the_exact_gelu_of_todays_nanogpt_is_approximated() -> None:
    oracle = hf_gpt2(2, activation_function="gelu")
    with torch.no_grad():
        case = Case(as_linear(oracle.state_dict()), IDS, oracle(IDS).logits)
    assert error_of(load_checkpoint(case.state, n_heads=N_HEADS, activation="gelu"), case) < TOLERANCE
    assert error_of(load_checkpoint(case.state, n_heads=N_HEADS, activation="gelu_tanh"), case) > 2 * TOLERANCE


def test_a_transformers_folder_with_the_exact_gelu_is_refused(tmp_path: Any) -> None:
    oracle = hf_gpt2(2, activation_function="gelu")
    oracle.save_pretrained(tmp_path)
    model = load_checkpoint(tmp_path)
    assert model.config.activation == "gelu"
    with torch.no_grad():
        assert error_of(model, Case({}, IDS, oracle(IDS).logits)) < TOLERANCE


def test_the_tanh_gelu_is_further_from_the_exact_one_than_the_documentation_says() -> None:
    x = torch.linspace(-8, 8, 100001, dtype=torch.float64)
    deviation = (nn.functional.gelu(x) - nn.functional.gelu(x, approximate="tanh")).abs().max()
    assert 4e-4 < deviation < 5e-4


# What a file does not tell ----------------------------------------------------------------------------------------


def test_the_number_of_heads_is_guessed(case: Case) -> None:
    fields = {name: value for name, value in case.fields.items() if name != "n_heads"}
    with pytest.raises(ValueError, match="does not tell its number of heads; pass n_heads="):
        load_checkpoint(case.state, **fields)


def widened(state: dict[str, Tensor], width: int = 256) -> dict[str, Tensor]:
    """The same keys for another width; the vocabulary and n_dims stay."""
    sizes = {D_MODEL: width, 3 * D_MODEL: 3 * width, 4 * D_MODEL: 4 * width}
    return {key: torch.zeros([sizes.get(size, size) for size in tensor.shape]) for key, tensor in state.items()}


def test_published_head_count_is_missing_or_taken_where_it_is_not_published(make_case: Callable[[str], Case]) -> None:
    for name in IN_CONTEXT:
        fields = make_case(name).fields | {"n_heads": 4}
        assert load_checkpoint(widened(make_case(name).state), **fields).config.n_heads == 4
        del fields["n_heads"]
        assert load_checkpoint(widened(make_case(name).state), **fields).config.n_heads == 8
    for state in (widened(make_case("gpt2").state), widened(make_case("garg").state, 128)):
        with pytest.raises(ValueError, match="number of heads"):
            load_checkpoint(state)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({}, "pass n_loops= and inject="), ({"n_loops": 3}, "pass inject="), ({"inject": "add"}, "pass n_loops=")],
)
def test_the_loop_is_guessed(make_case: Callable[[str], Case], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_checkpoint(make_case("looped_icl_add").state, n_heads=N_HEADS, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"d_model": 64}, "d_model=32, not the 64 asked for"),
        ({"n_core": 3}, "n_core=2, not the 3 asked for"),
        ({"tie_readout": False}, "tie_readout=True, not the False"),
        ({"n_loop": 3}, "unknown key 'n_loop'; did you mean 'n_loops'"),
        ({"n_layers": 2}, "unknown key 'n_layers'"),
        ({"inject": "concat"}, "inject='concat' is not one of"),
    ],
)
def test_an_argument_that_contradicts_the_file_is_dropped(gpt2: Case, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_checkpoint(gpt2.state, n_heads=N_HEADS, **fields)


# Keys and shapes --------------------------------------------------------------------------------------------------


def test_a_misspelt_key_loads_nothing_in_its_place(case: Case) -> None:
    for key in [key for key in case.state if "wte" not in key and key != "lm_head.weight" and "attn.bias" not in key]:
        if key.endswith("masked_bias"):
            continue
        state = {(name + "_" if name == key else name): tensor for name, tensor in case.state.items()}
        with pytest.raises(ValueError, match=f"lacks {re.escape(key)} and has the unknown {re.escape(key)}_"):
            load_checkpoint(state, **case.fields)
        with pytest.raises(ValueError, match=f"lacks {re.escape(key)}$"):
            load_checkpoint(state, allow_extra=True, **case.fields)


def test_an_extra_key_is_dropped_unasked(case: Case) -> None:
    state = case.state | {"score.weight": torch.ones(2, D_MODEL)}
    with pytest.raises(ValueError, match=r"has the unknown score\.weight; allow_extra=True drops"):
        load_checkpoint(state, **case.fields)
    assert error_of(load_checkpoint(state, allow_extra=True, **case.fields), case) < TOLERANCE


def test_a_lost_layer_makes_a_smaller_model() -> None:
    state = {key: tensor for key, tensor in hf_gpt2(3).state_dict().items() if ".h.1." not in key}
    with pytest.raises(
        ValueError, match=r"lacks transformer\.h\.1\.ln_1\.weight, .* and 4 more and has the unknown transformer\.h\.2"
    ):
        load_checkpoint(state, n_heads=N_HEADS)


def test_a_wrong_shape_is_loaded_or_not_named(case: Case) -> None:
    for key, tensor in case.state.items():
        if re.search(r"attn\.(masked_)?bias$|lm_head|wte", key):
            continue
        wrong = [torch.ones(())]
        if not re.search(r"wpe|read_in.weight|read_out.weight|h\.0\.mlp\.c_fc\.weight", key):  # these decide a size themselves
            wrong += [torch.ones(tensor.shape[0] + 1, *tensor.shape[1:]), torch.ones(*tensor.shape[:-1], tensor.shape[-1] + 1)]
        for other in wrong:
            with pytest.raises(ValueError, match=re.escape(key)):
                load_checkpoint(case.state | {key: other}, **case.fields)
        with pytest.raises(ValueError, match=rf"{re.escape(key)} is torch\.int8"):
            load_checkpoint(case.state | {key: tensor.to(torch.int8)}, **case.fields)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "no keys, which is no known layout"),
        ({"net.0.weight": torch.ones(2)}, r"net\.0\.weight, which is no known layout"),
        ({"core.0.attn.weight": torch.ones(2)}, "no known layout"),
        ({"step": 3, "h.0.ln_1.weight": torch.ones(2)}, "no tensors at step"),
        ({"model": {}, "state_dict": {}}, "several state dicts, model, state_dict"),
        ({"h.0.x": torch.ones(1), "module.h.0.x": torch.ones(1)}, "one without the prefixes"),
    ],
)
def test_something_else_is_taken_for_a_model(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_checkpoint(content)


def test_a_bare_state_dict_of_ours_says_how_it_is_loaded(tmp_path: Any) -> None:
    model, path = LoopedTransformer(icl_config(d_model=16, n_heads=2, n_core=2)), tmp_path / "weights.pt"
    for state in (model.state_dict(), {"model": model.state_dict()}, {f"module.{k}": v for k, v in model.state_dict().items()}):
        torch.save(state, path)
        for source in (state, path):
            with pytest.raises(ValueError, match=r"weights of a LoopedTransformer, .* the saved folder to load_model, or"):
                load_checkpoint(source, n_loops=3)
    torch.save(model.state_dict(), path)
    with pytest.raises(ValueError, match=r"is a file; pass the folder .* model = LoopedTransformer\(config\); model\.load_st"):
        load_model(path)
    again = LoopedTransformer(model.config)
    again.load_state_dict(torch.load(path))  # as the errors say
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    config = looped.LoopedGPT2Config(d_model=8, n_heads=2, vocab_size=11, n_positions=4, n_prelude=1)
    looped.LoopedGPT2(config).save_pretrained(tmp_path / "language")
    with pytest.raises(
        ValueError, match=r"weights of a LoopedGPT2, .* to LoopedGPT2\.from_pretrained, .* LoopedGPT2\(config\)"
    ):
        load_checkpoint(tmp_path / "language")


def test_a_module_is_taken_for_a_state_dict() -> None:
    with pytest.raises(TypeError, match=r"got Linear; for a module pass its state_dict\(\)"):
        load_checkpoint(nn.Linear(2, 2))


# Pickles ----------------------------------------------------------------------------------------------------------


class RunsCode:
    def __init__(self, flag: str) -> None:
        self.flag = flag

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.flag}",)


READERS: list[Callable[..., Any]] = [load_checkpoint, load_training_state]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_checkpoint_runs_code(tmp_path: Any, read: Callable[..., Any], is_zip: bool) -> None:
    path, flag = tmp_path / "evil.pt", tmp_path / "flag"
    torch.save({"model": {"h.0.x": RunsCode(str(flag))}}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(
        ValueError, match=rf"{read.__name__}: .*evil\.pt needs the Python object \S+\.system, which is never run"
    ):
        read(path)
    assert not flag.exists()


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("thing", "name"), [(argparse.Namespace(lr=1.0), r"argparse\.Namespace"), (np.float64(0.5), r"numpy\S+\.scalar")]
)
def test_a_python_object_beside_the_tensors_gives_a_long_error(
    tmp_path: Any, read: Callable[..., Any], thing: Any, name: str, gpt2: Case
) -> None:
    path = tmp_path / "args.pt"
    torch.save({"model": gpt2.state, "args": thing}, path)
    with pytest.raises(ValueError, match=rf"needs the Python object {name}.*re-save its tensors alone") as caught:
        read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("is_zip", [True, False])
def test_a_truncated_pickle_gives_an_unclear_error(tmp_path: Any, read: Callable[..., Any], is_zip: bool) -> None:
    path = tmp_path / "state.pt"
    torch.save({"model": {"h.0.x": torch.ones(300)}}, path, _use_new_zipfile_serialization=is_zip)
    whole = path.read_bytes()
    message = rf"{read.__name__}: .*state\.pt is truncated, corrupt or not written by torch\.save"
    if not is_zip:  # cut inside the name of an object, the old format seems to need another one
        message += r"|needs the Python object \S+, which is never run; if the file is whole"
    for length in [*range(0, len(whole), 61), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=message):
            read(path)


@pytest.mark.parametrize("read", READERS)
def test_a_file_that_is_no_dict_is_returned(tmp_path: Any, read: Callable[..., Any]) -> None:
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    with pytest.raises(ValueError, match=r"holds a Tensor but must hold a dict"):
        read(tmp_path / "tensor.pt")
    (tmp_path / "text.pt").write_text("hello, world\n" * 9)
    with pytest.raises(ValueError, match=r"not written by torch\.save"):
        read(tmp_path / "text.pt")
    with pytest.raises(FileNotFoundError, match=r"there is no file .*absent\.pt"):
        read(tmp_path / "absent.pt")


# Our own layout ---------------------------------------------------------------------------------------------------

CONFIGS = {
    "icl": icl_config(n_dims=N_DIMS, n_points=5, d_model=D_MODEL, n_heads=N_HEADS, n_loops=3),
    "classes": icl_config(n_dims=3, n_points=5, d_model=24, n_heads=3, readout="classes", n_classes=2, bias=False),
    "gpt2": gpt2_config(VOCAB_SIZE, N_POSITIONS, D_MODEL, N_HEADS, 2, n_prelude=1, n_coda=2, tie_readout=False),
    "llama": icl_config(n_dims=3, n_points=5, d_model=24, n_heads=3, norm_kind="rms", activation="silu_gated", d_ff=20),
    "states": LoopedConfig(
        input_kind="states",
        readout="none",
        d_model=12,
        n_heads=2,
        head_dim=5,
        norm_kind="none",
        loop_norm="none",
        pos_kind="none",
    ),
}


def same_tensors(a: LoopedTransformer, b: LoopedTransformer) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype and torch.equal(first[name], second[name]) for name in first
    )


@pytest.fixture
def saved(tmp_path: Any) -> Any:
    save_model(LoopedTransformer(CONFIGS["icl"]), tmp_path / "ours")
    return tmp_path / "ours"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_saved_model_comes_back_changed(tmp_path: Any, name: str, dtype: torch.dtype) -> None:
    model = LoopedTransformer(CONFIGS[name]).to(dtype)
    randomise(model, 5)
    save_model(model, tmp_path / "new" / "folder")
    random_state = torch.get_rng_state()
    loaded = load_model(tmp_path / "new" / "folder")
    assert torch.equal(torch.get_rng_state(), random_state)
    assert loaded.config == model.config
    assert same_tensors(loaded, model)
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == ["config.json", "model.safetensors"]


def test_truncated_weights_are_loaded(saved: Any) -> None:
    whole = (saved / "model.safetensors").read_bytes()
    for length in [0, 5, 8, 100, len(whole) // 2, len(whole) - 1]:
        (saved / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"load_model: .*model\.safetensors is truncated or corrupt"):
            load_model(saved)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"config\.json is not JSON"),
        ('{"format": "looped-1"', r"config\.json is not JSON"),
        (b"\xff\xfe", r"config\.json is not JSON"),
        ("[1]", "holds a JSON list"),
        ('{"n_layer": 2}', "has the format None but must have 'looped-1'; .*load_checkpoint"),
        ('{"format": "looped-9"}', "has the format 'looped-9'"),
        ('{"format": "looped-1", "d_modl": 3}', r"config\.json describes no model: .*'d_modl'; did you mean 'd_model'"),
        ('{"format": "looped-1", "d_model": "wide"}', r"config\.json describes no model"),
    ],
)
def test_a_damaged_config_gives_an_unclear_error(saved: Any, content: str | bytes, message: str) -> None:
    (saved / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=message):
        load_model(saved)


def test_weights_that_do_not_fit_are_loaded(saved: Any) -> None:
    path = saved / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    faults = {
        r"lacks core\.0\.norm_1\.bias$": {key: tensor for key, tensor in tensors.items() if key != "core.0.norm_1.bias"},
        r"it has the unknown core\.1\.x$": tensors | {"core.1.x": torch.ones(1)},
        r"read_in\.weight is torch\.float32 \[5, 32\] instead of float \[32, 5\]": tensors
        | {"read_in.weight": torch.ones(5, 32)},
    }
    for message, wrong in faults.items():
        safetensors.torch.save_file(wrong, path)
        with pytest.raises(ValueError, match=message):
            load_model(saved)


def test_a_missing_file_or_folder_gives_an_unclear_error(saved: Any, tmp_path: Any) -> None:
    with pytest.raises(FileNotFoundError, match=r"load_model: there is no file .*absent.config\.json"):
        load_model(tmp_path / "absent")
    with pytest.raises(ValueError, match="is a file; pass the folder"):
        load_model(saved / "model.safetensors")
    with pytest.raises(ValueError, match="takes no n_loops"):
        load_checkpoint(saved, n_loops=3)
    (saved / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_model(saved)


# Full disks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing_call", [1, 2])
def test_a_full_disk_spoils_the_model_saved_before(saved: Any, monkeypatch: pytest.MonkeyPatch, failing_call: int) -> None:
    before, calls = load_model(saved), []

    def fsync(handle: int) -> None:
        calls.append(handle)
        if len(calls) == failing_call:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space left"):
        save_model(LoopedTransformer(CONFIGS["icl"].replace(n_loops=9)), saved)
    after = load_model(saved)
    assert after.config == before.config
    assert same_tensors(after, before)
    assert sorted(os.listdir(saved)) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_spoils_the_state_written_before(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "state.pt"
    write_training_state(path, {"step": 1, "weights": torch.arange(3.0)})

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="No space left"):
        write_training_state(path, {"step": 2})
    state = load_training_state(path)
    assert state["step"] == 1
    assert torch.equal(state["weights"], torch.arange(3.0))
    assert os.listdir(tmp_path) == ["state.pt"]


def test_a_written_file_is_readable_by_its_owner_alone(tmp_path: Any) -> None:
    umask = os.umask(0o022)
    try:
        write_atomically(tmp_path / "file", b"content")
    finally:
        os.umask(umask)
    assert (tmp_path / "file").read_bytes() == b"content"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_reading_a_checkpoint_imports_transformers() -> None:
    code = "import sys, looped.checkpoint; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_saved_model_cannot_be_loaded(tmp_path):
    """What save_model accepts, load_model reads: wrappers are left out, foreign parameters refused."""
    model = looped.LoopedTransformer(looped.icl_config(n_dims=2, n_points=3, d_model=8, n_heads=2))
    for wrapped in (torch.compile(model, backend="eager"), torch.nn.DataParallel(model)):
        looped.save_model(wrapped, tmp_path / "wrapped")
        loaded = looped.load_model(tmp_path / "wrapped")
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    with pytest.raises(TypeError, match=r"save_model: model must be .*, got Linear"):
        looped.save_model(torch.nn.Linear(1, 1), tmp_path / "linear")
    torch.nn.utils.parametrizations.weight_norm(model.core[0].mlp.fc)
    with pytest.raises(ValueError, match=r"core\.0\.mlp\.fc"):
        looped.save_model(model, tmp_path / "normed")
    assert not (tmp_path / "normed").exists()


def test_weights_and_configuration_come_from_two_models(tmp_path):
    for n_loops in (3, 5):
        config = looped.icl_config(n_dims=2, n_points=3, d_model=8, n_heads=2, n_loops=n_loops)
        looped.save_model(looped.LoopedTransformer(config), tmp_path / str(n_loops))
    (tmp_path / "3" / "config.json").write_bytes((tmp_path / "5" / "config.json").read_bytes())
    with pytest.raises(ValueError, match="come from two models"):
        looped.load_model(tmp_path / "3")


def test_a_model_is_saved_otherwise_each_time(tmp_path):
    model = looped.LoopedTransformer(looped.icl_config(n_dims=2, n_points=3, d_model=8, n_heads=2))
    looped.save_model(model, tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for _ in range(12):
        looped.save_model(model, tmp_path)
        assert (tmp_path / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("written", ["{", "[" * 100_000])
def test_a_configuration_inside_the_weights_is_no_json(saved, written):
    tensors = safetensors.torch.load_file(saved / "model.safetensors")
    config = (saved / "config.json").read_text()
    safetensors.torch.save_file(tensors, saved / "model.safetensors", metadata={"format": "looped-1", "config": config})
    load_model(saved)  # as older versions wrote it
    safetensors.torch.save_file(tensors, saved / "model.safetensors", metadata={"config": written})
    with pytest.raises(ValueError, match=r"the configuration inside .*model\.safetensors is not JSON .*; restore the file"):
        load_model(saved)


@pytest.mark.parametrize("part", ["data/0", "data.pkl", "version"])
def test_a_flipped_bit_of_a_state_is_read(tmp_path, part):
    path = tmp_path / "state.pt"
    write_training_state(path, {"step": 1, "weights": torch.rand(300)})
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as file:
        (entry,) = [one for one in file.infolist() if one.filename.endswith("/" + part)]
    start = whole.index(entry.filename.encode(), entry.header_offset) + len(entry.filename)
    start += int.from_bytes(whole[entry.header_offset + 28 : entry.header_offset + 30], "little")  # its extra field
    for place in range(start, start + entry.file_size, 61):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=rf"{part} is not what was written.; restore it, or remove it to start the run"):
            load_training_state(path)
    path.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=r"is truncated.*restore it, or remove it to start the run again"):
        load_training_state(path)


def test_a_file_that_holds_itself_hangs_the_reader(tmp_path):
    state = {}
    state["model"] = state
    torch.save(state, tmp_path / "ring.pt")
    with pytest.raises(ValueError, match="holds itself"):
        looped.load_checkpoint(tmp_path / "ring.pt", n_loops=1)
