"""Run programs on their machine: many at once through `looped.solve`, or one loop by loop beside a plain interpreter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

import looped.engine as engine
from looped.backends import cpu
from looped.exits import PRECISION_OF, Exact
from looped.loop import LoopState, Status
from looped.model import LoopedTransformer
from looped.programs.circuit import why_not_model
from looped.programs.snapshot import Snapshot

OFF_GRID = 1e-3  # a machine rounds its codes in every loop: further off, something else has written them
CHUNK = 64  # loops of a trace that are held in memory as states


class Program(Protocol):
    """What all machines' programs say of themselves."""

    @property
    def name(self) -> str: ...

    @property
    def names(self) -> Any: ...

    @property
    def end(self) -> int: ...

    @property
    def commands(self) -> tuple[Any, ...]: ...

    @property
    def n_tokens(self) -> int: ...


class Machine(Protocol):
    """A computer that is a `LoopedTransformer`: one loop is one command."""

    model: LoopedTransformer

    def encode(self, program: Any) -> Tensor:
        """The prompt [n, d]."""

    def decode(self, states: Tensor, program: Any) -> Snapshot:
        """What states [..., n, d] hold."""

    def why_not_backend(self, backend: str) -> str | None:
        """Why a backend of `solve` cannot carry this machine's numbers."""

    def check(self, program: Any, max_loops: int) -> None:
        """Raises ValueError where a program leaves, within so many commands, what the machine carries, which it cannot tell."""


class Outcome(str, Enum):
    """How a run ended."""

    HALTED = "halted"  # at a state that the next command leaves as it is: the end, or a command that changes nothing
    LOOP_LIMIT = "loop limit"
    CORRUPT = "corrupt"  # the state is not one that the machine makes


@dataclass(frozen=True)
class Run:
    """What became of a program.

    steps: loops until the last state was first reached, which is the number of commands run. n_loops: loops of the engine, the
    one that confirms a halt included. pc: the command that comes next. memory: [cells], or [D, columns] of a FLEQ machine. Both
    are None where the state is not finite.
    """

    program: Any
    outcome: Outcome
    steps: int
    n_loops: int
    pc: int | None
    memory: np.ndarray | None
    backend: str

    def __getitem__(self, name: str) -> Any:
        """The words or the matrix of a name. Raises ValueError where the run left no memory."""
        if self.memory is None:
            raise ValueError(f"{self.program.name}: the state is not finite, so {name} has no value")
        return self.program.value(name, self.memory)

    def named_values(self) -> list[str]:
        """`name = value` of everything that the program names and may write; nothing where the run left no memory."""
        if self.memory is None:
            return []
        values = {name: np.asarray(self[name]) for name in self.program.names if name not in self.program.constants}
        return [f"{name} = {np.array2string(value, prefix=f'{name} = ', threshold=200)}" for name, value in values.items()]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "program": self.program.name,
            "outcome": self.outcome.value,
            "steps": self.steps,
            "n_loops": self.n_loops,
            "pc": self.pc,
            "backend": self.backend,
            "memory": None if self.memory is None else {name: np.asarray(self[name]).tolist() for name in self.program.names},
        }


def run_programs(
    machine: Machine,
    programs: Sequence[Any],
    *,
    max_loops: int = 10_000,
    backend: str = "auto",
    progress: Any = None,
    check: bool = True,
) -> list[Run]:
    """Run programs of any lengths on one machine, all at once.

    A halted program is a fixed point of the machine, so the rule `exact` of `looped.solve` ends each at its own halt, and
    what has ended costs nothing. Results are, to the bit, those of runs alone on the fused backends.

    check: first run FLEQ programs, and those with registers, on the plain interpreter (`machine.check`), since a machine cannot
    tell that a number has left the range of a block; False skips it for programs that were checked before.

    Raises ValueError for a program that the machine does not take, naming it, ProgramError, which names the line, for one that
    leaves its range, and ValueError for a backend that does not carry the machine's numbers.
    """
    if max_loops < 1:
        raise ValueError(f"run_programs: max_loops={max_loops} must be at least 1")
    backend, device = _placed(machine, backend)
    prompts = [machine.encode(program).to(device) for program in programs]
    if check:
        for program in programs:
            machine.check(program, max_loops)
    result = engine.solve(machine.model, prompts, n_loops=max_loops, exit=Exact(), backend=backend, progress=progress)
    assert isinstance(result.y, list)
    return [
        _outcome(machine, program, state, int(n_loops), int(status), max_loops, result.backend)
        for program, state, n_loops, status in zip(programs, result.y, result.n_loops, result.status, strict=True)
    ]


def _placed(machine: Machine, backend: str) -> tuple[str, torch.device]:
    """The backend to ask for, and where the weights are. Raises ValueError for one that does not carry its numbers."""
    weight = next(machine.model.parameters())
    device = weight.device
    if weight.dtype not in PRECISION_OF:
        raise ValueError(
            f"run_programs: no backend of solve computes in {weight.dtype}; build the machine with dtype "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in PRECISION_OF)}"
        )
    is_eager = backend == "auto" and (device.type == "cuda" or not cpu.is_there())
    reason = why_not_model(machine.model.config) or machine.why_not_backend("eager" if is_eager else backend)
    if reason is not None:
        raise ValueError(f"run_programs: {reason}")
    if backend == "auto" and device.type == "cuda" and machine.why_not_backend("triton"):
        backend = "eager"
    return backend, device


def _outcome(machine: Machine, program: Any, state: Tensor, n_loops: int, status: int, max_loops: int, backend: str) -> Run:
    if status == Status.NONFINITE:
        return Run(program, Outcome.CORRUPT, n_loops, n_loops, None, None, backend)
    snapshot = machine.decode(state, program)
    pc, steps = int(snapshot.pc), n_loops - (status == Status.CONVERGED)
    if not snapshot.off_grid <= OFF_GRID or not 0 <= pc < len(program.commands):
        outcome = Outcome.CORRUPT
    elif status == Status.CONVERGED or pc == program.end:
        outcome = Outcome.HALTED
    else:
        outcome = Outcome.LOOP_LIMIT
    return Run(program, outcome, steps, n_loops, pc, snapshot.memory, backend)


def snapshots(
    machine: Machine, program: Any, max_loops: int, *, backend: str = "auto", check: bool = True
) -> Iterator[tuple[int, np.ndarray, float]]:
    """The command that comes next, the memory, and how far codes are off their grid: at the start and after every loop.

    Ends after the loop that confirms a halt, or max_loops. check, and what is raised: as in `run_programs`.
    """
    backend, device = _placed(machine, backend)
    prompt = machine.encode(program).to(device)
    if check:
        machine.check(program, max_loops)
    first = machine.decode(prompt, program)
    yield int(first.pc), first.memory, float(first.off_grid)
    state: LoopState | None = None
    done = 0
    while done < max_loops:
        upto = min(done + CHUNK, max_loops)
        result = engine.solve(
            machine.model, [prompt], n_loops=upto, exit=Exact(), state=state, backend=backend, return_predictions=True
        )
        n_loops, state = int(result.n_loops[0]), result.state
        assert result.predictions is not None
        states = result.predictions[0][: n_loops - done]
        if not bool(torch.isfinite(states).all()):
            raise ValueError(f"{program.name}: the state is no longer finite within loops {done + 1} .. {n_loops}")
        chunk = machine.decode(states, program)
        for pc, memory, off_grid in zip(chunk.pc, chunk.memory, chunk.off_grid, strict=True):
            yield int(pc), memory, float(off_grid)
        done = n_loops
        if int(result.status[0]) == Status.CONVERGED:
            return
