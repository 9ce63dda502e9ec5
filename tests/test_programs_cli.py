"""`looped run`, `looped verify`, `looped machine`, traces and pictures."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from programs import EXAMPLES

import looped.engine as engine
from looped.cli import main
from looped.loop import Interrupted, Status
from looped.programs import commands
from looped.programs.describe import describe, used_sizes
from looped.programs.fleq import Blocks, FleqMachine
from looped.programs.machines import machine_for, read_program
from looped.programs.pictures import draw_layers, layer_states
from looped.programs.subleq import SubleqMachine
from looped.programs.tracing import trace
from looped.programs.verification import Difference, verify


def looped(*arguments, code=0):
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def example(name):
    return EXAMPLES / name


def test_run_prints_what_became_of_a_program():
    output = looped("run", example("multiply.subleq"), "--set", "x=3", "--set", "y=4", "--dtype", "float32")
    assert "multiply.subleq: halted after" in output
    assert "z = 12" in output
    output = looped("run", example("sort.subleq"), "--set", "list=3,1,2,9,8,7")
    assert "list = [1 2 3 7 8 9]" in output
    output = looped("run", example("subtract.minsky"), "--set", "x=5", "--set", "y=2")
    assert "x = 3" in output


def test_run_gives_json_and_a_trace():
    result = json.loads(looped("run", example("add.subleq"), "--json", "--trace"))
    assert (result["outcome"], result["steps"], result["n_loops"], result["memory"]["z"]) == ("halted", 6, 7, 42)
    assert [row["loop"] for row in result["trace"]] == [1, 2, 3, 4, 5, 6]
    assert result["trace"][1] == dict(loop=2, command=1, line=8, text="t -= x", changes={"t": -20}, next=2)
    several = json.loads(looped("run", example("add.subleq"), example("compare.subleq"), "--json"))
    assert [result["program"] for result in several] == ["add.subleq", "compare.subleq"]


def test_a_picture_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    for command in ("run", "machine"):
        output = looped(command, example("add.subleq"), "--picture", tmp_path / "run.doc", code=2)
        assert "the suffix must be one of" in output
        output = looped(command, example("add.subleq"), "--picture", tmp_path / "none" / "run.png", code=2)
        assert "there is no folder" in output


def test_ctrl_c_says_how_many_programs_had_ended(monkeypatch):
    solve = engine.solve

    def interrupted(*args, **options):
        result = solve(*args, **options)
        result.status[1] = Status.INTERRUPTED
        raise Interrupted(result)

    monkeypatch.setattr(engine, "solve", interrupted)
    output = looped("run", example("add.subleq"), example("copy.subleq"), code=130)
    assert "looped: interrupted: 1 of 2 programs had ended; --max-loops N ends the others after N commands" in output


def test_a_state_that_is_not_finite_has_no_words_to_show(monkeypatch, tmp_path):
    make = commands._machine

    def broken(*args):
        machine = make(*args)
        with torch.no_grad():
            machine.model.core[8].mlp.proj.bias[0] = torch.nan
        return machine

    monkeypatch.setattr(commands, "_machine", broken)
    output = looped("run", example("add.subleq"), "--trace", "--picture", tmp_path / "run.png", code=4)
    assert output.splitlines()[0].startswith("add.subleq: corrupt after 1 steps (1 loops, ")
    assert len(output.splitlines()) == 1
    assert json.loads(looped("run", example("add.subleq"), "--json", code=4))["memory"] is None


def test_run_shows_a_table_of_loops_and_draws_a_picture(tmp_path):
    output = looped("run", example("inverse.fleq"), "--trace", "--picture", tmp_path / "run.png", "--set", "k=1")
    assert "T = At^T X" in output
    assert (tmp_path / "run.png").stat().st_size > 5000


def test_a_formula_runs_without_a_file():
    values = [part for value in ("a=6", "b=2.5", "c=4", "d=1.5") for part in ("--set", value)]
    output = looped("run", "--formula", "sqrt(1/((a+b-c)*d))/100", *values)
    assert "halted after 7 steps" in output
    assert f"result = [[{(1 / 6.75) ** 0.5 / 100:.6f}" in output
    assert "'a' has no value; give one with --set a=" in looped("run", "--formula", "a+1", code=2)
    assert "give program files, or --formula" in looped("run", code=2)


def test_options_of_the_other_machine_are_refused():
    assert "--terms is not of SUBLEQ machines" in looped("run", example("add.subleq"), "--terms", "8", code=2)
    assert "--layers is not of FLEQ machines" in looped("machine", example("inverse.fleq"), "--layers", "5", code=2)
    assert "--bits is of a machine without a program" in looped("machine", example("add.subleq"), "--bits", "8", code=2)
    for name, value in (("kind", "fleq"), ("width", 3), ("functions", "mm"), ("address-bits", 6)):
        output = looped("machine", example("add.subleq"), f"--{name}", value, code=2)
        assert f"--{name} is of a machine without a program" in output
    assert "--width is not of SUBLEQ machines" in looped("machine", "--width", "3", code=2)
    assert "--functions is not of SUBLEQ machines" in looped("machine", "--kind", "subleq", "--functions", "mm", code=2)
    assert "--bits is not of FLEQ machines" in looped("machine", "--kind", "fleq", "--bits", "8", code=2)
    assert "--functions: 'mul' is not one of mm, emul" in looped("machine", "--kind", "fleq", "--functions", "mm,mul", code=2)
    assert "--loop says which loop --picture draws" in looped("machine", example("add.subleq"), "--loop", "2", code=2)
    assert "--picture is of one SUBLEQ program" in looped("machine", example("inverse.fleq"), "--picture", "x.png", code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--formula", "a + 1", "--set", "a=1,2"), "'a' takes one number, got [1, 2]"),
        (("--formula", "a + 1", "--set", "a=1", "--set", "b=2"), "the formula has no 'b'"),
        (("--formula", "a**1e999", "--set", "a=1"), "powers are whole numbers of 1 .. 64"),
        (("--formula", "2", "--wrap"), "--wrap is of .subleq programs"),
        ((example("inverse.fleq"), "--wrap"), "--wrap is of .subleq programs"),
        ((example("subtract.minsky"), "--wrap"), "--wrap is of .subleq programs"),
        ((example("subtract.minsky"), "--set", "x=-1"), "subtract.minsky: x=-1 is below 0; registers hold 0 and more"),
        ((example("subtract.minsky"), "--set", "constant 1=2"), "constant 1 is a constant of every program"),
        ((example("add.subleq"), "--set", "ZERO=2"), "add.subleq: ZERO is a constant of every program"),
        ((example("inverse.fleq"), "--set", "ONE=2"), "inverse.fleq: ONE is a constant of every program"),
        ((example("inverse.fleq"), "--kappa", "0"), "kappa=0 must be a number above 0"),
        ((example("inverse.fleq"), "--kappa", "nan"), "kappa=nan must be a number above 0"),
        ((example("inverse.fleq"), "--kappa", "inf"), "kappa=inf must be a number above 0"),
        ((example("inverse.fleq"), "--kappa", "1e300"), "kappa=1e+300 rounds products to"),
        ((example("sort.subleq"), "--set", "list=1.5,2"), "list takes whole numbers, got 1.5"),
    ],
)
def test_values_that_mean_nothing_are_refused(arguments, message):
    assert message in looped("run", *arguments, code=2)


def test_a_program_that_is_no_text_is_named(tmp_path):
    (tmp_path / "b.subleq").write_bytes(b"\xff\xfe")
    assert "b.subleq: a program is UTF-8 text; byte 0 is not" in looped("run", tmp_path / "b.subleq", code=2)


def test_exit_codes():
    assert "loop limit after 5 steps" in looped("run", example("fibonacci.subleq"), "--max-loops", "5", code=3)
    assert "there is no cell named 'nn'" in looped("run", example("fibonacci.subleq"), "--set", "nn=1", code=2)
    assert "--set x takes a number" in looped("run", example("add.subleq"), "--set", "x=[1", code=2)
    for value in ("[" * 100_000, "9" * 5000):
        output = looped("run", example("add.subleq"), "--set", f"x={value}", code=2)
        assert "--set x takes a number" in output
        assert f"({len(value):,} characters)" in " ".join(output.split())
        assert len(output) < 1000
    assert "--tolerance nan is no number" in looped("verify", example("add.subleq"), "--tolerance", "nan", code=2)
    assert "--functions: '' is not one of" in looped("machine", "--kind", "fleq", "--functions", "", code=2)
    small = ("machine", "--kind", "fleq", "--width", 64, "--address-bits")
    assert "--width 64 has 70; give at least 7" in " ".join(looped(*small, 2, code=2).split())
    assert "SUBLEQ and FLEQ programs need a machine each" in looped(
        "run", example("add.subleq"), example("inverse.fleq"), code=2
    )
    assert "--trace and --picture are of one program" in looped(
        "run", example("add.subleq"), example("add.subleq"), "--trace", code=2
    )
    output = looped("run", example("calculator.fleq"), "--set", "a=500", code=2)
    assert "calculator.fleq:9:1: inv of 747.75 is outside 0.2 .. 20" in output
    assert "the Triton kernels multiply in bf16" in looped("run", example("inverse.fleq"), "--backend", "triton", code=2)


def test_a_mistake_in_a_program_is_one_line(tmp_path):
    path = tmp_path / "wrong.subleq"
    path.write_text("x: 1\nsubleq x y\n")
    output = looped("run", path, code=2)
    assert output == "looped: wrong.subleq:2:10: there is no cell named 'y'; choose from x, ZERO, MINUS_ONE\n"
    path.write_text("x: 40000\nhalt\n")
    assert "use --wrap" in looped("run", path, code=2)
    assert "x = -25536" in looped("run", path, "--wrap")


def test_verify_says_equal_or_shows_the_first_difference():
    output = looped("verify", example("add.subleq"), example("divide.subleq"), "--layers", "5")
    assert "add.subleq: equal for 7 loops, to its halt" in output
    assert "inverse.fleq: equal for" in looped("verify", example("inverse.fleq"), "--set", "k=1")
    program = read_program(example("add.subleq"))
    machine = machine_for([program])
    with torch.no_grad():  # the lowest bits of a difference stay those of before
        machine.model.core[2].mlp.proj.weight[list(machine.layout["VB"])] = 0.0
    result = verify(machine, program)
    assert result.difference == Difference(2, "t", -64, -20)
    assert str(result.difference) == "loop 2: t is -64 on the machine and -20 in the interpreter"
    assert (result.is_equal, result.n_loops) == (False, 2)


def test_verify_gives_json():
    result = json.loads(looped("verify", example("add.subleq"), "--json"))
    expected = dict(program="add.subleq", is_equal=True, n_loops=7, halted=True, difference=None, error=0.0)
    assert result == expected
    one, other = json.loads(looped("verify", example("add.subleq"), example("compare.subleq"), "--json"))
    assert (one["program"], other["program"]) == ("add.subleq", "compare.subleq")
    result = json.loads(looped("verify", example("inverse.fleq"), "--set", "k=1", "--tolerance", "1e-14", "--json", code=1))
    assert not result["is_equal"]
    assert set(result["difference"]) == {"loop", "what", "machine", "interpreter"}
    assert result["difference"]["what"].startswith("T[")
    assert 0 < abs(result["difference"]["machine"] - result["difference"]["interpreter"]) < 1e-9


def test_verify_names_the_number_that_is_off():
    output = looped("verify", example("inverse.fleq"), "--set", "k=1", "--tolerance", "1e-14", code=1)
    assert "on the machine and" in output
    assert output.startswith("inverse.fleq: loop 1: T[")


def test_machine_tells_sizes_read_off_the_weights():
    facts = json.loads(looped("machine", example("sort.subleq"), "--json"))
    assert (facts["layers"], facts["heads"], facts["paper"]) == (9, 2, [9, "2"])
    assert facts["lambda"] >= 12 > facts["least_lambda"] > 2.4
    assert facts["most_word_bits"] == {"float64": 63, "float32": 63, "bfloat16": 15, "float16": 24}
    assert [layer["heads"] for layer in facts["per_layer"]] == [1, 2, 0, 0, 0, 1, 0, 0, 0]
    assert "in the paper" in looped("machine", "--bits", "8", "--address-bits", "4", "--layers", "5")
    facts = json.loads(looped("machine", example("calculator.fleq"), "--json", "--terms", "16"))
    assert (facts["layers"], facts["heads"], facts["paper"]) == (8, 34, [12, "m"])
    assert facts["inv"]["relative_error"] < 2e-4


def test_a_fleq_machine_is_described_without_a_program():
    how = ("--kind", "fleq", "--width", "5", "--address-bits", "7", "--functions", "mm,inv, add", "--terms", "16", "--json")
    facts = json.loads(looped("machine", *how))
    assert (facts["kind"], facts["matrix"], facts["most_tokens"], facts["functions"]) == ("fleq", 5, 128, ["mm", "add", "inv"])
    assert (facts["layers"], facts["heads"], facts["inv"]["terms"]) == (8, 18, 16)
    facts = json.loads(looped("machine", "--kind", "fleq", "--dtype", "float32", "--lambda", "50", "--json"))
    assert (facts["matrix"], facts["functions"], facts["dtype"]) == (4, ["mm", "add", "sub"], "float32")
    assert 50 <= facts["lambda"] < 51
    facts = json.loads(looped("machine", "--layers", "5", "--lambda", "4", "--json"))
    assert (facts["kind"], facts["layers"], facts["word_bits"]) == ("subleq", 5, 16)


def test_layer_and_head_counts_beside_the_papers():
    subleq = describe(SubleqMachine(16, 6))
    algebra = describe(FleqMachine(4, 6))
    learning = describe(FleqMachine(5, 8, blocks=Blocks(("mm", "add", "sub", "emul", "sig"))))
    calculator = describe(FleqMachine(1, 5, blocks=Blocks(("mm", "add", "sub", "perc", "inv", "sqrt"))))
    assert [(facts["layers"], facts["heads"]) for facts in (subleq, calculator, algebra, learning)] == [
        (9, 2),
        (8, 66),
        (8, 3),
        (8, 3),
    ]
    assert describe(SubleqMachine(16, 6, n_layers=5))["heads"] == 2
    assert subleq["width"] == 8 * 6 + 3 * 16 + 32 + 3
    assert all(layer["hidden"] <= subleq["hidden"] for layer in used_sizes(SubleqMachine(16, 6)))


def test_one_command_on_its_way_through_the_layers(tmp_path):
    program = read_program(example("add.subleq"))
    machine = machine_for([program])
    states = layer_states(machine, program, 2)
    assert len(states) == 10
    scratch = [state[0] for state in states]
    a, b, _ = program.tokens_of(program.commands[1])
    assert np.allclose(scratch[1][list(machine.layout["PA"])], states[0][a, list(machine.layout["POS"])])
    assert np.allclose(scratch[2][list(machine.layout["VA"])], states[0][a, list(machine.layout["MEM"])])
    assert np.allclose(states[6][b, list(machine.layout["MEM"])], scratch[5][list(machine.layout["VB"])])
    draw_layers(machine, program, 2, tmp_path / "layers.png")
    assert (tmp_path / "layers.png").stat().st_size > 5000


def test_a_trace_leaves_out_the_loop_that_confirms():
    program = read_program(example("copy.subleq"))
    rows = list(trace(machine_for([program]), program, 100))
    assert [row.text for row in rows] == ["y -= y", "t -= t", "t -= x", "y -= t", "halt"]
    assert rows[-1].next == program.end


@pytest.mark.parametrize("command", ["run", "verify", "machine"])
def test_help(command):
    assert "--product" in looped(command, "--help")
