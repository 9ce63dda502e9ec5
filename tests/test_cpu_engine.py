"""The C++ engine against the eager one: the same numbers, counts and statuses, and the promises of every fused backend."""

import dataclasses
import functools
import json
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import icl_model, random_weights, scalar_map, states_model
from tolerances import FP32

import looped
from looped.exits import PRECISION_OF, ROUNDING_LEVEL, Absolute, Contraction, Exact, Fixed, Readout, Relative
from looped.loop import Status

_engine = pytest.importorskip("looped._engine", reason="the C++ engine is not built")

eager = functools.partial(looped.solve, backend="eager")  # the truth; the default would be the engine itself

CORE_FP64 = 1e-9  # one formula in float64 with sums in another order and folded norms, over tens of loops


class Cpu:
    """A model on the engine, with tensors in and out, and memory under the eager backend's names."""

    def __init__(self, model):
        self.model = model
        self.dtype = next(model.parameters()).dtype
        weights = {name: np.ascontiguousarray(weight.detach().numpy()) for name, weight in model.state_dict().items()}
        self.engine = _engine.Engine(model.config.to_dict(), weights)

    def embed(self, x, lengths=None):
        own = None if lengths is None else np.asarray(lengths)
        return torch.from_numpy(self.engine.embed(np.ascontiguousarray(x.numpy()), own))

    def __call__(
        self, x, lengths=None, exit=None, n_loops=None, on_stall="ignore", depth=0, state=None, memory=None, **options
    ):
        model, rule = self.model, looped.exits.make_exit(exit)
        own = None if lengths is None else torch.as_tensor(lengths)
        P = self.embed(x, own)
        first = state if memory else model.initial_state(P, state)
        predictions = options.pop("return_predictions", False)
        spec = dict(
            n_loops=model.config.n_loops if n_loops is None else n_loops,
            rule=type(rule).__name__.lower(),
            phi=ROUNDING_LEVEL[PRECISION_OF[self.dtype]],
            on_stall=on_stall,
            depth=depth,
            return_predictions=predictions,
            **dataclasses.asdict(rule),
        )
        return self.engine.run(
            P.numpy(), np.ascontiguousarray(first.numpy()), None if own is None else own.numpy(), spec, memory, **options
        )


def assert_agrees(model, x, lengths=None, exit=None, n_loops=40, on_stall="ignore", depth=0, state=None, tol=CORE_FP64):
    """One call on both engines: states, predictions, counts, statuses, residuals and memory."""
    got = Cpu(model)(x, lengths, exit, n_loops, on_stall, depth, state, return_predictions=True)
    want = eager(
        model,
        x,
        lengths=lengths,
        exit=exit,
        n_loops=n_loops,
        on_stall=on_stall,
        accelerate=looped.Anderson(depth) if depth else None,
        state=state,
        return_predictions=True,
    )
    memory = got["memory"]
    np.testing.assert_array_equal(memory["t"], want.n_loops.numpy())
    np.testing.assert_array_equal(memory["status"], want.status.numpy())
    for name, array in (("y", want.y), ("prediction", want.prediction), ("predictions", want.predictions)):
        if model.config.readout == "none" and name != "y":
            continue
        scale = 1 + array.abs().max().item() if array.numel() else 1
        np.testing.assert_allclose(got[name], array.numpy(), rtol=0, atol=tol * scale, err_msg=name)
    np.testing.assert_allclose(memory["residual"], want.residual.numpy(), rtol=1e-3, atol=1e-12)
    for name, tensor in want.state.memory.items():
        assert memory[name].shape == tuple(tensor.shape), name
        assert memory[name].dtype == tensor.numpy().dtype, name
        if not tensor.is_floating_point():
            is_own = own_units(tensor, x, lengths)
            np.testing.assert_array_equal(memory[name][is_own], tensor.numpy()[is_own], err_msg=name)
    assert set(want.state.memory) <= set(memory)
    if want.n_loops_by_token is not None:
        np.testing.assert_array_equal(memory["prefix.n_loops"], want.n_loops_by_token.numpy())
    return got


def own_units(tensor, x, lengths):
    """Where an array [B] or [B, T] belongs to a prompt and not to its padding."""
    if tensor.dim() == 1 or lengths is None:
        return np.ones(tensor.shape, dtype=bool)
    return np.arange(x.shape[1]) < np.asarray(lengths)[:, None]


