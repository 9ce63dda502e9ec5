"""Formulas compiled to FLEQ programs."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looped.programs.fleq_plain import run_fleq
from looped.programs.formula import compile_formula, formula_text
from looped.programs.source import ProgramError


def test_a_formula_compiles_to_the_papers_program():
    text = formula_text("sqrt(1/((a+b-c)*d))/100", dict(a=6, b=2.5, c=4, d=1.5))
    assert [line.split()[0] for line in text.splitlines()] == [*["let"] * 4, "add", "sub", "mm", "inv", "sqrt", "perc", "halt"]


FORMULAS = [
    "a",
    "3",
    "-a + 2",
    "a * b - c / 4",
    "(a + b) ** 3",
    "percent(a) + sig(c)",
    "1 / (a * 2)",
    "b / a",
    "sqrt(a) * inv(b)",
    "+a",
    "a / -2 + -3",
    "3 * number_0 + t0 - result",
    "--a - -2",
    "+".join(["a * 0.001"] * 1200),
    "-" * 1500 + "a",
]


@pytest.mark.parametrize("formula", FORMULAS)
def test_formulas_are_worth_what_python_says(formula):
    values = dict(a=1.5, b=2.25, c=-0.75, number_0=5, t0=np.float32(0.5), result=4.0)
    program = compile_formula(formula, values)
    here = values | dict(sqrt=math.sqrt, inv=lambda x: 1 / x, percent=lambda x: x / 100, sig=lambda x: 1 / (1 + math.exp(-x)))
    assert program.value("result", run_fleq(program, 10_000)[2])[0, 0] == pytest.approx(eval(formula, here), rel=1e-12)


FORMULA_ERRORS = [
    ("a +", "formula:1:"),
    ("a + y", "formula:1:5: 'y' has no value"),
    ("a ** 0.5", "powers are whole numbers"),
    ("a / 0", "division by 0"),
    ("exp(a)", "this is none of them"),
    ("a % 2", "a formula has"),
    ("sqrt(a, a)", "one argument"),
    ("'x'", "none of them"),
    ("a if a else a", "none of them"),
    ("(" * 500 + "a" + ")" * 500, "is no formula"),
    ("a +\r\n", "formula:1:"),
    ("  (a +\r  y)", "formula:2:3: 'y' has no value"),
    ("  a + y", "formula:1:7: 'y' has no value"),
    ("é + y", "formula:1:1: 'é' is no name; names are letters, digits and _"),
    ("mm + 1", "formula:1:1: 'mm' is a word of the language"),
    ("a + 1024", "formula:1:5: the number is 1024; numbers must be below 1024"),
    ("a + 1" + "0" * 400, "formula:1:5: the number is inf"),
    ("a / 1e-320", "formula:1:5: the factor is inf"),
    ("a / True", "none of them"),
    ("a ** -1", "powers are whole numbers"),
    ("+".join(["a"] * 20_000), "formula:1:1: .* is too long, or nested too deep"),
]


@pytest.mark.parametrize(("formula", "message"), FORMULA_ERRORS)
def test_mistakes_in_formulas(formula, message):
    with pytest.raises(ProgramError, match=message):
        compile_formula(formula, dict(a=1.0))


NO_NUMBERS = ["1", None, True, [1.0], 1j, 1024, -1e300, math.nan, math.inf, 10**400]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=range(len(NO_NUMBERS)))
def test_values_are_single_numbers_that_a_cell_can_hold(value):
    with pytest.raises(ProgramError, match=r"formula:1:5: 'a' (takes one number|is .*; numbers must be below 1024)"):
        compile_formula("2 * a", {"a": value})


TOKENS = [
    "a",
    "b",
    "t0",
    "number_1",
    "mm",
    "é",
    "0",
    "1",
    "3",
    "100",
    "2.5",
    "1e400",
    "1e-330",
    "3j",
    "'s'",
    "True",
    "+",
    "-",
    "*",
]
TOKENS += [
    "/",
    "**",
    "(",
    ")",
    ",",
    "sqrt(",
    "sig(",
    "inv(",
    "percent(",
    "exp(",
    "%",
    ":=",
    "=",
    ".",
    "[",
    "if",
    "\n",
    "\r",
    "\x00",
]
VALUES = st.one_of(st.floats(), st.integers(), st.none(), st.booleans(), st.text(max_size=2), st.complex_numbers())


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(TOKENS), max_size=12).map(" ".join) | st.text(max_size=30),
    st.dictionaries(st.sampled_from(["a", "b", "t0", "number_1", "mm"]), VALUES | st.floats(-9, 9)),
)
def test_no_formula_crashes_the_compiler(formula, values):
    try:
        compile_formula(formula, values)
    except ProgramError as error:
        assert str(error).startswith("formula:")  # noqa: PT017
        assert error.place.line >= 1  # noqa: PT017
        assert error.place.column >= 1  # noqa: PT017
