"""SUBLEQ without a transformer: the interpreter that machines are verified against."""

from __future__ import annotations

from collections.abc import Iterator

from looped.programs.source import ProgramError
from looped.programs.subleq_text import WORD_BITS, SubleqProgram


def step(program: SubleqProgram, pc: int, memory: list[int]) -> int:
    """Run command pc on the words of memory, in place. Returns the command that comes next."""
    a, b, c = program.commands[pc]
    half = 1 << (program.n_bits - 1)
    memory[b] = (memory[b] - memory[a] + half) % (2 * half) - half
    return c if memory[b] <= 0 else pc + 1


def subleq_states(program: SubleqProgram) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The command that comes next and all words: at the start, and after every command, for ever."""
    pc, memory = 0, list(program.memory)
    while True:
        yield pc, tuple(memory)
        pc = step(program, pc, memory)


def run_subleq(program: SubleqProgram, max_steps: int) -> tuple[int, int, list[int]]:
    """Commands run until the end, or max_steps; the command that comes next; all words."""
    pc, memory, steps = 0, list(program.memory), 0
    while pc != program.end and steps < max_steps:
        pc = step(program, pc, memory)
        steps += 1
    return steps, pc, memory


def check_registers(program: SubleqProgram, max_steps: int) -> int:
    """Run a program whose registers are numbers from 0, and see that none of its words wraps. Returns the commands run.

    Raises ProgramError that names the line: a word that wraps would make another machine of it.
    """
    pc, memory = 0, list(program.memory)
    for steps in range(max_steps):
        if pc == program.end:
            return steps
        a, b, _ = program.commands[pc]
        at, exact, is_unchanged = pc, memory[b] - memory[a], memory[a] == 0
        pc = step(program, pc, memory)
        if memory[b] != exact:
            hint = f"; begin with .bits {program.n_bits + 1} or more" if program.n_bits < WORD_BITS[1] else ""
            message = (
                f"{program.cell_name(b)} comes to {exact} at step {steps}, and words of {program.n_bits} bits hold at most"
            )
            raise ProgramError(program.places[at], f"{message} {2 ** (program.n_bits - 1) - 1}{hint}")
        if pc == at and is_unchanged:
            return steps  # a fixed point: the machine halts here
    return max_steps
