"""benches/peers.py: its rows, its bars, and that a wrong or missing peer ends it."""

import json
import subprocess
import sys
import time
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


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_every_setting_of_a_peer_agrees_with_eager(peers, name):
    if package := peers.missing(name):
        pytest.skip(f"{package} is not installed: pip install 'looped[bench]'")
    model = peers.random_model("C16H2T7")
    x = torch.randn(4, 7, 20, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = model(x, n_loops=5).numpy()
    for setting, call in peers.IMPLEMENTATIONS[name](model, x, 5, 2).items():
        np.testing.assert_allclose(call(x), want, atol=1e-5, err_msg=setting)
