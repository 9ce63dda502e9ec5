"""Arithmetic expressions compiled to FLEQ: `sqrt(1/((a+b-c)*d))/100` becomes add, sub, mm, inv, sqrt, perc."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Mapping
from typing import NoReturn

from looped.programs.fleq_program import FleqProgram
from looped.programs.fleq_text import assemble_fleq
from looped.programs.source import Place, ProgramError

NAMED = {"sqrt": "sqrt", "sig": "sig", "inv": "inv", "percent": "perc"}
MOST_POWER = 64


def formula_text(formula: str, values: Mapping[str, float], *, name: str = "formula") -> str:
    """The program that leaves the formula's value in the cell `result`.

    The formula has numbers, names, + - * /, whole powers, sqrt(x), sig(x), inv(x), percent(x) and brackets. x / 100 is percent,
    1 / x the reciprocal, and x / y a product with it. Raises ProgramError, which names the column, for anything else.
    """
    return _Compiler(name, values).compile(formula)


def compile_formula(formula: str, values: Mapping[str, float], *, name: str = "formula") -> FleqProgram:
    """The assembled program of `formula_text`."""
    return assemble_fleq(formula_text(formula, values, name=name), name=name)


class _Compiler:
    def __init__(self, name: str, values: Mapping[str, float]) -> None:
        self.name, self.values = name, values
        self.data: dict[str, float] = {}
        self.lines: list[str] = []
        self.n_temporary = 0

    def compile(self, formula: str) -> str:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                tree = ast.parse(formula.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            column = getattr(error, "offset", None) or 1
            raise ProgramError(Place(self.name, 1, column), f"{formula.strip()!r} is no formula") from None
        last = self._value(tree.body)
        self.lines += [f"copy result, {last}", "halt"]
        if len(self.lines) > 2 and self.lines[-3].split()[1] == f"{last},":  # the last command writes the result itself
            what, _, rest = self.lines[-3].partition(f"{last},")
            self.lines[-3:-1] = [f"{what}result,{rest}"]
        return "\n".join([*(f"let {name} = {value!r}" for name, value in self.data.items()), *self.lines]) + "\n"

    def _refuse(self, node: ast.expr, message: str) -> NoReturn:
        raise ProgramError(Place(self.name, node.lineno, node.col_offset + 1), message)

    def _emit(self, what: str, *operands: str) -> str:
        target = f"t{self.n_temporary}"
        while target in self.values:
            self.n_temporary += 1
            target = f"t{self.n_temporary}"
        self.n_temporary += 1
        self.lines.append(f"{what} {', '.join((target, *operands))}")
        return target

    def _constant(self, value: float) -> str:
        if value in (0.0, 1.0):
            return "ZERO" if value == 0.0 else "ONE"
        name = f"number_{len(self.data)}"
        for known, held in self.data.items():
            if held == value and known.startswith("number_"):
                return known
        self.data[name] = value
        return name

    def _value(self, node: ast.expr) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
            return self._constant(float(node.value))
        if isinstance(node, ast.Name):
            if node.id not in self.values:
                self._refuse(node, f"{node.id!r} has no value; give one with --set {node.id}=")
            value = self.values[node.id]
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                self._refuse(node, f"{node.id!r} takes one number, got {value!r}")
            self.data[node.id] = float(value)
            return node.id
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._emit("sub", "ZERO", self._value(node.operand))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
            return self._value(node.operand)
        if isinstance(node, ast.BinOp):
            return self._binary(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMED:
            if len(node.args) != 1 or node.keywords:
                self._refuse(node, f"{node.func.id} takes one argument")
            return self._emit(NAMED[node.func.id], self._value(node.args[0]))
        self._refuse(node, f"a formula has numbers, names, + - * / **, {', '.join(NAMED)}; this is none of them")

    def _binary(self, node: ast.BinOp) -> str:
        is_number = isinstance(node.right, ast.Constant) and isinstance(node.right.value, (int, float))
        right = float(node.right.value) if is_number else None  # type: ignore[attr-defined]
        if isinstance(node.op, ast.Div):
            if right == 100:
                return self._emit("perc", self._value(node.left))
            if right is not None:
                if right == 0:
                    self._refuse(node, "division by 0")
                return self._emit("mm", self._value(node.left), self._constant(1 / right))
            left = None if isinstance(node.left, ast.Constant) and node.left.value == 1 else self._value(node.left)
            inverse = self._emit("inv", self._value(node.right))
            return inverse if left is None else self._emit("mm", left, inverse)
        if isinstance(node.op, ast.Pow):
            if right is None or not 1 <= right <= MOST_POWER or right != int(right):
                self._refuse(node, f"powers are whole numbers of 1 .. {MOST_POWER}")
            return self._power(self._value(node.left), int(right))
        forms = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mm"}
        what = forms.get(type(node.op))
        if what is None:
            self._refuse(node, "a formula has + - * / ** alone")
        left = self._value(node.left)
        return self._emit(what, left, self._value(node.right))

    def _power(self, base: str, n: int) -> str:
        """By squaring."""
        if n == 1:
            return base
        half = self._power(base, n // 2)
        square = self._emit("mm", half, half)
        return self._emit("mm", square, base) if n % 2 else square
