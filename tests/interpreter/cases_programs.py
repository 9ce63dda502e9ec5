"""SUBLEQ machines on the kernels: whole numbers survive every arithmetic that their chunks allow."""

import pytest
import torch

import looped
from looped.programs.machines import machine_for
from looped.programs.run import Outcome, run_programs
from looped.programs.subleq_plain import run_subleq
from looped.programs.subleq_text import assemble_subleq

COUNTDOWN = """
.bits {bits}
x: 3
y: 5
k: {k}
one: 1
stay: 0
loop: subleq x y
      subleq one k halt
      subleq stay stay loop
"""


@pytest.fixture(autouse=True)
def _setting():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("precision", "setting"), [("fp32", "highest"), ("bf16", "medium")])
def test_programs_halt_where_the_interpreter_does(precision, setting, tiles):
    tiles(16, precision)
    torch.set_float32_matmul_precision(setting)
    programs = [assemble_subleq(COUNTDOWN.format(bits=5, k=k)) for k in (1, 2)]
    machine = machine_for(programs, dtype=torch.float32, n_layers=5)
    for program, run in zip(programs, run_programs(machine, programs, backend="triton", max_loops=20), strict=True):
        steps, pc, memory = run_subleq(program, 20)
        assert (run.outcome, run.steps, run.n_loops, run.pc) == (Outcome.HALTED, steps, steps + 1, pc)
        assert list(run.memory) == memory
        assert run.backend == "triton"


@pytest.mark.parametrize(("precision", "setting"), [("fp32", "highest"), ("bf16", "medium")])
def test_nine_layers_keep_every_bit_for_some_loops(precision, setting, tiles):
    tiles(16, precision)
    torch.set_float32_matmul_precision(setting)
    program = assemble_subleq(COUNTDOWN.format(bits=8, k=3))
    machine = machine_for([program], dtype=torch.float32)
    _, pc, memory = run_subleq(program, 3)
    state = looped.solve(machine.model, [machine.encode(program)], n_loops=3, backend="triton").y[0]
    snapshot = machine.decode(state, program)
    assert (int(snapshot.pc), list(snapshot.memory)) == (pc, memory)
    assert set(state.unique().tolist()) == {-1.0, 0.0, 1.0}