def prompts(n, T=9, d=3, seed=1, dtype=torch.float64):
    return torch.randn(n, T, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


ALL_RULES = {
    "fixed": Fixed(),
    "exact": Exact(),
    "absolute": Absolute(tol=1e-2),
    "relative": Relative(tol=1e-3),
    "contraction": Contraction(tol=1e-3),
    "readout": Readout(tol=1e-3),
}


# Agreement with the eager engine in float64 -----------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["prompt", "prefix"])
@pytest.mark.parametrize("check_every", [1, 3])
@pytest.mark.parametrize("name", ALL_RULES)
def test_rules_agree(name, check_every, scope):
    rule = dataclasses.replace(ALL_RULES[name], check_every=check_every, scope=scope, min_loops=2)
    spread = set()
    for seed in range(3):
        model = icl_model(std=0.1, seed=seed)
        got = assert_agrees(model, prompts(4, seed=seed), [9, 1, 6, 0], rule)
        spread |= set(got["memory"]["t"].tolist())
    assert len(spread) > 2 or name in ("fixed", "exact")


@pytest.mark.parametrize("scope", ["prompt", "prefix"])
@pytest.mark.parametrize("tol", [1e-3, math.inf])
def test_a_readout_that_stays_zero_is_still(tol, scope):
    model = icl_model(std=0.1)
    with torch.no_grad():
        model.read_out.weight.zero_()
        model.read_out.bias.zero_()
    got = assert_agrees(model, prompts(3), None, Readout(tol=tol, scope=scope), n_loops=12)
    assert scope == "prefix" or got["memory"]["t"].max() == 4


@pytest.mark.parametrize("tol", [0.0, math.inf])
@pytest.mark.parametrize("rule", [Absolute, Relative, Contraction, Readout])
def test_extreme_tolerances_agree(rule, tol):
    for scope in ("prompt", "prefix"):
        assert_agrees(icl_model(std=0.1), prompts(3), None, rule(tol=tol, stall_window=2, scope=scope), n_loops=12)


@pytest.mark.parametrize("on_stall", ["ignore", "exit", "damp"])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("std", [0.1, 0.3, 0.6])
def test_stalls_agree(on_stall, depth, std):
    # A wandering map multiplies rounding, so few loops; a small window lets it stall in them.
    for seed in range(3):
        rule = Contraction(tol=1e-9, stall_window=3, check_every=1 + seed % 2)
        assert_agrees(icl_model(std=std, seed=seed), prompts(3, seed=seed), None, rule, 14, on_stall, depth, tol=1e-6)


def test_damping_brings_a_cycle_to_rest():
    x = torch.full((1, 1, 1), 3.0, dtype=torch.float64)
    for on_stall, used in (("ignore", 60), ("exit", 17), ("damp", 19)):
        got = assert_agrees(scalar_map(-1.0), x, None, "contraction", 60, on_stall)
        assert got["memory"]["t"].tolist() == [used]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", ["fixed", "relative", "contraction", "readout"])
def test_anderson_agrees(depth, name):
    for seed in range(3):
        rule = dataclasses.replace(ALL_RULES[name], check_every=1 + seed % 2)
        assert_agrees(icl_model(std=0.12, seed=seed), prompts(4, seed=seed), [9, 3, 7, 0], rule, 15, depth=depth, tol=1e-7)


VARIANTS = {
    "mul, ones": dict(inject="mul", state_init="ones"),
    "twin": dict(inject="none", state_init="embedding"),
    "full mask": dict(mask_kind="full"),
    "relu": dict(activation="relu"),
    "exact gelu": dict(activation="gelu"),
    "gated": dict(activation="silu_gated"),
    "gated, odd widths": dict(activation="silu_gated", d_ff=19, bias=False),
    "rms": dict(norm_kind="rms"),
    "rms once": dict(norm_kind="rms", loop_norm="once", n_coda=1),
    "rms without final norm": dict(norm_kind="rms", loop_norm="none"),
    "llama": dict(norm_kind="rms", activation="silu_gated", bias=False, d_ff=40, norm_eps=1e-2, n_prelude=1, n_core=2),
    "no norm": dict(norm_kind="none", loop_norm="none"),
    "no bias": dict(bias=False),
    "norm once": dict(loop_norm="once"),
    "deep": dict(loop_norm="once", n_prelude=1, n_core=3, n_coda=2),
    "two core layers": dict(n_core=2),
    "positions once": dict(pos_when="once"),
    "no positions": dict(pos_kind="none", n_positions=0),
    "classes": dict(readout="classes", n_classes=5, read_stride=3),
    "closed state": dict(readout="none", read_stride=1, loop_norm="once", n_coda=1),
    "given state": dict(state_init="given"),
    "head_dim": dict(head_dim=5, n_heads=3, d_ff=19),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_field_of_the_configuration_agrees(name):
    model = icl_model(std=0.1, **VARIANTS[name])
    x = prompts(3)
    state = prompts(3, d=16, seed=5) if model.config.state_init == "given" else None
    rules = [Relative(tol=1e-3), Readout(tol=1e-2)]
    if model.config.mask_kind == "causal":
        rules += [Contraction(tol=1e-3, scope="prefix"), Readout(tol=1e-2, scope="prefix")]
    for rule in rules:
        assert_agrees(model, x, [9, 4, 7], rule, 30, state=state, tol=1e-8)


def test_tied_vocabulary_and_plain_gpt2_agree():
    config = looped.config.gpt2_config(vocab_size=37, n_positions=12, d_model=16, n_heads=4, n_layers=2)
    model = random_weights(looped.LoopedTransformer(config))
    ids = torch.randint(0, 37, (3, 12), generator=torch.Generator().manual_seed(0))
    assert_agrees(model, ids, [12, 5, 1], None, 1)
    untied = random_weights(looped.LoopedTransformer(config.replace(tie_readout=False)))
    assert_agrees(untied, ids, [12, 5, 1], None, 2)


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(pos_when="once", n_prelude=2),
        dict(mask_kind="full", n_prelude=1),
        dict(input_kind="tokens", vocab_size=11, n_dims=None, pos_when="once"),
        dict(input_kind="states", n_dims=None, n_prelude=1),
    ],
)
def test_embedding_agrees_and_never_reads_padding(changes):
    model = icl_model(**changes)
    lengths, kind = [9, 0, 4], model.config.input_kind
    x = torch.randint(0, 11, (3, 9)) if kind == "tokens" else prompts(3, d=3 if kind == "features" else 16)
    want = model.embed(x, torch.tensor(lengths)).detach().numpy()
    for i, n in enumerate(lengths):
        x[i, n:] = -1 if kind == "tokens" else torch.nan
    cpu = Cpu(model)
    got = cpu.embed(x, lengths).numpy()
    np.testing.assert_allclose(got, want, atol=1e-10 * (1 + abs(want).max()))
    for i, n in enumerate(lengths):
        alone = cpu.embed(x[i : i + 1, : max(1, n)], [n]).numpy()
        np.testing.assert_array_equal(alone[0, :n], got[i, :n])
        assert not got[i, n:].any()
    if kind == "tokens":
        x[2, 3] = 11
        with pytest.raises(ValueError, match=r"prompt 2 holds token id 11 at position 3, but ids must lie in 0 \.\. 10"):
            cpu.embed(x, lengths)


