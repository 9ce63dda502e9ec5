"""What a CUDA graph cannot hold: a wait of the host for the device, a copy from the host. And which backend a GPU gets.

Shown without a GPU, on tensors of the device "meta", which stands for it: they have no memory, so an operation that asks for
their numbers raises, and one that brings numbers from the host is seen by its devices. Launches of Triton kernels are noted,
not run; what they compute is checked in tests/interpreter.
"""

import contextlib
import dataclasses
import importlib.util
import os
import types

import pytest
import torch
from models import icl_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import looped
from looped import op
from looped.backends import device, graph, triton
from looped.exits import Contraction, Readout, Relative
from looped.weights import weights_of

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("fake tensors have no numbers to interpret", allow_module_level=True)

from loopkernels import launch, linear, settle


class NoHost(TorchDispatchMode):
    """Refuses operations that read the host's memory for the device: a copy could not be captured."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        used = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = {x.device.type for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
        if "cpu" in used and "meta" in used | made:
            raise AssertionError(f"{function} copies from the host")
        return out


class Launches(list):
    """Stands for a kernel: notes its launches."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.append((grid, args, kwargs))


@pytest.fixture
def launches(monkeypatch):
    """The device "meta" as a GPU, and the launches on it by kernel."""
    noted = {}
    for module, names in (
        (launch, ("loop_tile", "loop_blocks")),
        (linear, ("linear_rows",)),
        (settle, ("measure", "decide", "advance")),
    ):
        for name in names:
            noted[name] = Launches()
            monkeypatch.setattr(module, name, noted[name])
    monkeypatch.setattr(launch, "target_of", lambda device: "sm_90")
    monkeypatch.setattr(launch, "_sources", lambda packed, weights: weights)
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(device, "is_on_gpu", lambda tensor: tensor.is_meta)
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
    return noted


def on_gpu(config, dtype=torch.float32):
    """A model without numbers."""
    with torch.device("meta"):
        return looped.LoopedTransformer(config).to(dtype)


