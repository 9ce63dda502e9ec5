"""A GPU's batch of short and long prompts: each runs where it would run alone, and the result is one.

Shown without a GPU: the eager backend stands for the fused kernels and for the graph, and the CPU for the GPU.
"""

import dataclasses
import math

import pytest
import torch
from models import icl_model
from tolerances import EAGER_BATCH

import looped
from looped import op
from looped.backends import device, eager, graph, triton
from looped.exits import Contraction, Readout
from looped.loop import LoopState, Status, not_begun
from looped.weights import weights_of

MOST = 5  # tokens, of a prompt that the kernels here take
LENGTHS = [9, 3, 5, 0, 7, 1]


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """(backend, tokens in a row, prompts) of each run."""
    runs = []

    def stand_in(name, extra):
        def run(model, prompts, lengths, spec, state=None, on_progress=None, weights=None):
            assert prompts.is_contiguous()
            runs.append((name, prompts.shape[1], len(prompts)))
            if weights is not None:
                model = op.with_weights(model, list(weights.values()))
            if isinstance(state, LoopState):
                assert state.y.shape[:2] == prompts.shape[:2]
            result = eager.run(model, prompts, lengths, spec, state, on_progress)
            memory = result.state.memory | {name: tensor(result) for name, tensor in extra.items()}
            state = dataclasses.replace(result.state, memory=memory, weights_sum=None)
            return dataclasses.replace(result, backend=name, state=state)

        return run

    monkeypatch.setattr(device, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(triton, "run", stand_in("triton", {"F32": lambda result: result.y.float()}))
    monkeypatch.setattr(graph, "run", stand_in("graph", {}))
    monkeypatch.setattr(triton, "why_not", lambda model, spec=None: None)
    monkeypatch.setattr(triton, "cannot_run", lambda config, weights, spec=None: None)
    monkeypatch.setattr(graph, "why_not", lambda model, spec=None: None)
    monkeypatch.setattr(triton, "too_long", lambda n: f"up to {MOST} tokens and one has {n}" if n > MOST else None)
    monkeypatch.setattr(triton, "why_not_for_few", lambda model, lengths: "so few" if len(lengths) < 3 else None)
    return runs


def prompts(lengths=LENGTHS, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 3, generator=generator, dtype=dtype) for n in lengths]


def close(a, b):
    torch.testing.assert_close(a, b, rtol=EAGER_BATCH, atol=EAGER_BATCH, equal_nan=True)


