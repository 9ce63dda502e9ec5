"""The SUBLEQ machine against the interpreter: every cell at every loop."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from programs import EXAMPLES, IN_PART_AND_WHOLE, machine_states, random_subleq

import looped
from looped.backends import cpu
from looped.model import LoopedTransformer
from looped.programs.addresses import add_small, bits_for, codes, increment, least_lambda, position
from looped.programs.circuit import Layer, Layout
from looped.programs.fleq import Blocks
from looped.programs.lists import search_text, sort_text
from looped.programs.machines import machine_for, read_program
from looped.programs.run import Outcome, run_programs
from looped.programs.subleq import SubleqMachine
from looped.programs.subleq_plain import run_subleq, subleq_states
from looped.programs.subleq_text import assemble_subleq
from looped.programs.tracing import trace
from looped.programs.verification import verify

BACKENDS = ["eager", pytest.param("cpu", marks=pytest.mark.skipif(not cpu.is_there(), reason="no C++ engine here"))]
DTYPES = [torch.float64, torch.float32]
ALL = list(itertools.product(["eager", "cpu"] if cpu.is_there() else ["eager"], DTYPES))


def hidden_layer(layer, x):
    """What a layer's hidden units add to rows x [n, d]."""
    out = np.zeros_like(x)
    for (terms, bias), targets in layer.units.items():
        total = np.full(len(x), bias)
        for row, value in terms:
            total = total + value * x[:, row]
        for row, value in targets.items():
            out[:, row] += value * np.maximum(total, 0)
    return x + out


@pytest.mark.parametrize("n_bits", [3, 6, 10])
def test_every_position_is_incremented_and_added_to(n_bits):
    layout = Layout({"P": n_bits, "ONE": 1, "K": 1, "OUT": n_bits, "SUM": n_bits})
    layer = Layer("add")
    increment(layer, layout["P"], layout.row("ONE"), layout["OUT"])
    add_small(layer, layout["P"], {layout.row("K"): 1.0}, 5, layout.row("ONE"), layout["SUM"])
    for k in range(6):
        x = np.zeros((2**n_bits, layout.width))
        x[:, layout["P"]] = np.where((np.arange(2**n_bits)[:, None] >> np.arange(n_bits)) & 1, 1.0, -1.0)
        x[:, layout.row("ONE")], x[:, layout.row("K")] = 1.0, k
        y = hidden_layer(layer, x)
        assert set(np.unique(y[:, [*layout["OUT"], *layout["SUM"]]])) == {-1.0, 1.0}
        assert (position(y[:, layout["OUT"]]) == (np.arange(2**n_bits) + 1) % 2**n_bits).all()
        assert (position(y[:, layout["SUM"]]) == (np.arange(2**n_bits) + k) % 2**n_bits).all()


def test_codes_and_the_bound_on_lambda():
    assert (position(codes(64, 6))[1:] == np.arange(1, 64)).all()
    assert not codes(64, 6)[0].any()
    assert bits_for(64) == 6
    assert bits_for(65) == 7
    assert least_lambda(4) == pytest.approx(2.17, abs=0.01)
    assert least_lambda(8) == pytest.approx(2.47, abs=0.01)


def subtractions(machine, words_a, words_b):
    """Prompts of `b -= a; if <= 0 to the end`, one for each pair of words, and the program."""
    program = assemble_subleq(f".bits {machine.n_bits}\na: 0\nb: 0\nsubleq a b halt\nhalt")
    prompts = machine.encode(program).repeat(len(words_a), 1, 1)
    for token, words in ((1, words_a), (2, words_b)):
        bits = (torch.as_tensor(words)[:, None] >> torch.arange(machine.n_bits)) & 1
        prompts[:, token, machine.layout["MEM"]] = (2.0 * bits - 1).to(machine.dtype)
    return program, prompts


@IN_PART_AND_WHOLE
@pytest.mark.parametrize("n_layers", [9, 5])
@pytest.mark.parametrize(("backend", "dtype"), ALL)
def test_all_subtractions_of_8_bits_and_their_flags_are_exact(backend, dtype, n_layers, whole):
    a, b = (words.ravel() for words in np.meshgrid(np.arange(-128, 128), np.arange(-128, 128)))
    if not whole and (backend, n_layers) != ("cpu", 9):  # of the others one in 31: odd, so that all bits are met
        a, b = a[::31], b[::31]
    machine = SubleqMachine(8, 3, n_layers=n_layers, dtype=dtype)
    program, prompts = subtractions(machine, a, b)
    result = looped.solve(machine.model, prompts, n_loops=1, backend=backend)
    snapshot = machine.decode(result.y, program)
    difference = (b - a + 128) % 256 - 128
    assert (snapshot.memory[:, 1] == difference).all()
    assert (snapshot.memory[:, 0] == a).all()
    assert (snapshot.pc == np.where(difference <= 0, 2, 1)).all()
    assert (result.y - result.y.round()).abs().max() == 0


