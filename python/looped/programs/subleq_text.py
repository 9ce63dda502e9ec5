"""SUBLEQ programs as text, and the assembler.

    .bits 16            ; word width; the default is 16
    .cells 64           ; the fewest memory cells, for room; the default is what the program names
    x: 7                ; a named cell and its first word
    list: 5 -3 9        ; three cells in a row; list+2 is the third
    loop: subleq x y    ; y -= x, then the next command
          subleq x y loop  ; y -= x, and to loop where the result is <= 0
          halt          ; the end; -1 as third operand jumps there too

ZERO and MINUS_ONE are two cells that every program has and none may write. Numbers as operands are cells from 0 and commands
from 0. Comments begin with ; or #.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from looped.programs.reachability import notes_on
from looped.programs.source import Names, Place, ProgramError, Word, integer_of, lines_of
from looped.suggestion import suggestion

RESERVED = frozenset({"subleq", "halt", "zero", "minus_one"})
MOST_CELLS = 2**20
WORD_BITS = (2, 63)
Command = tuple[int, int, int]  # cell a, cell b, command c


@dataclass(frozen=True)
class SubleqProgram:
    """An assembled program.

    memory: first words of all cells; the last two are the constants 0 and -1. names: cells of a name, from its first to its
    last. commands: (a, b, c) by cell and command number; the last is the end: it subtracts 0 from -1 and jumps to itself.
    places: where each command stands in the text. notes: what is odd but allowed. constants: names of cells that take no other
    words. registers: names of cells that hold numbers from 0 and must not wrap, as those of a Minsky machine.
    """

    name: str
    n_bits: int
    memory: tuple[int, ...]
    names: Mapping[str, range]
    commands: tuple[Command, ...]
    places: tuple[Place, ...]
    notes: tuple[str, ...] = ()
    constants: frozenset[str] = frozenset({"ZERO", "MINUS_ONE"})
    registers: frozenset[str] = frozenset()

    kind = "subleq"

    @property
    def end(self) -> int:
        """The number of the command that ends the program."""
        return len(self.commands) - 1

    @property
    def first_command(self) -> int:
        """The token of command 0; the scratchpad is token 0 and the cells are those from 1."""
        return 1 + len(self.memory)

    @property
    def n_tokens(self) -> int:
        return self.first_command + len(self.commands)

    def tokens_of(self, command: Command) -> Command:
        """The tokens that a command points to."""
        a, b, c = command
        return a + 1, b + 1, c + self.first_command

    def value(self, name: str, memory: Sequence[int] | np.ndarray) -> int | list[int]:
        """The word of a named cell, or the words of several, in a memory."""
        words = [int(memory[cell]) for cell in cells_named(name, self.names, self.name)]
        return words[0] if len(words) == 1 else words

    def command_text(self, i: int) -> str:
        """A command as text, with names for cells."""
        if i == self.end:
            return "the end"
        a, b, c = self.commands[i]
        if self.commands[i] == self.commands[self.end]:
            return "halt"
        to = "" if c == i + 1 else f" -> {'the end' if c == self.end else f'command {c}'}"
        return f"{self.cell_name(b)} -= {self.cell_name(a)}{to}"

    def cell_name(self, cell: int) -> str:
        """What a cell is called."""
        for name, cells in self.names.items():
            if cell in cells:
                return name if len(cells) == 1 else f"{name}+{cell - cells[0]}"
        return f"cell {cell}"

    def with_values(self, values: Mapping[str, int | Iterable[int]], *, wrap: bool = False) -> SubleqProgram:
        """The program with other first words in named cells.

        Raises ValueError for an unknown name, a constant, a word out of range, or a register below 0.
        """
        memory = list(self.memory)
        for name, given in values.items():
            cells, base = cells_named(name, self.names, self.name), name.partition("+")[0]
            if base in self.constants:
                raise ValueError(f"{self.name}: {name} is a constant of every program, which has no other word")
            words = [_integer(word, f"{self.name}: {name}") for word in (given if isinstance(given, Iterable) else [given])]
            if len(words) > len(cells):
                raise ValueError(f"{self.name}: {name} has {len(cells)} cells, got {len(words)} words")
            for cell, word in zip(cells, words, strict=False):
                if base in self.registers and word < 0:
                    raise ValueError(f"{self.name}: {name}={word} is below 0; registers hold 0 and more")
                may_wrap = wrap and base not in self.registers
                memory[cell] = in_range(word, self.n_bits, may_wrap, f"{self.name}: {name}={word}")
        return replace(self, memory=tuple(memory))


def _integer(word: object, what: str) -> int:
    if isinstance(word, bool) or not hasattr(word, "__index__"):
        raise ValueError(f"{what} takes whole numbers, got {word!r}")
    return operator.index(word)


def cells_named(name: str, names: Mapping[str, range], program: str) -> range:
    """The cells of `name` or `name+2`. Raises ValueError that names the nearest, or all, for others."""
    base, plus, offset = name.partition("+")
    if base not in names:
        raise ValueError(f"{program}: there is no cell named {base!r}{suggestion(base, names)}")
    if not plus:
        return names[base]
    if not (offset.isdecimal() and len(offset) < 10) or int(offset) >= len(names[base]):
        raise ValueError(f"{program}: {name!r} is outside the {len(names[base])} cells of {base}")
    return names[base][int(offset) :]


def in_range(word: int, n_bits: int, wrap: bool, what: str) -> int:
    """The word as two's complement of n bits. Raises ValueError for one that is out of range, unless `wrap`."""
    least, most = -(2 ** (n_bits - 1)), 2 ** (n_bits - 1) - 1
    if least <= word <= most:
        return word
    if not wrap:
        raise ValueError(f"{what} does not fit words of {n_bits} bits, which hold {least} .. {most}; use --wrap or wider words")
    return (word - least) % 2**n_bits + least


