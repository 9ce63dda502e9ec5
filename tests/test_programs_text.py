"""The assemblers: what they take, and errors that name file, line and column."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import EXAMPLES

from looped.programs.fleq_text import assemble_fleq
from looped.programs.machines import read_program
from looped.programs.minsky import parse_minsky, translate_minsky
from looped.programs.source import ProgramError
from looped.programs.subleq_text import assemble_subleq

SUBLEQ = """
.bits 8            ; words
.cells 6
x: 7
list: 1 -2 0x10 # three
start: subleq x, list+1
       subleq ZERO 2 start
       subleq MINUS_ONE x -1
last:
       subleq x x halt
"""


def test_a_subleq_program_is_what_it_says():
    program = assemble_subleq(SUBLEQ)
    assert program.n_bits == 8
    assert program.memory == (7, 1, -2, 16, 0, 0, 0, -1)
    assert program.commands == ((0, 2, 1), (6, 2, 0), (7, 0, 4), (0, 0, 4), (6, 7, 4))
    assert (program.end, program.first_command, program.n_tokens) == (4, 9, 14)
    assert str(program.places[1]) == "program:7:8"
    assert program.cell_name(3) == "list+2"
    assert program.value("list", program.memory) == [1, -2, 16]
    assert program.value("list+1", program.memory) == [-2, 16]
    assert program.command_text(0) == "list+1 -= x"
    assert program.command_text(1) == "list+1 -= ZERO -> command 0"
    assert program.with_values({"list": [5]}).memory[:4] == (7, 5, -2, 16)
    assert assemble_subleq("x: 200\nhalt", n_bits=8, wrap=True).memory[0] == -56
    for n_bits in (0, 1, 64):
        with pytest.raises(ValueError, match=f"n_bits={n_bits} must lie in 2 .. 63"):
            assemble_subleq("halt", n_bits=n_bits)


SUBLEQ_ERRORS = [
    ("", "p:1:1: the program has no command; write at least halt"),
    ("x: 1\nx: 2\nhalt", "p:2:1: 'x' is named twice, first in line 1"),
    ("x: 1\nx: halt", "p:2:1: 'x' is named twice"),
    ("x: 40000\nhalt", r"p:1:4: 40000 does not fit words of 16 bits, which hold -32768 .. 32767; use --wrap or wider words"),
    ("x: 1\nsubleq x y\nhalt", "p:2:10: there is no cell named 'y'; choose from x, ZERO, MINUS_ONE$"),
    ("x: 1\nsubleq x x away\nhalt", "p:2:12: there is no command named 'away'"),
    ("x: 1\nhere: subleq x here\nhalt", "p:2:16: 'here' names a command"),
    ("x: 1\nsubleq x x x\nhalt", "p:2:12: 'x' names a cell"),
    ("x: 1\nsubleq x ZERO\nhalt", "p:2:10: 'ZERO' is one of the constant cells"),
    ("x: 1\nsubleq x 2\nhalt", "p:2:10: '2' is one of the constant cells"),
    ("x: 1\nsubleq x 3\nhalt", r"p:2:10: cell 3 is outside memory, which has cells 0 .. 2"),
    ("x: 1\nsubleq x x 9\nhalt", r"p:2:12: command 9 is outside the program, which has commands 0 .. 2"),
    ("x: 1\nsubleq x x+1\nhalt", r"p:2:10: 'x\+1' is outside the 1 cells of x"),
    ("x: 1\nsubleq x\nhalt", "p:2:1: subleq takes two or three operands, got 1"),
    ("x: 1\nmove x x", "p:2:1: 'move' is no command"),
    ("x: 1 b\nhalt", "p:1:6: 'b' is no number"),
    (".bits 99\nhalt", r"p:1:1: .bits takes one number in 2 .. 63"),
    (".word 8\nhalt", "p:1:1: '.word' is no directive"),
    ("halt 3", "p:1:6: halt takes no operand"),
    ("halt: 3\nhalt", "p:1:1: 'halt' is a word of the language"),
    ("9x: 3\nhalt", "p:1:1: '9x' is no name"),
    ("l:\nx: 3\nhalt", "p:2:4: the label 'l' stands before data"),
    ("halt\x00", "p:1:5: the character '.x00' does not belong"),
    ("x: " + "9" * 80 + "\nhalt", r"p:1:4: the number 9{20}... is too long"),
]


@pytest.mark.parametrize(("text", "message"), SUBLEQ_ERRORS)
def test_mistakes_in_subleq_name_their_place(text, message):
    with pytest.raises(ProgramError, match=message):
        assemble_subleq(text, name="p")


def test_values_that_do_not_fit_are_refused():
    program = assemble_subleq(SUBLEQ, name="p")
    for values, message in [
        ({"y": 1}, "p: there is no cell named 'y'"),
        ({"x": 300}, r"p: x=300 does not fit words of 8 bits"),
        ({"x": [1, 2]}, "p: x has 1 cells, got 2 words"),
        ({"x": 1.5}, r"p: x takes whole numbers, got 1\.5"),
        ({"list": [1, 1.5]}, r"p: list takes whole numbers, got 1\.5"),
        ({"x": None}, "p: x takes whole numbers, got None"),
        ({"x": [[1]]}, r"p: x takes whole numbers, got \[1\]"),
        ({"x": True}, "p: x takes whole numbers, got True"),
        ({"ZERO": 1}, "p: ZERO is a constant of every program, which has no other word"),
        ({"MINUS_ONE+0": -1}, r"p: MINUS_ONE\+0 is a constant of every program"),
        ({"list+²": 1}, "p: 'list.²' is outside the 3 cells of list"),
    ]:
        with pytest.raises(ValueError, match=message):
            program.with_values(values)
    assert program.with_values({"x": np.int64(5), "list": np.array([1, 2])}).memory[:3] == (5, 1, 2)


def test_an_end_that_nothing_leads_to_is_noted():
    assert assemble_subleq("x: 1\nl: subleq x x l\nsubleq x x l").notes == ()
    assert assemble_fleq("l: jmp l").notes == ("no command leads to the end",)


FLEQ = """
let A = [[1, 2], [3, 4.5]]
let k = 2
let r = [1, -2e-1, 3]
let E = EYE (2)
l: mm C, A, E if k -> out
   emul s, A, C
   sub r.1, r.1, k
   copy D, r
   transpose F, D
   nop if k -> l
   jmp l
