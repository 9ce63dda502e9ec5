"""FLEQ without a transformer: the interpreter, in float64, and what a program does that a machine would not survive."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from looped.programs.fleq_program import MOST_DATA, FleqCommand, FleqProgram
from looped.programs.source import ProgramError

if TYPE_CHECKING:
    from looped.programs.fleq import FleqMachine

Array = NDArray[np.float64]


def apply(command: FleqCommand, memory: Array) -> Array | None:
    """What a command writes, [D, n_c], or None."""
    if command.function is None:
        return None
    D = len(memory)
    A = np.zeros((D, command.n_c if command.function in ("add", "sub", "emul") else command.n_a))
    A[:, : command.n_a] = memory[:, command.a : command.a + command.n_a]
    B = memory[:, command.b : command.b + command.n_b]
    if command.function in ("add", "sub", "emul") and command.n_b < A.shape[1]:
        B = np.pad(B, ((0, 0), (0, A.shape[1] - command.n_b)))
    out = np.zeros((D, command.n_c))
    if command.function in ("mm", "perc"):
        out[: command.n_b] = (B.T @ A)[:, : command.n_c] * (0.01 if command.function == "perc" else 1.0)
    elif command.function == "emul":
        out[0] = (A * B).sum(axis=0)
    elif command.function in ("add", "sub"):
        out[:] = A + B if command.function == "add" else A - B
    else:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            x = A[0]
            out[0] = {"inv": lambda: 1 / x, "sqrt": lambda: np.sqrt(x), "sig": lambda: 1 / (1 + np.exp(-x))}[command.function]()
    return out


def step(program: FleqProgram, pc: int, memory: Array) -> int:
    """Run command pc on memory [D, columns], in place. Returns the command that comes next."""
    command = program.commands[pc]
    flag = memory[0, command.flag]  # read before the write
    out = apply(command, memory)
    if out is not None:
        memory[:, command.c : command.c + command.n_c] = out
    return command.jump if flag <= 0 else pc + 1


def fleq_states(program: FleqProgram) -> Iterator[tuple[int, Array]]:
    """The command that comes next and memory [D, columns]: at the start, and after every command, for ever."""
    pc, memory = 0, program.memory.copy()
    while True:
        yield pc, memory.copy()
        pc = step(program, pc, memory)


def run_fleq(program: FleqProgram, max_steps: int) -> tuple[int, int, Array]:
    """Commands run until the end, or max_steps; the command that comes next; memory."""
    pc, memory, steps = 0, program.memory.copy(), 0
    while pc != program.end and steps < max_steps:
        pc = step(program, pc, memory)
        steps += 1
    return steps, pc, memory


def check_ranges(machine: FleqMachine, program: FleqProgram, max_steps: int) -> int:
    """Run the interpreter and see whether all numbers stay where the machine's blocks hold. Returns the commands run.

    Raises ProgramError that names the line: a flag between 0 and 1, an argument outside a fitted range, a product too large for
    kappa, or a number of 1024 and more. The machine itself could not tell: a sigmoid sum out of its range is just flat.
    """
    pc, memory = 0, program.memory.copy()
    for steps in range(max_steps):
        if pc == program.end:
            return steps
        command, at = program.commands[pc], pc
        before = memory.copy() if command.jump == at else None
        _check_operands(machine, program, pc, memory, steps)
        pc = step(program, pc, memory)
        written = memory[:, command.c : command.c + command.n_c]
        if not np.isfinite(written).all() or np.abs(written).max(initial=0) >= MOST_DATA:
            _refuse(program, at, steps, f"a number of {np.abs(written).max():g} is not below {MOST_DATA:g}")
        if pc == at and np.array_equal(before, memory):  # type: ignore[arg-type]
            return steps  # a fixed point: the machine halts here
    return max_steps


def _refuse(program: FleqProgram, pc: int, steps: int, message: str) -> NoReturn:
    raise ProgramError(program.places[pc], f"{message} (step {steps})")


def _check_operands(machine: FleqMachine, program: FleqProgram, pc: int, memory: Array, steps: int) -> None:
    command = program.commands[pc]
    flag = float(memory[0, command.flag])
    if not is_whole_or_large(flag):
        _refuse(program, pc, steps, f"the flag is {flag:g}; one between 0 and 1 would half take the jump")
    x = memory[0, command.a : command.a + command.n_a]
    for name, block in (("inv", machine.blocks.inv), ("sqrt", machine.blocks.sqrt)):
        if command.function == name and not ((x >= block.lo) & (x <= block.hi)).all():
            wrong = x[~((x >= block.lo) & (x <= block.hi))][0]
            message = f"{name} of {wrong:g} is outside {block.lo:g} .. {block.hi:g}, where the sigmoid sum is fitted"
            _refuse(program, pc, steps, message)
    if command.function in ("mm", "perc", "emul"):
        A = memory[:, command.a : command.a + command.n_a]
        B = memory[:, command.b : command.b + command.n_b]
        largest = float(np.abs(B.T @ A).max(initial=0))  # an element product makes all of these too
        if largest > machine.product.largest:
            message = f"a product of {largest:g} is above {machine.product.largest:g}, half of kappa; build the machine with a "
            _refuse(program, pc, steps, f"{message}kappa of at least {_power_above(2 * largest):g}")


def _power_above(x: float) -> float:
    return 2.0 ** int(np.ceil(np.log2(x)))


def is_whole_or_large(flag: float) -> bool:
    """Whether the machine reads a flag as the interpreter does: between 0 and 1 a jump would be half taken."""
    return flag <= 0 or flag >= 1 or math.isclose(flag, 1, rel_tol=1e-6)
