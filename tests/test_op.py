"""looped::loop, the operator: PyTorch's own checks, compiled and exported graphs, and when a forward pass is the operator."""

import copy
import subprocess
import sys
import weakref

import pytest
import torch
from models import icl_model, random_weights

import looped
from looped import op
from looped.backends import cpu
from looped.exits import Contraction, Fixed, Readout
from looped.loop import Status
from looped.weights import weights_of

pytestmark = pytest.mark.skipif(not cpu.is_there(), reason="the C++ engine is not built")


def prompts(n=3, T=9, d=3, dtype=torch.float32):
    return torch.randn(n, T, d, generator=torch.Generator().manual_seed(1), dtype=dtype)


def weights(model):
    return [weight.detach() for weight in weights_of(model).values()]


def call(model, x, lengths=None, state=None, **how):
    return torch.ops.looped.loop(x, lengths, list(weights_of(model).values()), state, op.encode(model.config, **how))


LENGTHS = torch.tensor([9, 4, 0])

SPECS = {
    "plain": dict(n_loops=4),
    "no loops": dict(n_loops=0),
    "predictions": dict(n_loops=3, return_predictions=True),
    "exit": dict(n_loops=30, exit=Contraction(tol=1e-3, check_every=2), on_stall="damp"),
    "prefix": dict(n_loops=30, exit=Contraction(tol=1e-2, scope="prefix")),
    "anderson": dict(n_loops=30, exit=Readout(tol=float("inf")), accelerate=looped.Anderson(2)),
}


@pytest.mark.parametrize("name", [name for name in SPECS if name != "no loops"])  # its residual is NaN, which opcheck compares
def test_opcheck(name):
    model = icl_model(std=0.1, dtype=torch.float32)
    for lengths in (None, LENGTHS):
        arguments = (prompts(), lengths, weights(model), None, op.encode(model.config, **SPECS[name]))
        torch.library.opcheck(torch.ops.looped.loop.default, arguments)


