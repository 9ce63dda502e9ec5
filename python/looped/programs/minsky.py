"""Minsky machines, and their translation into SUBLEQ (Giannou et al., 2023, appendix C).

    add r            ; r += 1
    sub r else L     ; r -= 1, or, where r is 0, go to L and leave it
    goto L   halt    ; for ease: both follow from the first two

Registers are words, so they hold 0 .. 2^(N-1) - 1 in place of every number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from looped.programs.source import Names, ProgramError, Word, lines_of
from looped.programs.subleq_text import SubleqProgram, assemble_subleq

RESERVED = frozenset({"add", "sub", "else", "goto", "halt", "zero", "minus_one", "one", "spare"})
Instruction = tuple[str, str, str]  # what, register, label


def parse_minsky(text: str, *, name: str = "machine") -> tuple[list[Instruction], dict[str, int], list[str]]:
    """Instructions, the instruction of every label, and the registers. Raises ProgramError, which names line and column."""
    taken, labels, registers = Names(), dict[str, int](), dict[str, None]()
    instructions: list[Instruction] = []
    jumps: list[Word] = []
    for words in lines_of(text, name):
        if len(words) > 1 and words[1].text == ":":
            labels[taken.take(words[0], RESERVED)] = len(instructions)
            words = words[2:]
            if not words:
                continue
        what, *rest = words
        forms = {"add": 1, "sub": 3, "goto": 1, "halt": 0}
        if what.text not in forms:
            what.refuse(f"{what.text!r} is no instruction; there are {', '.join(forms)}")
        if len(rest) != forms[what.text] or (what.text == "sub" and rest[1].text != "else"):
            what.refuse("write one of: add REGISTER, sub REGISTER else LABEL, goto LABEL, halt")
        if what.text in ("add", "sub"):
            if not rest[0].is_name or rest[0].text.lower() in RESERVED:
                rest[0].refuse(f"{rest[0].text!r} cannot name a register")
            registers.setdefault(rest[0].text)
        if what.text in ("sub", "goto"):
            jumps.append(rest[-1])
        register = rest[0].text if what.text in ("add", "sub") else ""
        instructions.append((what.text, register, rest[-1].text if what.text in ("sub", "goto") else ""))
    for word in jumps:
        if word.text not in labels:
            word.refuse(f"there is no instruction named {word.text!r}")
    for label in labels:
        if label in registers:
            raise ProgramError(taken.places[label], f"{label!r} names an instruction and a register")
    return instructions, labels, list(registers)


def translate_minsky(
    text: str, *, name: str = "machine", n_bits: int = 16, values: Mapping[str, int] | None = None
) -> SubleqProgram:
    """The Minsky machine as a SUBLEQ program: `add` is one command, `sub` five (the paper's), `goto` one.

    The cell SPARE takes jumps that are always taken: it is 0 and stays so. Raises as `parse_minsky` does.
    """
    instructions, labels, registers = parse_minsky(text, name=name)
    starts: dict[int, list[str]] = {}
    for label, i in labels.items():
        starts.setdefault(i, []).append(label)
    lines = [f".bits {n_bits}", "ONE: 1", "SPARE: 0", *(f"{register}: 0" for register in registers)]
    for i, (what, register, label) in enumerate(instructions):
        lines += [f"{label_here}:" for label_here in starts.get(i, [])]
        if what == "add":
            lines.append(f"subleq MINUS_ONE {register}")
        elif what == "goto":
            lines.append(f"subleq SPARE SPARE {label}")
        elif what == "halt":
            lines.append("halt")
        else:  # 0 - r <= 0 holds for every r, so r is tested by r - 1 < 0: subtract, and where that is -1 undo it
            lines += [
                f"subleq ONE {register} test_{i}",
                f"subleq SPARE SPARE next_{i}",
                f"test_{i}: subleq MINUS_ONE {register} zero_{i}",
                f"subleq ONE {register} next_{i}",
                f"zero_{i}: subleq SPARE SPARE {label}",
                f"next_{i}:",
            ]
    lines += [f"{label_here}:" for label_here in starts.get(len(instructions), [])] + ["halt"]
    program = assemble_subleq("\n".join(lines), name=name)
    return program if values is None else program.with_values(values)


def minsky_states(text: str, values: Mapping[str, int] | None = None) -> Iterator[dict[str, int]]:
    """Registers after every instruction, until the machine halts: the translation's truth."""
    instructions, labels, registers = parse_minsky(text)
    held = dict.fromkeys(registers, 0) | dict(values or {})
    i = 0
    yield dict(held)
    while i < len(instructions) and instructions[i][0] != "halt":
        what, register, label = instructions[i]
        i += 1
        if what == "add":
            held[register] += 1
        elif what == "goto" or held[register] == 0:
            i = labels[label]
        else:
            held[register] -= 1
        yield dict(held)
