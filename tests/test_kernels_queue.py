"""The queue and refill protocol of the fused kernels as a model in plain Python, under adversarial interleavings.

Triton's interpreter runs programs one after another, so the first one drains the queue. Here every atomic step of every
program is a point at which another program may run: a schedule drawn by hypothesis decides which.
"""

import hypothesis.strategies as st
from hypothesis import given, settings


class Memory:
    """What programs share: the queue's counter, the order of prompts, loops needed, and who wrote which result how often."""

    def __init__(self, loops, done):
        self.queue, self.order = 0, list(range(len(loops)))
        self.loops, self.done = loops, done
        self.written = [0] * len(loops)
        self.ran = [0] * len(loops)


def claim(memory):
    """`loopkernels.loop.claim`, one atomic step at a time."""
    while True:
        place = memory.queue  # atomic_add: read and write in one step
        memory.queue += 1
        yield
        if place >= len(memory.order):
            return -1
        candidate = memory.order[place]
        yield
        if not memory.done[candidate] and memory.loops[candidate] > 0:
            return candidate


def program(memory, n_slots, max_steps):
    """`loopkernels.loop.loop_tile`: fill the empty slots, loop all live ones, write those that leave, refill."""
    slots, counted, empty, step = [-1] * n_slots, [0] * n_slots, False, 0

    def fill():
        nonlocal empty
        for i in range(n_slots):
            if slots[i] < 0 and not empty:
                taken = yield from claim(memory)
                if taken < 0:
                    empty = True
                else:
                    slots[i], counted[i] = taken, 0

    yield from fill()
    while any(slot >= 0 for slot in slots) and step < max_steps:
        for i, prompt in enumerate(slots):
            if prompt >= 0:
                counted[i] += 1
                memory.ran[prompt] += 1
                yield
        leaving = [i for i, prompt in enumerate(slots) if prompt >= 0 and counted[i] >= memory.loops[prompt]]
        for i in leaving:
            memory.written[slots[i]] += 1
            slots[i] = -1
            yield
        if leaving:
            yield from fill()
        step += 1


@settings(max_examples=300, deadline=None)
@given(
    loops=st.lists(st.integers(0, 7), max_size=12),
    done=st.lists(st.booleans(), min_size=12, max_size=12),
    n_programs=st.integers(1, 5),
    n_slots=st.sampled_from([1, 2, 4]),
    schedule=st.randoms(use_true_random=False),
)
def test_every_prompt_runs_once_to_its_end(loops, done, n_programs, n_slots, schedule):
    memory = Memory(loops, done[: len(loops)])
    max_steps = len(loops) * max(loops, default=0) + 1
    programs = [program(memory, n_slots, max_steps) for _ in range(n_programs)]
    while programs:
        running = schedule.choice(programs)
        try:
            next(running)
        except StopIteration:
            programs.remove(running)
    for prompt, needed in enumerate(loops):
        expected = needed if needed > 0 and not memory.done[prompt] else 0
        assert memory.ran[prompt] == expected
        assert memory.written[prompt] == (expected > 0)
    assert memory.queue >= len(loops)


def test_a_slow_prompt_holds_up_no_other():
    """One program is stuck in a long prompt; the others finish all the rest."""
    memory = Memory([1000, *[1] * 20], [False] * 21)
    stuck, quick = program(memory, 1, 10**6), program(memory, 1, 10**6)
    for _ in range(4):
        next(stuck)
    for _ in quick:
        pass
    assert memory.written == [0, *[1] * 20]