@pytest.mark.parametrize(
    "changes",
    [
        dict(readout="classes", n_classes=5, read_stride=3),
        dict(readout="none", read_stride=1),
        dict(readout="none", read_stride=1, loop_norm="once", n_coda=1),
        dict(state_init="given"),
        dict(input_kind="tokens", vocab_size=11, n_dims=None, readout="vocabulary", tie_readout=True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_every_kind_of_model(changes, dtype):
    model = icl_model(std=0.1, dtype=dtype, **changes)
    x = torch.randint(0, 11, (3, 9)) if model.config.input_kind == "tokens" else prompts(dtype=dtype)
    state = prompts(d=16, dtype=dtype) if model.config.state_init == "given" else None
    for how in (dict(n_loops=3), dict(n_loops=3, return_predictions=True)):
        arguments = (x, LENGTHS, weights(model), state, op.encode(model.config, **how))
        torch.library.opcheck(torch.ops.looped.loop.default, arguments)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_gives_what_solve_gives(name, dtype):
    model, x, how = icl_model(std=0.1, dtype=dtype), prompts(dtype=dtype), SPECS[name]
    want = looped.solve(model, x, lengths=LENGTHS, backend="cpu" if dtype == torch.float32 else "eager", **how)
    y, n_loops, status, residual, predictions = call(model, x, LENGTHS, **how)
    assert torch.equal(y, want.y)
    assert torch.equal(predictions, want.predictions if how.get("return_predictions") else want.prediction)
    assert torch.equal(n_loops, want.n_loops)
    assert torch.equal(status, want.status)
    torch.testing.assert_close(residual, want.residual, rtol=0, atol=0, equal_nan=True)


def test_a_spec_is_text_that_holds_everything():
    class Mine(Fixed):
        pass

    model = icl_model(std=0.1)
    how = dict(n_loops=30, exit=Readout(tol=float("inf"), patience=2), on_stall="damp", accelerate=looped.Anderson(2))
    empty, spec = op.decode(op.encode(model.config, **how))
    assert empty.config == model.config
    assert spec == looped.loop.LoopSpec(30, how["exit"], "damp", looped.Anderson(2), False)
    with pytest.raises(ValueError, match="Mine is a rule of your own; a graph holds those of"):
        op.encode(model.config, n_loops=3, exit=Mine())
    with pytest.raises(ValueError, match="spec describes a model of 19 weights, got 1"):
        torch.ops.looped.loop(prompts(), None, [torch.zeros(3)], None, op.encode(model.config, n_loops=1))


def test_a_spec_is_checked_like_the_arguments_of_solve():
    config = icl_model().config
    assert op.decode(op.encode(config, n_loops=torch.tensor(9), exit="relative", accelerate="anderson"))[1].accelerate == (
        looped.Anderson()
    )
    for how, error, text in (
        (dict(n_loops=3.0), TypeError, "n_loops must be an integer, got 3.0"),
        (dict(n_loops=-3), ValueError, "n_loops must be 0 or more, got -3"),
        (dict(n_loops=3, accelerate=3), ValueError, "accelerate=3 is not one of"),
        (dict(n_loops=3, on_stall="stop"), ValueError, "on_stall='stop' is not one of"),
    ):
        with pytest.raises(error, match=text):
            op.encode(config, **how)
    with pytest.raises(ValueError, match="needs a causal mask"):
        op.encode(icl_model(mask_kind="full").config, n_loops=3, exit=Contraction(scope="prefix"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        ("loop", "Expecting value"),
        ("[]", "no attribute"),
        ("{}", "it has no 'config'"),
        ('{"config": CONFIG}', "it has no 'n_loops'"),
        ('{"n_loops": 3, "config": {"a": 1}}', "unknown key 'a'"),
        ('{"n_loops": 2.5, "config": CONFIG}', "n_loops must be an integer, got 2.5"),
        ('{"n_loops": -1, "config": CONFIG}', "n_loops must be 0 or more, got -1"),
        ('{"n_loops": 3, "anderson": 9, "config": CONFIG}', "depth=9"),
        ('{"n_loops": 3, "exit": {"rule": "fix"}, "config": CONFIG}', "did you mean 'fixed'"),
        ('{"n_loops": 3, "exit": {"tol": 1}, "config": CONFIG}', "it has no 'rule'"),
    ],
)
def test_a_text_that_is_no_spec_is_told(text, reason):
    model = icl_model(std=0.1, dtype=torch.float32)
    text = text.replace("CONFIG", model.config.json)
    with pytest.raises(ValueError, match=f"looped::loop: spec=.* is not the JSON text that looped.op.encode makes.*{reason}"):
        torch.ops.looped.loop(prompts(), None, weights(model), None, text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lengths_are_checked_on_every_path(dtype):
    model, x = icl_model(std=0.1, dtype=dtype), prompts(dtype=dtype)
    for lengths, text in (
        (torch.tensor([1.5, 2, 3]), "lengths must be integers"),
        (torch.tensor([True, False, True]), "lengths must be integers"),
        (torch.tensor([1, 2]), "lengths must be integers"),
        (torch.tensor([[1, 2, 3]]), "lengths must be integers"),
        (torch.tensor([1, 10, 3]), r"prompt 1 has length 10, which must lie in 0 \.\. 9"),
        (torch.tensor([1, 2, -1]), r"prompt 2 has length -1, which must lie in 0 \.\. 9"),
    ):
        with pytest.raises(ValueError, match=f"looped::loop: {text}"):
            call(model, x, lengths, n_loops=2)
    assert torch.equal(call(model, x, LENGTHS.to(torch.uint8), n_loops=2)[0], call(model, x, LENGTHS, n_loops=2)[0])


@torch.no_grad()
def test_lengths_may_have_any_strides():
    model, x = icl_model(std=0.1, dtype=torch.float32), prompts()
    for lengths in (
        torch.tensor([9, 0, 4, 0, 7, 0])[::2],
        torch.tensor([[9, 1], [4, 1], [7, 1]])[:, 0],
        torch.tensor(9).expand(3),
    ):
        assert not lengths.is_contiguous()
        assert torch.equal(model(x, lengths=lengths), model(x, lengths=lengths.clone()))


@torch.no_grad()
@pytest.mark.parametrize("return_predictions", [False, True])
def test_a_prompt_that_leaves_the_finite_numbers_keeps_one_state_in_memory(return_predictions, monkeypatch):
    """On the rule `fixed` it runs all loops in plain PyTorch."""
    model, x, alive, most, iterate = (
        icl_model(std=0.1, dtype=torch.float32),
        prompts(),
        [],
        [0],
        looped.LoopedTransformer.iterate,
    )
    x[1, 0, 0] = float("nan")

    def counted(*arguments, **options):
        for Y in iterate(*arguments, **options):
            alive.append(weakref.ref(Y))
            most[0] = max(most[0], sum(state() is not None for state in alive))
            yield Y

    monkeypatch.setattr(looped.LoopedTransformer, "iterate", counted)
    read = model(x, n_loops=30, return_predictions=return_predictions)
    assert len(alive) == 30
    assert most[0] <= 3  # the last one, this one, and one in the caller's hands
    assert read[1].isnan().any()
    assert read[[0, 2]].isfinite().all()


def test_there_is_no_gradient():
    model = icl_model(std=0.1, dtype=torch.float32)
    y = call(model, prompts(), n_loops=2)[0]
    with pytest.raises(RuntimeError, match="looped::loop is for inference and has no gradient"):
        y.sum().backward()


# A forward pass ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_compiled_forward_gives_the_bits_of_uncompiled_and_of_solve():
    model, x = icl_model(std=0.1, dtype=torch.float32), prompts()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    for n in (1, 3, 5):  # the third size is compiled for all
        batch, lengths = prompts(n), torch.tensor([9, 4, 0, 7, 9])[:n]
        for how in (dict(), dict(n_loops=7, return_predictions=True, n_loop_start=2)):
            got, want = compiled(batch, lengths=lengths, **how), model(batch, lengths=lengths, **how)
            assert torch.equal(got, want)
            assert got.shape == model(batch, lengths=lengths, backend="eager", **how).shape
    assert torch.equal(compiled(x, lengths=LENGTHS), looped.solve(model, x, lengths=LENGTHS, backend="cpu").prediction)
    model.core[0].mlp.fc.weight.mul_(2)
    assert torch.equal(compiled(x), model(x))
    assert not torch.equal(compiled(x, backend="eager"), model(x, backend="fused"))  # plain PyTorch, compiled by itself
    torch.testing.assert_close(compiled(x, backend="eager"), model(x))


def test_with_gradients_a_forward_pass_is_plain_pytorch():
    model, x = icl_model(std=0.1, dtype=torch.float32), prompts()
    plain = model(x, lengths=LENGTHS)
    assert plain.requires_grad
    assert torch.equal(plain, model(x, lengths=LENGTHS, backend="eager"))
    with pytest.raises(ValueError, match='backend="fused" cannot run this: gradients are recorded'):
        model(x, backend="fused")
    with torch.no_grad():
        fused = model(x, lengths=LENGTHS)
        assert torch.equal(fused, looped.solve(model, x, lengths=LENGTHS, backend="cpu").prediction)
        assert torch.equal(plain.detach(), model(x, lengths=LENGTHS, backend="eager"))
    assert not torch.equal(fused, plain)  # rounding tells which one ran
    torch.testing.assert_close(fused, plain.detach())
    with pytest.raises(ValueError, match=r"'cpu' is not one of auto, eager, fused, .* cpu, eager, graph and triton are"):
        model(x, backend="cpu")


class Changed(looped.LoopedTransformer):
    def inject(self, Y, P):
        return Y - P


@torch.no_grad()
def test_what_makes_a_forward_pass_plain():
    model, x = icl_model(std=0.1, dtype=torch.float32), prompts()
    plain = model(x, backend="eager")
    assert not torch.equal(model(x), plain)
    seen = []
    handle = model.core[0].register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(model(x), plain)
    assert len(seen) == model.config.n_loops
    with pytest.raises(ValueError, match="a module has hooks"):
        model(x, backend="fused")
    handle.remove()
    assert not torch.equal(model(x), plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    model.core[0].mlp.fc = torch.nn.Sequential(model.core[0].mlp.fc)
    assert torch.equal(model(x), plain)
    changed = random_weights(Changed(icl_model().config), std=0.1, dtype=torch.float32)
    assert torch.equal(changed(x), changed(x, backend="eager"))
    half = icl_model(std=0.1, dtype=torch.bfloat16)
    assert torch.equal(half(x.bfloat16()), half(x.bfloat16(), backend="eager"))
    with pytest.raises(RuntimeError, match="dtype"):
        icl_model(std=0.1)(x)


@torch.no_grad()
def test_solve_does_not_take_a_changed_model_for_its_config():
    x = prompts()
    model = icl_model(std=0.1, dtype=torch.float32)
    model.core[0].mlp.register_forward_hook(lambda *_: None)
    for changed, reason in ((model, "a module has hooks"), (Changed(model.config), "Changed is a class of your own")):
        result = looped.solve(changed, x)
        assert (result.backend, result.reason) == ("eager", reason)
        with pytest.raises(ValueError, match=reason):
            looped.solve(changed, x, backend="cpu")


class OwnMLP(torch.nn.Module):
    """The parameters of an MLP, and another map."""

    def __init__(self, mlp):
        super().__init__()
        self.fc, self.proj = mlp.fc, mlp.proj

    def forward(self, x):
        return self.proj(self.fc(x).sin())


def other_eps(model):
    norm = torch.nn.LayerNorm(16, eps=0.1)
    norm.load_state_dict(model.core[0].norm_1.state_dict())
    model.core[0].norm_1 = norm


def zero_step(Y, P, lengths=None):
    return 0 * Y


MLP_OF = "a module or parameter of the model was replaced"
METHOD = "a method of the model was replaced"
SETTING = "a setting of a module is not that of the config"
CHANGED = {
    "eps": (other_eps, SETTING),
    "activation": (lambda model: setattr(model.core[0].mlp, "activation", torch.relu), SETTING),
    "heads": (lambda model: setattr(model.core[0].attn, "n_heads", 4), SETTING),
    "mask": (lambda model: setattr(model.core[0].attn, "is_causal", False), SETTING),
    "own class": (lambda model: setattr(model.core[0], "mlp", OwnMLP(model.core[0].mlp)), MLP_OF),
    "no norm": (lambda model: model.core[0].__setattr__("norm_1", torch.nn.Identity()), MLP_OF),
    "forward": (lambda model: setattr(model.core[0].mlp, "forward", torch.sin), METHOD),
    "step": (lambda model: setattr(model, "step", zero_step), METHOD),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CHANGED)
def test_a_changed_module_is_seen(name):
    change, reason = CHANGED[name]
    model, x = icl_model(std=0.1, dtype=torch.float32), prompts()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    before = compiled(x)
    assert torch.equal(before, model(x, backend="fused"))
    change(model)
    plain = model(x, backend="eager")
    assert not torch.allclose(plain, before)
    assert torch.equal(model(x), plain)
    torch.testing.assert_close(compiled(x), plain)
    result = looped.solve(model, x)
    assert (result.backend, result.reason) == ("eager", reason)
    with pytest.raises(ValueError, match=reason):
        looped.solve(model, x, backend="cpu")
    with pytest.raises(ValueError, match=reason):
        model(x, backend="fused")


@torch.no_grad()
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
def test_global_hooks_are_called(kind):
    model, x, seen = icl_model(std=0.1, dtype=torch.float32), prompts(), []
    handle = getattr(torch.nn.modules.module, f"register_module_{kind}")(lambda *_: seen.append(1))
    try:
        assert looped.solve(model, x).reason == "there are global hooks on all modules"
        n_seen = len(seen)
        model(x)
        assert len(seen) > n_seen > model.config.n_loops
    finally:
        handle.remove()
    assert looped.solve(model, x).backend == "cpu"


@torch.no_grad()
def test_a_copy_and_an_attribute_of_your_own_change_nothing():
    model, x = icl_model(std=0.1, dtype=torch.float32), prompts()
    want = model(x, backend="fused")
    twin = copy.deepcopy(model)
    twin.note, twin.core[0].mlp.note = "mine", "mine"
    twin.forward = torch.compile(twin.forward, backend="eager")
    assert torch.equal(twin(x, backend="fused"), want)
    assert torch.equal(twin.eval()(x), want)


@torch.no_grad()
def test_vmap_and_inference_mode():
    model, x = icl_model(std=0.1, dtype=torch.float32), torch.stack([prompts(), -prompts()])
    want = torch.stack([model(x[0]), model(x[1])])
    assert torch.equal(torch.vmap(model)(x), want)
    assert torch.equal(torch.vmap(model, in_dims=1)(x.transpose(0, 1)), want)
    twice = {name: torch.stack([weight, 2 * weight]) for name, weight in model.named_parameters()}
    both = torch.vmap(lambda weights: torch.func.functional_call(model, weights, (x[0],)))(twice)
    assert torch.equal(both[0], want[0])
    assert not torch.equal(both[1], want[0])
    with torch.inference_mode():
        assert torch.equal(model(x[0]), want[0])


@torch.no_grad()
def test_a_prompt_with_a_nan_is_what_plain_pytorch_makes_of_it():
    model, x = icl_model(std=0.1, dtype=torch.float32, n_points=50), prompts(T=100)
    x[1, 96] = torch.nan
    for how in (dict(), dict(return_predictions=True)):
        got, want = model(x, **how), model(x, backend="eager", **how)
        torch.testing.assert_close(got, want, equal_nan=True)
        assert got[1, ..., 48:].isnan().all()
    assert call(model, x, n_loops=6)[2].tolist() == [Status.MAX_LOOPS, Status.NONFINITE, Status.MAX_LOOPS]


@torch.no_grad()
def test_wrong_prompts_are_named():
    model = icl_model(std=0.1, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"features must be \[B, T, 3\]"):
        model(prompts(d=4))
    with pytest.raises(ValueError, match="positions"):
        model(prompts(T=18))
    with pytest.raises(ValueError, match="prompt 1 has length 10"):
        model(prompts(), lengths=torch.tensor([9, 10, 1]))


class Deployed(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, lengths):
        return self.model(x, lengths=lengths, backend="fused")


@torch.no_grad()
def test_an_exported_graph_runs_in_another_process(tmp_path):
    model, x = icl_model(std=0.1, dtype=torch.float32), prompts()
    plain = torch.export.export(model, (x,), dict(lengths=LENGTHS))
    assert "looped" not in str(plain.graph)
    program = torch.export.export(Deployed(model), (x, LENGTHS))
    assert "looped.loop" in str(program.graph)
    torch.export.save(program, tmp_path / "model.pt2")
    torch.save((x, LENGTHS, model(x, lengths=LENGTHS)), tmp_path / "want.pt")
    code = f"""
import torch, looped
x, lengths, want = torch.load({str(tmp_path / "want.pt")!r})
program = torch.export.load({str(tmp_path / "model.pt2")!r}).module()
assert torch.equal(program(x, lengths), want)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