@pytest.mark.parametrize(("backend", "dtype"), ALL)
def test_random_programs_equal_the_interpreter_in_every_cell_at_every_loop(backend, dtype):
    compare_random(range(2), 30, backend, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtype"), ALL)
def test_200_random_programs_for_300_loops(backend, dtype):
    for first in range(0, 200, 40):
        compare_random(range(first, first + 40), 300, backend, dtype)


def compare_random(seeds, n_loops, backend, dtype):
    programs = [random_subleq(seed) for seed in seeds]
    machine = machine_for(programs, dtype=dtype)
    plain = [subleq_states(program) for program in programs]
    for states in plain:
        next(states)
    visited = [set() for _ in programs]
    for loop, snapshots in machine_states(machine, programs, n_loops, backend=backend):
        for i, (pc, memory, off_grid) in enumerate(snapshots):
            assert (pc, tuple(memory)) == next(plain[i]), f"{programs[i].name}, loop {loop}"
            assert off_grid == 0
            visited[i].add(pc)
    assert max(map(len, visited)) > 5  # the programs do run about


LIBRARY = {
    "copy": (dict(x=-5), dict(y=-5)),
    "add": (dict(x=300, y=-41), dict(z=259)),
    "multiply": (dict(x=-7, y=9), dict(z=-63)),
    "divide": (dict(x=47, y=5), dict(q=9, r=2)),
    "compare": (dict(x=-3, y=9), dict(r=-1)),
    "fibonacci": (dict(n=10), dict(a=55)),
    "collatz": (dict(n=6), dict(n=1, steps=8)),
    "factorial": (dict(n=4), dict(r=24)),
    "sort": ({"list": [3, -7, 12, 0, 3, -1]}, {"list": [-7, -1, 0, 3, 3, 12]}),
    "search": (dict(key=12), dict(place=2)),
}


@pytest.mark.parametrize("name", LIBRARY)
def test_the_library_computes_what_it_says(name):
    values, expected = LIBRARY[name]
    program = read_program(EXAMPLES / f"{name}.subleq").with_values(values)
    _, pc, memory = run_subleq(program, 20_000)
    assert pc == program.end
    assert {key: program.value(key, memory) for key in expected} == expected


def library():
    return [read_program(EXAMPLES / f"{name}.subleq").with_values(values) for name, (values, _) in LIBRARY.items()]


MORE = [
    ("divide", dict(x=45, y=5), dict(q=9, r=0)),
    ("divide", dict(x=3, y=5), dict(q=0, r=3)),
    ("divide", dict(x=0, y=1), dict(q=0)),
    ("compare", dict(x=9, y=9), dict(r=0)),
    ("compare", dict(x=9, y=-9), dict(r=1)),
    ("multiply", dict(x=5, y=0), dict(z=0)),
    ("fibonacci", dict(n=0), dict(a=0)),
    ("factorial", dict(n=0), dict(r=1)),
    ("factorial", dict(n=7), dict(r=5040)),
    ("collatz", dict(n=27), dict(n=1, steps=111)),
    ("collatz", dict(n=1), dict(steps=0)),
    ("search", dict(key=5), dict(place=-1)),
    ("search", dict(key=3), dict(place=0)),
]


@pytest.mark.parametrize(("name", "values", "expected"), MORE)
def test_the_library_at_its_edges(name, values, expected):
    program = read_program(EXAMPLES / f"{name}.subleq").with_values(values)
    _, pc, memory = run_subleq(program, 400_000)
    assert pc == program.end
    assert {key: program.value(key, memory) for key in expected} == expected


def test_the_list_programs_are_what_their_makers_write():
    assert (EXAMPLES / "sort.subleq").read_text() == sort_text([5, -3, 9, 0, 2, -8])
    assert (EXAMPLES / "search.subleq").read_text() == search_text([3, -7, 12, 0], 12)


@pytest.mark.parametrize(("backend", "dtype"), ALL)
def test_the_library_runs_on_one_machine_as_in_the_interpreter(backend, dtype):
    longest, least = (150, 7) if backend == "cpu" else (40, 4)
    programs = [program for program in library() if run_subleq(program, longest)[1] == program.end]
    assert len(programs) >= least
    machine = machine_for(programs, dtype=dtype)
    for program, run in zip(programs, run_programs(machine, programs, backend=backend, max_loops=200), strict=True):
        steps, pc, memory = run_subleq(program, 200)
        assert (run.outcome, run.steps, run.pc) == (Outcome.HALTED, steps, pc), program.name
        assert run.n_loops == steps + 1  # and one that confirms the halt
        assert list(run.memory) == memory


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtype"), ALL)
def test_the_whole_library_equals_the_interpreter_in_every_cell_at_every_loop(backend, dtype):
    for program in library():
        result = verify(machine_for([program], dtype=dtype), program, max_loops=2000, backend=backend)
        assert result.is_equal, f"{program.name}: {result.difference}"
        assert result.halted, program.name


@pytest.mark.parametrize("n_loops", [300, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("backend", "dtype"), ALL)
def test_collatz_of_27_does_not_drift(backend, dtype, n_loops):
    if backend == "eager" and n_loops == 300:
        n_loops = 100
    program = read_program(EXAMPLES / "collatz.subleq").with_values({"n": 27})
    machine = machine_for([program], dtype=dtype)
    result = verify(machine, program, max_loops=n_loops, backend=backend)
    assert result.is_equal, str(result.difference)
    assert result.n_loops == n_loops
    state = looped.solve(machine.model, [machine.encode(program)], n_loops=n_loops, backend=backend).y[0]
    assert set(state.unique().tolist()) == {-1.0, 0.0, 1.0}


@pytest.mark.parametrize(
    ("n_bits", "dtype"), [(2, torch.float32), (5, torch.float64), (24, torch.float32), (63, torch.float64)]
)
def test_narrow_and_wide_words(n_bits, dtype):
    half = 2 ** (n_bits - 1)
    program = assemble_subleq(
        f".bits {n_bits}\na: {half - 1}\nb: {-half}\nc: {-half}\nd: 0\nsubleq a b\nsubleq c d\nsubleq c c\nsubleq b b\nhalt"
    )
    machine = machine_for([program], dtype=dtype)
    result = verify(machine, program, max_loops=20, backend="eager" if n_bits == 24 else "auto")
    assert result.is_equal, str(result.difference)
    assert result.halted


@pytest.mark.parametrize(("n_bits", "n_layers"), [(15, 9), (5, 5)])
def test_whole_numbers_survive_bfloat16(n_bits, n_layers):
    source = (EXAMPLES / "divide.subleq").read_text().replace("x: 47", "x: 13")
    program = assemble_subleq(source, n_bits=n_bits)
    machine = machine_for([program], dtype=torch.bfloat16, n_layers=n_layers)
    result = verify(machine, program, max_loops=60, backend="eager")
    assert result.is_equal, str(result.difference)
    assert result.halted


def test_float16_is_refused_before_anything_runs():
    program = read_program(EXAMPLES / "divide.subleq")
    machine = machine_for([program], dtype=torch.float16)
    for call in (lambda: run_programs(machine, [program]), lambda: next(trace(machine, program))):
        with pytest.raises(ValueError, match="float16; build the machine with dtype float64, float32, bfloat16"):
            call()


def test_a_trace_goes_on_to_the_halt():
    program = read_program(EXAMPLES / "divide.subleq")
    machine = machine_for([program])
    assert len(list(trace(machine, program))) == run_programs(machine, [program])[0].steps


def test_a_machine_of_five_layers_is_the_same_computer():
    programs = [read_program(EXAMPLES / f"{name}.subleq") for name in ("add", "divide", "compare")]
    for dtype in DTYPES:
        machine = machine_for(programs, dtype=dtype, n_layers=5)
        assert len(machine.model.core) == 5
        for program in programs:
            result = verify(machine, program, max_loops=200)
            assert result.is_equal, str(result.difference)
            assert result.halted


def test_weights_depend_on_sizes_alone():
    weights = [SubleqMachine(8, 5).model.state_dict() for _ in range(2)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    longer = machine_for([random_subleq(0, n_cells=20, n_commands=30)])
    other = machine_for([random_subleq(1, n_cells=25, n_commands=34)])
    assert all(torch.equal(a, b) for a, b in zip(longer.model.parameters(), other.model.parameters(), strict=True))


def test_the_smallest_lambda_that_works_is_near_its_bound():
    program = read_program(EXAMPLES / "add.subleq")
    machine = machine_for([program], lam=least_lambda(4) + 0.01, address_bits=4)
    assert verify(machine, program).is_equal
    with pytest.raises(ValueError, match=r"lam=1.5 is below 2.17, the bound for 4 position bits; take 12"):
        machine_for([program], lam=1.5, address_bits=4)


def test_a_fixed_point_that_is_not_the_end_is_a_halt_too():
    program = assemble_subleq(".bits 8\nx: 0\nhere: subleq x x here\nhalt")
    run = run_programs(machine_for([program]), [program])[0]
    assert (run.outcome, run.pc, run.steps) == (Outcome.HALTED, 0, 0)


def test_limits_and_corruption_are_told():
    program = read_program(EXAMPLES / "fibonacci.subleq")
    machine = machine_for([program])
    steps = run_subleq(program, 10_000)[0]
    run = run_programs(machine, [program], max_loops=steps - 1)[0]
    assert (run.outcome, run.steps, run.n_loops) == (Outcome.LOOP_LIMIT, steps - 1, steps - 1)
    run = run_programs(machine, [program], max_loops=steps)[0]
    assert (run.outcome, run.steps, run.n_loops) == (Outcome.HALTED, steps, steps)
    with torch.no_grad():
        machine.model.core[8].mlp.proj.bias[machine.layout.row("PC", 1)] = 0.3
    assert run_programs(machine, [program], max_loops=5)[0].outcome is Outcome.CORRUPT
    with torch.no_grad():
        machine.model.core[8].mlp.proj.bias[machine.layout.row("PC", 1)] = math.nan
    run = run_programs(machine, [program], max_loops=5)[0]
    assert (run.outcome, run.pc, run.memory, run.named_values()) == (Outcome.CORRUPT, None, None, [])
    assert (run.to_dict()["memory"], run.to_dict()["pc"]) == (None, None)
    with pytest.raises(ValueError, match="the state is not finite, so a has no value"):
        run["a"]


REFUSED = [
    (dict(n_bits=1, address_bits=4), "n_bits=1 must lie in 2 .. 63"),
    (dict(n_bits=64, address_bits=4), "must lie in 2 .. 63"),
    (dict(n_bits=16, address_bits=21), "address_bits=21 must lie in 2 .. 20"),
    (dict(n_bits=16, address_bits=4, n_layers=7), "n_layers=7 is not one of 9, 5"),
    (dict(n_bits=16, address_bits=4, dtype=torch.int8), "dtype=torch.int8 is not one of"),
    (dict(n_bits=16, address_bits=4, lam=1e4, dtype=torch.float16), "makes scores that torch.float16 does not hold"),
    (dict(n_bits=16, address_bits=4, dtype=torch.bfloat16), r"16 bits in 3 subtracting layers are chunks of 6.*carries 5"),
    (dict(n_bits=24, address_bits=4, n_layers=5, dtype=torch.float32), r"24 bits in 1 subtracting layer are chunks of 24"),
    (dict(n_bits=16, address_bits=4, lam=math.nan), "lam=nan is below"),
]


@pytest.mark.parametrize(("sizes", "message"), REFUSED)
def test_machines_that_cannot_be_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        SubleqMachine(**sizes)


def test_programs_that_do_not_fit_are_refused():
    program = read_program(EXAMPLES / "sort.subleq")
    with pytest.raises(ValueError, match=r"sort.subleq needs 148 tokens, and 6 position bits tell 64 apart"):
        run_programs(SubleqMachine(16, 6), [program])
    with pytest.raises(ValueError, match=r"sort.subleq has words of 16 bits, the machine of 8"):
        SubleqMachine(8, 8).encode(program)
    with pytest.raises(ValueError, match="words of 8, 16 bits need a machine each"):
        machine_for([program, assemble_subleq(".bits 8\nhalt")])
    wide = assemble_subleq(".cells 1048576\nhalt", name="wide.subleq")
    with pytest.raises(ValueError, match=r"wide.subleq needs 1,048,5\d\d tokens, .* at most 1,048,576; name fewer cells"):
        machine_for([program, wide])
    with pytest.raises(ValueError, match="there is no program"):
        machine_for([])
    with pytest.raises(ValueError, match="machine_for: blocks is not of SUBLEQ machines; leave it out"):
        machine_for([program], blocks=Blocks())


@pytest.mark.parametrize(("field", "value"), [("mask_kind", "causal"), ("activation", "gelu")])
def test_a_model_that_masks_or_adds_is_no_machine(field, value):
    program = read_program(EXAMPLES / "add.subleq")
    machine = machine_for([program])
    machine.model = LoopedTransformer(dataclasses.replace(machine.model.config, **{field: value})).double().eval()
    for run in (run_programs, verify_all):
        with pytest.raises(ValueError, match=f"the machine's model has {field}='{value}', and the layers of a machine need"):
            run(machine, [program])


def verify_all(machine, programs):
    return [verify(machine, program) for program in programs]
