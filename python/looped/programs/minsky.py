"""Minsky machines, and their translation into SUBLEQ (Giannou et al., 2023, appendix C).

    .bits 16         ; word width; the default is 16
    add r            ; r += 1
    sub r else L     ; r -= 1, or, where r is 0, go to L and leave it
    goto L   halt    ; for ease: both follow from the first two

Registers are words, so they hold 0 .. 2^(N-1) - 1 in place of every number; a run that would leave that is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from looped.programs.reachability import notes_on
from looped.programs.source import Names, Place, ProgramError, Word, lines_of
from looped.programs.subleq_text import WORD_BITS, Command, SubleqProgram, check_bits, following, number_of

RESERVED = frozenset({"add", "sub", "else", "goto", "halt", "zero", "minus_one"})
FORMS = {"add": 1, "sub": 3, "goto": 1, "halt": 0}  # words after each
N_COMMANDS = {"add": 1, "sub": 5, "goto": 1, "halt": 1}
ONE, SPARE = "constant 1", "constant 0"  # cells of the translation, under names that no text can write


@dataclass(frozen=True)
class Instruction:
    """What it does, to which register, where it jumps, and where it stands. "" where there is none."""

    what: str
    register: str
    label: str
    place: Place


@dataclass(frozen=True)
class MinskyMachine:
    """instructions; the instruction of every label; registers in order of their names' first use; the width of a word."""

    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    registers: tuple[str, ...]
    n_bits: int


def parse_minsky(text: str, *, name: str = "machine") -> MinskyMachine:
    """The machine that a text describes. Raises ProgramError, which names line and column."""
    taken, labels, registers = Names(), dict[str, int](), dict[str, None]()
    instructions: list[Instruction] = []
    jumps: list[Word] = []
    n_bits = 16
    for words in lines_of(text, name):
        if words[0].text.startswith("."):
            if words[0].text != ".bits":
                words[0].refuse(f"{words[0].text!r} is no directive; there is .bits")
            n_bits = number_of(words[0], words[1:], WORD_BITS)
            continue
        if len(words) > 1 and words[1].text == ":":
            labels[taken.take(words[0], RESERVED)] = len(instructions)
            words = words[2:]
            if not words:
                continue
        what, *rest = words
        if what.text not in FORMS:
            what.refuse(f"{what.text!r} is no instruction; there are {', '.join(FORMS)}")
        if len(rest) != FORMS[what.text] or (what.text == "sub" and rest[1].text != "else"):
            what.refuse("write one of: add REGISTER, sub REGISTER else LABEL, goto LABEL, halt")
        if what.text in ("add", "sub"):
            if not rest[0].is_name or rest[0].text.lower() in RESERVED:
                rest[0].refuse(f"{rest[0].text!r} cannot name a register")
            registers.setdefault(rest[0].text)
        if what.text in ("sub", "goto"):
            jumps.append(rest[-1])
        register = rest[0].text if what.text in ("add", "sub") else ""
        label = rest[-1].text if what.text in ("sub", "goto") else ""
        instructions.append(Instruction(what.text, register, label, what.place))
    for word in jumps:
        if word.text not in labels:
            word.refuse(f"there is no instruction named {word.text!r}")
    for label in labels:
        if label in registers:
            raise ProgramError(taken.places[label], f"{label!r} names an instruction and a register")
    return MinskyMachine(tuple(instructions), labels, tuple(registers), n_bits)


def translate_minsky(
    text: str, *, name: str = "machine", n_bits: int | None = None, values: Mapping[str, int] | None = None
) -> SubleqProgram:
    """The Minsky machine as a SUBLEQ program: `add` is one command, `sub` five (the paper's), `goto` one.

    n_bits: in place of the machine's own `.bits`. values: of registers, 0 and more. A cell that is 0 and stays so takes the
    jumps that are always taken. Raises as `parse_minsky` does, and ValueError for n_bits outside 2 .. 63 or a wrong value.
    """
    check_bits(n_bits)
    machine = parse_minsky(text, name=name)
    n = len(machine.registers)
    cells = {register: i for i, register in enumerate(machine.registers)}
    one, spare, zero, minus_one = n, n + 1, n + 2, n + 3
    starts = [0]
    for instruction in machine.instructions:
        starts.append(starts[-1] + N_COMMANDS[instruction.what])
    end = starts[-1] + 1  # after a halt of its own
    commands: list[Command] = []
    places: list[Place] = []
    for instruction in machine.instructions:
        at, r = len(commands), cells.get(instruction.register, spare)
        to = starts[machine.labels[instruction.label]] if instruction.label else 0
        commands += {
            "add": [(minus_one, r, at + 1)],
            "goto": [(spare, spare, to)],
            "halt": [(zero, minus_one, end)],
            # 0 - r <= 0 holds for every r, so r is tested by r - 1 < 0: subtract, and where that is -1 undo it.
            "sub": [
                (one, r, at + 2),
                (spare, spare, at + 5),
                (minus_one, r, at + 4),
                (one, r, at + 5),
                (spare, spare, to),
            ],
        }[instruction.what]
        places += [instruction.place] * N_COMMANDS[instruction.what]
    commands += [(zero, minus_one, end), (zero, minus_one, end)]
    last = Place(name, places[-1].line if places else 1, 1)
    program = SubleqProgram(
        name=name,
        n_bits=machine.n_bits if n_bits is None else n_bits,
        memory=(*[0] * n, 1, 0, 0, -1),
        names={
            **{register: range(i, i + 1) for register, i in cells.items()},
            ONE: range(one, one + 1),
            SPARE: range(spare, spare + 1),
            "ZERO": range(zero, zero + 1),
            "MINUS_ONE": range(minus_one, minus_one + 1),
        },
        commands=tuple(commands),
        places=(*places, last, last),
        notes=notes_on(following(commands)),
        constants=frozenset({ONE, SPARE, "ZERO", "MINUS_ONE"}),
        registers=frozenset(machine.registers),
    )
    return program if values is None else program.with_values(values)


def minsky_states(text: str, values: Mapping[str, int] | None = None) -> Iterator[dict[str, int]]:
    """Registers after every instruction, until the machine halts: the translation's truth."""
    machine = parse_minsky(text)
    held = dict.fromkeys(machine.registers, 0) | dict(values or {})
    i = 0
    yield dict(held)
    while i < len(machine.instructions) and machine.instructions[i].what != "halt":
        instruction = machine.instructions[i]
        i += 1
        if instruction.what == "add":
            held[instruction.register] += 1
        elif instruction.what == "goto" or held[instruction.register] == 0:
            i = machine.labels[instruction.label]
        else:
            held[instruction.register] -= 1
        yield dict(held)