@settings(max_examples=40, deadline=None)
@given(
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([1, 3, 5, 8, 16, 17, 33, 48]),
    C=st.sampled_from([1, 3, 8, 20, 31, 33, 64]),
    d_ff=st.sampled_from([1, 7, 32, 65]),
    T=st.integers(1, 45),
    mask=st.sampled_from(["causal", "full"]),
    activation=st.sampled_from(looped.config.CHOICES["activation"]),
    norm=st.sampled_from(["layernorm", "rms"]),
    seed=st.integers(0, 3),
)
def test_odd_shapes_agree(heads, head_dim, C, d_ff, T, mask, activation, norm, seed):
    model = looped.LoopedTransformer(
        looped.LoopedConfig(
            input_kind="states",
            readout="classes",
            n_classes=3,
            d_model=C,
            n_heads=heads,
            head_dim=head_dim,
            d_ff=d_ff,
            n_positions=T,
            mask_kind=mask,
            activation=activation,
            norm_kind=norm,
        )
    )
    model = random_weights(model, std=0.2, seed=seed)
    x = prompts(2, T, C, seed)
    assert_agrees(model, x, [T, T - 1], None, 2, tol=1e-8 if C == 1 else CORE_FP64)  # a norm over one number is all rounding


# float32 keeps its promise ---------------------------------------------------------------------------------------------


