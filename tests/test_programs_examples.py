"""The FLEQ programs among the examples that a maker writes: they are what it writes, and do what they say on a machine."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from programs import EXAMPLES

from looped.backends import cpu
from looped.cli import main
from looped.programs import (
    gauss_seidel_text,
    inverse_text,
    linear_sgd_text,
    machine_for,
    network_text,
    power_text,
    qr_text,
    read_program,
    run_programs,
)
from looped.programs.fleq_plain import run_fleq
from looped.programs.learning import sgd_network

A = np.array([[2.0, 1, 0], [1, 3, 1], [0, 1, 2]])
DOMINANT, B = np.array([[4, 1, 0.5], [1, 5, 1], [0.2, 1, 3]]), np.array([1.0, 2, 3])
POINTS = np.array([[0.8, -0.1, 0.4], [-0.5, 0.7, 0.2], [0.3, 0.6, -0.7], [-0.2, -0.8, 0.5], [0.6, 0.1, 0.1], [-0.4, 0.3, 0.9]])
WEIGHTS = np.array([0.5, -0.3, 0.8])
XOR = np.array([[0, 0], [0, 1], [1, 0], [1, 1]]), np.array([0, 1, 1, 0])
NETWORK = [
    [[-0.8, 0.2, -1.7, 0.7], [1.1, -0.5, 0.4, 0.3], [-0.4, -0.9, -2.0, 1.4]],
    [[-0.0], [2.5], [0.8], [0.3], [-0.7]],
]

EXAMPLE_TEXTS = {
    "power": power_text(A, np.ones(3), 15),
    "gauss_seidel": gauss_seidel_text(DOMINANT, B, 8),
    "qr": qr_text(A),
    "linear_sgd": linear_sgd_text(POINTS, (POINTS @ WEIGHTS).round(6), 0.5, 20),
    "xor": network_text(NETWORK, *XOR, 8.0, 100),
}


@pytest.mark.parametrize("name", EXAMPLE_TEXTS)
def test_the_examples_are_what_their_makers_write(name):
    assert (EXAMPLES / f"{name}.fleq").read_text() == EXAMPLE_TEXTS[name]


def results(name):
    """The program's matrices in the interpreter, and how many commands it took."""
    program = read_program(EXAMPLES / f"{name}.fleq")
    steps, pc, memory = run_fleq(program, 10_000)
    assert pc == program.end  # within the loops that `looped run` allows
    return {key: program.value(key, memory) for key in program.names}, steps


def test_they_compute_what_they_say():
    v = results("power")[0]["v"][:, 0]
    assert np.abs(A @ v - 4 * v).max() < 1e-3
    x = results("gauss_seidel")[0]["x"][0]
    assert np.abs(DOMINANT @ x - B).max() < 1e-6
    qr = results("qr")[0]
    assert np.abs(qr["Q"] @ qr["R"] - A).max() < 1e-9
    assert np.abs(qr["Q"].T @ qr["Q"] - np.eye(3)).max() < 1e-9
    assert np.abs(results("linear_sgd")[0]["w"][:, 0] - WEIGHTS).max() < 0.02
    outputs = results("xor")[0]["o"][0]
    assert np.abs(outputs - XOR[1]).max() < 0.1
    assert np.abs(outputs - sgd_network(NETWORK, *XOR, 8.0, 100)[1]).max() < 1e-9


@pytest.mark.parametrize("name", ["power", "gauss_seidel", "qr", "linear_sgd"])
def test_they_run_from_the_command_line(name):
    values, steps = results(name)
    output = CliRunner().invoke(main, ["run", str(EXAMPLES / f"{name}.fleq"), "--json"])
    assert output.exit_code == 0, output.output
    run = json.loads(output.output)
    assert (run["outcome"], run["steps"], run["n_loops"]) == ("halted", steps, steps + 1)
    result = {"power": "v", "gauss_seidel": "x", "qr": "R", "linear_sgd": "w"}[name]
    assert np.abs(run["memory"][result] - values[result]).max() < 1e-7


@pytest.mark.skipif(not cpu.is_there(), reason="no C++ engine here")
def test_the_network_learns_on_the_machine():
    program = read_program(EXAMPLES / "xor.fleq").with_values({"k": 3})
    run = run_programs(machine_for([program]), [program])[0]
    assert np.abs(run["o"] - sgd_network(NETWORK, *XOR, 8.0, 3)[1]).max() < 1e-7


NO_PROGRAMS = [
    (lambda: power_text(np.ones((2, 3)), [1, 1], 3), r"power_text: A must be \[2, 2\], got \[2, 3\]"),
    (lambda: power_text(np.eye(2), [1, 1, 1], 3), r"power_text: v must be \[2\], got \[3\]"),
    (lambda: power_text(np.eye(2), [0, 0], 3), "power_text: A and v must not be 0"),
    (lambda: power_text(np.eye(2), [1, 1], 0), "power_text: n_iterations=0 must be at least 1"),
    (lambda: inverse_text([1, 2], 3), r"inverse_text: A must be \[n, n\], got \[2\]"),
    (lambda: inverse_text([[np.nan]], 3), "inverse_text: A holds NaN or infinity"),
    (lambda: gauss_seidel_text(np.eye(2), [1], 3), r"gauss_seidel_text: b must be \[2\], got \[1\]"),
    (lambda: qr_text(np.ones((3, 2))), r"qr_text: A \[3, 2\] must have columns that are independent"),
    (lambda: linear_sgd_text(np.ones((3, 2)), [1, 2], 0.1, 2), r"linear_sgd_text: y must be \[3\], got \[2\]"),
    (lambda: linear_sgd_text(np.ones((0, 2)), [], 0.1, 2), r"linear_sgd_text: X must be \[n, n\], got \[0, 2\]"),
    (lambda: network_text(NETWORK[::-1], *XOR, 1.0, 1), r"network_text: weights\[0\] must be \[3, n\], got \[5, 1\]"),
    (lambda: network_text([], *XOR, 1.0, 1), "network_text: layers=0 must be at least 1"),
]


@pytest.mark.parametrize(("make", "message"), NO_PROGRAMS, ids=range(len(NO_PROGRAMS)))
def test_data_that_make_no_program_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