out: sub k, k, k if ZERO -> l
   copy k, k if k -> end
   perc k, k if ONE -> end
end: halt
"""


def test_a_fleq_program_is_what_it_says():
    program = assemble_fleq(FLEQ)
    assert program.width == 3
    assert {name: matrix.shape for name, matrix in program.names.items()} == {
        "ZERO": (1, 1),
        "ONE": (1, 1),
        "A": (2, 2),
        "k": (1, 1),
        "r": (1, 3),
        "E": (2, 2),
        "C": (2, 2),
        "s": (1, 2),
        "D": (1, 3),
        "F": (3, 1),
        "identity of transpose": (3, 3),
    }
    assert (program.value("A", program.memory) == [[1, 2], [3, 4.5]]).all()
    assert program.command_text(0) == "C = A^T E if k <= 0 -> command 7"
    assert program.command_text(2) == "r.1 = r.1 - k"
    assert [program.command_text(i) for i in (4, 5, 6, 7)] == [
        "F = D^T",
        "if k <= 0 -> command 0",
        "to command 0",
        "k = k - k -> command 0",
    ]
    assert [program.command_text(i) for i in (8, 9, 10)] == ["k = k if k <= 0 -> command 10", "k = k / 100", "halt"]
    assert (program.with_values({"r": [7, 8, 9]}).value("r", program.with_values({"r": [7, 8, 9]}).memory) == [[7, 8, 9]]).all()


FLEQ_ERRORS = [
    ("", "p:1:1: the program has no command"),
    ("let A = [[1, 2], [3]]\nhalt", "p:1:9: the rows of a matrix must have one length"),
    ("let A = [[1, 2]\nhalt", "p:1:15: the matrix has no end"),
    ("let A = 1 2\nhalt", "p:1:9: '1' is not expected here"),
    ("let A = [1, nan]\nhalt", "p:1:13: 'nan' is not expected here"),
    ("let A = 2000\nhalt", "p:1:9: the matrix holds 2000; numbers must be below 1024 in size"),
    ("let A = missing.npy\nhalt", "p:1:9: a program given as text has no folder"),
    ("let A\nhalt", "p:1:1: write: let NAME = matrix"),
    ("let A = 1\nlet A = 2\nhalt", "p:2:5: 'A' is named twice"),
    ("let mm = 1\nhalt", "p:1:5: 'mm' is a word of the language"),
    (
        "let A = [[1,2],[3,4]]\nlet b = [1,2]\nmm C, A, b\nhalt",
        "p:3:1: mm makes A.T B of matrices with as many rows, but A is 2 x 2 and b is 1 x 2",
    ),
    ("let A = [[1,2],[3,4]]\nlet b = [1,2]\nadd C, A, b\nhalt", "p:3:1: add needs two matrices of one shape"),
    ("let A = [[1,2],[3,4]]\ninv C, A\nhalt", "p:2:1: inv works on rows, but A is 2 x 2"),
    ("let A = [[1,2],[3,4]]\ncopy b, A.0\ncopy b, A\nhalt", "p:3:1: the result is 2 x 2, but b is 2 x 1"),
    ("copy ONE, ZERO\nhalt", "p:1:6: ONE is a constant"),
    ("copy b, c\nhalt", "p:1:9: there is no matrix named 'c' yet"),
    ("let b = 1\ncopy b, b.1\nhalt", r"p:2:9: b has columns 0 .. 0, not '1'"),
    ("let b = [1, 2]\nnop if b -> l\nl: halt", "p:2:8: a flag is one number, but b is 1 x 2"),
    ("nop if ONE -> l\nhalt", "p:1:15: there is no command named 'l'"),
    ("nop if ONE l\nhalt", "p:1:5: write: if FLAG -> LABEL"),
    ("l: halt\nlet b = 1\ncopy l, b", "p:3:6: 'l' is named twice|p:3:6: 'l' names a command"),
    ("mull a, b\nhalt", "p:1:1: 'mull' is no command; did you mean 'emul'"),
    ("mm a, ONE\nhalt", "p:1:1: write: mm C, A, B"),
    ("let A = ZEROS (3, 99)\nhalt", "p:1:9: write: ZEROS"),
]


@pytest.mark.parametrize(("text", "message"), FLEQ_ERRORS)
def test_mistakes_in_fleq_name_their_place(text, message):
    with pytest.raises(ProgramError, match=message):
        assemble_fleq(text, name="p")


WORDS = [
    "subleq",
    "halt",
    "x",
    "y",
    "x:",
    "l:",
    ":",
    ",",
    "0",
    "-1",
    "99999",
    "0x",
    "x+1",
    "x+",
    "+",
    ".bits",
    ".cells",
    "8",
    "ZERO",
    "let",
    "=",
    "[",
    "]",
    "[[1,2],[3,4]]",
    "mm",
    "add",
    "inv",
    "A",
    "B",
    "A.0",
    "A.9",
    "if",
    "->",
    "jmp",
    "nop",
    "EYE",
    "(2)",
    "1e400",
    "nan",
    "a.npy",
    "../a.csv",
    ";",
    "#",
    "\t",
    "\x00",
    "é",
    "\uff11",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=7).map(" ".join), max_size=8).map("\n".join) | st.text(max_size=60))
def test_no_text_crashes_an_assembler(text):
    for assemble in (assemble_subleq, assemble_fleq, parse_minsky, translate_minsky):
        try:
            assemble(text)
        except ProgramError as error:
            assert error.place.line >= 1  # noqa: PT017
            assert error.place.column >= 1  # noqa: PT017


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([SUBLEQ, FLEQ]), st.integers(0, 10**6), st.sampled_from(WORDS))
def test_no_mutation_crashes_an_assembler(text, at, word):
    parts = text.split(" ")
    parts[at % len(parts)] = word
    for assemble in (assemble_subleq, assemble_fleq):
        try:
            assemble(" ".join(parts))
        except ProgramError as error:
            assert str(error).startswith("program:")  # noqa: PT017


def test_every_example_assembles():
    files = [path for path in EXAMPLES.iterdir() if path.suffix in (".subleq", ".fleq", ".minsky")]
    assert len(files) >= 13
    for path in files:
        assert not read_program(path).notes, path
    with pytest.raises(ValueError, match="the suffix of a program is one of"):
        read_program(EXAMPLES / "table.csv")
