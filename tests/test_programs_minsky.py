"""Minsky machines: what they mean, and that their translation means the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import EXAMPLES

from looped.programs.machines import machine_for
from looped.programs.minsky import minsky_states, parse_minsky, translate_minsky
from looped.programs.run import run_programs
from looped.programs.source import ProgramError
from looped.programs.subleq_plain import check_registers, run_subleq
from looped.programs.tracing import trace

MINSKY_ERRORS = [
    ("adds r", "m:1:1: 'adds' is no instruction"),
    ("sub r", "m:1:1: write one of"),
    ("sub r then l", "m:1:1: write one of"),
    ("goto l", "m:1:6: there is no instruction named 'l'"),
    ("add goto", "m:1:5: 'goto' cannot name a register"),
    (".bits 64\nadd r", r"m:1:1: .bits takes one number in 2 .. 63"),
    (".cells 4\nadd r", "m:1:1: '.cells' is no directive; there is .bits"),
    ("add r x", "m:1:1: write one of"),
    ("r: add r", "m:1:1: 'r' names an instruction and a register"),
    ("l: halt\nl: halt", "m:2:1: 'l' is named twice"),
]


@pytest.mark.parametrize(("text", "message"), MINSKY_ERRORS)
def test_mistakes_in_minsky_machines_name_their_place(text, message):
    with pytest.raises(ProgramError, match=message):
        parse_minsky(text, name="m")


@pytest.mark.parametrize(("x", "y"), [(7, 3), (3, 7), (0, 0), (5, 5)])
def test_a_minsky_machine_translates_to_subleq(x, y):
    text = (EXAMPLES / "subtract.minsky").read_text()
    *_, last = minsky_states(text, {"x": x, "y": y})
    program = translate_minsky(text, values={"x": x, "y": y})
    _, pc, memory = run_subleq(program, 1000)
    assert pc == program.end
    assert {name: program.value(name, memory) for name in ("x", "y")} == last
    assert last["x"] == max(x - y, 0)
    assert len(translate_minsky("sub r else l\nl: halt").commands) == 5 + 3  # a halt, one at the end of all, and the end itself


@st.composite
def minsky_machines(draw):
    """A few instructions on two registers; endless ones are cut."""
    n = draw(st.integers(1, 8))
    lines = []
    for i in range(n):
        kind = draw(st.sampled_from(["add", "sub", "goto"]))
        register, to = draw(st.sampled_from("pq")), draw(st.integers(0, n))
        lines.append(f"l{i}: " + {"add": f"add {register}", "sub": f"sub {register} else l{to}", "goto": f"goto l{to}"}[kind])
    return "\n".join([*lines, f"l{n}: halt"]), draw(st.integers(0, 5)), draw(st.integers(0, 5))


@settings(max_examples=60, deadline=None)
@given(minsky_machines())
def test_minsky_machines_keep_their_meaning(machine):
    text, p, q = machine
    registers = parse_minsky(text).registers
    values = {name: value for name, value in (("p", p), ("q", q)) if name in registers}
    states = []
    for state in minsky_states(text, values):
        states.append(state)
        if len(states) > 200:
            return
    program = translate_minsky(text, values=values)
    _, pc, memory = run_subleq(program, 2000)
    assert pc == program.end
    assert {name: program.value(name, memory) for name in registers} == states[-1]


COUNT = """
.bits 4           ; 7 at most
start: add n
       sub m else start
       halt
"""


def test_places_are_those_of_the_machines_own_text():
    program = translate_minsky(COUNT, name="count.minsky")
    assert [str(place) for place in program.places] == [
        "count.minsky:3:8",
        *["count.minsky:4:8"] * 5,
        *["count.minsky:5:8"],
        *["count.minsky:5:1"] * 2,
    ]
    rows = list(trace(machine_for([program]), program.with_values({"m": 1}), 20))
    assert [row.line for row in rows] == [3, 4, 4, 4, 5]
    assert rows[1].text == "m -= constant 1 -> command 3"
    assert rows[3].changes == {"m": 0}


def test_no_name_of_a_machine_is_taken_by_its_translation():
    text = "test_1: add subleq\nsub ONE else next_1\nnext_1: sub one else zero_1\nsub SPARE else zero_1\nzero_1: halt"
    program = translate_minsky(text, values={"one": 1, "SPARE": 2})
    _, pc, memory = run_subleq(program, 100)
    assert pc == program.end
    *_, last = minsky_states(text, {"one": 1, "SPARE": 2})
    assert {name: program.value(name, memory) for name in ("subleq", "ONE", "one", "SPARE")} == last
    for name in ("constant 1", "constant 0", "ZERO", "MINUS_ONE"):
        with pytest.raises(ValueError, match=f"{name} is a constant of every program, which has no other word"):
            program.with_values({name: 5})


def test_the_width_of_words_is_the_machines_own():
    assert translate_minsky(COUNT).n_bits == 4
    assert translate_minsky(COUNT, n_bits=8).n_bits == 8
    assert translate_minsky("add r").n_bits == 16
    for n_bits in (0, 1, 64):
        with pytest.raises(ValueError, match=rf"n_bits={n_bits} must lie in 2 .. 63"):
            translate_minsky(COUNT, n_bits=n_bits)


def test_registers_hold_no_number_below_0_and_none_that_does_not_fit():
    program = translate_minsky(COUNT, name="count")
    with pytest.raises(ValueError, match="count: m=-5 is below 0; registers hold 0 and more"):
        program.with_values({"m": -5})
    with pytest.raises(ValueError, match="count: m=-5 is below 0; registers hold 0 and more"):
        program.with_values({"m": -5}, wrap=True)
    with pytest.raises(ValueError, match=r"count: m=8 does not fit words of 4 bits"):
        program.with_values({"m": 8}, wrap=True)


def test_a_register_that_would_wrap_is_refused():
    program = translate_minsky(COUNT, name="count")
    machine = machine_for([program])
    full = program.with_values({"n": 7})
    for run in (lambda: run_programs(machine, [full]), lambda: list(trace(machine, full, 100))):
        with pytest.raises(ProgramError, match=r"count:3:8: n comes to 8 at step 0, and words of 4 bits hold at most 7; begin"):
            run()
    endless = translate_minsky("l: add r\ngoto l", n_bits=4, name="endless")
    assert check_registers(endless, 10) == 10  # as far as it runs, and no further
    with pytest.raises(ProgramError, match="endless:1:4: r comes to 8 at step 14"):
        check_registers(endless, 100)
    assert check_registers(translate_minsky("l: goto l"), 100) == 0  # a fixed point
