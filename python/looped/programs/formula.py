"""Arithmetic expressions compiled to FLEQ: `sqrt(1/((a+b-c)*d))/100` becomes add, sub, mm, inv, sqrt, perc."""

from __future__ import annotations

import ast
import math
import warnings
from collections.abc import Generator, Mapping
from numbers import Real
from typing import Any, NoReturn

from looped.programs.fleq_program import MOST_DATA, FleqProgram
from looped.programs.fleq_text import RESERVED, assemble_fleq
from looped.programs.source import MOST_CHARACTERS, NAME, Place, ProgramError

NAMED = {"sqrt": "sqrt", "sig": "sig", "inv": "inv", "percent": "perc"}
MOST_POWER = 64
Steps = Generator[ast.expr, str, str]  # asks for the cells of parts, returns that of the whole


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
        self.name, self.values, self.formula = name, values, ""
        self.data: dict[str, float] = {}
        self.constants: dict[float, str] = {}
        self.lines: list[str] = []
        self.taken = {*values, "result"}  # names that the compiler's own must not be
        self.n_made = 0

    def compile(self, formula: str) -> str:
        last = self._run(self._parsed(formula))
        self.lines += [f"copy result, {last}", "halt"]
        if len(self.lines) > 2 and self.lines[-3].split()[1] == f"{last},":  # the last command writes the result itself
            what, _, rest = self.lines[-3].partition(f"{last},")
            self.lines[-3:-1] = [f"{what}result,{rest}"]
        return "\n".join([*(f"let {name} = {value!r}" for name, value in self.data.items()), *self.lines]) + "\n"

    def _parsed(self, formula: str) -> ast.expr:
        self.formula = formula.replace("\r\n", "\n").replace("\r", "\n")  # lines as Python counts them
        text, start = self.formula.strip(), Place(self.name, 1, 1)
        shown = repr(text if len(text) < 80 else f"{text[:60]}...")
        if len(formula) > MOST_CHARACTERS:
            raise ProgramError(start, f"the formula has {len(formula)} characters; at most {MOST_CHARACTERS} are read")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SyntaxWarning)
                return ast.parse(text, mode="eval").body
        except (RecursionError, MemoryError):
            raise ProgramError(start, f"{shown} is too long, or nested too deep; compute parts of it first") from None
        except (SyntaxError, ValueError) as error:
            line, column = getattr(error, "lineno", None) or 1, getattr(error, "offset", None) or 1
            raise ProgramError(self._place(max(1, line), max(1, column)), f"{shown} is no formula") from None

    def _run(self, root: ast.expr) -> str:
        """The cell of an expression. On a stack of its own, since a long sum is nested as deep as it is long."""
        stack, cell = [self._value(root)], ""
        while stack:
            try:
                part = stack[-1].send(cell) if cell else next(stack[-1])
            except StopIteration as done:
                cell = done.value
                stack.pop()
            else:
                cell = ""
                stack.append(self._value(part))
        return cell

    def _place(self, line: int, column: int) -> Place:
        """The place in the formula as it was given, of one in the formula without its margins."""
        margin = self.formula[: len(self.formula) - len(self.formula.lstrip())]
        lines = margin.split("\n")
        return Place(self.name, line + len(lines) - 1, column + (len(lines[-1]) if line == 1 else 0))

    def _refuse(self, node: ast.expr, message: str) -> NoReturn:
        before = self.formula.strip().split("\n")[node.lineno - 1].encode()[: node.col_offset]
        raise ProgramError(self._place(node.lineno, len(before.decode()) + 1), message)

    def _new(self, stem: str) -> str:
        """A name that nothing has."""
        while f"{stem}{self.n_made}" in self.taken:
            self.n_made += 1
        self.n_made += 1
        return f"{stem}{self.n_made - 1}"

    def _emit(self, what: str, *operands: str) -> str:
        target = self._new("t")
        self.lines.append(f"{what} {', '.join((target, *operands))}")
        return target

    def _number(self, node: ast.expr, given: Any, what: str) -> float:
        """A number that a cell can hold."""
        if isinstance(given, bool) or not isinstance(given, Real):
            self._refuse(node, f"{what} takes one number, got {given!r}")
        try:
            value = float(given)
        except OverflowError:
            value = math.inf
        if not abs(value) < MOST_DATA:
            self._refuse(node, f"{what} is {value:g}; numbers must be below {MOST_DATA:g} in size")
        return value

    def _constant(self, value: float) -> str:
        if value in (0.0, 1.0):
            return "ZERO" if value == 0.0 else "ONE"
        if value not in self.constants:
            self.constants[value] = self._new("number_")
            self.data[self.constants[value]] = value
        return self.constants[value]

    def _value(self, node: ast.expr) -> Steps:
        number = _literal(node)
        if number is not None:
            return self._constant(self._number(node, number, "the number"))
        if isinstance(node, ast.Name):
            return self._variable(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._emit("sub", "ZERO", (yield node.operand))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd):
            return (yield node.operand)
        if isinstance(node, ast.BinOp):
            return (yield from self._binary(node))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMED:
            if len(node.args) != 1 or node.keywords:
                self._refuse(node, f"{node.func.id} takes one argument")
            return self._emit(NAMED[node.func.id], (yield node.args[0]))
        self._refuse(node, f"a formula has numbers, names, + - * / **, {', '.join(NAMED)}; this is none of them")

    def _variable(self, node: ast.Name) -> str:
        if not NAME.match(node.id):
            self._refuse(node, f"{node.id!r} is no name; names are letters, digits and _")
        if node.id.lower() in RESERVED:
            self._refuse(node, f"{node.id!r} is a word of the language; choose another name")
        if node.id not in self.values:
            self._refuse(node, f"{node.id!r} has no value; give one with --set {node.id}=")
        self.data[node.id] = self._number(node, self.values[node.id], repr(node.id))
        return node.id

    def _binary(self, node: ast.BinOp) -> Steps:
        right = _literal(node.right)
        if isinstance(node.op, ast.Div):
            if right == 100:
                return self._emit("perc", (yield node.left))
            if right is not None:
                divisor = self._number(node.right, right, "the divisor")
                if divisor == 0:
                    self._refuse(node, "division by 0")
                return self._emit("mm", (yield node.left), self._constant(self._number(node.right, 1 / divisor, "the factor")))
            left = None if _literal(node.left) == 1 else (yield node.left)
            inverse = self._emit("inv", (yield node.right))
            return inverse if left is None else self._emit("mm", left, inverse)
        if isinstance(node.op, ast.Pow):
            if right is None or not 1 <= right <= MOST_POWER or right != int(right):
                self._refuse(node, f"powers are whole numbers of 1 .. {MOST_POWER}")
            return self._power((yield node.left), int(right))
        forms = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mm"}
        what = forms.get(type(node.op))
        if what is None:
            self._refuse(node, "a formula has + - * / ** alone")
        left = yield node.left
        return self._emit(what, left, (yield node.right))

    def _power(self, base: str, n: int) -> str:
        """By squaring."""
        if n == 1:
            return base
        half = self._power(base, n // 2)
        square = self._emit("mm", half, half)
        return self._emit("mm", square, base) if n % 2 else square


def _literal(node: ast.expr) -> int | float | None:
    """The number that an expression is, with a sign or without."""
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        sign, node = (-1 if isinstance(node.op, ast.USub) else 1), node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return sign * node.value
    return None