OPTIONS = {
    "fixed": dict(),
    "contraction": dict(exit=Contraction(tol=1e-2)),
    "readout": dict(exit=Readout(tol=1e-2, check_every=2)),
    "damped": dict(exit=Contraction(tol=1e-9, stall_window=3), on_stall="damp"),
    "predictions": dict(return_predictions=True, exit=Contraction(tol=1e-2)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_prompt_runs_where_it_runs_alone(name, runs):
    model, x, options = icl_model(std=0.15), prompts(), OPTIONS[name]
    both = looped.solve(model, x, n_loops=30, **options)
    assert runs == [("triton", 5, 4), ("graph", 9, 2)]
    assert both.backend == "triton and graph"
    assert both.reason == "triton: the fastest that runs this model on a GPU; graph: up to 5 tokens and one has 9"
    padded = looped.solve(model, torch.nn.utils.rnn.pad_sequence(x, batch_first=True), lengths=LENGTHS, n_loops=30, **options)
    for i, prompt in enumerate(x):
        alone = looped.solve(model, [prompt], n_loops=30, **options)
        assert alone.backend == ("graph" if len(prompt) > MOST else "triton")
        assert (alone.n_loops, alone.status) == (both.n_loops[i], both.status[i])
        for field in ("y", "prediction", "predictions", "residual"):
            if getattr(alone, field) is not None:
                close(getattr(both, field)[i], getattr(alone, field)[0])
        close(padded.y[i, : len(prompt)], alone.y[0])
        assert not padded.y[i, len(prompt) :].any()
        assert (padded.n_loops[i], padded.status[i]) == (alone.n_loops[0], alone.status[0])
    assert padded.y.shape == (6, 9, 16)
    assert padded.prediction.shape == (6, 5)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("first", [[0, 1, 2, 3, 4, 5], [4, 1]])
def test_a_state_of_both_goes_on_in_both(name, first, runs):
    model, x, options = icl_model(std=0.15), prompts(), OPTIONS[name]
    whole = looped.solve(model, x, n_loops=30, **options)
    half = looped.solve(model, x, n_loops=11, **options)
    rest = looped.solve(model, [x[i] for i in first], n_loops=30, state=half.state.select(first), **options)
    for place, i in enumerate(first):
        assert (rest.n_loops[place], rest.status[place]) == (whole.n_loops[i], whole.status[i])
        close(rest.y[place], whole.y[i])
        close(rest.prediction[place], whole.prediction[i])
        if rest.predictions is not None:
            used, start = int(half.n_loops[i]), int(half.n_loops[first].min())
            assert rest.predictions[place].shape == (30 - start, -(-len(x[i]) // 2))
            assert rest.predictions[place][: used - start].isnan().all()
            close(rest.predictions[place][used - start :], whole.predictions[i][used:])
    runs.clear()
    alone = looped.solve(model, [x[1]], n_loops=30, state=half.state.select([1]), **options)  # in a state of 9 rows a prompt
    assert runs == [("triton", 3, 1)]
    close(alone.y[0], whole.y[1])


def test_only_what_a_prompt_is_decides(runs):
    model, x = icl_model(std=0.15), prompts()
    for rows, expected in (([1, 2], "triton"), ([0, 4], "graph"), ([], "triton"), ([3], "triton")):
        assert looped.solve(model, [x[i] for i in rows], n_loops=2).backend == expected
    given = icl_model(std=0.15, state_init="given")
    y0 = [torch.randn(len(prompt), 16, dtype=torch.float64) for prompt in x]
    both = looped.solve(given, x, state=y0, n_loops=7)
    for i in (0, 1):
        close(both.y[i], looped.solve(given, [x[i]], state=[y0[i]], n_loops=7).y[0])
    with pytest.raises(ValueError, match='backend="triton" cannot run this: up to 5 tokens and one has 9'):
        looped.solve(model, x, backend="triton")
    few = looped.solve(model, x[:2], n_loops=2, allow_batch_dependent=True)
    assert (few.backend, few.reason) == ("graph", "so few; up to 5 tokens and one has 9")
    assert looped.solve(model, x, n_loops=2, allow_batch_dependent=True).backend == "triton and graph"


def test_progress_counts_all_and_an_interrupt_stops_both():
    model, x, seen = icl_model(std=0.15), prompts(), []
    options = dict(n_loops=30, exit=Contraction(tol=1e-6), return_predictions=True)
    whole = looped.solve(model, x, progress=lambda n, of: seen.append((n, of)), **options)
    assert seen == sorted(seen)
    assert seen[-1] == (6, 6)
    state, n_stops = None, 0
    while True:
        calls = []

        def stop(n_finished, n_prompts, calls=calls):
            calls.append(n_finished)
            if len(calls) == 4:
                raise KeyboardInterrupt

        result = looped.solve(model, x, state=state, progress=stop, on_interrupt="return", **options)
        if not result.interrupted:
            break
        n_stops += 1
        unfinished = ~result.finished
        if n_stops == 1:  # after the fourth loop of the short ones: the long ones stop where they first look
            assert result.n_loops[[1, 2, 5]].tolist() == [4, 4, 4]
            assert result.n_loops[[0, 4]].tolist() == [1, 1]
        assert unfinished.any()
        assert all(bool(result.prediction[i].isnan().all()) for i in unfinished.nonzero().flatten() if LENGTHS[i])
        state = result.state
    assert n_stops > 3
    for i in range(6):
        close(result.y[i], whole.y[i])
    assert result.n_loops.tolist() == whole.n_loops.tolist()
    assert result.status.tolist() == whole.status.tolist()


@pytest.mark.parametrize("module", [triton, graph])
def test_an_interrupt_before_the_first_loop_of_a_part_loses_nothing(module, monkeypatch):
    model, x = icl_model(std=0.15, state_init="embedding"), prompts()
    options = dict(n_loops=12, exit=Contraction(tol=1e-3), on_stall="damp")
    whole, run, calls = looped.solve(model, x, **options), module.run, []

    def hit(model, prompts, lengths, spec, state=None, on_progress=None):
        calls.append(1)
        if len(calls) > 1:
            return run(model, prompts, lengths, spec, state, on_progress)
        return not_begun(model.config, prompts, lengths, prompts.dtype, spec, state, "hit", model.read)

    monkeypatch.setattr(module, "run", hit)
    result = looped.solve(model, x, on_interrupt="return", **options)
    assert result.interrupted
    rest = looped.solve(model, x, state=result.state, **options)
    for i in range(6):
        close(rest.y[i], whole.y[i])
    assert rest.n_loops.tolist() == whole.n_loops.tolist()
    assert rest.status.tolist() == whole.status.tolist()


def test_a_prompt_that_leaves_the_finite_numbers_leaves_the_other_part_alone():
    model, x = icl_model(std=0.15), prompts()
    want = looped.solve(model, x, n_loops=5)
    x[0][0] = math.nan
    got = looped.solve(model, x, n_loops=5)
    assert got.status.tolist() == [Status.NONFINITE] + [Status.MAX_LOOPS] * 5
    for i in range(1, 6):
        close(got.y[i], want.y[i])


def test_the_operator_runs_each_prompt_where_solve_does(runs):
    model = icl_model(std=0.15, dtype=torch.float32)
    x = torch.nn.utils.rnn.pad_sequence(prompts(dtype=torch.float32), batch_first=True)
    weights, spec = list(weights_of(model).values()), op.encode(model.config, n_loops=9, return_predictions=True)
    want = looped.solve(model, x, lengths=LENGTHS, n_loops=9, return_predictions=True)
    runs.clear()
    with torch.no_grad():
        y, n_loops, status, _, read = op.loop_on_gpu(x, torch.tensor(LENGTHS), weights, None, spec)
    assert runs == [("triton", 5, 4), ("graph", 9, 2)]
    assert torch.equal(y, want.y)
    assert torch.equal(read, want.predictions)
    assert (n_loops.tolist(), status.tolist()) == (want.n_loops.tolist(), want.status.tolist())
    runs.clear()
    with torch.no_grad():
        short = op.loop_on_gpu(x[[1, 2]], torch.tensor([3, 5]), weights, None, spec)[0]
        none = op.loop_on_gpu(x[:, :0], None, weights, None, spec)[0]
    assert runs == [("triton", 5, 2)]
    assert torch.equal(short, y[[1, 2]])
    assert none.shape == (6, 0, 16)