KINDS = [dict(), dict(activation="gelu"), dict(norm_kind="rms", activation="silu_gated"), dict(norm_kind="rms")]


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("n_loops", [1, 2, 20])
@pytest.mark.parametrize(("C", "H", "T"), [(64, 4, 22), (128, 4, 41), (256, 8, 41), (48, 3, 35), (20, 4, 7)])
def test_float32_is_as_exact_as_promised(C, H, T, n_loops, kinds):
    truth = icl_model(std=0.05, d_model=C, n_heads=H, n_points=50, **kinds)
    x = prompts(2, T)
    want = eager(truth, x, n_loops=n_loops).y
    single = truth.float()
    plain = eager(single, x.float(), n_loops=n_loops).y.double()
    got = torch.from_numpy(Cpu(single)(x.float(), n_loops=n_loops)["y"]).double()
    limit = max(FP32, 2 * ((plain - want).norm() / want.norm()).item())
    assert ((got - want).norm() / want.norm()).item() <= limit


def test_float32_counts_agree():
    for seed in range(4):
        model = icl_model(std=0.1, seed=seed).float()
        x = prompts(6, seed=seed).float()
        for rule in (Contraction(tol=1e-3), Contraction(tol=1e-3, scope="prefix"), Relative(tol=1e-3)):
            got = Cpu(model)(x, exit=rule, n_loops=60)
            want = eager(model, x, exit=rule, n_loops=60)
            np.testing.assert_array_equal(got["memory"]["status"], want.status.numpy())
            np.testing.assert_array_equal(got["memory"]["t"], want.n_loops.numpy())


def activated(activation, x, shift=0.0):
    """The engine's activation of every number of the vector x + shift: the MLP of a layer alone, channel 0 to channel 1."""

    def weights(model):
        mlp = model.core[0].mlp
        mlp.fc.weight[0, 0] = 4.0
        mlp.fc.bias[0] = shift
        mlp.fc.bias[1:] = 1.0  # up, where there are gates
        mlp.proj.weight[1, 0] = 1.0

    # Infinities and NaN come about in the MLP: in the state they would reach the attention, and 0 times either is NaN.
    model = states_model(weights, d_model=2, d_ff=1, activation=activation, inject="none", state_init="given", n_loops=1)
    state = torch.zeros(-(-len(x) // 32), 32, 2, dtype=x.dtype)
    state.view(-1, 2)[: len(x), 0] = (x / 4).clamp(torch.finfo(x.dtype).min, torch.finfo(x.dtype).max)
    y = Cpu(model.to(x.dtype))(torch.zeros_like(state), state=state)["y"]
    return torch.from_numpy(y)[..., 1].reshape(-1)[: len(x)]


ACTIVATION_FORMULAS = {
    "gelu": lambda x: x * mpmath.ncdf(x),
    "gelu_tanh": lambda x: x * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))) / 2,
    "silu_gated": lambda x: x / (1 + mpmath.exp(-x)),
    "relu": lambda x: max(x, mpmath.mpf(0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ACTIVATION_FORMULAS)
def test_activations_are_exact_to_a_few_units(name, dtype):
    generator = torch.Generator().manual_seed(3)
    kept = 12.5 if dtype == torch.float32 else 37.0  # beyond, the exact GELU of -x is no normal number
    x = torch.cat(
        [
            torch.linspace(-kept, kept, 1501, dtype=torch.float64),
            torch.randn(500, generator=generator, dtype=torch.float64),
            *(s * 2 ** (-80 * torch.rand(250, generator=generator, dtype=torch.float64)) for s in (-1, 1)),
        ]
    ).to(dtype)
    if name == "gelu_tanh":  # its argument is rounded before the exponential: exact in the absolute, not far out on the left
        x = x[x > -2]
    got = activated(name, x).double()
    with mpmath.workdps(60):
        want = [ACTIVATION_FORMULAS[name](mpmath.mpf(value)) for value in x.tolist()]
        error = [abs((mpmath.mpf(g) - w) / w) if w else abs(g) for g, w in zip(got.tolist(), want, strict=True)]
    limit = {"gelu": 3.8, "silu_gated": 2.4, "gelu_tanh": 8.0, "relu": 0.0}[name]
    assert max(error) <= limit * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ACTIVATION_FORMULAS)
def test_activations_far_out_are_their_argument_or_zero(name, dtype):
    most = torch.finfo(dtype).max
    far = [40.0, 90.0, 800.0, 1e4, 1e10, 1e19, 1e20, 1e35, 3e38, most / 2, most, math.inf]
    x = torch.tensor(far, dtype=dtype)
    assert torch.equal(activated(name, x), x)
    left = activated(name, -x)
    assert (left[3:] == 0).all()
    assert (left[:3].abs() < 1e-15).all()
    assert activated(name, torch.tensor([0.0, -0.0], dtype=dtype)).tolist() == [0.0, 0.0]
    assert activated(name, x[:3], shift=math.nan).isnan().all()


