"""Ctrl-C in a call of the fused kernels: what it keeps, and that the rest gives the bits of a call that was not stopped."""

import os
import signal

import pytest
import torch
from cases_parity import pair, prompts_of

import looped
from looped.backends import triton as backend
from looped.exits import Contraction
from loopkernels import launch

LENGTHS = [20, 5, 9]


def signalled(function, at):
    """The function, which gets a signal in its call number `at`, the first being 1."""
    calls = []

    def run(*arguments, **options):
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(1000):  # the signal is seen between two instructions
                pass
        return function(*arguments, **options)

    return run


@pytest.mark.parametrize("where", ["packed", "embed", "memory_of", "run"])
def test_a_call_that_is_stopped_before_its_end_has_not_begun(tiles, monkeypatch, where):
    tiles(32)
    module = launch if where == "run" else backend
    _, model = pair(std=0.1, n_heads=1)
    prompts = [p.float() for p in prompts_of(LENGTHS)]
    how = dict(n_loops=8, exit=Contraction(tol=0.2), backend="triton", return_predictions=True)
    whole = looped.solve(model, prompts, **how)
    half = looped.solve(model, prompts, **(how | dict(n_loops=7)))
    ended = half.state.memory["done"]
    assert 0 < ended.sum() < len(prompts)
    for state in (None, half.state) if where != "memory_of" else (half.state,):
        with monkeypatch.context() as patch:
            patch.setattr(module, where, signalled(getattr(module, where), 1))
            stopped = looped.solve(model, prompts, state=state, on_interrupt="return", **how)
        assert stopped.interrupted
        assert stopped.backend == "triton"
        assert stopped.finished.tolist() == ([False] * 3 if state is None else ended.tolist())
        assert stopped.n_loops.tolist() == ([0] * 3 if state is None else half.n_loops.tolist())
        for i in range(3):
            if stopped.finished[i]:
                assert torch.equal(stopped.prediction[i], half.prediction[i])
            else:
                assert stopped.prediction[i].isnan().all()
        rest = looped.solve(model, prompts, state=stopped.state, **how)
        assert torch.equal(rest.n_loops, whole.n_loops)
        for got, want in zip(rest.y, whole.y, strict=True):
            assert torch.equal(got, want)


def test_what_the_launches_of_one_loop_each_have_done_stays(tiles, monkeypatch):
    tiles(32)
    _, model = pair(std=0.1, n_heads=1, readout="classes", n_classes=3)
    batch = torch.full((3, 20, 3), torch.nan)
    for row, prompt in zip(batch, prompts_of(LENGTHS), strict=True):
        row[: len(prompt)] = prompt.float()
    how = dict(n_loops=8, exit=Contraction(tol=0.2), backend="triton", return_predictions=True, lengths=LENGTHS)
    whole = looped.solve(model, batch, **how)
    assert whole.n_loops.tolist() == [7, 8, 7]
    for at, done in ((9, 7), (4, 2), (1, 0)):  # the first launch has no loop
        with monkeypatch.context() as patch:
            patch.setattr(launch, "run", signalled(launch.run, at))
            with pytest.raises(looped.Interrupted) as caught:
                looped.solve(model, batch, **how)
        part = caught.value.result
        assert part.n_loops.tolist() == [min(done, n) for n in whole.n_loops.tolist()]
        assert part.finished.tolist() == [n <= done for n in whole.n_loops.tolist()]
        assert (part.status[~part.finished] == looped.Status.INTERRUPTED).all()
        assert part.prediction[~part.finished].isnan().all()
        assert torch.equal(part.prediction[part.finished], whole.prediction[part.finished])
        if done:
            assert torch.equal(part.predictions[:, :done], whole.predictions[:, :done])
            for i in (~part.finished).nonzero().flatten().tolist():  # read at every second token
                assert part.predictions[i, done:, : (LENGTHS[i] + 1) // 2].isnan().all()
        rest = looped.solve(model, batch, state=part.state, **how)
        for field in ("y", "prediction", "n_loops", "status", "residual"):
            assert torch.equal(getattr(rest, field), getattr(whole, field)), field


def test_a_signal_while_the_end_is_read_loses_nothing(tiles, monkeypatch):
    tiles(32)
    _, model = pair(std=0.1, n_heads=1)
    prompts = [p.float() for p in prompts_of(LENGTHS)]
    whole = looped.solve(model, prompts, n_loops=3, backend="triton")
    monkeypatch.setattr(backend, "read", signalled(backend.read, 1))
    stopped = looped.solve(model, prompts, n_loops=3, backend="triton", on_interrupt="return")
    assert stopped.interrupted
    assert stopped.finished.all()
    for got, want in zip(stopped.prediction, whole.prediction, strict=True):
        assert torch.equal(got, want)