def read_subleq(path: str | Path, *, wrap: bool = False) -> SubleqProgram:
    """Assemble a file."""
    path = Path(path)
    return assemble_subleq(path.read_text(encoding="utf-8"), name=path.name, wrap=wrap)


def assemble_subleq(text: str, *, name: str = "program", wrap: bool = False, n_bits: int | None = None) -> SubleqProgram:
    """Assemble text. n_bits: in place of the program's own `.bits`. wrap: words out of range wrap, as results do.

    Raises ProgramError, a ValueError, which names the line and column, and ValueError for n_bits outside 2 .. 63.
    """
    check_bits(n_bits)
    return _Assembler(name, wrap, n_bits).assemble(text)


def check_bits(n_bits: int | None) -> None:
    """Raises ValueError for a word width that no machine has."""
    least, most = WORD_BITS
    if n_bits is not None and not least <= n_bits <= most:
        raise ValueError(f"n_bits={n_bits} must lie in {least} .. {most}")


def number_of(directive: Word, rest: Sequence[Word], limits: tuple[int, int]) -> int:
    """The number of a directive, which takes one. Raises ProgramError."""
    least, most = limits
    value = integer_of(rest[0]) if len(rest) == 1 else None
    if value is None or not least <= value <= most:
        directive.refuse(f"{directive.text} takes one number in {least} .. {most}")
    return value


