"""The FLEQ machine: blocks, programs and the error table, against the interpreter in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import EXAMPLES, IN_PART_AND_WHOLE

from looped.backends import cpu
from looped.programs import subleq
from looped.programs.algebra import gauss_seidel_text, inverse_text, matrix_text, power_text, qr_text
from looped.programs.blocks import MatrixProduct, SigmoidSum
from looped.programs.fleq import Blocks, FleqMachine, default_product
from looped.programs.fleq_plain import check_ranges, run_fleq
from looped.programs.fleq_text import assemble_fleq
from looped.programs.learning import linear_sgd_text, network_text, sgd_network
from looped.programs.machines import check_program, machine_for, read_program
from looped.programs.run import Outcome, run_programs
from looped.programs.source import ProgramError
from looped.programs.tracing import trace
from looped.programs.verification import verify

F64, F32 = torch.float64, torch.float32
NAMES = ["eager", "cpu"] if cpu.is_there() else ["eager"]
ALL = list(itertools.product(NAMES, (F64, F32)))


def product(form, power, sink):
    return MatrixProduct(form, 2.0**power, sink)


def matrix_of_condition(n, condition, seed=0):
    """Random, with singular values from `condition` down to 1: its inverse, which products are of, has entries up to 1."""
    rng = np.random.default_rng(seed)
    U, V = (np.linalg.qr(rng.normal(size=(n, n)))[0] for _ in range(2))
    return U @ np.diag(np.geomspace(condition, 1, n)) @ V


def run_one(program, backend, dtype, blocks=None, **options):
    """The program on its machine: it must halt where the interpreter does."""
    machine = machine_for([program], dtype=dtype, blocks=blocks, **options)
    max_loops = run_fleq(program, 100_000)[0] + 1
    check_program(machine, program, max_loops)
    run = run_programs(machine, [program], backend=backend, max_loops=max_loops)[0]
    steps, pc, memory = run_fleq(program, 100_000)
    assert (run.outcome, run.steps, run.n_loops, run.pc) == (Outcome.HALTED, steps, steps + 1, pc)
    return run, memory


# Blocks -----------------------------------------------------------------------------------------------------------

# The best kappa and C of each form, and the largest error that was found for matrices of products up to 0.9 (w = 4) and 1.3
# (w = 8), which the error, s^3 / (6 kappa^2) for a pair, depends on; held within 3x.
PRODUCTS = [
    (F64, 4, product("single", 24, 28), 5.1e-8),
    (F64, 8, product("single", 24, 28), 1.4e-7),
    (F64, 4, product("pair", 16, 4), 2.5e-11),
    (F64, 8, product("pair", 16, 4), 8.5e-11),
    (F64, 4, product("richardson", 8, 4), 2.1e-13),
    (F64, 8, product("richardson", 8, 4), 1.3e-12),
    (F32, 4, product("single", 10, 12), 5.3e-4),
    (F32, 8, product("single", 10, 12), 2.3e-3),
    (F32, 4, product("pair", 6, 2), 1.6e-5),
    (F32, 8, product("pair", 6, 2), 5.9e-5),
    (F32, 4, product("richardson", 2, 4), 2.8e-6),
    (F32, 8, product("richardson", 2, 4), 8.5e-6),
]


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize(("dtype", "width", "how", "error"), PRODUCTS)
def test_products_are_as_exact_as_their_form_allows(dtype, width, how, error, backend):
    programs, rng = [], np.random.default_rng(1)
    for _ in range(8):
        A, B = rng.uniform(-1, 1, (2, width, width))
        A *= (0.9 if width == 4 else 1.3) / np.abs(A.T @ B).max()
        programs.append(assemble_fleq(f"let A = {matrix_text(A)}\nlet B = {matrix_text(B)}\nmm C, A, B\nhalt"))
    machine = machine_for(programs, dtype=dtype, blocks=Blocks(("mm",), product=how))
    assert max(len(layer.heads) for layer in machine.layers) == max(3, how.n_heads)
    worst = 0.0
    for program, run in zip(programs, run_programs(machine, programs, backend=backend), strict=True):
        A, B = (program.value(name, program.memory) for name in "AB")
        off, s, size = np.abs(run["C"] - A.T @ B).max(), np.abs(A.T @ B).max(), (np.abs(A).T @ np.abs(B)).max()
        assert off < how.bound(s, width, torch.finfo(dtype).eps, size)  # its own bound
        worst = max(worst, off)
    assert worst < 3 * error


# m, then the largest relative error over 25 points of [0.21, 19] for 1 / x and of [0.021, 38] for the root.
FITS = [(8, 2.1e-2, 6e-3), (16, 3e-5, 5e-5), (32, 2.2e-7, 2.3e-7), (64, 1.5e-7, 6.5e-8), (128, 8.5e-8, 3.5e-8)]


@pytest.mark.parametrize(("m", "inverse", "root"), FITS)
def test_sigmoid_sums_beat_the_barron_rate(m, inverse, root):
    for block, lo, hi, want, exact in (
        (SigmoidSum("inv", m, 0.2, 20), 0.21, 19, inverse, lambda x: 1 / x),
        (SigmoidSum("sqrt", m, 0.02, 40), 0.021, 38, root, np.sqrt),
    ):
        x = np.geomspace(lo, hi, 25)
        error = np.abs(block(x) / exact(x) - 1).max()
        assert error < 2 * want
        assert error < 0.1 / math.sqrt(m)
        assert error <= block.error < 20 * error


@pytest.mark.parametrize(("backend", "dtype"), ALL)
def test_every_function_on_a_row(backend, dtype):
    text = """
    let x = [0.5, 2, 3.5]
    let y = [-1, 0.25, 1.5]
    inv a, x
    sqrt b, x
    sig c, y
    perc d, x
    emul e, x, y
    add f, x, y
    sub g, x, y
    copy h, y
    transpose i, x
    halt"""
    program = assemble_fleq(text)
    run, memory = run_one(program, backend, dtype)
    tolerance = 1e-6 if dtype == F64 else 1e-2  # a product of s is off by s^3 / (6 kappa^2), with kappa 64 in float32
    for name in "abcdefghi":
        assert np.abs(run[name] - program.value(name, memory)).max() < tolerance, name
    assert (run["h"] == run["y"]).all()  # a copy is to the bit


# Programs: the error table, within 3x -----------------------------------------------------------------------------

CALCULATORS = [
    (F64, product("pair", 18, 4), 2.8e-7),
    (F32, product("pair", 8, 2), 1.2e-4),
    (F32, product("richardson", 4, 4), 2.4e-5),
    (F64, product("single", 24, 28), 3.5e-7),
    (F32, product("single", 10, 12), 2.4e-3),
]


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize(("dtype", "how", "error"), CALCULATORS)
def test_the_calculator(dtype, how, error, backend):
    rng, programs = np.random.default_rng(0), []
    source = (EXAMPLES / "calculator.fleq").read_text()
    while len(programs) < (20 if backend == "cpu" else 8):
        a, b, c, d = rng.uniform(0.5, 5, 4)
        if 0.3 < (a + b - c) * d < min(18, how.largest):
            programs.append(assemble_fleq(source).with_values(dict(a=a, b=b, c=c, d=d)))
    names = ("mm", "add", "sub", "perc", "inv", "sqrt")
    machine = machine_for(programs, dtype=dtype, blocks=Blocks(names, product=how))
    assert max(len(layer.heads) for layer in machine.layers) == 64 + how.n_heads
    worst = 0.0
    for program, run in zip(programs, run_programs(machine, programs, backend=backend), strict=True):
        check_program(machine, program, 10)
        assert (run.steps, run.n_loops) == (7, 8)
        exact = program.value("result", run_fleq(program, 10)[2])
        worst = max(worst, float(abs(run["result"] / exact - 1).max()))
    assert worst < 3 * error


INVERSES = [
    (F64, 4, 10, product("pair", 16, 4), 2.0e-10),
    (F64, 4, 10, product("richardson", 8, 4), 6.9e-13),
    (F32, 4, 10, product("pair", 6, 2), 1.1e-4),
    (F32, 4, 10, product("richardson", 3, 4), 8.5e-6),
    (F64, 4, 12, product("single", 23, 18), 7.0e-8),
    (F32, 4, 12, product("single", 10, 8), 1.1e-3),
    (F64, 8, 12, product("pair", 16, 4), 4.5e-11),
    (F32, 8, 12, product("pair", 7, 4), 5.2e-5),
]


@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize(("dtype", "n", "n_iterations", "how", "error"), INVERSES)
def test_newtons_inverse(dtype, n, n_iterations, how, error, backend):
    program = assemble_fleq(inverse_text(matrix_of_condition(n, 4 if n == 4 else 2), n_iterations))
    run, memory = run_one(program, backend, dtype, Blocks(("mm", "sub"), product=how))
    assert np.abs(run["X"] - program.value("X", memory)).max() < 3 * error
    assert np.abs(run["X"] - np.linalg.inv(program.value("At", program.memory).T)).max() < 3 * error + 1e-6


@IN_PART_AND_WHOLE
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize(
    ("dtype", "how", "error"), [(F64, product("pair", 16, 4), 3.9e-11), (F32, product("pair", 6, 2), 1.9e-5)]
)
def test_power_iteration(dtype, how, error, backend, whole):
    whole = whole or backend == "cpu"
    rng = np.random.default_rng(0)
    Q = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    A = Q @ np.diag([1.0, 0.5, 0.3, 0.1]) @ Q.T
    program = assemble_fleq(power_text(A, np.ones(4), 15 if whole else 2))
    run, memory = run_one(program, backend, dtype, Blocks(("mm", "add", "sub"), product=how))
    v = run["v"][:, 0]
    assert np.abs(v - program.value("v", memory)[:, 0]).max() < 3 * error
    if whole:
        assert np.abs(v * np.sign(v @ Q[:, 0]) - Q[:, 0]).max() < 1e-4


SGDS = [(F64, product("pair", 16, 4), 2.3e-11), (F32, product("pair", 6, 2), 7.3e-6)]
# Rounding, times kappa, is most of the error, so problems differ by it: the median over five, which is above that of the table.
SGD_MEDIANS = {F64: 5.9e-11, F32: 2.8e-5}


@IN_PART_AND_WHOLE
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize(("dtype", "how", "error"), SGDS)
def test_linear_regression_by_sgd(dtype, how, error, backend, whole, request):
    if (backend, dtype, whole) == ("eager", F64, True):
        request.applymarker(pytest.mark.xfail(strict=True, reason="7.5e-11 on the first problem: 3.3 times the table's"))
    n_epochs = 20 if whole or backend == "cpu" else 2
    errors = []
    for seed in range(5 if whole else 1):
        rng = np.random.default_rng(seed)
        X, w = rng.uniform(-0.8, 0.8, (6, 4)), rng.uniform(-0.8, 0.8, 4)
        program = assemble_fleq(linear_sgd_text(X, X @ w, 0.3, n_epochs))
        run, memory = run_one(program, backend, dtype, Blocks(("mm", "sub"), product=how))
        errors.append(np.abs(run["w"] - program.value("w", memory)).max())
        plain = np.zeros(4)
        for _ in range(n_epochs):
            for x in X:
                plain -= 0.3 * (plain @ x - w @ x) * x
        assert np.abs(program.value("w", memory)[:, 0] - plain).max() < 1e-12
    assert np.median(errors) < 1.5 * SGD_MEDIANS[dtype]
    assert max(errors) < 4 * SGD_MEDIANS[dtype]
    assert errors[0] < 3 * error


XOR = np.array([[0, 0], [0, 1], [1, 0], [1, 1]]), np.array([0, 1, 1, 0])


def network(sizes, seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(a + 1, b)) for a, b in itertools.pairwise(sizes)]


def learn_xor(backend, dtype, n_epochs, n_rows=4):
    """The largest error of an output against plain SGD, and these outputs."""
    weights, data = network((2, 4, 1), 6), [part[:n_rows] for part in XOR]
    program = assemble_fleq(network_text(weights, *data, 8.0, n_epochs))
    how = product("pair", 14, 4) if dtype == F64 else product("pair", 7, 2)
    run, memory = run_one(program, backend, dtype, Blocks(("mm", "add", "sub", "emul", "sig"), product=how))
    Ws, o = sgd_network(weights, *data, 8.0, n_epochs)
    if n_epochs <= 20:  # rounding grows as the network learns, in the interpreter too
        assert np.abs(program.value("W0", memory) - Ws[0]).max() < 1e-12
        assert np.abs(program.value("W1", memory) - Ws[1][:-1]).max() < 1e-12
        assert np.abs(run["W0"] - Ws[0]).max() < (1e-7 if dtype == F64 else 2e-3)
    return np.abs(run["o"][0] - o).max(), o


XOR_ERROR = {F64: 8.7e-9, F32: 1.1e-4}


@pytest.mark.parametrize(("backend", "dtype"), ALL)
def test_xor_by_backpropagation(backend, dtype):
    error, _ = learn_xor(backend, dtype, 20) if backend == "cpu" else learn_xor(backend, dtype, 1, n_rows=2)
    assert error < 3 * XOR_ERROR[dtype]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtype", "n_epochs"), [("eager", F64, 20), ("eager", F32, 20), ("cpu", F64, 150)])
def test_xor_is_learned_as_plain_sgd_learns_it(backend, dtype, n_epochs):
    error, o = learn_xor(backend, dtype, n_epochs)
    if n_epochs == 150:
        assert error < 2e-3  # training amplifies rounding by then
        assert o.round(2).tolist() == [0.02, 0.97, 0.97, 0.03]
    else:
        assert error < 3 * XOR_ERROR[dtype]


@pytest.mark.skipif(not cpu.is_there(), reason="no C++ engine here")
def test_a_deeper_network_needs_more_loops_and_the_same_machine():
    programs = []
    for sizes in ((2, 3, 1), (2, 3, 3, 1)):
        weights = network(sizes, 1)
        programs.append(assemble_fleq(network_text(weights, *XOR, 2.0, 1), name=f"network {len(sizes) - 1}"))
    machine = machine_for(programs, blocks=Blocks(("mm", "add", "sub", "emul", "sig")))
    runs = run_programs(machine, programs)
    for program, run, sizes in zip(programs, runs, ((2, 3, 1), (2, 3, 3, 1)), strict=True):
        _, o = sgd_network(network(sizes, 1), *XOR, 2.0, 1)
        assert run.outcome is Outcome.HALTED
        assert np.abs(run["o"] - o).max() < 1e-7, program.name
    assert runs[1].steps > runs[0].steps


@IN_PART_AND_WHOLE
@pytest.mark.parametrize(("backend", "dtype"), ALL)
def test_gauss_seidel(backend, dtype, whole):
    whole = whole or backend == "cpu"
    A = np.array([[4, 1, 0.5], [1, 5, 1], [0.2, 1, 3]])
    b = np.array([1.0, 2, 3])
    n_sweeps = 8 if whole else 1
    program = assemble_fleq(gauss_seidel_text(A, b, n_sweeps))
    run, memory = run_one(program, backend, dtype)
    assert np.abs(run["x"] - program.value("x", memory)).max() < (2e-9 if dtype == F64 else 2e-4)
    if whole:
        assert np.abs(run["x"] @ A.T - b).max() < (1e-7 if dtype == F64 else 1e-3)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(not cpu.is_there(), reason="no C++ engine here")),
        pytest.param("eager", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("dtype", [F64, F32])
def test_qr(backend, dtype):
    A = matrix_of_condition(3, 3, seed=2)
    program = assemble_fleq(qr_text(A))
    how = product("pair", 16, 4) if dtype == F64 else product("pair", 7, 2)
    run, _ = run_one(program, backend, dtype, Blocks(("mm", "add", "sub"), product=how))
    tolerance = 1e-8 if dtype == F64 else 1e-3
    assert np.abs(run["Q"].T @ run["Q"] - np.eye(3)).max() < tolerance
    assert np.abs(run["Q"] @ run["R"] - A).max() < tolerance
    assert np.abs(np.tril(run["R"], -1)).max() < tolerance


def test_files_run_as_in_the_interpreter():
    for name in ("inverse.fleq", "column_sums.fleq"):
        program = read_program(EXAMPLES / name)
        run, memory = run_one(program, "auto", F64)
        assert np.abs(run.memory - memory).max() < 1e-6
    assert np.abs(run["total"] - [[12.5, 15, 18]]).max() < 1e-6


# Refusals ---------------------------------------------------------------------------------------------------------

OUT_OF_RANGE = [
    ("let a = 30\ninv b, a\nhalt", r"p:2:1: inv of 30 is outside 0.2 .. 20, where the sigmoid sum is fitted \(step 0\)"),
    ("let a = -1\nsqrt b, a\nhalt", r"p:2:1: sqrt of -1 is outside 0.02 .. 40"),
    (
        "let a = 300\nmm b, a, a\nmm c, b, b\nhalt",
        r"p:2:1: a product of 90000 is above 32768, half of kappa; build .* of at least 262144",
    ),
    ("let a = 1000\nadd b, a, a\nhalt", r"p:2:1: a number of 2000 is not below 1024"),
    ("let a = 0.5\nnop if a -> l\nl: halt", r"p:2:1: the flag is 0.5; one between 0 and 1 would half take the jump .step 0."),
]


@pytest.mark.parametrize(("text", "message"), OUT_OF_RANGE)
def test_programs_that_leave_the_range_of_a_block_are_refused(text, message):
    program = assemble_fleq(text, name="p")
    machine = machine_for([program], blocks=Blocks(("mm", "add", "inv", "sqrt")))
    for run in (check_program, trace_all):
        with pytest.raises(ProgramError, match=message):
            run(machine, program, 100)
    for run in (run_programs, verify_all):
        with pytest.raises(ProgramError, match=message):
            run(machine, [program], max_loops=100)


def trace_all(machine, program, max_loops):
    return list(trace(machine, program, max_loops))


def verify_all(machine, programs, **options):
    return [verify(machine, program, **options) for program in programs]


def test_a_program_may_be_run_unchecked():
    program = assemble_fleq("let a = 0.05\ninv b, a\nhalt", name="p")
    machine = machine_for([program])
    run = run_programs(machine, [program], check=False)[0]
    assert run["b"] < 7  # not 20: the sum is flat there
    assert not verify(machine, program, tolerance=1.0, check=False).is_equal
    assert [row.text for row in trace(machine, program, 5, check=False)] == ["b = inv(a)", "halt"]


def test_thousands_of_subleq_programs_are_not_interpreted_first(monkeypatch):
    def fail(*_):
        raise AssertionError

    monkeypatch.setattr(subleq, "check_registers", fail)
    program = read_program(EXAMPLES / "add.subleq")
    assert run_programs(machine_for([program]), [program])[0].outcome is Outcome.HALTED


def test_constants_have_no_other_value():
    program = assemble_fleq("let A = [1, 2]\ntranspose B, A\nhalt", name="p")
    for name in ("ZERO", "ONE", "identity of transpose"):
        with pytest.raises(ValueError, match=f"p: {name} is a constant of every program, which has no other value"):
            program.with_values({name: 1})


def test_ranges_are_checked_as_far_as_the_program_runs():
    program = assemble_fleq("let k = 3\nl: sub k, k, ONE\nnop if k -> e\njmp l\ne: halt")
    assert check_ranges(machine_for([program]), program, 100) == run_fleq(program, 100)[0] == 9
    assert check_ranges(machine_for([program]), program, 4) == 4
    still = assemble_fleq("let k = -1\nl: copy k, k if k -> l\nhalt")
    assert check_ranges(machine_for([still]), still, 10**9) == 0  # a fixed point: the machine halts there too


REFUSED = [
    (dict(width=0, address_bits=5), "width=0 must lie in 1 .. 64"),
    (dict(width=4, address_bits=15), "address_bits=15 must lie in 2 .. 14"),
    (dict(width=4, address_bits=5, dtype=torch.bfloat16), "dtype=torch.bfloat16 does not keep data"),
    (dict(width=4, address_bits=5, lam=30.0), "lam=30.0 must lie in 60 .. 1000 in torch.float64"),
]


@pytest.mark.parametrize(("sizes", "message"), REFUSED)
def test_machines_that_cannot_be_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        FleqMachine(**sizes)


def test_programs_that_do_not_fit_are_refused():
    program = read_program(EXAMPLES / "inverse.fleq")
    for machine, message in [
        (FleqMachine(2, 6), "has matrices of 3 rows or columns, the machine takes 2"),
        (FleqMachine(3, 6, blocks=Blocks(("mm",))), "inverse.fleq uses sub, and the machine has mm"),
        (FleqMachine(3, 4), r"inverse.fleq needs 35 tokens, and 4 position bits tell 16 apart"),
    ]:
        with pytest.raises(ValueError, match=message):
            run_programs(machine, [program])
    with pytest.raises(ValueError, match="the Triton kernels multiply in bf16, tf32 or bf16x3"):
        run_programs(machine_for([program]), [program], backend="triton")
    with pytest.raises(ValueError, match="the Triton kernels multiply in bf16, tf32 or bf16x3"):
        verify(machine_for([program]), program, backend="triton")
    for precision in ("high", "medium"):
        torch.set_float32_matmul_precision(precision)
        try:
            with pytest.raises(
                ValueError, match=r"need full float32, and PyTorch is set to round factors .* call torch.set_float32"
            ):
                run_programs(machine_for([program], dtype=F32), [program], backend="eager")
            assert "full float32" in machine_for([program], dtype=F32).why_not_backend("graph")
            assert machine_for([program]).why_not_backend("eager") is None
            assert machine_for([program], dtype=F32).why_not_backend("cpu") is None
        finally:
            torch.set_float32_matmul_precision("highest")
    for blocks, message in [(("mm", "mm"), "stands twice"), (("mul",), "'mul' is not one of")]:
        with pytest.raises(ValueError, match=message):
            Blocks(blocks)
    with pytest.raises(ValueError, match="A is 3 x 3, got 1 x 2"):
        assemble_fleq("let A = ZEROS (3, 3)\nhalt").with_values({"A": [1, 2]})
    with pytest.raises(ValueError, match="machine_for: n_layers is not of FLEQ machines; leave it out"):
        machine_for([program], n_layers=5)
    with pytest.raises(ValueError, match="needs 0 < lo < hi"):
        SigmoidSum("inv", 8, 2.0, 1.0)(np.ones(1))


# Properties -------------------------------------------------------------------------------------------------------


@st.composite
def fleq_programs(draw):
    """Random matrices and commands on them, with a jump forward now and then; numbers stay below some tens."""
    seed, n = draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 3))
    rng = np.random.default_rng(seed)
    lines = [f"let {name} = {matrix_text(rng.uniform(-1, 1, (n, n)).round(3))}" for name in "ABC"]
    lines += ["let r = [" + ", ".join(map(str, rng.uniform(-1, 1, n).round(3))) + "]", f"let f = {rng.integers(-1, 2)}"]
    n_commands = draw(st.integers(1, 7))
    for i in range(n_commands):
        to, a, b = rng.choice(list("ABC"), 3)
        command = rng.choice(["mm", "add", "sub", "transpose", "copy", "emul", "column"])
        text = {
            "transpose": f"transpose {to}, {a}",
            "copy": f"copy {to}, {a}",
            "emul": f"emul r, {a}, {b}",
            "column": f"copy {to}.{rng.integers(n)}, {a}.{rng.integers(n)}",
        }.get(command, f"{command} {to}, {a}, {b}")
        lines.append(f"l{i}: {text} if f -> l{rng.integers(i + 1, n_commands + 1)}")
    return "\n".join([*lines, f"l{n_commands}: halt"])


@settings(max_examples=15, deadline=None)
@given(fleq_programs())
def test_random_programs_take_the_interpreters_path(text):
    program = assemble_fleq(text)
    machine = machine_for([program], blocks=Blocks(("mm", "add", "sub", "emul"), product=default_product(F64, "richardson")))
    result = verify(machine, program, tolerance=1e-6, max_loops=20)
    assert result.is_equal, str(result.difference)
    assert result.halted
