"""The eager engine against an independent loop in plain Python, and the promises every backend is held to."""

import functools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from models import icl_model, random_weights, scalar_map, states_model
from reference_loop import reference
from tolerances import EAGER_BATCH, FP64

import looped
from looped.exits import Absolute, Contraction, Exact, ExitRule, Fixed, Readout, Relative, make_exit
from looped.loop import Status
from looped.prompt_batch import PromptBatch, sums_of_words


@pytest.fixture(autouse=True, params=["eager", "cpu"])
def backend(request, monkeypatch):
    """Every test of this file holds on every backend that runs here."""
    if request.param == "cpu":
        pytest.importorskip("looped._engine", reason="the C++ engine is not built")
    if request.param == "cpu" and "eager_only" in request.keywords:
        pytest.skip("a rule in Python, or a look into the eager loop")
    monkeypatch.setattr(looped, "solve", functools.partial(looped.engine.solve, backend=request.param))
    return request.param


RULES = {"absolute": Absolute, "relative": Relative, "contraction": Contraction, "readout": Readout}


def prompts(n, T=9, d=3, seed=1, dtype=torch.float64):
    return torch.randn(n, T, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def check_against_reference(model, x, rule, fields, spec, on_stall="ignore", depth=0, n_loops=60):
    result = looped.solve(
        model, x, exit=rule, n_loops=n_loops, on_stall=on_stall, accelerate=looped.Anderson(depth) if depth else None
    )
    for i in range(len(x)):
        F, used, status, residual = reference(model, x[i : i + 1], n_loops=n_loops, on_stall=on_stall, depth=depth, **spec)
        got = result[i]
        assert (got.n_loops, got.status.name) == (used, status), (i, fields)
        np.testing.assert_allclose(got.y.numpy(), F[0], rtol=0, atol=1e-8)
        assert got.residual == pytest.approx(residual, rel=1e-3, abs=1e-12)
    return result


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("check_every", [1, 3])
def test_rules_agree_with_the_reference(name, check_every):
    spread = set()
    for seed, tol in ((0, 1e-2), (1, 1e-2), (1, 1e-5), (5, 1e-5)):
        model = icl_model(std=0.1, seed=seed)
        rule = RULES[name](tol=tol, check_every=check_every, min_loops=4)
        spec = dict(rule=name, tol=tol, check_every=check_every, min_loops=4)
        spread |= set(check_against_reference(model, prompts(5, seed=seed), rule, (name, tol), spec).n_loops.tolist())
    assert len(spread - {60}) > 3  # prompts leave at different loops


def restless_model(seed, turn):
    """A model whose final norm turns the state over: some prompts cycle, and damping brings some of those to rest."""
    model = icl_model(std=0.3, seed=seed)
    with torch.no_grad():
        model.final_norm.weight *= turn
    return model


@pytest.mark.parametrize("on_stall", ["ignore", "exit", "damp"])
@pytest.mark.parametrize("check_every", [1, 2])
@pytest.mark.parametrize("name", ["contraction", "relative"])
def test_stalls_agree_with_the_reference(on_stall, check_every, name):
    statuses = []
    for seed, turn in ((0, -1.0), (1, -2.0), (2, 1.0), (3, -0.5)):
        for min_loops in (0, 25):
            model = restless_model(seed, turn)
            fields = dict(tol=1e-6, check_every=check_every, min_loops=min_loops)
            rule, spec = RULES[name](stall_window=6, **fields), dict(rule=name, window=6, **fields)
            result = check_against_reference(model, prompts(4, seed=seed), rule, seed, spec, on_stall=on_stall, n_loops=60)
            statuses += result.status.tolist()
    assert statuses.count(Status.STALLED) > 4
    assert len(set(statuses)) > 1


@pytest.mark.parametrize("on_stall", ["ignore", "damp"])
@pytest.mark.parametrize("check_every", [1, 3])
def test_restless_prompts_accelerated_agree_with_the_reference(on_stall, check_every):
    for seed, turn in ((1, -2.0), (2, 1.0), (3, -0.5)):
        fields = dict(tol=1e-4, check_every=check_every)
        rule, spec = Contraction(stall_window=6, **fields), dict(rule="contraction", window=6, **fields)
        x = prompts(4, seed=seed)
        check_against_reference(restless_model(seed, turn), x, rule, seed, spec, on_stall=on_stall, depth=2, n_loops=50)


def test_a_prompt_at_rest_is_not_stalled_before_its_least_loops():
    model = scalar_map(0.5)
    x = torch.full((1, 1, 1), 2.0, dtype=torch.float64)
    for on_stall in ("ignore", "exit", "damp"):
        for rule in (Contraction, Relative):
            result = looped.solve(model, x, exit=rule(tol=1e-3, min_loops=100), on_stall=on_stall, n_loops=300)
            assert (result[0].status, result[0].n_loops) == (Status.CONVERGED, 100)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", ["relative", "contraction"])
def test_anderson_agrees_with_the_reference(depth, name):
    for seed in range(3):
        model = icl_model(std=0.12, seed=seed)
        rule = RULES[name](tol=1e-4)
        check_against_reference(model, prompts(4, seed=seed), rule, seed, dict(rule=name, tol=1e-4), depth=depth)


def test_anderson_saves_loops_on_a_slow_linear_map():
    model = scalar_map(0.95, inject="add", state_init="zeros")
    x = torch.full((1, 1, 1), 1.0, dtype=torch.float64)
    plain = looped.solve(model, x, exit=Contraction(tol=1e-8), n_loops=1000)
    faster = looped.solve(model, x, exit=Contraction(tol=1e-8), n_loops=1000, accelerate=looped.Anderson(1))
    assert faster.n_loops.item() < 12 < 100 < plain.n_loops.item()
    torch.testing.assert_close(faster.y, torch.full_like(x, 19.0), rtol=1e-7, atol=0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_anderson_survives_residuals_whose_squares_underflow(depth):
    def halves(model):  # Y <- Y - relu(Y) / 2 + relu(-Y) / 2
        model.core[0].mlp.fc.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model.core[0].mlp.proj.weight.copy_(torch.tensor([[-0.5, 0.5]]))

    model = states_model(halves, d_ff=2, activation="relu", inject="none", state_init="given")
    x = torch.zeros(1, 2, 1, dtype=torch.float64)
    result = looped.solve(model, x, state=torch.ones_like(x), n_loops=200, accelerate=looped.Anderson(depth))
    assert result[0].status == Status.MAX_LOOPS
    assert result.y.abs().max() < 1e-60


def test_wrappers_of_pytorch_are_looked_through():
    model, x = icl_model(), prompts(3)
    want = looped.solve(model, x, n_loops=4)
    for wrapped in (torch.compile(model, backend="eager"), torch.nn.DataParallel(torch.nn.DataParallel(model))):
        assert torch.equal(looped.solve(wrapped, x, n_loops=4).y, want.y)
        torch.testing.assert_close(next(looped.solve_iter(wrapped, list(x), n_loops=4)).y, want.y[0])
        looped.repack(wrapped)
    other = torch.nn.Sequential(model)
    for call in (looped.solve, looped.solve_iter, lambda model, _: looped.repack(model)):
        with pytest.raises(TypeError, match=r"got Sequential; pass model[.]transformer of a LoopedGPT2"):
            call(other, x)


def test_damping_needs_a_rule_that_can_stall():
    model, x = scalar_map(-1.0), torch.full((1, 1, 1), 3.0, dtype=torch.float64)
    for rule, name in ((None, "Fixed"), ("exact", "Exact"), (Contraction(tol=0), "Contraction with tol=0")):
        with pytest.raises(ValueError, match=f'on_stall="damp" does nothing under the exit rule {name}, which never stalls'):
            looped.solve(model, x, exit=rule, on_stall="damp")
        looped.solve(model, x, exit=rule, on_stall="exit")


def test_damping_brings_a_cycle_to_rest():
    model = scalar_map(-1.0)  # Y <- -(Y + P): a cycle of two, with the fixed point -P / 2
    x = torch.full((1, 1, 1), 3.0, dtype=torch.float64)
    ignored = looped.solve(model, x, exit="contraction", n_loops=60)
    assert (ignored[0].status, ignored[0].n_loops) == (Status.STALLED, 60)
    damped = looped.solve(model, x, exit="contraction", n_loops=60, on_stall="damp")
    assert damped[0].status == Status.CONVERGED
    assert damped[0].n_loops == 19  # stalled at 17 (first check sets the best), then one step and its confirmation
    torch.testing.assert_close(damped.y, torch.full_like(x, -1.5))
    exited = looped.solve(model, x, exit="contraction", n_loops=60, on_stall="exit")
    assert (exited[0].status, exited[0].n_loops) == (Status.STALLED, 17)


# What a rule means, by hand -------------------------------------------------------------------------------------------


def test_growing_state_is_not_converged():
    model = states_model(d_model=4, n_loops=50)  # Y_t = t P
    x = torch.ones(1, 3, 4, dtype=torch.float64)
    relative = looped.solve(model, x, exit=Relative(tol=0.049))
    assert (relative[0].n_loops, relative[0].status) == (21, Status.CONVERGED)  # 1 / 21 = 0.0476
    contraction = looped.solve(model, x, exit=Contraction(tol=0.049))
    assert (contraction[0].n_loops, contraction[0].status) == (50, Status.STALLED)


def test_relative_and_absolute_are_not_confused():
    model = scalar_map(0.5, inject="add")  # Y <- 0.5 (Y + 2)
    x = torch.full((1, 1, 1), 2.0, dtype=torch.float64)
    assert looped.solve(model, x, exit=Relative(tol=0.05))[0].n_loops == 5
    assert looped.solve(model, x, exit=Absolute(tol=0.05))[0].n_loops == 6
    assert looped.solve(model, x, exit=Absolute(tol=0.0625))[0].n_loops == 5  # not strict


@pytest.mark.parametrize("rule", ["absolute", "relative", "contraction", "readout", "exact"])
@pytest.mark.parametrize("scope", ["prompt", "prefix"])
def test_zero_state_rests_at_once_with_residual_zero(rule, scope):
    model = icl_model(std=0.0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                p.fill_(1.0)
    result = looped.solve(model, torch.zeros(2, 5, 3), exit=looped.exits.make_exit(rule, scope=scope), n_loops=50)
    assert result.n_loops.tolist() == [1, 1]
    assert result.status.tolist() == [Status.CONVERGED] * 2
    assert result.residual.tolist() == [0.0, 0.0]
    assert not result.prediction.any()


def test_zero_tolerance_runs_all_loops_and_infinite_runs_one():
    model, x = icl_model(), prompts(2)
    for rule in (Absolute, Relative, Contraction, Readout):
        result = looped.solve(model, x, exit=rule(tol=0.0, stall_window=1), n_loops=30)
        assert result.n_loops.tolist() == [30, 30]
        assert result.status.tolist() == [Status.MAX_LOOPS] * 2
    for rule in (Absolute, Relative):
        assert looped.solve(model, x, exit=rule(tol=math.inf), n_loops=30).n_loops.tolist() == [1, 1]


@pytest.mark.parametrize("exit", [None, "contraction", Contraction(scope="prefix")])
def test_zero_and_one_loops(exit):
    model, x = icl_model(), prompts(3)
    none = looped.solve(model, x, n_loops=0, exit=exit, return_predictions=True)
    P = model.embed(x)
    torch.testing.assert_close(none.y, torch.zeros_like(P))
    torch.testing.assert_close(none.prediction, model.read(torch.zeros_like(P)).detach())
    assert none.n_loops.tolist() == [0] * 3
    assert none.status.tolist() == [Status.MAX_LOOPS] * 3
    assert none.predictions.shape == (3, 0, 5)
    assert none.residual.isnan().all()
    one = looped.solve(model, x, n_loops=1, exit=exit)
    torch.testing.assert_close(one.y, model.step(torch.zeros_like(P), P).detach())


def test_loop_counts_that_make_no_sense():
    model, x = icl_model(), prompts(1)
    with pytest.raises(ValueError, match="n_loops must be 0 or more"):
        looped.solve(model, x, n_loops=-1)
    with pytest.raises(TypeError, match="n_loops must be an integer"):
        looped.solve(model, x, n_loops=4.0)
    assert looped.solve(model, x, n_loops=torch.tensor(4)).n_loops.item() == 4
    with pytest.raises(ValueError, match="min_loops=9 is more than n_loops=8"):
        looped.solve(model, x, n_loops=8, exit=Relative(min_loops=9))
    with pytest.raises(ValueError, match="n_loop_start=5"):
        model(x, n_loops=5, n_loop_start=5)
    with pytest.raises(ValueError, match="tol=-1"):
        Relative(tol=-1)
    with pytest.raises(ValueError, match="tol=nan"):
        Relative(tol=math.nan)


def test_min_loops_and_confirming_loops_are_counted():
    model = scalar_map(0.5)
    x = torch.full((1, 1, 1), 2.0, dtype=torch.float64)
    first = looped.solve(model, x, exit=Contraction(tol=0.05))[0].n_loops
    assert first == 6  # rho = 0.5: the bound holds at 5 and 6
    assert looped.solve(model, x, exit=Contraction(tol=0.05, min_loops=20))[0].n_loops == 20


def test_stalls_are_counted_by_checks_without_a_tenth_gained():
    x = torch.full((1, 1, 1), 3.0, dtype=torch.float64)
    slow = scalar_map(0.97)  # g needs four loops to fall below 0.9 of its best
    assert looped.solve(slow, x, exit=Contraction(tol=1e-9, stall_window=3), on_stall="exit", n_loops=60)[0].n_loops == 4
    going = looped.solve(slow, x, exit=Contraction(tol=1e-9, stall_window=4), on_stall="exit", n_loops=60)
    assert (going[0].n_loops, going[0].status) == (60, Status.MAX_LOOPS)
    cycle = scalar_map(-1.0)
    rule = Contraction(check_every=3, stall_window=4)  # the check at 3 sets the best; 6, 9, 12, 15 gain nothing
    assert looped.solve(cycle, x, exit=rule, on_stall="exit", n_loops=60)[0].n_loops == 15


def test_stalls_act_at_checks():
    model = states_model(n_loops=60)  # Y <- Y + P
    x = torch.ones(1, 1, 1, dtype=torch.float64)
    rule = Contraction(check_every=10, stall_window=1, min_loops=25)
    assert looped.solve(model, x, exit=rule, on_stall="exit")[0].n_loops == 30
    assert looped.solve(model, x, exit=rule, n_loops=28)[0].status == Status.MAX_LOOPS
    assert looped.solve(model, x, exit=rule, n_loops=38)[0].status == Status.STALLED


def test_readout_compares_with_the_check_before():
    model, x = icl_model(std=0.15), prompts(2)
    assert looped.solve(model, x, exit=Readout(tol=1e9, patience=1), n_loops=30).n_loops.tolist() == [2, 2]
    assert looped.solve(model, x, exit=Readout(tol=1e9, patience=3, check_every=4), n_loops=30).n_loops.tolist() == [16, 16]


def test_resuming_between_two_passes_keeps_the_first():
    model, x = icl_model(std=0.15), prompts(1)
    for rule in (Contraction(tol=1e-3), Readout(tol=1e-3)):
        n_loops = looped.solve(model, x, exit=rule, n_loops=100)[0].n_loops
        for k in range(n_loops - 3, n_loops):
            part = looped.solve(model, x, exit=rule, n_loops=k)
            assert looped.solve(model, x, exit=rule, n_loops=100, state=part.state)[0].n_loops == n_loops


def test_exact_compares_bits():
    model = scalar_map(0.5)
    x = torch.full((1, 1, 1), 2.0, dtype=torch.float64)
    result = looped.solve(model, x, exit=Exact(), n_loops=200)
    assert result[0].status == Status.CONVERGED
    assert result.y.item() == 2.0
    again = looped.solve(model, x, n_loops=result[0].n_loops - 1)
    before = looped.solve(model, x, n_loops=result[0].n_loops - 2)
    assert torch.equal(result.y, again.y)
    assert not torch.equal(before.y, again.y)


@pytest.mark.parametrize(("dtype", "level"), [(torch.float64, 2e-15), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rounding_level_is_that_of_the_arithmetic(dtype, level):
    """A state that grows by 1 a loop has the rate 1, and passes only where that step is within the rounding level."""
    model = states_model(state_init="given").to(dtype)
    x = torch.ones(1, 1, 1, dtype=dtype)
    solve = looped.engine.solve if dtype == torch.bfloat16 else looped.solve  # bfloat16 runs on eager alone
    for start, expected in ((2 / level, (Status.CONVERGED, 2)), (0.5 / level, (Status.MAX_LOOPS, 3))):
        result = solve(model, x, state=torch.full_like(x, start), exit=Contraction(tol=0.5), n_loops=3)
        assert (result[0].status, result[0].n_loops) == expected


def test_rounding_level_passes_without_a_rate():
    model = scalar_map(0.0)  # Y <- 0 (Y + P): at rest from the second loop on
    x = torch.ones(1, 1, 1, dtype=torch.float64)
    assert looped.solve(model, x, exit=Contraction(tol=1e-3))[0].n_loops == 1
    stepped = states_model(lambda m: None, state_init="embedding", inject="none")  # Y <- Y
    assert looped.solve(stepped, x, exit=Contraction(tol=1e-3))[0].n_loops == 1


def test_exits_by_mapping(backend):
    model, x = icl_model(std=0.1), prompts(3)
    mapping, rule = {"rule": "contraction", "tol": 0.1, "min_loops": 4}, Contraction(tol=0.1, min_loops=4)
    want = looped.solve(model, x, n_loops=30, exit=rule)
    assert want.n_loops.max() < 30
    got = looped.solve(model, x, n_loops=30, exit=mapping)
    one_by_one = looped.solve_iter(model, x, n_loops=30, exit=mapping, backend=backend)
    assert got.n_loops.tolist() == [result.n_loops for result in one_by_one] == want.n_loops.tolist()
    assert got.state.stopping == want.state.stopping
    assert torch.equal(got.y, want.y)
    assert mapping == {"rule": "contraction", "tol": 0.1, "min_loops": 4}
    for call in (looped.solve, looped.solve_iter):
        for wrong, message in [
            ({"rule": "contractoin"}, "'contractoin' is not a rule; did you mean 'contraction'"),
            ({"rule": "kl"}, r"exit='kl' is not a rule; choose from fixed, exact, .*, readout$"),
            ({"rule": None}, "exit=None is not a rule"),
            ({"tol": 1}, r"exit=\{'tol': 1\} has no 'rule'; add one of fixed"),
            ({"rule": "relative", "tolerance": 1}, "has no 'tolerance'; did you mean 'tol'"),
            ({"rule": "relative", "tol": -1}, "tol=-1 must be a number"),
            ({"rule": "relative", "scope": "token"}, "language models"),
        ]:
            with pytest.raises(ValueError, match=message):
                call(model, x, exit=wrong)
    with pytest.raises(ValueError, match="no 'tolerance'; did you mean 'tol'"):
        make_exit("relative", tolerance=1)
    with pytest.raises(ValueError, match="tol go with the name of a rule"):
        make_exit({"rule": "relative"}, tol=1)


@pytest.mark.eager_only
def test_a_rule_of_your_own():
    class AfterFive(ExitRule):
        def update(self, memory, step):
            return (step.t >= 5) if not step.is_per_token else (step.t >= 5)[:, None].expand_as(step.g)

    result = looped.solve(icl_model(), prompts(3), exit=AfterFive(), n_loops=20)
    assert result.n_loops.tolist() == [5] * 3
    with pytest.raises(TypeError, match="subclass ExitRule"):
        looped.solve(icl_model(), prompts(3), exit=object())
    with pytest.raises(ValueError, match="did you mean 'contraction'"):
        looped.solve(icl_model(), prompts(3), exit="contractoin")
    with pytest.raises(NotImplementedError, match=r"^ExitRule needs update\(memory, step\)"):
        looped.solve(icl_model(), prompts(3), n_loops=2, exit=ExitRule())


@pytest.mark.eager_only
def test_the_rule_of_the_documentation():
    page = (Path(__file__).parent.parent / "docs" / "exits.md").read_text(encoding="utf-8")
    names = {"__name__": __name__}
    for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL):
        exec(compile(block, "docs/exits.md", "exec"), names)
    result = names["result"]
    assert result.backend == "eager"
    assert (result.status == Status.CONVERGED).all()
    assert result.n_loops.min() > 5
    assert result.n_loops.max() < 60


@pytest.mark.parametrize("rule", looped.exits.RULES)
@pytest.mark.parametrize("accelerate", [None, "anderson"])
def test_a_saved_state_goes_on(tmp_path, rule, accelerate):
    if rule == "exact" and accelerate:
        pytest.skip("exact is never accelerated")
    model, x = icl_model(), prompts(3)
    stalls = rule not in ("fixed", "exact")
    options = dict(exit=make_exit(rule, min_loops=9), accelerate=accelerate, on_stall="damp" if stalls else "ignore")
    torch.save(looped.solve(model, x, n_loops=9, **options).state, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    ours, whole = looped.solve(model, x, n_loops=20, state=state, **options), looped.solve(model, x, n_loops=20, **options)
    for name in ("y", "n_loops", "status"):
        assert torch.equal(getattr(ours, name), getattr(whole, name))


def test_a_state_of_another_dtype_is_refused_as_such():
    model, x = icl_model(), prompts(3)
    state = looped.solve(model, x, n_loops=3).state
    with pytest.raises(ValueError, match=r"state is torch\.float64; resume with the same dtype"):
        looped.solve(model, x, n_loops=4, state=state, dtype=torch.float32)


# Promises -------------------------------------------------------------------------------------------------------------

OPTIONS = {
    "fixed": dict(exit=None),
    "contraction": dict(exit=Contraction(tol=1e-3)),
    "relative every 2": dict(exit=Relative(tol=1e-3, check_every=2)),
    "readout": dict(exit=Readout(tol=1e-3)),
    "anderson": dict(exit=Contraction(tol=1e-4), accelerate="anderson"),
    "damped": dict(exit=Contraction(tol=1e-9, stall_window=3), on_stall="damp"),
    "prefix": dict(exit=Contraction(tol=1e-3, scope="prefix")),
    "prefix readout": dict(exit=Readout(tol=1e-3, scope="prefix")),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_resume_equals_one_call(options):
    model, x = icl_model(std=0.15), prompts(5)
    whole = looped.solve(model, x, n_loops=30, return_predictions=True, **options)
    for k in (0, 1, 7, 30):
        part = looped.solve(model, x, n_loops=k, **options)
        rest = looped.solve(model, x, n_loops=30, state=part.state, return_predictions=True, **options)
        assert torch.equal(rest.n_loops, whole.n_loops)
        assert torch.equal(rest.status, whole.status)
        torch.testing.assert_close(rest.y, whole.y, rtol=FP64, atol=FP64)
        torch.testing.assert_close(rest.residual, whole.residual, rtol=1e-4, atol=1e-12)
        torch.testing.assert_close(rest.prediction, whole.prediction, rtol=FP64, atol=FP64)
        start = int(part.n_loops.min())
        for i in range(5):  # loops that the prompt had behind it are NaN, the others as in one call
            behind = int(part.n_loops[i]) - start
            assert rest.predictions[i, :behind].isnan().all()
            shown, expected = rest.predictions[i, behind:], whole.predictions[i, start + behind :]
            torch.testing.assert_close(shown, expected, rtol=FP64, atol=FP64)


def test_resume_under_another_rule_goes_on():
    model, x = icl_model(std=0.15), prompts(4)
    loose = looped.solve(model, x, n_loops=40, exit=Relative(tol=1e-1))
    tight = looped.solve(model, x, n_loops=40, exit=Relative(tol=1e-4), state=loose.state)
    direct = looped.solve(model, x, n_loops=40, exit=Relative(tol=1e-4))
    assert torch.equal(tight.n_loops, direct.n_loops)
    assert (tight.n_loops > loose.n_loops).all()
    with pytest.raises(ValueError, match="resume with the same ones"):
        looped.solve(model, x[:2], n_loops=40, state=loose.state)


FULL_MASK = [name for name in OPTIONS if not name.startswith("prefix")]


@pytest.mark.parametrize(
    ("mask_kind", "name"), [*(("causal", name) for name in OPTIONS), *(("full", name) for name in FULL_MASK)]
)
def test_alone_as_in_any_batch_and_padding_is_never_read(mask_kind, name):
    options = OPTIONS[name]
    model = icl_model(std=0.15, mask_kind=mask_kind)
    lengths = [9, 1, 4, 9, 0, 2]
    x = prompts(6)
    for i, length in enumerate(lengths):
        x[i, length:] = math.nan
    batch = looped.solve(model, x, lengths=lengths, n_loops=25, return_predictions=True, **options)
    ragged = looped.solve(model, [x[i, :n] for i, n in enumerate(lengths)], n_loops=25, return_predictions=True, **options)
    backwards = looped.solve(model, x.flip(0), lengths=lengths[::-1], n_loops=25, **options)
    for i, length in enumerate(lengths):
        alone = looped.solve(model, x[i : i + 1, :length], n_loops=25, return_predictions=True, **options)[0]
        for other in (batch[i], ragged[i], backwards[5 - i]):
            assert (other.n_loops, other.status) == (alone.n_loops, alone.status)
            torch.testing.assert_close(other.y[:length], alone.y, rtol=EAGER_BATCH, atol=EAGER_BATCH)
        torch.testing.assert_close(ragged[i].predictions, alone.predictions, rtol=EAGER_BATCH, atol=EAGER_BATCH)
        assert not batch.y[i, length:].any()
        assert not batch.prediction[i, -(-length // 2) :].any()


@pytest.mark.parametrize("mask_kind", ["causal", "full"])
def test_padding_is_not_read_before_the_loop_either(mask_kind):
    model = icl_model(std=0.15, mask_kind=mask_kind, n_prelude=1, n_coda=1, loop_norm="once")
    x = prompts(2)
    x[1, 4:] = math.nan
    result = looped.solve(model, x, lengths=[9, 4], n_loops=5)
    alone = looped.solve(model, x[1:, :4], n_loops=5)
    torch.testing.assert_close(result.prediction[1, :2], alone.prediction[0], rtol=EAGER_BATCH, atol=EAGER_BATCH)
    assert result.prediction.isfinite().all()
    config = looped.gpt2_config(vocab_size=11, n_positions=9, d_model=8, n_heads=2, n_layers=1, mask_kind=mask_kind)
    tokens = random_weights(looped.LoopedTransformer(config))
    ids = torch.randint(11, (2, 6))
    ids[1, 3:] = -100  # no row of the embedding
    padded = looped.solve(tokens, ids, lengths=[6, 3])
    alone = looped.solve(tokens, ids[1:, :3])
    torch.testing.assert_close(padded.prediction[1, :3], alone.prediction[0], rtol=EAGER_BATCH, atol=EAGER_BATCH)


def test_easy_neighbours_do_not_change_a_hard_prompt():
    model = icl_model(std=0.15)
    easy, hard = torch.zeros(1, 9, 3, dtype=torch.float64), prompts(1)
    rule = Contraction(tol=1e-6)
    k1, k2 = (looped.solve(model, x, exit=rule, n_loops=200)[0].n_loops for x in (easy, hard))
    assert k1 != k2
    for batch, expected in (([easy, hard], [k1, k2]), ([hard, easy], [k2, k1]), ([easy] * 7 + [hard], [k1] * 7 + [k2])):
        assert looped.solve(model, torch.cat(batch), exit=rule, n_loops=200).n_loops.tolist() == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_nonfinite_prompt_ends_alone(bad, options):
    model, x = icl_model(std=0.15), prompts(3)
    expected = looped.solve(model, x, n_loops=20, **options)
    x[1, 0, 0] = bad
    result = looped.solve(model, x, n_loops=20, **options)
    assert (result[1].status, result[1].n_loops) == (Status.NONFINITE, 1)
    assert result.y[1].isnan().any(1).all()  # every token sees token 0
    for i in (0, 2):
        assert (result[i].n_loops, result[i].status) == (expected[i].n_loops, expected[i].status)
        torch.testing.assert_close(result.y[i], expected.y[i], rtol=EAGER_BATCH, atol=EAGER_BATCH)


@pytest.mark.eager_only
def test_finished_prompts_cost_nothing(monkeypatch):
    model, x = icl_model(std=0.15), prompts(6)
    seen = []
    step = looped.LoopedTransformer.step
    monkeypatch.setattr(
        looped.LoopedTransformer, "step", lambda self, Y, P, lengths=None: (seen.append(len(Y)), step(self, Y, P, lengths))[1]
    )
    result = looped.solve(model, x, exit=Contraction(tol=1e-4), n_loops=100)
    assert sum(seen) == int(result.n_loops.sum())


def test_predictions_after_every_loop_hold_after_the_exit():
    model, x = icl_model(std=0.15), prompts(4)
    all_loops = torch.stack([looped.solve(model, x, n_loops=t).prediction for t in range(1, 26)], dim=1)
    result = looped.solve(model, x, n_loops=25, exit=Contraction(tol=1e-3), return_predictions=True)
    assert result.predictions.shape == (4, 25, 5)
    for i in range(4):
        used = result[i].n_loops
        torch.testing.assert_close(result.predictions[i, :used], all_loops[i, :used], rtol=EAGER_BATCH, atol=EAGER_BATCH)
        torch.testing.assert_close(result.predictions[i, used - 1 :], result.prediction[i].expand(26 - used, -1))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_autocast_does_not_reach_the_loop(options):
    model, x = icl_model(std=0.15, dtype=torch.float32), prompts(3, dtype=torch.float32)
    expected = looped.solve(model, x, n_loops=20, **options)
    with torch.autocast("cpu", torch.bfloat16):
        result = looped.solve(model, x, n_loops=20, **options)
    assert torch.equal(result.y, expected.y)
    assert torch.equal(result.prediction, expected.prediction)


def test_states_are_kept_apart():
    model, x = icl_model(std=0.15), prompts(4)
    lengths = [9, 4, 7, 2]
    ragged = [x[i, :n] for i, n in enumerate(lengths)]
    part = looped.solve(model, ragged, n_loops=5)
    whole = looped.solve(model, ragged, n_loops=9)
    alone = looped.solve(model, [ragged[1]], n_loops=9, state=part[1].state)  # its state came from a longer batch
    torch.testing.assert_close(alone.y[0], whole.y[1], rtol=FP64, atol=FP64)
    mask = torch.tensor([False, True, False, True])
    some = looped.solve(model, [ragged[1], ragged[3]], n_loops=9, state=part.state.select(mask))
    torch.testing.assert_close(some.y[1], whole.y[3], rtol=FP64, atol=FP64)
    with pytest.raises(ValueError, match="state is of another prompt 1"):
        looped.solve(model, [ragged[0], prompts(1, T=4, seed=9)[0], *ragged[2:]], n_loops=9, state=part.state)
    with pytest.raises(ValueError, match="list of prompt numbers or a mask"):
        part.state.select(3)
    given = icl_model(std=0.15, state_init="given")
    with pytest.raises(ValueError, match=r"state 1 must be \[4, 16\], got \[9, 16\]"):
        looped.solve(given, ragged[:2], state=[torch.ones(9, 16), torch.ones(9, 16)])
    for other in (x.flip(1), x.flip(2), x[:, [1, 0, *range(2, x.shape[1])]]):
        with pytest.raises(ValueError, match="state is of another prompt 0"):
            looped.solve(model, other, n_loops=9, state=looped.solve(model, x, n_loops=5).state)


def test_results_are_shown_in_one_line_each(backend):
    model, x = icl_model(std=0.1), prompts(3) * torch.tensor([0.1, 1, 3], dtype=torch.float64)[:, None, None]
    result = looped.solve(model, x, n_loops=9, exit=Contraction(tol=0.1))
    loops = result.n_loops.tolist()
    assert min(loops) < max(loops) == loops[0] == 9
    n_ended = int((result.status == Status.CONVERGED).sum())
    counted = f"loops min {min(loops)}, mean {sum(loops) / 3:.4g}, max 9)"
    assert repr(result) == f"LoopResult(3 prompts, backend {backend}: {3 - n_ended} MAX_LOOPS, {n_ended} CONVERGED; {counted}"
    assert repr(result.state.select([0])).startswith("LoopState(1 prompt, y [1, 9, 16]")
    assert repr(result.state) == f"LoopState(3 prompts, y [3, 9, 16] torch.float64; {counted}"
    assert repr(result[0]) == (
        f"PromptResult(MAX_LOOPS after 9 loops, residual {result.residual[0]:.3g}, y [9, 16] torch.float64, prediction [5])"
    )
    empty = looped.solve(model, x[:0])
    assert repr(empty) == f"LoopResult(0 prompts, backend {backend})"
    assert repr(empty.state).endswith(", 16] torch.float64)")
    begun = looped.loop.LoopState(result.y, {}, result.state.stopping)
    assert repr(begun) == "LoopState(3 prompts, y [3, 9, 16] torch.float64; no loop has begun)"


def test_a_state_knows_its_prompts_to_the_last_bit():
    model, x = icl_model(std=0.15), prompts(3)
    state = looped.solve(model, x, n_loops=5).state
    assert state.prompt_sums.dtype == torch.int64
    others = {
        "one bit": lambda y: y[1, 4, 2].copy_(torch.nextafter(y[1, 4, 2], torch.tensor(math.inf, dtype=y.dtype))),
        "two signs": lambda y: y[1, 4].mul_(-1),
        "a large number's small neighbour": lambda y: y[1, 8, 0].add_(1e-9),
        "two numbers change places": lambda y: y[1, 3].copy_(y[1, 3].flip(0)),
    }
    for change in others.values():
        other = x.clone()
        change(other)
        with pytest.raises(ValueError, match="state is of another prompt 1; resume with the same ones"):
            looped.solve(model, other, n_loops=9, state=state)
    with pytest.raises(ValueError, match="state is of another prompt 1"):
        looped.solve(model, x, lengths=[9, 8, 9], n_loops=9, state=state)
    large = x.clone()
    large[1, 0] = 1e12
    state = looped.solve(model, large, n_loops=5).state
    large[1, 8, 0] += 1
    with pytest.raises(ValueError, match="state is of another prompt 1"):
        looped.solve(model, large, n_loops=9, state=state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_the_sums_of_prompts_are_the_same_on_every_device_and_in_every_batch(dtype):
    """Whole numbers: NumPy on a CPU, PyTorch elsewhere, and any batch add them up to the same."""
    if dtype == torch.int64:
        config = looped.gpt2_config(vocab_size=50, n_positions=9, d_model=8, n_heads=2, n_layers=1)
        model, x = looped.LoopedTransformer(config), torch.randint(50, (4, 9))
    else:
        model, x = icl_model(dtype=dtype), prompts(4, dtype=dtype)
    lengths = [9, 3, 0, 7]
    batch = PromptBatch.of(model, x, lengths, None)
    sums = batch.sums()
    assert torch.equal(sums, sums_of_words(batch.words(), batch.lengths))
    assert len(sums.unique()) == 4
    for i, length in enumerate(lengths):
        assert torch.equal(PromptBatch.of(model, x[i : i + 1, :length], None, None).sums(), sums[i : i + 1])


def test_what_is_no_length_loop_count_or_tolerance_is_refused():
    model, x = icl_model(std=0.15), prompts(2)
    for lengths in ([True, False], [True, 2], torch.tensor([True, False]), np.array([True, False]), [2.0, 3.0], [2], 2):
        with pytest.raises(ValueError, match=r"solve: lengths must be integers \[2\], one for each prompt, got"):
            looped.solve(model, x, lengths=lengths)
    with pytest.raises(TypeError, match="n_loops must be an integer, got True"):
        looped.solve(model, x, n_loops=True)
    for tol in (True, np.True_, "1e-3", None, -1, math.nan):
        with pytest.raises(ValueError, match=r"Contraction: tol=.* must be a number of at least 0"):
            Contraction(tol=tol)
    for count in (True, np.True_, torch.tensor(True), 2.0, "2", None, -1):
        with pytest.raises(ValueError, match=r"Contraction: min_loops=.* must be an integer of at least 0"):
            Contraction(min_loops=count)
        with pytest.raises(ValueError, match=r"Anderson: depth=.* is not one of 1, 2, 3"):
            looped.Anderson(count)


def test_numbers_of_numpy_are_numbers():
    model, x = icl_model(std=0.15), prompts(2)
    rule = Readout(tol=np.float32(1e-3), min_loops=np.int64(3), check_every=np.int32(1), patience=np.uint8(2))
    same = Readout(tol=float(np.float32(1e-3)), min_loops=3, check_every=1, patience=2)
    assert rule == same
    assert {type(value) for value in vars(rule).values()} == {float, int, str}
    anderson = looped.Anderson(np.int64(2))
    assert anderson == looped.Anderson(2) == looped.Anderson(torch.tensor(2))
    assert type(anderson.depth) is int
    result = looped.solve(model, x, exit=rule, n_loops=np.int64(40), lengths=np.array([9, 4]), accelerate=anderson)
    expected = looped.solve(model, x, exit=same, n_loops=40, lengths=[9, 4], accelerate=looped.Anderson(2))
    assert torch.equal(result.y, expected.y)


def test_a_given_state_has_a_row_for_every_token_and_no_more():
    model = icl_model(std=0.15, state_init="given")
    x, y0 = prompts(2, T=5), prompts(2, T=30, d=16)
    with pytest.raises(ValueError, match=r"state must be \[2, 5, 16\], got \[2, 30, 16\]"):
        looped.solve(model, x, state=y0)
    with pytest.raises(ValueError, match=r"state must be \[2, 5, 16\], got \[2, 4, 16\]"):
        looped.solve(model, x, state=y0[:, :4])
    want = looped.solve(model, x, state=y0[:, :5], lengths=[3, 4])
    assert torch.equal(looped.solve(model, x, state=y0[:, :4], lengths=[3, 4]).y, want.y)  # none for padding
    assert looped.solve(model, [], state=[]).y == []
    nothing = looped.solve(model, prompts(0, T=3), state=prompts(0, T=3, d=16))
    assert nothing.y.shape == (0, 3, 16)


def test_numbers_that_are_views_with_a_negative_sign_are_read_as_they_are(backend):
    conjugate = torch.complex(prompts(2), prompts(2, seed=2)).conj()
    x = conjugate.imag
    assert x.is_neg()
    model = icl_model(std=0.15)
    assert torch.equal(looped.solve(model, x).y, looped.solve(model, x.clone()).y)
    with torch.no_grad():
        assert torch.equal(model(x), model(x.clone()))
        model.core[0].mlp.fc.weight = torch.nn.Parameter(
            torch.complex(*model.core[0].mlp.fc.weight.repeat(2, 1, 1)).conj().imag
        )
        assert model.core[0].mlp.fc.weight.is_neg()
        got = looped.solve(model, x).y
        model.core[0].mlp.fc.weight = torch.nn.Parameter(model.core[0].mlp.fc.weight.clone())
        torch.testing.assert_close(got, looped.solve(model, x).y)


# Prefix freezing ------------------------------------------------------------------------------------------------------


def test_prefix_at_no_tolerance_equals_plain_loops():
    for n_core in (1, 2):
        model, x = icl_model(std=0.15, n_core=n_core), prompts(3)
        plain = looped.solve(model, x, n_loops=12)
        frozen = looped.solve(model, x, n_loops=12, exit=Fixed(scope="prefix"))
        torch.testing.assert_close(frozen.y, plain.y, rtol=FP64, atol=FP64)
        assert (frozen.n_loops_by_token == 12).all()


def test_prefix_freezes_in_order_and_holds_its_tolerance():
    model, x = icl_model(std=0.15, n_core=2), prompts(4)
    tol = 1e-4
    rule = Contraction(tol=tol, scope="prefix")
    result = looped.solve(model, x, n_loops=300, exit=rule, lengths=[9, 9, 5, 1])
    truth = looped.solve(model, x, n_loops=2000, exit=Contraction(tol=1e-13), lengths=[9, 9, 5, 1])
    assert result.status.tolist() == [Status.CONVERGED] * 4
    for i, length in enumerate([9, 9, 5, 1]):
        loops = result.n_loops_by_token[i, :length]
        assert (loops.diff() >= 0).all()
        assert loops[-1] == result.n_loops[i]
        assert not result.n_loops_by_token[i, length:].any()
        error = (result.y[i, :length] - truth.y[i, :length]).norm(dim=1) / truth.y[i, :length].norm(dim=1)
        assert error.max() < 10 * tol
    assert len(result.n_loops_by_token[0].unique()) > 2


@pytest.mark.eager_only
def test_prefix_freezing_skips_work(monkeypatch):
    model, x = icl_model(std=0.15), prompts(4)
    tokens = []
    forward = looped.model.MLP.forward
    monkeypatch.setattr(looped.model.MLP, "forward", lambda self, x: (tokens.append(x.shape[0]), forward(self, x))[1])
    result = looped.solve(model, x, n_loops=100, exit=Contraction(tol=1e-4, scope="prefix"))
    assert sum(tokens) == int(result.n_loops_by_token.sum())


def test_prefix_refuses_what_mixes_tokens():
    model, x = icl_model(), prompts(1)
    for options in (dict(accelerate="anderson"), dict(on_stall="damp")):
        with pytest.raises(ValueError, match="needs plain iteration"):
            looped.solve(model, x, exit=Contraction(scope="prefix"), **options)
    with pytest.raises(ValueError, match="causal mask"):
        looped.solve(icl_model(mask_kind="full"), x, exit=Contraction(scope="prefix"))
