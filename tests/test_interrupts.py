"""Progress and Ctrl-C: what is finished is kept, and the rest goes on to the bits of a run that was never stopped."""

import _thread
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from models import icl_model, random_weights

import looped
from looped.backends import cpu, eager
from looped.exits import Contraction, Readout
from looped.loop import Status

BACKENDS = ["eager", pytest.param("cpu", marks=pytest.mark.skipif(cpu._engine is None, reason="the C++ engine is not built"))]
LENGTHS = [17, 3, 0, 9, 17, 1]

MODES = {
    "fixed": dict(),
    "prefix": dict(exit=Contraction(tol=1e-12, scope="prefix")),
    "anderson": dict(exit=Contraction(tol=1e-12, stall_window=10**6), accelerate="anderson"),
    "damped readout": dict(exit=Readout(tol=1e-14, check_every=3, stall_window=4), on_stall="damp"),
}


def prompts(n=6, T=17, seed=1, dtype=torch.float64):
    return torch.randn(n, T, 3, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def same(a, b):
    return torch.equal(torch.nan_to_num(a, nan=-7.0), torch.nan_to_num(b, nan=-7.0))


def interrupt_after(n_calls):
    """A progress function that is hit by Ctrl-C when it is called for the n-th time."""
    calls = []

    def progress(n_finished, n_prompts):
        calls.append(n_finished)
        if len(calls) == n_calls:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", MODES)
def test_an_interrupted_run_goes_on_to_the_same_bits(mode, backend):
    # The engine calls back every 50 ms, eager after every loop: many interrupts, wherever they happen to come.
    n_copies, n_loops = (1, 60) if backend == "eager" else (100, 400)
    model, x = icl_model(std=0.12), prompts(n_copies * len(LENGTHS))
    options = dict(lengths=n_copies * LENGTHS, n_loops=n_loops, backend=backend, **MODES[mode])
    whole = looped.solve(model, x, **options)
    state, n_stops, t = None, 0, torch.zeros(len(x), dtype=torch.int64)
    while True:
        stop = dict(state=state, progress=interrupt_after(1 + n_stops % 3), on_interrupt="return")
        result = looped.solve(model, x, **options, **stop)
        if not result.interrupted:
            break
        state, n_stops = result.state, n_stops + 1
        assert (result.n_loops >= t).all()
        moved = (~result.finished & (result.n_loops > t)).nonzero().flatten().tolist()
        for i in moved[:2]:  # y is the F of the last complete loop
            alone = options | dict(lengths=[options["lengths"][i]], n_loops=int(result.n_loops[i]))
            torch.testing.assert_close(result.y[i], looped.solve(model, x[i : i + 1], **alone).y[0], rtol=0, atol=1e-9)
        t = result.n_loops
    assert n_stops > 3
    for name in ("y", "prediction", "n_loops", "residual"):
        assert same(getattr(result, name), getattr(whole, name)), name
    assert result.status.tolist() == whole.status.tolist()
    assert result.finished.all()
    for name, tensor in whole.state.memory.items():
        if name not in ("prefix.keys", "prefix.values"):  # those of tokens that move are made again in every loop
            assert same(result.state.memory[name], tensor), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_finished_is_told_apart(backend):
    model, n = icl_model(std=0.1), 8
    x = prompts(n) * torch.linspace(0.1, 3, n)[:, None, None]
    # Eager: prompts leave one by one at their exits. C++: one thread takes them one after the other.
    options = dict(backend=backend, return_predictions=True)
    options |= dict(n_loops=200, exit=Contraction(tol=1e-3)) if backend == "eager" else dict(n_loops=5000)
    whole = looped.solve(model, x, **options)

    def stop(n_finished, n_prompts):
        assert n_prompts == n
        if n_finished >= 2:
            raise KeyboardInterrupt

    with pytest.raises(looped.Interrupted, match=r"\d of 8 prompts had finished") as stopped:
        looped.solve(model, x, progress=stop, **options)
    result = stopped.value.result
    assert isinstance(stopped.value, KeyboardInterrupt)
    assert result.interrupted
    assert not whole.interrupted
    n_finished = int(result.finished.sum())
    assert 2 <= n_finished < n
    assert whole.finished.all()
    for i in range(n):
        if result.finished[i]:
            for name in ("y", "prediction", "predictions", "n_loops", "residual", "status"):
                assert same(getattr(result, name)[i], getattr(whole, name)[i]), name
            continue
        used = int(result.n_loops[i])
        assert result.status[i] == result[i].status == Status.INTERRUPTED
        assert result.prediction[i].isnan().all()
        assert same(result.predictions[i, :used], whole.predictions[i, :used])
        assert result.predictions[i, used:].isnan().all()
        if used:  # the state is that of its last complete loop
            assert same(result.y[i], looped.solve(model, x[i : i + 1], n_loops=used, backend="cpu").y[0]) or backend == "eager"
    if backend == "cpu":
        assert result.n_loops.tolist().count(0) > 0  # the last ones have not begun
    rest = looped.solve(model, x, state=result.state, **(options | dict(return_predictions=False)))
    for name in ("y", "prediction", "n_loops", "status", "residual"):
        assert same(getattr(rest, name), getattr(whole, name)), name


@pytest.mark.parametrize(
    ("owner", "method", "after"),
    [
        (looped.LoopedTransformer, "inject", False),
        (looped.Anderson, "step", False),
        (looped.Anderson, "step", True),
        (eager.EagerLoop, "once", True),
        (eager.Finished, "take", True),
    ],
)
@pytest.mark.parametrize("at", [1, 5, "last"])
def test_an_interrupt_inside_an_eager_loop_leaves_no_trace(owner, method, after, at, monkeypatch):
    model, x, original, calls = icl_model(std=0.12), prompts(), getattr(owner, method), []
    n_loops = 7 if at == "last" else 30
    options = dict(lengths=LENGTHS, n_loops=n_loops, exit="contraction", accelerate="anderson", backend="eager")
    whole = looped.solve(model, x, **options)

    def counted(*arguments):
        calls.append(1)
        out = original(*arguments) if after or len(calls) != at else None
        if len(calls) == at:
            raise KeyboardInterrupt
        return out

    if at == "last":
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, counted)
            looped.solve(model, x, **options)
        at = len(calls)
        calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, counted)
        result = looped.solve(model, x, on_interrupt="return", **options)
    assert result.interrupted
    for i in (~result.finished & (result.n_loops > 0)).nonzero().flatten().tolist():
        alone = options | dict(lengths=[LENGTHS[i]], n_loops=int(result.n_loops[i]))
        torch.testing.assert_close(result.y[i], looped.solve(model, x[i : i + 1], **alone).y[0], rtol=0, atol=1e-9)
    rest = looped.solve(model, x, state=result.state, **options)
    assert same(rest.y, whole.y)
    assert rest.n_loops.tolist() == whole.n_loops.tolist()