def packed_on_gpu(**fields):
    """Such a model, and its weights packed."""
    model = icl_model(**fields)
    block = triton.block_of(model.config, weights_of(model))
    packed = launch.pack(block, launch.choose(block, "bf16x3", "sm_90"))
    tensors = {field.name: getattr(packed, field.name) for field in dataclasses.fields(packed)}
    moved = {name: tensor.to("meta") for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    return on_gpu(model.config), {"core": dataclasses.replace(packed, **moved)}


MODEL = dict(dtype=torch.float32, d_model=64, n_heads=4, n_points=64)
RULES = [None, Contraction(tol=1e-2, check_every=2), Readout(tol=1e-2)]


@pytest.mark.parametrize(
    ("rule", "changes"),
    [(rule, changes) for rule in RULES for changes in (dict(), dict(return_predictions=True))]
    + [(rule, dict(on_stall="damp")) for rule in RULES if rule],  # without a rule nothing stalls
    ids=str,
)
def test_a_call_of_the_fused_kernels_says_no_word_to_the_host(launches, monkeypatch, rule, changes):
    model, parts = packed_on_gpu(**MODEL)
    monkeypatch.setattr(triton, "packed", lambda config, weights: parts)
    x = torch.empty(600, 41, 3, device="meta")
    with NoHost():
        result = looped.solve(model, x, n_loops=30, exit=rule, **changes)
    assert (result.backend, result.reason) == ("triton", "the fastest that runs this model on a GPU")
    assert result.y.shape == (600, 41, 64)
    ((grid, _, kwargs),) = launches["loop_tile"]
    assert grid == (132,)  # as many programs as processors, not as prompts
    assert kwargs["NSLOT"] == 1
    assert len(launches["linear_rows"]) == 2  # read-in and read-out


@pytest.mark.parametrize(
    ("rule", "on_stall"),
    [
        (rule, on_stall)
        for rule in [*RULES, Relative(tol=float("inf"))]
        for on_stall in (["ignore", "damp"] if rule else ["ignore"])
    ],
    ids=str,
)
@pytest.mark.parametrize("changes", [dict(), dict(mask_kind="full", n_core=2), dict(readout="classes", n_classes=3)], ids=str)
@pytest.mark.parametrize("ragged", [False, True])
def test_the_loops_of_a_graph_say_no_word_to_the_host(launches, rule, changes, on_stall, ragged):
    model, _ = packed_on_gpu(**MODEL, **changes)
    x = torch.empty(5, 9, 3, device="meta")
    lengths = torch.empty(5, dtype=torch.int64, device="meta") if ragged else None
    spec = looped.loop.LoopSpec(30, looped.exits.make_exit(rule), on_stall, None, False)
    with torch.no_grad():
        board, _ = graph._start(model, x, lengths, spec, None)
        board.reads = x.new_zeros(5, 30, *model.config.prediction_shape(5, 9)[1:])
        loops = graph.Loops(board, triton.stop_of(spec, "fp32"), 5, 3)
        with NoHost():
            for i in range(3):
                loops.body(model, i)
    is_readout = isinstance(rule, Readout)
    assert len(launches["decide"]) == 3
    assert len(launches["measure"]) == (6 if is_readout else 3)
    assert len(launches["advance"]) == (9 if is_readout else 6)  # the state, the predictions kept, those of the last check


def test_grids_beyond_65535(launches):
    """Prompts and rows are counted on the first axis of a grid, which takes 2^31 - 1; the others take 65,535."""
    B = 70_000
    ints, floats = torch.empty(B, 8, dtype=torch.int32, device="meta"), torch.empty(B, 4, device="meta")
    settler = settle.Settler(ints, floats, launch.Stop(3))
    state = torch.empty(B, 101, 1024, device="meta")
    settler.step(torch.empty_like(state), state, state)
    linear.linear(torch.empty(32 * 70_000, 4, device="meta"), torch.empty(9, 4, device="meta"), None)
    grids = [grid for noted in launches.values() for grid, _, _ in noted]
    assert len(grids) == 4
    assert max(grid[0] for grid in grids) == 70_000
    assert all(axis <= 65_535 for grid in grids for axis in grid[1:])


def test_this_test_sees_a_wait_and_a_copy(launches):
    x = torch.empty(3, device="meta")
    for waits in (lambda: bool((x > 0).any()), lambda: x.tolist(), lambda: x.nonzero(), lambda: x.cpu(), lambda: x[x > 0]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            waits()
    with NoHost():
        (x + 1).masked_fill(x > 0, 2)
        for wrong in (lambda: torch.ones(1).to("meta"), lambda: torch.where(x > 0, x, torch.ones(()))):
            with pytest.raises(AssertionError, match="copies from the host"):
                wrong()


def chosen(model, x, few=False):
    spec = looped.engine._spec(model, 3, None, "ignore", None, False, "auto", few)
    choices, reason = looped.engine._choose(model, spec, "auto", [x.shape[1]] * len(x), few)
    assert [list(choice.rows) for choice in choices] == [list(range(len(x)))]
    return choices[0].run.__module__.rpartition(".")[2], reason


def test_what_auto_takes_on_a_gpu_and_why(launches):
    def model(dtype=torch.float32, **changes):
        return on_gpu(looped.icl_config(n_points=600, **(dict(d_model=256) | changes)), dtype)

    x = torch.empty(1, 41, 20, device="meta")
    assert chosen(model(), x) == ("triton", "the fastest that runs this model on a GPU")
    name, reason = chosen(model(d_model=512), x)
    assert name == "graph"
    assert reason == "the Triton kernels on sm_90 take widths up to 256 in bf16x3 and the model is 512 wide"
    name, reason = chosen(model(n_heads=4), x)
    assert name == "graph"
    assert reason == "the Triton kernels on sm_90 take heads of up to 32 lanes in bf16x3 at width 256 and the model's have 64"
    name, reason = chosen(model(), torch.empty(1, 300, 20, device="meta"))
    assert (name, reason) == ("graph", "the Triton kernels take prompts of up to 256 tokens and one has 300")
    name, reason = chosen(model(torch.float64), x)
    assert name == "eager"
    assert reason.endswith("; the rule on the GPU sums in float32 and the model is torch.float64")
    # So few prompts that a fused kernel would wait for its weights: float32 at width 256, not at width 64, and not many of
    # them.
    name, reason = chosen(model(), x, few=True)
    assert name == "graph"
    assert "allow_batch_dependent" in reason
    assert "would use 1 of 132 processors" in reason
    assert chosen(model(d_model=64), x, few=True)[0] == "triton"
    assert chosen(model(), x.expand(4096, -1, -1), few=True)[0] == "triton"
    with pytest.raises(ValueError, match='allow_batch_dependent is for backend="auto"'):
        looped.solve(model(), x, allow_batch_dependent=True, backend="triton")


@pytest.mark.parametrize(("target", "older", "needed"), [("sm_100", (3, 8), "3.9"), ("sm_90", (3, 5), "3.6")])
def test_a_toolchain_too_old_for_a_chip_is_named(launches, monkeypatch, target, older, needed):
    from loopkernels import table

    monkeypatch.setattr(launch, "target_of", lambda device: target)
    model = on_gpu(looped.icl_config(n_points=64))
    x = torch.empty(1, 41, 20, device="meta")
    assert chosen(model, x)[0] == "triton"
    monkeypatch.setattr(table, "VERSION", older)
    name, reason = chosen(model, x)
    assert name == "graph"
    assert f"the Triton kernels for {target} need Triton {needed} or newer" in reason


@pytest.mark.parametrize(("hip", "is_fast"), [(None, True), ("6.4", False)])
def test_the_tanh_of_nvidias_special_function_unit_is_for_nvidia(monkeypatch, hip, is_fast):
    """The rows of Ampere and AMD are one: what is compiled follows from the device."""
    model = icl_model(**MODEL)
    block = triton.block_of(model.config, weights_of(model))
    row = launch.choose(block, "bf16", "gfx942")
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert launch.pack(block, row).fixed["FAST"] is is_fast


def test_the_operator_is_there_for_a_gpu(launches, monkeypatch):
    """Registered, chosen by a forward pass, and with the fused kernels, ordinary ones or eager behind it."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key("looped::loop", "CUDA")
    assert looped.model.FUSED["cuda"] == (torch.float32, torch.bfloat16)
    model, parts = packed_on_gpu(**MODEL)
    monkeypatch.setattr(triton, "packed", lambda config, weights: parts)
    x = torch.empty(6, 41, 3, device="meta")
    with torch.no_grad():
        monkeypatch.setitem(looped.model.FUSED, "meta", looped.model.FUSED["cuda"])
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
        assert model._why_not_fused(x, "auto") is None
        weights, spec = list(weights_of(model).values()), op.encode(model.config, n_loops=3, exit="contraction")
        y, n_loops, status, residual, read = op.loop_on_gpu(x, None, weights, None, spec)
        fake = torch.ops.looped.loop(x, None, weights, None, spec)
    assert len(launches["loop_tile"]) == 1
    for got, want in zip((y, n_loops, status, residual, read), fake, strict=True):
        assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)


@pytest.mark.parametrize(
    ("n_tokens", "changes", "where"),
    [(5, dict(), "triton"), (300, dict(), "graph"), (5, dict(d_model=512), "graph"), (5, dict(dtype=torch.float64), "eager")],
)
def test_the_operator_on_a_gpu_takes_what_runs(launches, monkeypatch, n_tokens, changes, where):
    called = []

    def note(name):
        def run(model, x, lengths, **rest):
            called.append(name)
            raise RuntimeError("seen")

        return run

    for module in (triton, graph, op.eager):
        monkeypatch.setattr(module, "run", note(module.__name__.rpartition(".")[2]))
    dtype, width = changes.get("dtype", torch.float32), changes.get("d_model", 64)
    model = on_gpu(looped.icl_config(n_points=200, n_dims=3, d_model=width), dtype)
    weights, spec = list(weights_of(model).values()), op.encode(model.config, n_loops=3)
    with pytest.raises(RuntimeError, match="seen"):
        op.loop_on_gpu(torch.empty(2, n_tokens, 3, device="meta", dtype=dtype), None, weights, None, spec)
    assert called == [where]
