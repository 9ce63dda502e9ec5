"""Assembled FLEQ programs: memory as columns, matrices by name, commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from looped.programs.source import Place
from looped.suggestion import suggestion

MOST_WIDTH, MOST_DATA = 64, 1024.0
IDENTITY = "identity of transpose"  # a name that no text can write


@dataclass(frozen=True)
class Matrix:
    """Columns first .. first + n_columns - 1 of memory, n_rows of their rows."""

    first: int
    n_rows: int
    n_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.n_rows, self.n_columns


@dataclass(frozen=True)
class FleqCommand:
    """mem[c ..] = function(mem[a ..], mem[b ..]) with n columns each, then to `jump` where mem[flag] <= 0.

    function None writes nothing. a, b, c, flag are memory columns, jump is a command.
    """

    function: str | None
    a: int
    n_a: int
    b: int
    n_b: int
    c: int
    n_c: int
    flag: int
    jump: int


@dataclass(frozen=True)
class FleqProgram:
    """An assembled program. memory: float64 [D, columns] at the start, D the most rows or columns of a matrix."""

    name: str
    memory: NDArray[np.float64]
    names: Mapping[str, Matrix]
    commands: tuple[FleqCommand, ...]
    places: tuple[Place, ...]
    notes: tuple[str, ...] = ()

    kind = "fleq"
    constants = frozenset({"ZERO", "ONE", IDENTITY})  # names of matrices that no program or user may write

    @property
    def end(self) -> int:
        """The number of the command that ends the program: it writes nothing and jumps to itself."""
        return len(self.commands) - 1

    @property
    def width(self) -> int:
        return len(self.memory)

    def value(self, name: str, memory: NDArray[np.float64]) -> NDArray[np.float64]:
        """The matrix of a name in a memory [D, columns]."""
        matrix = self._matrix(name)
        return memory[: matrix.n_rows, matrix.first : matrix.first + matrix.n_columns]

    def command_text(self, i: int) -> str:
        """A command as text, with names for matrices."""
        command = self.commands[i]
        if i == self.end:
            return "the end"
        is_sure = command.flag == self.commands[self.end].flag  # ZERO
        if command.function is None and is_sure:
            return "halt" if command.jump == self.end else f"to command {command.jump}"
        to = f"-> {'the end' if command.jump == self.end else f'command {command.jump}'}"
        if command.jump == i + 1:
            to = ""
        elif not is_sure:
            to = f"if {self._columns(command.flag, 1)} <= 0 {to}"
        if command.function is None:
            return to or "nop"
        a, b = self._columns(command.a, command.n_a), self._columns(command.b, command.n_b)
        right = {"mm": f"{b}^T {a}", "add": f"{a} + {b}", "sub": f"{a} - {b}", "emul": f"<{a}, {b}>", "perc": f"{a} / 100"}
        text = right.get(command.function, f"{command.function}({a})").removesuffix(" + ")
        if command.function == "mm" and IDENTITY in self.names and command.a == self.names[IDENTITY].first:
            text = f"{b}^T"
        return f"{self._columns(command.c, command.n_c)} = {text} {to}".rstrip()

    def _columns(self, first: int, n: int) -> str:
        for name, matrix in self.names.items():
            if n and matrix.first <= first < matrix.first + matrix.n_columns:
                return name if n == matrix.n_columns else f"{name}.{first - matrix.first}"
        return ""

    def cell_name(self, row: int, column: int) -> str:
        """What a number of memory is called."""
        for name, matrix in self.names.items():
            if matrix.first <= column < matrix.first + matrix.n_columns:
                return f"{name}[{row}, {column - matrix.first}]"
        return f"column {column}, row {row}"

    def with_values(self, values: Mapping[str, Any]) -> FleqProgram:
        """The program with other first values of named matrices.

        Raises ValueError for an unknown name, a constant, or another shape.
        """
        memory = self.memory.copy()
        for name, given in values.items():
            matrix = self._matrix(name)
            if name in self.constants:
                raise ValueError(f"{self.name}: {name} is a constant of every program, which has no other value")
            array = as_matrix(given, f"{self.name}: {name}")
            if array.shape != matrix.shape:
                raise ValueError(f"{self.name}: {name} is {shape_text(matrix.shape)}, got {shape_text(array.shape)}")
            memory[: matrix.n_rows, matrix.first : matrix.first + matrix.n_columns] = array
        return replace(self, memory=memory)

    def _matrix(self, name: str) -> Matrix:
        if name not in self.names:
            own = [known for known in self.names if known not in self.constants]
            raise ValueError(f"{self.name}: there is no matrix named {name!r}{suggestion(name, own)}")
        return self.names[name]


def shape_text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def as_matrix(given: Any, what: str) -> NDArray[np.float64]:
    """float64 [rows, columns] of real numbers.

    Raises ValueError for anything else, for NaN, infinity, other dimensions, or numbers of 1024 and more.
    """
    try:
        array = np.asarray(given)
        if array.dtype.kind == "O":  # integers that no type of NumPy holds, or no numbers
            array = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise ValueError(f"{what} is no matrix of numbers") from None
    if array.dtype.kind == "c":
        raise ValueError(f"{what} holds complex numbers; a matrix has real ones")
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{what} is no matrix of numbers")
    array = array.reshape(1, -1) if array.ndim < 2 else array
    if array.ndim != 2 or 0 in array.shape:
        raise ValueError(f"{what} has shape {shape_text(array.shape)}; matrices have rows and columns")
    if max(array.shape) > MOST_WIDTH:
        raise ValueError(f"{what} is {shape_text(array.shape)}; matrices have at most {MOST_WIDTH} rows and columns")
    array = array.astype(np.float64)
    if not np.isfinite(array).all():
        raise ValueError(f"{what} holds NaN or infinity")
    if np.abs(array).max() >= MOST_DATA:
        raise ValueError(f"{what} holds {array.flat[np.abs(array).argmax()]:g}; numbers must be below {MOST_DATA:g} in size")
    return array
