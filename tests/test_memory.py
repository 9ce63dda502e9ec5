"""Memory does not grow with the number of prompts or of loops; benches/memory.py at its full size prints the figure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from looped.backends import cpu

SCRIPT = Path(__file__).parents[1] / "benches" / "memory.py"
MEGABYTES = 60  # measured: 15, most of it code that is loaded with the first batch
GROWTH = 4


def megabytes(tmp_path, backend, n_prompts, n_loops):
    out = tmp_path / "memory.json"
    options = ["--prompts", n_prompts, "--loops", n_loops, "--batch", 64, "--backend", backend, "--json", out]
    run = subprocess.run([sys.executable, SCRIPT, *map(str, options)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(out.read_text())["megabytes_above"]


@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("cpu", marks=pytest.mark.skipif(not cpu.is_there(), reason="not built"))]
)
def test_memory_is_bounded(tmp_path, backend):
    few = megabytes(tmp_path, backend, 192, 2)
    assert few < MEGABYTES
    assert megabytes(tmp_path, backend, 1920, 2) < few + GROWTH
    assert megabytes(tmp_path, backend, 192, 60) < few + GROWTH
