"""benches/exit.py: ways that differ in one thing each, and eager in the better of two allocator settings."""

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("looped._engine", reason="the C++ engine is not built")
BENCHES = Path(__file__).parents[1] / "benches"


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCHES))
    try:
        import exit
    finally:
        sys.path.remove(str(BENCHES))
    return exit


def test_every_way_that_exits_does_so_alike(bench):
    exits = [way for way in bench.WAYS.values() if "exit" in way]
    assert len(exits) == 4
    assert all(way["on_stall"] == "exit" and way["exit"].tol == exits[0]["exit"].tol for way in exits)


@pytest.mark.parametrize(("seconds", "better"), [(1e-9, "default"), (1e9, "kept")])
def test_eager_has_the_better_of_two_allocator_settings(bench, monkeypatch, tmp_path, seconds, better):
    asked = []

    class Worker:
        def ask(self, what, function, way, parts, n_threads):
            asked.append((what, function, way["backend"], n_threads))
            return seconds

        def stop(self):
            asked.append("stopped")

    monkeypatch.setattr(bench, "DefaultHeapEager", Worker)
    monkeypatch.setattr(bench, "N_LOOPS", 3)
    arguments = ["exit.py", "--rounds", "2", "--prompts", "2", "--threads", "1", "--json", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", arguments)
    bench.main()
    assert asked == [("call", bench.seconds_of_way, "eager", 1)] * 4 + ["stopped"]
    rows = {row["way"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert {name: row["heap"] for name, row in rows.items()} == {
        name: better if name.startswith("eager") else "kept" for name in bench.WAYS
    }
    assert (rows["eager, all loops"]["seconds"] == seconds) == (better == "default")
    ratio = rows["eager, all loops"]["seconds"] / rows["cpu, exit"]["seconds"]
    assert rows["cpu, exit"]["speedup"] == pytest.approx(ratio)


def test_the_other_process_has_the_default_heap(bench, monkeypatch):
    setups = sys.modules["peer_setups"]
    monkeypatch.syspath_prepend(BENCHES)  # it is imported there
    for name, value in setups.KEEP_HEAP.items():
        monkeypatch.setenv(name, value)
    worker = setups.DefaultHeapEager()
    try:
        assert [worker.ask("call", os.getenv, name) for name in setups.KEEP_HEAP] == [None, None]
    finally:
        worker.stop()
    assert os.environ["MALLOC_TRIM_THRESHOLD_"] == setups.KEEP_HEAP["MALLOC_TRIM_THRESHOLD_"]
