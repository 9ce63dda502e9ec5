"""benches/device.py: what it finds wrong. A run is recorded once, and judged again with one of its results spoilt."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

import looped

BENCHES = Path(__file__).parents[2] / "benches"


@pytest.fixture(scope="module")
def device():
    sys.path.insert(0, str(BENCHES))
    try:
        import device
    finally:
        sys.path.remove(str(BENCHES))
    return device


@pytest.fixture(scope="module")
def recorded(device):
    """Runs of a part, by its name and arguments: the results of its calls of `solve`, in their order."""
    kept = {}

    def run(part, *arguments):
        key = (part, *arguments)
        if key not in kept:
            results, solve = [], looped.solve
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(looped, "solve", lambda *args, **options: results.append(solve(*args, **options)) or results[-1])
                found = device.PARTS[part](*arguments)
            assert found["ok"], found
            kept[key] = results
        return kept[key]

    yield run
    torch.set_float32_matmul_precision("highest")


def later(result):
    return dict(n_loops=result.n_loops + 1)


SPOILT = {
    "states": lambda result: dict(y=result.y * 1.1),
    "a state that is NaN": lambda result: dict(y=result.y.index_fill(0, torch.tensor([1]), torch.nan)),
    "predictions": lambda result: dict(predictions=result.predictions * 1.1),
    "a prediction that is NaN": lambda result: dict(predictions=result.predictions.index_fill(2, torch.tensor([0]), torch.nan)),
    "loop counts": later,
    "statuses": lambda result: dict(status=result.status + 1),
}
GRAPH, AGAIN, RESUMED = 1, 2, 4  # of the calls of `ordinary`, of which the first is eager float64


@pytest.mark.parametrize(("part", "arguments", "call", "what"), [
    *[("exits", ("bf16x3",), 1, what) for what in SPOILT],
    *[("ordinary", (32, dtype), GRAPH, what) for dtype in ("float32", "bfloat16") for what in SPOILT],
    *[("ordinary", (32, dtype), AGAIN, "states") for dtype in ("float32", "bfloat16")],
    *[("ordinary", (32, dtype), RESUMED, "loop counts") for dtype in ("float32", "bfloat16")],
])  # fmt: skip
def test_a_wrong_result_does_not_pass(device, recorded, monkeypatch, part, arguments, call, what):
    results = list(recorded(part, *arguments))
    results[call] = dataclasses.replace(results[call], **SPOILT[what](results[call]))
    monkeypatch.setattr(looped, "solve", lambda *args, **options: results.pop(0))
    found = device.PARTS[part](*arguments)
    assert not results
    assert not found["ok"], found
