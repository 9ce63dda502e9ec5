"""SUBLEQ without a transformer: the interpreter that machines are verified against."""

from __future__ import annotations

from collections.abc import Iterator

from looped.programs.subleq_text import SubleqProgram


def subleq_states(program: SubleqProgram) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The command that comes next and all words: at the start, and after every command, for ever."""
    half, whole = 2 ** (program.n_bits - 1), 2**program.n_bits
    pc, memory = 0, list(program.memory)
    yield pc, tuple(memory)
    while True:
        a, b, c = program.commands[pc]
        memory[b] = (memory[b] - memory[a] + half) % whole - half
        pc = c if memory[b] <= 0 else pc + 1
        yield pc, tuple(memory)


def run_subleq(program: SubleqProgram, max_steps: int) -> tuple[int, int, list[int]]:
    """Commands run until the end, or max_steps; the command that comes next; all words."""
    half, whole = 2 ** (program.n_bits - 1), 2**program.n_bits
    pc, memory, steps = 0, list(program.memory), 0
    while pc != program.end and steps < max_steps:
        a, b, c = program.commands[pc]
        memory[b] = (memory[b] - memory[a] + half) % whole - half
        pc = c if memory[b] <= 0 else pc + 1
        steps += 1
    return steps, pc, memory
