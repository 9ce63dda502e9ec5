"""The backend of ordinary kernels in a CUDA graph: its loops as they run without one, against eager float64."""

import math

import pytest
import torch
from cases_exit import LENGTHS, RULES
from cases_parity import both as both_triton
from cases_parity import padded, pair, prompts_of, relative_error
from models import icl_model, scalar_map, states_model
from tolerances import FP32

import looped
from looped.backends import graph
from looped.exits import Absolute, Contraction, Exact, Readout, Relative
from looped.weights import weights_of


def both(truth, model, prompts, **options):
    batch, lengths = padded(prompts)
    want = looped.solve(truth, batch, lengths=lengths, backend="eager", **options)
    got = looped.solve(model, batch.float(), lengths=lengths, backend="graph", **options)
    assert got.backend == "graph"
    return want, got


def assert_same(got, want):
    assert torch.equal(got.n_loops, want.n_loops)
    assert torch.equal(got.status, want.status)
    assert relative_error(got.y, want.y) <= FP32
    torch.testing.assert_close(got.residual, want.residual, rtol=1e-3, atol=1e-6, equal_nan=True)
    if want.predictions is not None:
        torch.testing.assert_close(got.predictions.double(), want.predictions, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("rule", [rule for rule, _ in RULES], ids=str)
def test_rules(rule):
    truth, model = pair(std=0.1, n_heads=1)
    want, got = both(truth, model, prompts_of(LENGTHS), n_loops=10, exit=rule, return_predictions=True)
    assert_same(got, want)
    if rule == Contraction(tol=8e-2):
        assert len(set(got.n_loops.tolist())) > 1  # they left at different loops


@pytest.mark.parametrize("on_stall", ["ignore", "exit", "damp"])
def test_stalls(on_stall):
    truth, model = pair(std=0.9, seed=1)
    rule = Contraction(stall_window=2, tol=1e-6)
    want, got = both(truth, model, prompts_of([5, 20, 9, 6, 7]), n_loops=12, exit=rule, on_stall=on_stall)
    assert torch.equal(got.n_loops, want.n_loops)
    assert torch.equal(got.status, want.status)
    assert on_stall == "ignore" or (got.status == looped.Status.STALLED).any()
    assert relative_error(got.y, want.y) <= 1e-4  # the map does not contract


@pytest.mark.parametrize("changes", [
    dict(mask_kind="full", n_core=2, inject="mul", state_init="ones"),
    dict(pos_when="once", loop_norm="once", n_coda=1, n_prelude=1, activation="silu_gated"),
    dict(readout="classes", n_classes=3, inject="none", state_init="embedding", norm_kind="rms"),
    dict(readout="none", activation="gelu", d_model=20, n_heads=4),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("rule", [None, Readout(tol=5e-2)], ids=str)
def test_kinds_of_models(changes, rule):
    truth, model = pair(std=0.1, **changes)
    want, got = both(truth, model, prompts_of([7, 3, 12]), n_loops=6, exit=rule, return_predictions=True)
    assert_same(got, want)


@pytest.mark.parametrize("options", [
    dict(exit=None),
    dict(exit=Contraction(tol=5e-2)),
    dict(exit=Readout(tol=3e-2, check_every=2)),
    dict(exit=Contraction(stall_window=2, tol=1e-6), on_stall="damp"),
], ids=str)  # fmt: skip
def test_resuming_gives_what_one_call_gives(options):
    is_damped = options.get("on_stall") == "damp"
    _, model = pair(std=0.9, seed=1) if is_damped else pair(std=0.1, n_heads=1)
    prompts = [p.float() for p in prompts_of([5, 20, 9])]
    how = dict(backend="graph", return_predictions=True, **options)
    whole = looped.solve(model, prompts, n_loops=13, **how)
    state = None
    for n in (1, 4, 12, 13):
        part = looped.solve(model, prompts, n_loops=n, state=state, **how)
        state = part.state
    for got, want in zip(part.y, whole.y, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(part.n_loops, whole.n_loops)
    assert torch.equal(part.status, whole.status)
    assert not is_damped or part.state.memory["damped"].any()
    torch.testing.assert_close(part.residual, whole.residual, rtol=1e-3, atol=1e-6)
    for i in range(3):
        tail = part.predictions[i]
        is_new = ~tail.isnan().any(dim=-1)  # the others are of loops that the prompt had behind it
        assert is_new[-1]
        torch.testing.assert_close(tail[is_new], whole.predictions[i][-len(tail) :][is_new], rtol=1e-4, atol=1e-5)


def test_resuming_prompts_that_stand_at_different_loops():
    truth, model = pair(std=0.1, n_heads=1)
    prompts = prompts_of([5, 20, 9, 4])
    rule = Contraction(tol=4e-2)
    for one, backend in ((truth, "eager"), (model, "graph")):
        own = [p.to(next(one.parameters())) for p in prompts]
        begun = looped.solve(one, own, n_loops=20, exit=rule, backend=backend)
        assert len(set(begun.n_loops.tolist())) > 1
        done = looped.solve(one, own, n_loops=20, backend=backend, state=begun.state, return_predictions=True)
        assert (done.n_loops == 20).all()
        results = (begun, done) if one is truth else (*results, begun, done)  # noqa: F821
    assert torch.equal(results[0].n_loops, results[2].n_loops)
    for want, got in zip(results[1].predictions, results[3].predictions, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("backends", [("eager", "graph"), ("graph", "triton"), ("triton", "graph")], ids=str)
def test_a_state_goes_from_one_backend_to_another(backends, tiles):
    tiles(16)
    truth, model = pair(std=0.1, n_heads=1)
    prompts = [p.float() for p in prompts_of([5, 20])]
    rule = Contraction(tol=1e-2)
    begun = looped.solve(model, prompts, n_loops=3, exit=rule, backend=backends[0])
    got = looped.solve(model, prompts, n_loops=12, exit=rule, backend=backends[1], state=begun.state)
    want = looped.solve(truth, [p.double() for p in prompts], n_loops=12, exit=rule, backend="eager")
    assert torch.equal(got.n_loops, want.n_loops)
    assert torch.equal(got.status, want.status)


def test_half_of_the_prompts_ended_and_the_rest_goes_on_in_fewer_rows(monkeypatch):
    monkeypatch.setattr(graph, "LEAST_TO_SHRINK", 2)
    monkeypatch.setattr(graph, "LOOPS_AT_ONCE", 2)
    sizes = []
    real = graph.Loops.load

    def noted(loops, board, index, n_loops):
        sizes.append((len(loops.P), len(index)))
        real(loops, board, index, n_loops)

    monkeypatch.setattr(graph.Loops, "load", noted)
    truth, model = pair(std=0.1, n_heads=1)
    prompts = prompts_of([5, 20, 9, 3, 30, 1, 4, 2, 12])
    want, got = both(truth, model, prompts, n_loops=30, exit=Contraction(tol=6e-2), return_predictions=True)
    assert_same(got, want)
    assert sizes[0] == (9, 9)
    assert len(sizes) > 2
    assert all(rows >= n and rows & (rows - 1) == 0 for rows, n in sizes[1:])
    assert any(rows > n for rows, n in sizes[1:])  # some rows held a prompt that had ended


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_a_state_that_is_not_finite_harms_no_neighbour(poison, mask):
    _, model = pair(std=0.1, n_heads=1, mask_kind=mask)
    prompts = [p.float() for p in prompts_of([5, 9, 7, 16])]
    options = dict(n_loops=8, exit=Relative(tol=1e-2), backend="graph")
    clean = looped.solve(model, prompts, **options)
    prompts[1] = prompts[1].clone()
    prompts[1][0] = poison
    got = looped.solve(model, prompts, **options)
    assert (got.status[1], got.n_loops[1]) == (looped.Status.NONFINITE, 1)
    for i in (0, 2, 3):
        assert torch.equal(got.y[i], clean.y[i])
        assert got.n_loops[i] == clean.n_loops[i]


def test_known_maps_and_edges():
    """A state that merely grows, z <- -0.5 z + 1, zero, no loops, no prompts, no tokens."""
    grows, ones = states_model().float(), [torch.ones(1, 1)]
    assert looped.solve(grows, ones, n_loops=40, exit=Relative(tol=0.049), backend="graph").n_loops[0] == 21
    stalled = looped.solve(grows, ones, n_loops=40, exit=Contraction(tol=0.049), on_stall="exit", backend="graph")
    assert stalled.status[0] == looped.Status.STALLED
    model, prompt = scalar_map(-0.5).float(), [torch.full((1, 1), -2.0)]
    for rule in (Relative(tol=0.05), Absolute(tol=0.05)):
        want = looped.solve(scalar_map(-0.5), [p.double() for p in prompt], exit=rule, backend="eager")
        assert looped.solve(model, prompt, exit=rule, backend="graph").n_loops[0] == want.n_loops[0]
    zero = looped.solve(states_model(d_model=16).float(), [torch.zeros(3, 16)], exit="contraction", backend="graph")
    assert (zero.status[0], zero.n_loops[0], zero.residual[0]) == (looped.Status.CONVERGED, 1, 0.0)
    halted = looped.solve(states_model(d_model=16).float(), [torch.zeros(3, 16)], exit=Exact(), backend="graph")
    assert (halted.status[0], halted.n_loops[0]) == (looped.Status.CONVERGED, 1)
    counts = looped.solve(states_model(d_model=16).float(), [torch.ones(3, 16)], n_loops=9, exit=Exact(), backend="graph")
    assert (counts.status[0], counts.n_loops[0]) == (looped.Status.MAX_LOOPS, 9)
    _, model = pair(std=0.1, n_heads=1)
    prompts = [p.float() for p in prompts_of([0, 1, 0, 3])]
    for n in (0, 3):
        got = looped.solve(model, prompts, n_loops=n, exit="contraction", backend="graph", return_predictions=True)
        want = looped.solve(model, prompts, n_loops=n, exit="contraction", backend="eager", return_predictions=True)
        assert torch.equal(got.n_loops, want.n_loops)
        assert torch.equal(got.status, want.status)
        for a, b in zip((*got.y, *got.predictions), (*want.y, *want.predictions), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert looped.solve(model, [], n_loops=3, backend="graph").y == []
    assert looped.solve(model, torch.zeros(2, 0, 3), n_loops=3, backend="graph").y.shape == (2, 0, 16)


def test_a_model_in_bfloat16_is_eagers_in_bfloat16():
    _, model = pair(std=0.1)
    model, prompts = model.bfloat16(), [p.bfloat16() for p in prompts_of([9, 20])]
    got = looped.solve(model, prompts, n_loops=3, backend="graph", return_predictions=True)
    want = looped.solve(model, prompts, n_loops=3, backend="eager", return_predictions=True)
    for a, b in zip((*got.y, *got.predictions), (*want.y, *want.predictions), strict=True):
        assert a.dtype == torch.bfloat16
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_an_interrupt_keeps_what_has_ended_and_goes_on(monkeypatch):
    monkeypatch.setattr(graph, "LOOPS_AT_ONCE", 2)
    _, model = pair(std=0.1, n_heads=1)
    prompts = [p.float() for p in prompts_of(LENGTHS)]
    how = dict(n_loops=20, exit=Contraction(tol=2e-2), backend="graph")
    whole = looped.solve(model, prompts, **how)

    def stop(n_finished, n_prompts):
        if 0 < n_finished < n_prompts:
            raise KeyboardInterrupt

    with pytest.raises(looped.Interrupted) as caught:
        looped.solve(model, prompts, progress=stop, **how)
    part = caught.value.result
    assert part.finished.any()
    assert not part.finished.all()
    assert (part.status[~part.finished] == looped.Status.INTERRUPTED).all()
    assert all(part.prediction[i].isnan().all() for i in range(len(prompts)) if not part.finished[i])
    rest = looped.solve(model, prompts, state=part.state, **how)
    assert torch.equal(rest.n_loops, whole.n_loops)
    for a, b in zip(rest.y, whole.y, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_buffers_are_used_again_and_go_with_the_model():
    _, model = pair(std=0.1)
    before = len(graph._idle)
    x = torch.randn(3, 5, 3)
    want = looped.solve(model, x, n_loops=4, backend="graph")
    kept = next(iter(graph._idle.values())) if before == 0 else None
    again = looped.solve(model, x * 2, n_loops=4, backend="graph")
    assert not torch.equal(again.y, want.y)
    assert torch.equal(looped.solve(model, x, n_loops=4, backend="graph").y, want.y)
    assert len(graph._idle) == before + 1
    assert kept is None or len(kept) == 1
    with torch.no_grad():
        model.core[0].mlp.proj.weight.mul_(2)  # seen without a new graph: it reads the weights where they lie
    changed = looped.solve(model, x, n_loops=4, backend="graph")
    torch.testing.assert_close(changed.y, looped.solve(model, x, n_loops=4, backend="eager").y, rtol=1e-5, atol=1e-5)
    looped.repack(model)
    assert len(graph._idle) == before
    looped.solve(model, x, n_loops=4, backend="graph")
    del model
    assert len(graph._idle) == before


def test_the_last_graph_has_few_loops_too_many():
    """20 loops are three graphs of 7, not of 8."""
    _, model = pair(std=0.1)
    x = torch.randn(2, 5, 3)
    counted = []
    real = graph.Loops.body
    try:
        graph.Loops.body = lambda self, model, i: counted.append(i) or real(self, model, i)
        looped.solve(model, x, n_loops=20, backend="graph")
    finally:
        graph.Loops.body = real
    assert len(counted) == 21


def test_what_it_does_not_run_is_named():
    model, prompts = icl_model(dtype=torch.float32), [torch.randn(4, 3)]
    with pytest.raises(ValueError, match="Anderson"):
        looped.solve(model, prompts, exit="contraction", accelerate="anderson", backend="graph")
    with pytest.raises(ValueError, match="whole prompts"):
        looped.solve(model, prompts, exit=Contraction(scope="prefix"), backend="graph")
    with pytest.raises(ValueError, match=r"sums in float32 and the model is torch\.float64"):
        looped.solve(model.double(), [p.double() for p in prompts], backend="graph")


def test_both_backends_of_a_gpu_agree_to_the_last_decision(tiles):
    tiles(32)
    truth, model = pair(std=0.1, n_heads=1)
    rule = Contraction(tol=2e-2, check_every=2, min_loops=3)
    _, fused = both_triton(truth, model, prompts_of(LENGTHS), n_loops=20, exit=rule)
    _, plain = both(truth, model, prompts_of(LENGTHS), n_loops=20, exit=rule)
    assert torch.equal(fused.n_loops, plain.n_loops)
    assert torch.equal(fused.status, plain.status)
    for name, kept in fused.state.memory.items():
        torch.testing.assert_close(kept, plain.state.memory[name], rtol=1e-3, atol=1e-5, equal_nan=True)


def test_sums_of_a_long_state_in_chunks():
    """More numbers than one program takes: several chunks, and several blocks in a chunk."""
    from loopkernels import launch, settle

    n = settle.MOST_CHUNKS * settle.BLOCK + 5
    assert settle.chunks_of(n) == (settle.MOST_CHUNKS, 2 * settle.BLOCK)
    assert settle.chunks_of(1) == (1, settle.BLOCK)
    generator = torch.Generator().manual_seed(0)
    new, old = (torch.randn(2, 3, 5000, generator=generator) for _ in range(2))
    settler = settle.Settler(*launch.fresh_memory(2, torch.device("cpu")), launch.Stop(9, "absolute", tol=1e9))
    settler.limit.fill_(9)
    state = old.clone()
    settler.step(new, state, state)
    want = (new - old).flatten(1).norm(dim=1) / new.flatten(1).norm(dim=1)
    torch.testing.assert_close(settler.floats[:, 0], want)
    assert torch.equal(state, new)
    assert settler.ints[:, :3].tolist() == [[1, 1, 1]] * 2


def test_another_number_of_loops_needs_no_other_graph():
    _, model = pair(std=0.1)
    x = torch.randn(2, 5, 3)
    for n in (8, 16, 24):
        assert (looped.solve(model, x, n_loops=n, backend="graph").n_loops == n).all()
    assert len(graph._idle[next(iter(weights_of(model).values()))]) == 1