def test_an_interrupt_while_all_leave_at_once(monkeypatch):
    model, x, take, calls = icl_model(std=0.12), prompts(), eager.Finished.take, []
    half = looped.solve(model, x, n_loops=4, accelerate="anderson", backend="eager").state  # its Y is not its F
    options = dict(n_loops=5, state=half, backend="eager")
    whole = looped.solve(model, x, **options)

    def interrupted(*arguments):
        take(*arguments)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(eager.Finished, "take", interrupted)
        result = looped.solve(model, x, on_interrupt="return", **options)
    assert torch.equal(result.y, half.y)
    assert torch.equal(looped.solve(model, x, **(options | dict(state=result.state))).y, whole.y)


class Stopped:
    """An engine that Ctrl-C hits while it embeds."""

    def embed(self, *arguments, **options):
        raise KeyboardInterrupt


@pytest.mark.parametrize("state_init", ["zeros", "embedding", "given"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_interrupt_before_the_first_loop(backend, state_init, monkeypatch):
    model, x = icl_model(std=0.12, state_init=state_init), prompts()
    given = torch.randn(len(x), 17, 16, dtype=torch.float64) if state_init == "given" else None
    options = dict(lengths=LENGTHS, n_loops=9, backend=backend)
    whole = looped.solve(model, x, state=given, **options)
    half = looped.solve(model, x, state=given, **(options | dict(n_loops=4)))
    with monkeypatch.context() as patch:
        if backend == "eager":
            patch.setattr(model, "embed", Stopped().embed)
        patch.setattr(cpu, "packed", lambda config, weights: (Stopped(), half.state.weights_sum))
        first = looped.solve(model, x, state=given, on_interrupt="return", return_predictions=True, **options)
        again = looped.solve(model, x, state=half.state, on_interrupt="return", **options)
    assert first.interrupted
    assert not first.finished.any()
    assert first.n_loops.tolist() == [0] * len(x)
    assert first.prediction.shape == whole.prediction.shape
    assert first.predictions.shape == (len(x), 9, 9)
    assert again.n_loops.tolist() == half.n_loops.tolist()
    for result in (first, again):
        assert same(looped.solve(model, x, state=result.state, **options).y, whole.y)


class StopsWhileEmbedding(Stopped):
    """The rest is an engine's own."""

    def __init__(self, engine):
        self.run = engine.run


@pytest.mark.parametrize("where", ["embed", "packed", "checksum"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_had_ended_stays_when_an_interrupt_comes_before_the_first_loop(backend, where, monkeypatch):
    model, n = icl_model(std=0.1), 6
    x = prompts(n) * torch.linspace(0.1, 3, n)[:, None, None]
    options = dict(lengths=LENGTHS, exit=Contraction(tol=0.1), backend=backend, return_predictions=True)
    half = looped.solve(model, x, n_loops=12, **options)
    ended = half.state.memory["done"]
    assert 1 < ended.sum() < n
    whole = looped.solve(model, x, n_loops=50, state=half.state, **options)
    packed = cpu.packed

    def stopped(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if backend == "eager":
            patch.setattr(*((model, "embed") if where == "embed" else (eager, "checksum")), stopped)
        elif where == "embed":
            patch.setattr(cpu, "packed", lambda *weights: (StopsWhileEmbedding(packed(*weights)[0]), packed(*weights)[1]))
        else:
            cpu._packed.clear()
            patch.setattr(cpu, where, stopped)
        result = looped.solve(model, x, n_loops=50, state=half.state, on_interrupt="return", **options)
        other = looped.solve(model, x, n_loops=12, state=half.state, on_interrupt="return", **(options | dict(exit=None)))
    assert result.interrupted
    assert result.finished.tolist() == ended.tolist()
    exact = dict(rtol=0, atol=0) if where == "embed" or backend == "eager" else dict()  # else read by plain PyTorch
    for name in ("y", "prediction", "predictions", "n_loops", "status", "residual"):
        got, want = getattr(result, name)[ended], getattr(whole, name)[ended]
        if name in ("prediction", "predictions") and backend == "eager":
            exact = dict()  # of another batch
        torch.testing.assert_close(got, want, equal_nan=True, **exact)
    assert result.prediction[~ended].isnan().all()
    assert result.predictions[~ended].isnan().all()
    at_limit = half.n_loops == 12
    assert other.finished.tolist() == at_limit.tolist()
    assert (other.status[at_limit] == Status.MAX_LOOPS).all()
    rest = looped.solve(model, x, n_loops=50, state=result.state, **options)
    assert same(rest.y, whole.y)
    assert rest.status.tolist() == whole.status.tolist()


@pytest.mark.parametrize("n_before", [None, 0, 4])
def test_an_interrupt_goes_through_pickle_and_says_how_to_go_on(n_before):
    result = looped.solve(icl_model(std=0.1), prompts(), exit="contraction", backend="eager")
    stop = looped.Interrupted(result, n_before)
    again = pickle.loads(pickle.dumps(stop))
    assert type(again) is looped.Interrupted
    assert str(again) == str(stop)
    assert ("state=" in str(stop)) == (n_before is None)
    assert again.n_before == n_before
    assert same(again.result.y, result.y)
    assert again.result.state.stopping == result.state.stopping


@pytest.mark.parametrize("backend", BACKENDS)
def test_progress_is_told_and_what_it_raises_comes_through(backend):
    model, x, seen = icl_model(std=0.1), prompts(), []
    want = looped.solve(model, x, n_loops=9, backend=backend)
    looped.solve(model, x, n_loops=9, backend=backend, progress=lambda *numbers: seen.append(numbers))
    assert seen == sorted(seen)
    assert seen[-1] == (len(x), len(x))

    def stop(n_finished, n_prompts):
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        looped.solve(model, x, n_loops=10**7, backend=backend, progress=stop)
    assert same(looped.solve(model, x, n_loops=9, backend=backend).y, want.y)
    for call in (looped.solve, looped.solve_iter):
        with pytest.raises(TypeError, match="progress must be True, a function"):
            call(model, x, progress="bar")
    with pytest.raises(ValueError, match="on_interrupt='stop' is not one of raise, return"):
        looped.solve(model, x, on_interrupt="stop")


def test_the_bar_is_for_long_calls(capsys, monkeypatch):
    model, x = icl_model(std=0.1), prompts()
    looped.solve(model, x, progress=True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(looped.progress, "BAR_AFTER", 0)
    looped.solve(model, x, progress=True)
    assert "6/6" in capsys.readouterr().err
    list(looped.solve_iter(model, iter(x), batch_size=4, progress=True))
    assert "6prompt" in capsys.readouterr().err


@pytest.mark.parametrize("backend", BACKENDS)
def test_solve_iter_counts_all_prompts_and_keeps_what_it_gave(backend):
    model, x, seen = icl_model(std=0.1), list(prompts()), []
    list(looped.solve_iter(model, x, batch_size=4, backend=backend, progress=lambda *numbers: seen.append(numbers)))
    assert seen == sorted(seen)
    assert (4, 6) in seen
    assert seen[-1] == (6, 6)
    seen.clear()
    list(looped.solve_iter(model, iter(x), batch_size=4, backend=backend, progress=lambda *numbers: seen.append(numbers)))
    assert seen[-1] == (6, None)

    def stop(n_finished, n_prompts):
        if n_finished > 4:
            raise KeyboardInterrupt

    given, results = [], looped.solve_iter(model, x, batch_size=4, backend=backend, progress=stop)
    with pytest.raises(looped.Interrupted, match="of the batch that begins with prompt 4") as stopped:
        given.extend(iter(lambda: given.append(next(results)), 0))
    given = [result for result in given if result is not None]
    assert len(given) == stopped.value.n_before == 4
    assert len(stopped.value.result) == 2


# The C++ engine and real signals ----------------------------------------------------------------------------------------

needs_engine = pytest.mark.skipif(cpu._engine is None, reason="the C++ engine is not built")


@needs_engine
@pytest.mark.parametrize("mask_kind", ["causal", "full"])
def test_ctrl_c_stops_a_long_loop_within_a_tenth_of_a_second(mask_kind):
    config = looped.LoopedConfig(
        input_kind="states", readout="none", d_model=64, n_heads=4, pos_kind="none", mask_kind=mask_kind, n_loops=50
    )
    model = random_weights(looped.LoopedTransformer(config), std=0.05, dtype=torch.float32)
    x = torch.randn(1, 20000, 64)  # one loop of it takes over a second
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    waits = []
    try:
        for _ in range(3):
            sent = []

            def press(sent=sent):
                sent.append(time.perf_counter())
                _thread.interrupt_main()

            timer = threading.Timer(0.6, press)
            timer.start()
            result = looped.solve(model, x, backend="cpu", on_interrupt="return")
            waits.append(time.perf_counter() - sent[0])
            timer.join()
            assert result.interrupted
            assert result.n_loops.tolist() == [0]
            assert not result.y.any()  # Y_0, untouched by the loop that was broken off
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(waits)[1] < 0.1, waits


READS = {
    "readout": dict(exit=Readout(tol=0.25, patience=100, stall_window=10**6)),
    "readout of every 2nd loop": dict(exit=Readout(tol=0.25, patience=100, check_every=2, stall_window=10**6)),
    "prefix": dict(exit=Readout(tol=1e-12, scope="prefix", stall_window=10**6)),
    "predictions": dict(return_predictions=True),
}


@needs_engine
@pytest.mark.parametrize("mode", READS)
def test_an_interrupt_inside_a_read_out_leaves_no_trace(mode):
    """Of a vocabulary so large that nearly every interrupt comes while it is read."""
    fields = dict(input_kind="states", readout="vocabulary", vocab_size=20_000, d_model=256, n_heads=4, pos_kind="none")
    model = random_weights(looped.LoopedTransformer(looped.LoopedConfig(**fields)), std=0.05, dtype=torch.float32)
    x, n_loops = torch.randn(2, 16, 256, generator=torch.Generator().manual_seed(1)), 40
    options = dict(n_loops=n_loops, backend="cpu", **READS[mode])
    check_every = options["exit"].check_every if "exit" in options else 1
    whole = looped.solve(model, x, **(options | dict(return_predictions=True)))
    assert whole.n_loops.tolist() == [n_loops] * 2
    state, first_t, n_stops, n_calls, result = None, torch.zeros(2, dtype=torch.int64), 0, 1, None
    while result is None or result.interrupted:
        result = looped.solve(model, x, **options, state=state, progress=interrupt_after(n_calls), on_interrupt="return")
        n_calls = 1 if (result.n_loops > first_t).any() else n_calls + 1  # a processor with many others to serve takes longer
        first = int(first_t.min())
        for i, (begin, used) in enumerate(zip(first_t.tolist(), result.n_loops.tolist(), strict=True)):
            if result.predictions is not None:
                assert same(result.predictions[i, begin - first : used - first], whole.predictions[i, begin:used])
            elif last_check := used - used % check_every:
                read = result.state.memory["rule.prediction"][i]
                assert torch.equal(read, whole.predictions[i, last_check - 1].double()), (i, used)
        state, first_t, n_stops = result.state, result.n_loops, n_stops + result.interrupted
    assert n_stops > 2
    for name in ("y", "prediction", "n_loops", "status", "residual"):
        assert same(getattr(result, name), getattr(whole, name)), name
    for name, tensor in whole.state.memory.items():
        if name not in ("prefix.keys", "prefix.values"):  # those of tokens that move are made again in every loop
            assert same(result.state.memory[name], tensor), name


@needs_engine
def test_other_threads_run_meanwhile():
    model, x, ticks, running = icl_model(std=0.1), prompts(), [0], [True]

    def count():
        while running[0]:
            ticks[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    start = time.perf_counter()
    looped.solve(model, x, n_loops=20000, backend="cpu")
    seconds, running[0] = time.perf_counter() - start, False
    thread.join()
    assert ticks[0] > 20 * seconds


@needs_engine
def test_a_signal_from_outside_raises_with_the_result():
    code = f"""
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored for background jobs
sys.path[:0] = {sys.path!r}
from test_interrupts import *
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    looped.solve(icl_model(std=0.1), prompts(), n_loops=10**9, backend="cpu")
except looped.Interrupted as stop:
    sys.exit(7 if (stop.result.n_loops > 0).any() and not stop.result.finished.any() else 1)
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    assert subprocess.run([sys.executable, "-c", code], timeout=60, env=environment).returncode == 7


@pytest.mark.skipif(cpu._engine is None or not hasattr(signal, "setitimer"), reason="the C++ engine, and a timer")
def test_an_interrupt_of_a_short_call_keeps_its_result():
    model, x = looped.load_pretrained("linear_regression"), torch.randn(1, 21, 5)
    want = looped.solve(model, x, n_loops=300)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.003)  # sooner than the engine looks for signals
        result = looped.solve(model, x, n_loops=300, on_interrupt="return")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert result.interrupted
    assert torch.equal(looped.solve(model, x, n_loops=300, state=result.state).y, want.y)


def test_what_progress_raises_comes_out_of_solve_iter_as_it_is():
    class OwnError(ValueError):
        def __init__(self, code, detail):
            super().__init__(code, detail)

    def progress(n_finished, n_prompts):
        raise OwnError(42, "mine")

    with pytest.raises(OwnError) as caught:
        list(looped.solve_iter(icl_model(), list(prompts(3)), n_loops=2, progress=progress))
    assert caught.value.args == (42, "mine")


@pytest.mark.skipif(not hasattr(os, "fork") or cpu._engine is None, reason="forks, on the C++ engine")
def test_a_child_is_not_held_up_by_a_lock_that_another_thread_of_its_parent_had():
    model, x = icl_model(), prompts(2)
    looped.solve(model, x, n_loops=2, backend="cpu")
    with cpu._lock:
        child = os.fork()
        if not child:
            signal.alarm(20)
            looped.solve(model, x, n_loops=2, backend="cpu")
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