class _Assembler:
    def __init__(self, name: str, wrap: bool, n_bits: int | None) -> None:
        self.name, self.wrap, self.asked_bits = name, wrap, n_bits
        self.n_bits, self.n_cells = 16, 0
        self.taken = Names()
        self.words: list[tuple[int, Word]] = []
        self.names: dict[str, range] = {}
        self.labels: dict[str, int] = {}
        self.lines: list[list[Word]] = []  # operands of each command; none is a halt
        self.places: list[Place] = []
        self.waiting: list[str] = []  # labels of the line that comes

    def assemble(self, text: str) -> SubleqProgram:
        for line in lines_of(text, self.name):
            self._line(line)
        n_bits = self.asked_bits or self.n_bits
        if not self.lines:
            raise ProgramError(Place(self.name, 1, 1), "the program has no command; write at least halt")
        memory = []
        for value, word in self.words:
            try:
                memory.append(in_range(value, n_bits, self.wrap, word.text))
            except ValueError as error:
                word.refuse(str(error))
        memory += [0] * (self.n_cells - len(memory))
        zero, minus_one = len(memory), len(memory) + 1
        self.names |= {"ZERO": range(zero, zero + 1), "MINUS_ONE": range(minus_one, minus_one + 1)}
        self.end = len(self.lines)
        for label in self.waiting:
            self.labels[label] = self.end
        commands = [self._command(i, operands, zero) for i, operands in enumerate(self.lines)]
        commands.append((zero, minus_one, self.end))
        last = Place(self.name, self.places[-1].line, 1)
        return SubleqProgram(
            name=self.name,
            n_bits=n_bits,
            memory=(*memory, 0, -1),
            names=self.names,
            commands=tuple(commands),
            places=(*self.places, last),
            notes=notes_on(following(commands)),
        )

    def _line(self, line: list[Word]) -> None:
        first, *rest = line
        if first.text.startswith("."):
            self._directive(first, rest)
            return
        label: Word | None = None
        if rest and rest[0].text == ":":
            label, rest = first, rest[1:]
            name = self.taken.take(label, RESERVED)
            if rest and integer_of(rest[0]) is not None:
                self._data(name, rest)
                return
            self.waiting.append(name)
            if not rest:
                return
            first, *rest = rest
        if first.text.lower() == "halt":
            if rest:
                rest[0].refuse("halt takes no operand")
        elif first.text.lower() == "subleq":
            rest = [word for word in rest if word.text != ","]
            if not 2 <= len(rest) <= 3:
                first.refuse(f"subleq takes two or three operands, got {len(rest)}")
        else:
            first.refuse(f"{first.text!r} is no command; there are subleq and halt, .bits and .cells, and name: numbers")
        for name in self.waiting:
            self.labels[name] = len(self.lines)
        self.waiting = []
        self.lines.append(rest)
        self.places.append(first.place)

    def _directive(self, first: Word, rest: list[Word]) -> None:
        if first.text == ".bits":
            self.n_bits = number_of(first, rest, WORD_BITS)
        elif first.text == ".cells":
            self.n_cells = number_of(first, rest, (0, MOST_CELLS))
        else:
            first.refuse(f"{first.text!r} is no directive; there are .bits and .cells")

    def _data(self, name: str, words: list[Word]) -> None:
        if self.waiting:
            words[0].refuse(f"the label {self.waiting[-1]!r} stands before data; labels name commands")
        start = len(self.words)
        for word in words:
            value = integer_of(word)
            if value is None:
                word.refuse(f"{word.text!r} is no number")
            self.words.append((value, word))
        if len(self.words) > MOST_CELLS:
            words[0].refuse(f"the program has more than {MOST_CELLS} cells")
        self.names[name] = range(start, len(self.words))

    def _command(self, i: int, operands: list[Word], zero: int) -> Command:
        if not operands:
            return zero, zero + 1, self.end  # a jump to the end that changes nothing
        a, b = self._cell(operands[0], zero), self._cell(operands[1], zero)
        if b >= zero:
            operands[1].refuse(
                f"{operands[1].text!r} is one of the constant cells ZERO and MINUS_ONE, which no command may write"
            )
        return a, b, self._jump(operands[2]) if len(operands) == 3 else i + 1

    def _cell(self, word: Word, zero: int) -> int:
        number = integer_of(word)
        if number is not None:
            if not 0 <= number < zero + 2:
                word.refuse(f"cell {number} is outside memory, which has cells 0 .. {zero + 1}")
            return number
        if word.text.partition("+")[0] in self.labels:
            word.refuse(f"{word.text!r} names a command; a and b are cells: programs cannot change their commands")
        try:
            return cells_named(word.text, self.names, "program")[0]
        except ValueError as error:
            word.refuse(str(error).removeprefix("program: "))

    def _jump(self, word: Word) -> int:
        number = integer_of(word)
        if number == -1 or word.text.lower() == "halt":
            return self.end
        if number is not None:
            if not 0 <= number <= self.end:
                word.refuse(f"command {number} is outside the program, which has commands 0 .. {self.end}")
            return number
        if word.text in self.names:
            word.refuse(f"{word.text!r} names a cell; c is a command: jumps go to commands")
        if word.text not in self.labels:
            word.refuse(f"there is no command named {word.text!r}{suggestion(word.text, self.labels)}")
        return self.labels[word.text]


def following(commands: Sequence[Command]) -> list[Collection[int]]:
    """What may come after each command."""
    return [{c, min(i + 1, len(commands) - 1)} for i, (_, _, c) in enumerate(commands)]
