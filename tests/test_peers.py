"""benches/peers.py: its rows, its bars, and that a wrong or missing peer ends it."""

import json
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from looped.bench.shapes import random_model

pytest.importorskip("looped._engine", reason="the C++ engine is not built")
BENCHES = Path(__file__).parents[1] / "benches"


@pytest.fixture(scope="module")
def peers():
    sys.path.insert(0, str(BENCHES))
    try:
        import peers
    finally:
        sys.path.remove(str(BENCHES))
    return peers


def test_rows_of_ours_and_eager(tmp_path):
    options = ["--impl", "ours,eager", "--shapes", "C16H2T7B1,C16H2T7B128", "--threads", "1", "--rounds", "2"]
    command = [sys.executable, str(BENCHES / "peers.py"), *options, "--json", str(tmp_path / "rows.json")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = json.loads((tmp_path / "rows.json").read_text())
    pairs = [(f"C16H2T7B{B}", impl) for B in (1, 128) for impl in ("ours", "eager")]
    assert [(row["shape"], row["impl"]) for row in rows] == pairs
    for row in rows:
        B = int(row["shape"].partition("B")[2])
        assert row["gflops"] == pytest.approx(B * (24 * 16**2 * 7 + 2 * 7 * 8 * 16) / row["ms_per_loop"] / 1e6)
        assert 0 < row["peak_fraction"] < 2
        assert row["error"] < 1e-5
        assert (row["threads"], row["rounds"]) == (1, 2)
    assert "heap" in rows[1]["setting"]
    assert "C16H2T7B128, 1 thread, 2 rounds, FMA peak" in run.stdout


def test_bars_count_every_miss(peers):
    def row(shape, impl, ms, fraction, threads=1, **more):
        return dict(shape=shape, impl=impl, threads=threads, ms_per_loop=ms, peak_fraction=fraction, **more)

    rows = [
        row("C256H8T82B64", "ours", 10, 0.84),
        row("C256H8T82B64", "eager", 20, 0.4),
        row("C256H8T82B64", "openvino", 12, 0.7),
        row("C64H4T22B1", "ours", 1, 0.5, threads=2, scaling=0.96),
        row("C64H4T22B1", "openvino", 1, 0.5),  # of another run
        row("C64H4T22B1", "onnxruntime", 2.1, 0.2, threads=2),
        row("C128H4T41B1", "ours", 1, 0.1),
    ]
    found = peers.bars(rows)
    assert [(bar, seen) for _, bar, seen in found] == [(0.85, 0.84), (1.25, 1.2), (2.0, 2.1), (0.95, 0.96)]
    assert "time of openvino, the best of 2" in found[1][0]
    assert peers.bars_table(rows).title == "bars: 2 hold, 2 missed"


def test_a_wrong_output_ends_the_bench(peers):
    want = np.ones((2, 3))
    compared = torch.tensor([0, 4])
    good = np.ones((5, 3))
    assert peers.compare("x", good, 5, compared, want) == 0
    for wrong in (good + 1e-4, good * np.nan, good[:, :2], good[:4]):
        with pytest.raises(SystemExit, match="nothing is reported"):
            peers.compare("x", wrong, 5, compared, want)


@pytest.mark.parametrize("best", ["first", "second", "first in parts of 64", "second in parts of 64"])
def test_the_fastest_of_all_settings_and_both_sizes_enters(peers, monkeypatch, best):
    def settings(model, x, n_loops, n_threads):
        suffix = "" if len(x) == 128 else " in parts of 64"

        def call_of(name):
            def call(x):
                time.sleep(0 if name + suffix == best else 0.02)
                return np.ones((len(x), 3))

            return call

        return {name: call_of(name) for name in ("first", "second")}

    monkeypatch.setitem(peers.IMPLEMENTATIONS, "fake", settings)
    seen = []
    arguments = (random_model("C16H2T7"), torch.zeros(128, 7, 2), 1, torch.tensor([0, 1]), np.ones((2, 3)), seen.append)
    entry = peers.fastest("fake", "x", *arguments)
    assert entry.setting == best
    assert len(seen) == 4
    monkeypatch.setattr(peers, "WHOLE_BYTES", 1e3)
    assert peers.fastest("fake", "x", *arguments).setting.endswith("in parts of 64")
    assert len(seen) == 6


@pytest.mark.parametrize("is_eager", [False, True])
def test_the_first_call_of_a_trial_does_not_count(peers, monkeypatch, is_eager):
    """Two settings: one whose first call takes 20 s and the others 6 s, one that always takes 8 s, by a clock of the test's
    own."""
    now = [0.0]

    def slow(first, then):
        calls = []

        def call(x):
            now[0] += then if calls else first
            calls.append(1)
            return np.ones((len(x), 3))

        return call

    def sample(way, n_calls):
        begin = now[0]
        way.call()
        return now[0] - begin

    monkeypatch.setattr(peers, "sample", sample)
    monkeypatch.setattr(peers.time, "perf_counter", lambda: now[0])
    calls = {"warms up": slow(20, 6), "steady": slow(8, 8)}
    common = (torch.tensor([0, 1]), np.ones((2, 3)), lambda text: None)
    x = torch.zeros(128, 7, 2)
    if not is_eager:
        monkeypatch.setitem(peers.IMPLEMENTATIONS, "fake", lambda *arguments: calls)
        monkeypatch.setattr(peers, "PART", 128)
        assert peers.fastest("fake", "x", random_model("C16H2T7"), x, 1, *common).setting == "warms up"
        return

    class Worker:
        def ask(self, what, *values):
            if what == "use":
                self.call = calls["warms up" if values[0] is None else "steady"]
            elif what == "output":
                return self.call(x)
            elif what == "sample":
                return sample(peers.Way(lambda: self.call(x)), 1)
            return None

    assert peers.default_heap_entry(Worker(), "C16H2T7", "x", x, 1, *common).setting == "default heap"


def assert_every_setting_agrees(peers, name, n_settings):
    model = peers.random_model("C16H2T7")
    for n_prompts, n in zip((4, 1), n_settings, strict=True):
        x = torch.randn(n_prompts, 7, 20, generator=torch.Generator().manual_seed(0))
        settings = peers.IMPLEMENTATIONS[name](model, x, 5, 2)
        assert len(settings) == n
        for setting, call in settings.items():
            for prompts in (x, 2 * x):  # not the example's own
                with torch.no_grad():
                    want = model(prompts, n_loops=5, backend="eager").numpy()
                np.testing.assert_allclose(call(prompts), want, atol=1e-5, err_msg=setting)


@pytest.mark.parametrize(
    ("name", "n_settings"), [("ours", (1, 1)), ("eager", (1, 1)), ("onnxruntime", (2, 2)), ("openvino", (2, 1))]
)
def test_every_setting_of_what_is_installed_agrees_with_eager(peers, name, n_settings):
    if package := peers.missing(name):
        pytest.skip(f"{package} is not installed: pip install 'looped[bench]'")
    assert_every_setting_agrees(peers, name, n_settings)


def test_signals_are_survived_after_openvino(peers):
    """Set up twice and dropped in the same order: with a core each, the next signal had no stack to run on."""
    if package := peers.missing("openvino"):
        pytest.skip(f"{package} is not installed: pip install 'looped[bench]'")
    program = """
import signal, sys
sys.path.insert(0, sys.argv[1])
import peer_setups, torch
model, x = peer_setups.random_model("C16H2T7"), torch.zeros(1, 7, 20)
first, second = (peer_setups.openvino(model, x, 2, 1) for _ in range(2))
del first, second
signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
signal.raise_signal(signal.SIGUSR1)
"""
    run = subprocess.run([sys.executable, "-X", "faulthandler", "-c", program, str(BENCHES)], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "handled\n"), run.stderr[-2000:]


class Graph:
    """Stands for an exported graph: the module, taken apart by no one."""

    def __init__(self, module):
        self.module = module

    def SerializeToString(self):  # noqa: N802
        return self


class Session:
    """Stands for ONNX Runtime's."""

    def __init__(self, graph, options, providers):
        self.module = graph.module

    def get_inputs(self):
        return [types.SimpleNamespace(name="x")]

    @torch.no_grad()
    def run(self, names, inputs):
        return [self.module(torch.from_numpy(inputs["x"])).numpy()]


class Compiled:
    """Stands for OpenVINO's: takes the shape it was converted for, and no other."""

    def __init__(self, module, shape):
        self.module, self.shape = module, shape

    @torch.no_grad()
    def __call__(self, x):
        assert list(x.shape) == self.shape
        return [self.module(torch.from_numpy(x)).numpy()]


class Queue:
    """Stands for OpenVINO's: answers at the end, the last request first, in one buffer."""

    def __init__(self, compiled, n):
        self.compiled, self.n, self.waiting = compiled, n, []

    def set_callback(self, callback):
        self.callback = callback

    def start_async(self, x, i):
        self.waiting.append((x, i))
        assert len(self.waiting) <= self.n

    def wait_all(self):
        buffer = None
        for x, i in self.waiting[::-1]:
            answer = self.compiled(x)[0]
            buffer = answer if buffer is None else buffer
            buffer[:] = answer
            tensor = types.SimpleNamespace(data=buffer)
            self.callback(types.SimpleNamespace(get_output_tensor=lambda which, tensor=tensor: tensor), i)
        self.waiting = []


@pytest.mark.parametrize(("name", "n_settings"), [("compile", (1, 2)), ("onnxruntime", (2, 2)), ("openvino", (2, 1))])
def test_every_setting_of_a_peer_agrees_with_eager_on_stand_ins(peers, monkeypatch, name, n_settings):
    """What is ours in them, where no package is installed: parts and their order, loops, inputs and outputs."""
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    runtime = types.SimpleNamespace(
        SessionOptions=types.SimpleNamespace,
        GraphOptimizationLevel=types.SimpleNamespace(ORT_ENABLE_ALL=99),
        InferenceSession=Session,
    )
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    setups = sys.modules["peer_setups"]
    monkeypatch.setattr(setups, "export", lambda module, *inputs, **names: Graph(module))
    monkeypatch.setattr(setups, "export_loop", lambda model, x, n_loops: Graph(setups.AllLoops(model, n_loops)))
    core = types.SimpleNamespace(compile_model=lambda converted, device, config: converted)
    monkeypatch.setattr(setups, "openvino_core", lambda: core)
    vino = types.SimpleNamespace(
        convert_model=lambda module, example_input, input: Compiled(module, input), AsyncInferQueue=Queue
    )
    monkeypatch.setitem(sys.modules, "openvino", vino)
    assert_every_setting_agrees(peers, name, n_settings)