def test_extreme_activations_stay_finite():
    model = icl_model(std=8.0, dtype=torch.float32)
    for dtype in (torch.float32, torch.float64):
        x = 100 * prompts(3, dtype=dtype)
        got = Cpu(model.to(dtype))(x, n_loops=2)
        want = eager(model.to(dtype), x, n_loops=1).y.numpy()
        assert np.isfinite(got["y"]).all()
        np.testing.assert_allclose(Cpu(model.to(dtype))(x, n_loops=1)["y"], want, atol=1e-4 if dtype == torch.float32 else 1e-9)


# One prompt's bits -----------------------------------------------------------------------------------------------------

MODES = [
    dict(exit=Contraction(tol=1e-3)),
    dict(exit=Contraction(tol=1e-3, scope="prefix")),
    dict(exit=Contraction(tol=1e-3), depth=3),
    dict(exit=Readout(tol=1e-3), on_stall="damp"),
]


def bits(result, i, length):
    """Everything that belongs to prompt i's own tokens, as bytes."""
    parts = [result["y"][i, :length], result["prediction"][i, : -(-length // 2)]]
    parts += [result["memory"][name][i] for name in ("t", "status", "residual", "best_g")]
    return [np.ascontiguousarray(part).tobytes() for part in parts]


@pytest.mark.parametrize("kinds", [dict(), dict(norm_kind="rms", activation="silu_gated", d_ff=37), dict(activation="gelu")])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_prompts_bits_do_not_depend_on_its_batch(mode, dtype, kinds):
    cpu = Cpu(icl_model(std=0.1, dtype=dtype, d_model=24, n_heads=3, n_points=40, **kinds))
    lengths = [7, 1, 33, 64, 2, 0, 33, 50, 14, 15]
    x = prompts(len(lengths), 64, dtype=dtype)
    alone = [bits(cpu(x[i : i + 1, : max(1, n)], [n], n_loops=30, **mode), 0, n) for i, n in enumerate(lengths)]
    order = np.random.default_rng(0).permutation(len(lengths))
    for rows in (range(len(lengths)), order, [3, 3, 3]):
        for n_threads in (1, 2, 5):
            rows = list(rows)
            own = [lengths[i] for i in rows]
            result = cpu(x[rows], own, n_loops=30, n_threads=n_threads, **mode)
            for place, i in enumerate(rows):
                assert bits(result, place, lengths[i]) == alone[i]


@pytest.mark.parametrize("mode", MODES)
def test_padding_is_never_read_and_comes_out_zero(mode):
    model = icl_model(std=0.1)
    cpu, x, lengths = Cpu(model), prompts(3), [9, 4, 0]
    clean = cpu(x, lengths, n_loops=25, **mode)
    poisoned = cpu.embed(x, lengths)
    state = torch.zeros_like(poisoned)
    for i, n in enumerate(lengths):
        poisoned[i, n:] = torch.nan
        state[i, n:] = torch.nan
        assert not clean["y"][i, n:].any()
        assert not clean["prediction"][i, -(-n // 2) :].any()
    rule = mode["exit"]
    spec = dict(n_loops=25, rule=type(rule).__name__.lower(), phi=2e-15, on_stall=mode.get("on_stall", "ignore"))
    spec |= dict(depth=mode.get("depth", 0), return_predictions=False, **dataclasses.asdict(rule))
    got = cpu.engine.run(poisoned.numpy(), state.numpy(), np.array(lengths), spec)
    for name in ("y", "prediction"):
        np.testing.assert_array_equal(got[name], clean[name])
    for name, array in clean["memory"].items():
        np.testing.assert_array_equal(got["memory"][name], array, err_msg=name)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e308])
@pytest.mark.parametrize("mode", MODES[:3])
def test_a_prompt_that_is_not_finite_leaves_its_neighbours_alone(mode, bad):
    cpu, x = Cpu(icl_model(std=0.1)), prompts(3)
    alone = [bits(cpu(x[i : i + 1], n_loops=25, **mode), 0, 9) for i in range(3)]
    x[1, 4, 0] = bad
    got = cpu(x, n_loops=25, **mode)
    assert got["memory"]["status"][1] == Status.NONFINITE or bad == 1e308
    for i in (0, 2):
        assert bits(got, i, 9) == alone[i]
    again = cpu(prompts(3), n_loops=25, **mode)  # nothing of it stays behind
    assert [bits(again, i, 9) for i in range(3)] == alone


@pytest.mark.parametrize("mode", [*MODES, dict(exit=Relative(tol=1e-4, check_every=4)), dict(exit=Exact()), dict()])
def test_resuming_gives_the_same_bits(mode):
    model = icl_model(std=0.12)
    cpu, x, lengths = Cpu(model), prompts(4), [9, 4, 0, 7]
    whole = cpu(x, lengths, n_loops=30, return_predictions=True, **mode)
    for k in (0, 1, 5, 13, 30):
        part = cpu(x, lengths, n_loops=k, return_predictions=True, **mode)
        rest = cpu(x, lengths, n_loops=30, state=torch.from_numpy(part["y"]), memory=part["memory"], **mode)
        for name in ("y", "prediction"):
            np.testing.assert_array_equal(rest[name], whole[name])
        for name, array in whole["memory"].items():
            np.testing.assert_array_equal(rest["memory"][name], array, err_msg=name)
        for i, t in enumerate(part["memory"]["t"]):
            np.testing.assert_array_equal(part["predictions"][i, :t], whole["predictions"][i, :t])


@pytest.mark.parametrize("mode", MODES)
def test_a_state_goes_from_one_backend_to_the_other(mode):
    model, x, options = icl_model(std=0.12), prompts(4), dict(mode)
    depth = options.pop("depth", 0)
    options |= dict(accelerate=looped.Anderson(depth) if depth else None)
    half = eager(model, x, n_loops=4, **options).state
    want = eager(model, x, n_loops=30, state=half, **options)
    memory = {name: tensor.numpy() for name, tensor in half.memory.items()}
    got = Cpu(model)(x, n_loops=30, state=half.y, memory=memory, **mode)
    np.testing.assert_allclose(got["y"], want.y.numpy(), atol=1e-7)
    np.testing.assert_array_equal(got["memory"]["t"], want.n_loops.numpy())
    np.testing.assert_array_equal(got["memory"]["status"], want.status.numpy())


@pytest.mark.parametrize("before", [dict(exit=Relative(tol=1e-1)), dict(exit=Contraction(tol=1e-9), accelerate="anderson")])
@pytest.mark.parametrize("scope", ["prompt", "prefix"])
def test_a_state_resumes_under_another_rule_with_new_counters(before, scope):
    model, x, rule = icl_model(std=0.1), prompts(4), Contraction(tol=1e-4, scope=scope)
    half = eager(model, x, n_loops=7, **before).state
    want = eager(model, x, n_loops=60, exit=rule, state=half)
    kept = {name: half.memory[name].numpy() for name in ("t", "done", "status", "residual", "Y") if name in half.memory}
    got = Cpu(model)(x, n_loops=60, exit=rule, state=half.y, memory=kept)
    np.testing.assert_array_equal(got["memory"]["t"], want.n_loops.numpy())
    np.testing.assert_array_equal(got["memory"]["status"], want.status.numpy())
    np.testing.assert_allclose(got["y"], want.y.numpy(), atol=1e-9)


def test_inputs_are_left_as_they_are():
    cpu, x = Cpu(icl_model(std=0.1)), prompts(2)
    part = cpu(x, n_loops=4, exit=Contraction(tol=1e-4), depth=2)
    before = {name: array.copy() for name, array in part["memory"].items()}
    y = part["y"].copy()
    cpu(x, n_loops=9, exit=Contraction(tol=1e-4), depth=2, state=torch.from_numpy(part["y"]), memory=part["memory"])
    np.testing.assert_array_equal(part["y"], y)
    for name, array in before.items():
        np.testing.assert_array_equal(part["memory"][name], array)


# By hand ---------------------------------------------------------------------------------------------------------------


def test_growing_state_is_not_converged():
    model, x = states_model(d_model=4, n_loops=50), torch.ones(1, 3, 4, dtype=torch.float64)
    for rule, used, status in ((Relative(tol=0.049), 21, Status.CONVERGED), (Contraction(tol=0.049), 50, Status.STALLED)):
        memory = assert_agrees(model, x, None, rule, 50)["memory"]
        assert (memory["t"][0], memory["status"][0]) == (used, status)


@pytest.mark.parametrize("scope", ["prompt", "prefix"])
@pytest.mark.parametrize("name", ["exact", "absolute", "relative", "contraction", "readout"])
def test_zero_state_rests_at_once(name, scope):
    model = icl_model(std=0.0)
    got = Cpu(model)(torch.zeros(2, 5, 3, dtype=torch.float64), exit=looped.exits.make_exit(name, scope=scope), n_loops=50)
    assert got["memory"]["t"].tolist() == [1, 1]
    assert got["memory"]["residual"].tolist() == [0.0, 0.0]
    assert got["memory"]["status"].tolist() == [Status.CONVERGED] * 2


def test_no_loops_and_no_prompts():
    model = icl_model(std=0.1)
    for n_loops in (0, 1):
        for exit in (None, Contraction(), Contraction(scope="prefix")):
            assert_agrees(model, prompts(2), None, exit, n_loops)
    empty = Cpu(model)(prompts(0), n_loops=3)
    assert empty["y"].shape == (0, 9, 16)


# Threads, processes, errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "neon"])
def test_every_instruction_set_of_this_machine(isa):
    code = """
import json, sys, torch
sys.path[:0] = json.loads(sys.argv[1])
from test_cpu_engine import *
from test_cpu_engine import _engine
if _engine.isa() != sys.argv[2]: sys.exit(4)
for C, H, hd, T in ((20, 4, 5, 7), (64, 4, 16, 33), (33, 2, 48, 40), (3, 1, 3, 1)):
    for mask in ("causal", "full"):
        model = icl_model(std=0.1, d_model=C, n_heads=H, head_dim=hd, n_points=40, mask_kind=mask)
        assert_agrees(model, prompts(3, T), [T, T - 1, 0], Contraction(tol=1e-4))
        test_float32_is_as_exact_as_promised(C, 1, T, 20, {})
    for kinds in KINDS:
        model = icl_model(std=0.1, d_model=C, n_heads=H, head_dim=hd, n_points=40, d_ff=4 * C + 1, **kinds)
        assert_agrees(model, prompts(3, T), [T, T - 1, 0], Contraction(tol=1e-4))
for dtype in (torch.float32, torch.float64):
    for name in ACTIVATION_FORMULAS:
        test_activations_are_exact_to_a_few_units(name, dtype)
        test_activations_far_out_are_their_argument_or_zero(name, dtype)
for mode in MODES: test_a_prompts_bits_do_not_depend_on_its_batch(mode, torch.float32, {})
for kinds in KINDS: test_a_prompts_bits_do_not_depend_on_its_batch(MODES[1], torch.float32, kinds)
test_a_prompt_that_is_not_finite_leaves_its_neighbours_alone(MODES[0], math.nan)
test_extreme_activations_stay_finite()
"""
    run = subprocess.run(
        [sys.executable, "-c", code, json.dumps(sys.path), isa],
        env=os.environ | {"LOOPED_ISA": isa, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if run.returncode and "is not an instruction set of this machine" in run.stderr:
        pytest.skip(f"{isa} is not an instruction set of this machine")
    assert run.returncode == 0, run.stderr


def test_an_unknown_instruction_set_is_an_error_that_lists_those_there_are():
    code = f"import sys; sys.path[:0] = {sys.path!r}\nfrom test_cpu_engine import _engine\n_engine.isa()"
    run = subprocess.run([sys.executable, "-c", code], env=os.environ | {"LOOPED_ISA": "sse9"}, capture_output=True, text=True)
    assert run.returncode != 0
    assert "LOOPED_ISA=sse9" in run.stderr
    assert "portable" in run.stderr


def test_calls_from_many_threads_do_not_meet():
    cpu, batches = Cpu(icl_model(std=0.1)), [prompts(n, seed=n) for n in (1, 2, 3, 4)]
    serial = [cpu(x, n_loops=9 + len(x), exit=Contraction(tol=1e-3)) for x in batches]
    wrong = []

    def work(k):
        for _ in range(20):
            got = cpu(batches[k], n_loops=9 + len(batches[k]), exit=Contraction(tol=1e-3), n_threads=2)
            if got["y"].tobytes() != serial[k]["y"].tobytes():
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _run_in_child(queue, x):
    queue.put(Cpu(icl_model(std=0.1))(x, n_loops=9, n_threads=2)["y"])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_can_run(method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    x = prompts(3)
    want = Cpu(icl_model(std=0.1))(x, n_loops=9, n_threads=2)["y"]
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_run_in_child, args=(queue, x))
    child.start()
    got = queue.get(timeout=60)
    child.join(30)
    assert child.exitcode == 0
    np.testing.assert_array_equal(got, want)


def test_the_float_mode_is_left_alone_and_does_not_matter():
    cpu, x = Cpu(icl_model(std=0.1, dtype=torch.float32)), prompts(2, dtype=torch.float32)
    want = cpu(x, n_loops=9)["y"]
    tiny = np.float32(1e-45)

    def denormals_live():
        return 5e-324 > 0 and np.float32(1e-38) * np.float32(0.1) > 0 and tiny * np.float32(1) == tiny

    assert denormals_live()
    seen = []
    thread = threading.Thread(target=lambda: seen.append(denormals_live()))
    thread.start()
    thread.join()
    assert seen == [True]
    if torch.set_flush_denormal(True):
        try:
            np.testing.assert_array_equal(cpu(x, n_loops=9)["y"], want)
        finally:
            torch.set_flush_denormal(False)


def test_errors_name_the_prompt_and_the_next_call_is_right():
    model = icl_model(std=0.1)
    cpu, x = Cpu(model), prompts(8)
    good = cpu(x, n_loops=5)["y"]
    P = model.embed(x).detach().numpy()
    spec = dict(n_loops=5, rule="fixed", check_every=1, min_loops=0, stall_window=16, scope="prompt")
    spec |= dict(on_stall="ignore", depth=0, return_predictions=False)
    engine, zeros = cpu.engine, np.zeros_like(P)
    lengths = np.full(8, 9)
    for value in (-1, 10):
        lengths[5] = value
        with pytest.raises(ValueError, match=f"prompt 5 has length {value}"):
            engine.run(P, zeros, lengths, spec, n_threads=4)
    long = np.zeros((2, 18, 16))
    with pytest.raises(ValueError, match="prompt 1 has 18 tokens but the model has 17 positions"):
        engine.run(long, long, np.array([17, 18]), spec)
    for wrong in (P[:, ::2], P.astype(np.float32), P[..., :8], P.transpose(1, 0, 2)):
        with pytest.raises(ValueError, match="run: "):
            engine.run(wrong, zeros, None, spec)
    with pytest.raises(ValueError, match="state must be C-contiguous float64"):
        engine.run(P, zeros[:, ::2], None, spec)
    with pytest.raises(ValueError, match="rule='sometimes' is not one of"):
        engine.run(P, zeros, None, spec | dict(rule="sometimes"))
    with pytest.raises(ValueError, match="n_loops must be 0 or more"):
        engine.run(P, zeros, None, spec | dict(n_loops=-1))
    with pytest.raises(ValueError, match="memory"):
        engine.run(P, zeros, None, spec, cpu(x[:3], n_loops=2)["memory"])
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"weights hold no 'core\.0\.mlp\.fc\.bias'"):
        _engine.Engine(model.config.to_dict(), {k: w for k, w in weights.items() if k != "core.0.mlp.fc.bias"})
    with pytest.raises(ValueError, match=r"positions\.weight"):
        _engine.Engine(model.config.to_dict(), weights | {"positions.weight": weights["positions.weight"][1:]})
    np.testing.assert_array_equal(cpu(x, n_loops=5, n_threads=4)["y"], good)


def test_progress_is_called_and_may_stop_the_run():
    cpu, x = Cpu(icl_model(std=0.1, d_model=64, n_points=30)), prompts(16, 60)
    seen = []
    cpu(x, n_loops=400, n_threads=2, progress=seen.append)
    assert len(seen) > 1  # every 50 ms of a second or so
    assert seen == sorted(seen)
    assert set(seen) <= set(range(17))

    def stop(n_finished):
        raise LookupError("enough")

    start = time.perf_counter()
    with pytest.raises(LookupError, match="enough"):
        cpu(x, n_loops=10**8, n_threads=2, progress=stop)
    assert time.perf_counter() - start < 20
    assert np.isfinite(cpu(x, n_loops=2)["y"]).all()


def test_an_interrupt_stops_the_run():
    code = f"""
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored for background jobs
sys.path[:0] = {sys.path!r}
from test_cpu_engine import *
from test_cpu_engine import _engine
threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
got = Cpu(icl_model(std=0.1))(prompts(4), n_loops=10**9)
sys.exit(7 if got["interrupted"] and not got["finished"].any() else 0)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 7
