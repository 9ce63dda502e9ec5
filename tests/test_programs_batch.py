"""Many programs at once: each stops at its own halt, and nothing of a neighbour is seen."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import EXAMPLES, random_subleq

import looped
from looped.backends import cpu
from looped.programs.machines import machine_for, read_program
from looped.programs.run import Outcome, run_programs
from looped.programs.subleq_plain import run_subleq

needs_engine = pytest.mark.skipif(not cpu.is_there(), reason="no C++ engine here")


def mixed_programs():
    """Programs of several lengths that halt at several loops, and one that never does."""
    programs = [read_program(EXAMPLES / "multiply.subleq").with_values(dict(x=3, y=y)) for y in (0, 2, 5)]
    programs += [read_program(EXAMPLES / f"{name}.subleq") for name in ("add", "compare")]
    return [*programs, random_subleq(5, n_cells=6, n_commands=9)]


@needs_engine
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_program_has_the_same_bits_alone_and_in_any_batch(dtype, n_threads):
    programs = mixed_programs()
    machine = machine_for(programs, dtype=dtype)
    prompts = [machine.encode(program) for program in programs]
    torch.set_num_threads(n_threads)
    how = dict(n_loops=60, exit="exact", backend="cpu")
    together = looped.solve(machine.model, prompts, **how)
    backwards = looped.solve(machine.model, prompts[::-1], **how)
    assert len(set(together.n_loops.tolist())) >= 4
    for i, prompt in enumerate(prompts):
        alone = looped.solve(machine.model, [prompt], **how)
        for batch, place in ((together, i), (backwards, len(prompts) - 1 - i)):
            assert torch.equal(alone.y[0].view(torch.uint8), batch.y[place].view(torch.uint8))
            assert alone.n_loops[0] == batch.n_loops[place]
            assert alone.status[0] == batch.status[place]


def test_each_program_of_a_batch_stops_at_its_own_halt():
    programs = mixed_programs()
    machine = machine_for(programs)
    for backend in ["eager", "cpu"] if cpu.is_there() else ["eager"]:
        for program, run in zip(programs, run_programs(machine, programs, max_loops=60, backend=backend), strict=True):
            steps, pc, memory = run_subleq(program, 60)
            assert (run.steps, run.pc, list(run.memory)) == (steps, pc, memory)
            assert run.outcome is (Outcome.HALTED if pc == program.end else Outcome.LOOP_LIMIT)
            assert run.n_loops == min(60, steps + 1)
            assert run.backend == backend


def test_the_eager_backend_keeps_programs_apart_too():
    programs = mixed_programs()
    machine = machine_for(programs, dtype=torch.float32)
    prompts = [machine.encode(program) for program in programs]
    together = looped.solve(machine.model, prompts, n_loops=20, exit="exact", backend="eager")
    alone = [looped.solve(machine.model, [prompt], n_loops=20, exit="exact", backend="eager") for prompt in prompts]
    for i, one in enumerate(alone):
        assert torch.equal(one.y[0], together.y[i])  # whole numbers leave no room for rounding
        assert one.n_loops[0] == together.n_loops[i]


@needs_engine
def test_fleq_programs_have_the_same_bits_alone_and_together():
    source = read_program(EXAMPLES / "inverse.fleq")
    programs = [source.with_values({"k": k}) for k in (1, 3, 2)]
    for dtype in (torch.float64, torch.float32):
        machine = machine_for(programs, dtype=dtype)
        together = run_programs(machine, programs, backend="cpu")
        assert [run.steps for run in together] == [7, 21, 14]
        for program, run in zip(programs, together, strict=True):
            alone = run_programs(machine, [program], backend="cpu")[0]
            assert np.array_equal(alone.memory, run.memory)
            assert alone.n_loops == run.n_loops


@needs_engine
@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**16), st.integers(2, 8), st.integers(1, 12), st.integers(3, 8)), min_size=1, max_size=5)
)
def test_random_batches_equal_the_interpreter(choices):
    programs = [
        random_subleq(seed, n_cells=n_cells, n_commands=n_commands, n_bits=12) for seed, n_cells, n_commands, _ in choices
    ]
    machine = machine_for(programs, dtype=torch.float32)
    for program, run in zip(programs, run_programs(machine, programs, max_loops=25), strict=True):
        steps, pc, memory = run_subleq(program, run.steps)
        assert (run.pc, list(run.memory)) == (pc, memory)
        assert run.outcome is not Outcome.CORRUPT
        assert steps == run.steps or program.commands[pc][2] == pc  # a command that jumps to itself and changes nothing


def test_what_cannot_run_is_refused():
    programs = mixed_programs()
    with pytest.raises(ValueError, match="max_loops=0 must be at least 1"):
        run_programs(machine_for(programs), programs, max_loops=0)
