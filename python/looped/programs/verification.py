"""A machine beside the plain interpreter, loop by loop, and how far they are apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from looped.programs.fleq_plain import fleq_states
from looped.programs.run import OFF_GRID, Machine, snapshots
from looped.programs.subleq_plain import subleq_states


@dataclass(frozen=True)
class Difference:
    """The first loop after which machine and interpreter differ, and in what."""

    loop: int
    what: str
    machine: Any
    interpreter: Any

    def __str__(self) -> str:
        return f"loop {self.loop}: {self.what} is {self.machine} on the machine and {self.interpreter} in the interpreter"


@dataclass(frozen=True)
class Verification:
    """n_loops compared; whether the program halted; the first difference, if any; the largest error of any number of memory."""

    n_loops: int
    halted: bool
    difference: Difference | None
    error: float

    @property
    def is_equal(self) -> bool:
        return self.difference is None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        first = self.difference
        found = None if first is None else {key: _plain(value) for key, value in vars(first).items()}
        return {
            "is_equal": self.is_equal,
            "n_loops": self.n_loops,
            "halted": self.halted,
            "difference": found,
            "error": self.error,
        }


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def verify(
    machine: Machine,
    program: Any,
    *,
    max_loops: int = 10_000,
    tolerance: float | None = None,
    backend: str = "auto",
    check: bool = True,
) -> Verification:
    """Compare the command that comes next and all memory at the start and after every loop.

    tolerance: how far numbers may be apart: default 0 for SUBLEQ, whose words are whole, and no limit for FLEQ, where the
    largest error is reported and only the path through the program must be the same. check, and what is raised: as in
    `run_programs`.
    """
    exact = program.kind == "subleq"
    limit = (0.0 if exact else np.inf) if tolerance is None else tolerance
    plain: Iterator[tuple[int, Any]] = subleq_states(program) if exact else fleq_states(program)
    states = snapshots(machine, program, max_loops, backend=backend, check=check)
    worst, n_loops, pc = 0.0, 0, 0
    for loop, (pc, memory, off_grid) in enumerate(states):
        n_loops = loop
        expected_pc, expected = next(plain)
        expected = np.asarray(expected)
        if not off_grid <= OFF_GRID:
            return Verification(loop, False, Difference(loop, "the distance of codes from -1 and 1", off_grid, 0), worst)
        if pc != expected_pc:
            return Verification(loop, False, Difference(loop, "the next command", pc, expected_pc), worst)
        error = np.abs(memory - expected)
        worst = max(worst, float(error.max(initial=0)))
        if not error.max(initial=0) <= limit:
            place = np.unravel_index(int(error.argmax()), error.shape)
            what = program.cell_name(*(int(i) for i in place))
            return Verification(loop, False, Difference(loop, what, memory[place], expected[place]), worst)
    return Verification(n_loops, pc == program.end or n_loops < max_loops, None, worst)
