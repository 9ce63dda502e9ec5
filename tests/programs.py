"""Programs for tests: random ones, and machines beside their interpreter in batches."""

from pathlib import Path

import numpy as np
import pytest

import looped
from looped.programs.subleq_text import assemble_subleq

EXAMPLES = Path(__file__).parents[1] / "examples" / "programs"

# The engine does the whole of a test with this mark, the eager backend a part of it, and the whole among the slow tests.
IN_PART_AND_WHOLE = pytest.mark.parametrize(
    "whole", [pytest.param(False, id="part"), pytest.param(True, id="whole", marks=pytest.mark.slow)]
)


def random_subleq(seed, *, n_cells=60, n_commands=120, n_bits=16):
    """Random words and commands; some jumps lead to the end, but few."""
    rng = np.random.default_rng(seed)
    words = rng.integers(-(2 ** (n_bits - 1)), 2 ** (n_bits - 1), n_cells)
    lines = [f".bits {n_bits}", "m: " + " ".join(map(str, words))]
    for _ in range(n_commands):
        a = rng.integers(0, n_cells + 2)
        b, c = rng.integers(0, n_cells), rng.integers(0, n_commands)
        lines.append(f"subleq {a} {b} {c}")
    return assemble_subleq("\n".join(lines), name=f"random {seed}")


def machine_states(machine, programs, n_loops, *, backend, chunk=20):
    """Yields (loop, [snapshot of each program]) for every loop, all programs in one batch."""
    prompts = [machine.encode(program) for program in programs]
    state, done = None, 0
    while done < n_loops:
        upto = min(done + chunk, n_loops)
        result = looped.solve(machine.model, prompts, n_loops=upto, state=state, backend=backend, return_predictions=True)
        state = result.state
        decoded = [machine.decode(states, program) for states, program in zip(result.predictions, programs, strict=True)]
        for i in range(upto - done):
            yield done + i + 1, [(int(s.pc[i]), s.memory[i], float(s.off_grid[i])) for s in decoded]
        done = upto
