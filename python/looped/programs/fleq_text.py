"""FLEQ programs as text, and the assembler.

    let A = [[2, 1], [1, 3]]     ; a matrix, row by row; [1, 2] is one row, 3 a number
    let B = data.npy             ; or a .csv file, beside the program
    let k = 5
    loop: mm C, A, B             ; C = A^T B, the paper's product
          transpose D, A         ; D = A^T
          add C, C, D            ; sub likewise
          emul r, A, B           ; row of the products of columns: r_j = <A_j, B_j>; of two rows, element by element
          perc r, r              ; r / 100           inv | sqrt | sig  r, s   ; of every number of a row
          copy B, C
          sub k, k, ONE if k -> end   ; jumps where k, before the command, is <= 0
          nop if k -> end        ; only the jump
          jmp loop
    end:  halt

A.1 is column 1 of A, counted from 0, to read or to write. A matrix that no `let` declares has the shape of what is first
written to it, and starts at 0. ZERO and ONE are numbers that no program may write; ZEROS (rows, columns) and EYE (size) make
matrices after `let X =`. Flags are single numbers that are whole, or at least 1 where they are above 0. Comments begin with ;
or #.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from looped.programs.data import SUFFIXES, read_matrix
from looped.programs.fleq_program import IDENTITY, MOST_WIDTH, FleqCommand, FleqProgram, Matrix, as_matrix, shape_text
from looped.programs.reachability import notes_on
from looped.programs.source import Names, Place, ProgramError, Word, integer_of, lines_of
from looped.suggestion import suggestion

OPERANDS = {"mm": 2, "add": 2, "sub": 2, "emul": 2, "perc": 1, "inv": 1, "sqrt": 1, "sig": 1, "transpose": 1, "copy": 1}
FUNCTION_OF = {"transpose": "mm", "copy": "add"}
RESERVED = frozenset({*OPERANDS, "let", "if", "nop", "jmp", "halt", "zero", "one", "zeros", "eye"})
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\Z")


def read_fleq(path: str | Path) -> FleqProgram:
    """Assemble a file; data files are looked for beside it."""
    path = Path(path)
    return assemble_fleq(path.read_text(encoding="utf-8"), name=path.name, folder=path.parent)


def assemble_fleq(text: str, *, name: str = "program", folder: str | Path | None = None) -> FleqProgram:
    """Assemble text. folder: where data files are; without one there are none.

    Raises ProgramError, a ValueError, which names the line and column.
    """
    return _Assembler(name, None if folder is None else Path(folder)).assemble(text)


class _Assembler:
    def __init__(self, name: str, folder: Path | None) -> None:
        self.name, self.folder = name, folder
        self.taken = Names()
        self.values: dict[str, NDArray[np.float64]] = {"ZERO": np.zeros((1, 1)), "ONE": np.ones((1, 1))}
        self.labels: dict[str, int] = {}
        self.waiting: list[str] = []
        self.lines: list[tuple[Word, list[Word], Word | None, Word | None]] = []  # what, operands, flag, label
        self.uses_transpose = False

    def assemble(self, text: str) -> FleqProgram:
        for line in lines_of(text, self.name):
            self._line(line)
        if not self.lines:
            raise ProgramError(Place(self.name, 1, 1), "the program has no command; write at least halt")
        for label in self.waiting:
            self.labels[label] = len(self.lines)
        shapes = [self._shapes(*line[:2]) for line in self.lines]
        width = max(max(value.shape) for value in self.values.values())
        if self.uses_transpose:
            self.values[IDENTITY] = np.eye(width)
        names, first = {}, 0
        for name, value in self.values.items():
            names[name] = Matrix(first, *value.shape)
            first += value.shape[1]
        memory = np.zeros((width, first))
        for name, matrix in names.items():
            memory[: matrix.n_rows, matrix.first : matrix.first + matrix.n_columns] = self.values[name]
        commands = [self._command(i, names, shape) for i, shape in enumerate(shapes)]
        end, zero = len(commands), names["ZERO"].first
        commands.append(FleqCommand(None, zero, 0, zero, 0, zero, 0, zero, end))
        places = [line[0].place for line in self.lines]
        places.append(Place(self.name, places[-1].line, 1))
        return FleqProgram(self.name, memory, names, tuple(commands), tuple(places), notes_on(_following(commands)))

    def _line(self, line: list[Word]) -> None:
        first, *rest = line
        if first.text == "let":
            if self.waiting:
                first.refuse(f"the label {self.waiting[-1]!r} stands before data; labels name commands")
            if len(rest) < 3 or rest[1].text != "=":
                first.refuse("write: let NAME = matrix")
            name = self.taken.take(rest[0], RESERVED)
            self.values[name] = self._matrix(rest[2:])
            return
        if rest and rest[0].text == ":":
            self.waiting.append(self.taken.take(first, RESERVED))
            rest = rest[1:]
            if not rest:
                return
            first, *rest = rest
        flag = label = None
        if first.text == "jmp":
            if len(rest) != 1:
                first.refuse("write: jmp LABEL")
            rest, label = [], rest[0]
        elif first.text == "halt":
            if rest:
                rest[0].refuse("halt takes no operand")
        else:
            at = next((i for i, word in enumerate(rest) if word.text == "if"), None)
            if at is not None:
                if len(rest) != at + 4 or rest[at + 2].text != "->":
                    rest[at].refuse("write: if FLAG -> LABEL")
                rest, flag, label = rest[:at], rest[at + 1], rest[at + 3]
            if first.text != "nop" and first.text not in OPERANDS:
                first.refuse(f"{first.text!r} is no command{suggestion(first.text, [*OPERANDS, 'nop', 'jmp', 'halt', 'let'])}")
            n_operands = 1 + OPERANDS[first.text] if first.text in OPERANDS else 0
            rest = [word for i, word in enumerate(rest) if i % 2 == 0 or word.text != ","]
            if len(rest) != n_operands:
                form = ", ".join(["C", "A", "B"][:n_operands])
                first.refuse(f"write: {first.text} {form}" if n_operands else "nop takes no operand")
        for name in self.waiting:
            self.labels[name] = len(self.lines)
        self.waiting = []
        self.lines.append((first, rest, flag, label))

    def _matrix(self, words: list[Word]) -> NDArray[np.float64]:
        first = words[0]
        try:
            if first.text in ("ZEROS", "EYE") or (len(words) == 1 and first.text.lower().endswith(SUFFIXES)):
                return as_matrix(self._made(words) if first.text in ("ZEROS", "EYE") else self._file(first), first.text)
            rows, depth = self._numbers(words), first.text == "[" and len(words) > 1 and words[1].text == "["
            if len({len(row) for row in rows}) > 1:
                first.refuse("the rows of a matrix must have one length")
            return as_matrix(rows if depth else rows[0], "the matrix")
        except ProgramError:
            raise
        except ValueError as error:
            first.refuse(str(error))

    def _made(self, words: list[Word]) -> NDArray[np.float64]:
        sizes = [integer_of(Word(word.text.strip("()"), word.place)) for word in words[1:] if word.text.strip("(),")]
        if any(size is None or not 1 <= size <= MOST_WIDTH for size in sizes) or len(sizes) != (words[0].text == "ZEROS") + 1:
            words[0].refuse(f"write: ZEROS (rows, columns) or EYE (size), with sizes of 1 .. {MOST_WIDTH}")
        return np.zeros([size or 0 for size in sizes]) if words[0].text == "ZEROS" else np.eye(sizes[0] or 0)

    def _file(self, word: Word) -> NDArray[np.float64]:
        if self.folder is None:
            word.refuse("a program given as text has no folder of data files; use numbers, or a program file")
        path = self.folder / word.text
        try:
            return read_matrix(path)
        except OSError as error:
            word.refuse(f"{path} cannot be read: {error.strerror or error}")
        except ValueError as error:
            word.refuse(f"{path} holds no matrix: {error}")

    def _numbers(self, words: list[Word]) -> list[list[float]]:
        """Rows of numbers from 3, [1, 2] or [[1, 2], [3, 4]]."""
        rows: list[list[float]] = [[]]
        stack, expects_number = 0, True
        for i, word in enumerate(words):
            if word.text == "[" and expects_number and stack < 2 and (i == 0 or words[i - 1].text != "]"):
                if stack == 0 and i:
                    word.refuse("a matrix has one pair of outer brackets")
                stack += 1
                if stack == 2 and rows[-1]:
                    rows.append([])
            elif word.text == "]" and stack and not expects_number:
                stack -= 1
            elif word.text == "," and stack and not expects_number:
                expects_number = True
            elif NUMBER.match(word.text) and expects_number and (stack or len(words) == 1):
                rows[-1].append(float(word.text))
                expects_number = False
            else:
                word.refuse(f"{word.text!r} is not expected here; write a number, [1, 2] or [[1, 2], [3, 4]]")
        if stack or not rows[-1]:
            words[-1].refuse("the matrix has no end; write a number, [1, 2] or [[1, 2], [3, 4]]")
        return rows

    def _shape(self, word: Word) -> tuple[int, int]:
        """The shape of a matrix `A` or a column `A.1`."""
        name, dot, column = word.text.partition(".")
        if name in self.labels:
            word.refuse(f"{name!r} names a command, not a matrix")
        if name not in self.values:
            word.refuse(f"there is no matrix named {name!r} yet{suggestion(name, self.values)}")
        rows, columns = self.values[name].shape
        if not dot:
            return rows, columns
        if not (column.isdecimal() and len(column) < 4 and int(column) < columns):
            word.refuse(f"{name} has columns 0 .. {columns - 1}, not {column!r}")
        return rows, 1

    def _shapes(self, what: Word, operands: list[Word]) -> tuple[int, int] | None:
        """The shape of a command's result, checked; declares what is new."""
        if not operands:
            return None
        target, *rest = operands
        if target.text.partition(".")[0] in ("ZERO", "ONE"):
            target.refuse(f"{target.text} is a constant, which no command may write")
        shapes = [self._shape(word) for word in rest]
        a, b = shapes[0], shapes[-1]
        texts = " and ".join(f"{word.text} is {shape_text(shape)}" for word, shape in zip(rest, shapes, strict=True))
        if what.text == "mm":
            if a[0] != b[0]:
                what.refuse(f"mm makes A^T B of matrices with as many rows, but {texts}")
            shape = (a[1], b[1])
        elif what.text == "transpose":
            self.uses_transpose = True
            shape = (a[1], a[0])
        elif what.text in ("perc", "inv", "sqrt", "sig"):
            if a[0] != 1:
                what.refuse(f"{what.text} works on rows, but {texts}; transpose it, or take it row by row")
            shape = a
        else:
            if a != b:
                what.refuse(f"{what.text} needs two matrices of one shape, but {texts}")
            shape = (1, a[1]) if what.text == "emul" else a
        if target.text not in self.values and "." not in target.text:
            name = self.taken.take(target, RESERVED)
            if name in self.labels:
                target.refuse(f"{name!r} names a command")
            self.values[name] = np.zeros(shape)
        known = self._shape(target)
        if known != shape:
            what.refuse(f"the result is {shape_text(shape)}, but {target.text} is {shape_text(known)}")
        return shape

    def _command(self, i: int, names: dict[str, Matrix], shape: tuple[int, int] | None) -> FleqCommand:
        what, operands, flag_word, label = self.lines[i]
        zero, one = names["ZERO"].first, names["ONE"].first
        flag, jump = one, min(i + 1, len(self.lines))
        if what.text == "halt":
            flag, jump = zero, len(self.lines)
        if label is not None:
            if label.text not in self.labels:
                label.refuse(f"there is no command named {label.text!r}{suggestion(label.text, self.labels)}")
            flag, jump = zero, self.labels[label.text]
        if flag_word is not None:
            flag_shape = self._shape(flag_word)
            if flag_shape != (1, 1):
                flag_word.refuse(f"a flag is one number, but {flag_word.text} is {shape_text(flag_shape)}")
            flag = _matrix_of(flag_word, names).first
        if shape is None:
            return FleqCommand(None, zero, 0, zero, 0, zero, 0, flag, jump)
        target, *rest = [_matrix_of(word, names) for word in operands]
        a, b = rest[0], rest[-1]
        if what.text == "mm":  # the machine makes b^T a
            a, b = b, a
        n_a, n_b = a.n_columns, b.n_columns
        if what.text == "transpose":
            eye = names[IDENTITY]
            a, n_a = eye, b.n_rows
        elif what.text == "perc":
            b, n_b = names["ONE"], 1
        elif what.text == "copy" or OPERANDS[what.text] == 1:
            n_b = 0
        function = FUNCTION_OF.get(what.text, what.text)
        return FleqCommand(function, a.first, n_a, b.first, n_b, target.first, shape[1], flag, jump)


def _matrix_of(word: Word, names: Mapping[str, Matrix]) -> Matrix:
    """A checked operand `A` or `A.1`."""
    name, dot, column = word.text.partition(".")
    matrix = names[name]
    return Matrix(matrix.first + int(column), matrix.n_rows, 1) if dot else matrix


def _following(commands: Sequence[FleqCommand]) -> list[Collection[int]]:
    """What may come after each command: one that jumps at ZERO does so always."""
    always = commands[-1].flag
    return [{c.jump} if c.flag == always else {c.jump, min(i + 1, len(commands) - 1)} for i, c in enumerate(commands)]
