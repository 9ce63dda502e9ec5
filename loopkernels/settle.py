"""The end of a loop whose M is made of ordinary kernels: norms, the stopping rule, and the states that go on.

Three small launches a loop with no word to the host, so that many loops fit into one CUDA graph: `measure` sums a prompt's
squares chunk by chunk, `decide` judges every prompt (`loopkernels.stop`), `advance` moves the states of those that had run. A
prompt that has ended is held: nothing of it is written again.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from loopkernels.launch import Stop
from loopkernels.stop import judge, recall, remember

BLOCK = 1024  # numbers that a program of `measure` and `advance` takes at a time
MOST_CHUNKS = 64
LANES = 16  # prompts that a program of `decide` judges
SUMS = 3  # of a chunk: squares of the change, squares of the new numbers, how many have changed


@triton.jit(do_not_specialize=("n", "span", "n_chunks"))
def measure(new, old, sums, n, span, n_chunks, BLOCK: tl.constexpr):
    """sums [B, n_chunks, 3] of new and old [B, n]; a chunk is `span` numbers."""
    prompt = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    change = tl.zeros([BLOCK], tl.float32)
    size = tl.zeros([BLOCK], tl.float32)
    differing = tl.zeros([BLOCK], tl.float32)
    for at in range(0, span, BLOCK):
        i = chunk.to(tl.int64) * span + at + tl.arange(0, BLOCK)
        a = tl.load(new + prompt * n + i, mask=i < n, other=0.0).to(tl.float32)
        b = tl.load(old + prompt * n + i, mask=i < n, other=0.0).to(tl.float32)
        change += (a - b) * (a - b)
        size += a * a
        differing += (a.to(tl.int32, bitcast=True) != b.to(tl.int32, bitcast=True)).to(tl.float32)
    place = sums + (prompt * n_chunks + chunk) * 3
    tl.store(place, tl.sum(change, 0))
    tl.store(place + 1, tl.sum(size, 0))
    tl.store(place + 2, tl.sum(differing, 0))


@triton.jit
def total(sums, prompt, running, n_chunks, which: tl.constexpr, CHUNKS: tl.constexpr):
    """A sum over all chunks of every prompt, in an order of the prompt's own."""
    chunk = tl.arange(0, CHUNKS)
    mask = running[:, None] & (chunk < n_chunks)[None, :]
    return tl.sum(tl.load(sums + (prompt[:, None] * n_chunks + chunk[None, :]) * 3 + which, mask=mask, other=0.0), 1)


@triton.jit(do_not_specialize=("n_prompts", "n_chunks", "n_read_chunks", "check_every", "min_loops", "n_passes", "window"))
def decide(
    sums, read_sums, ints, floats, moves, noted, limit,
    n_prompts, n_chunks, n_read_chunks, check_every, min_loops, n_passes, window, tol, phi,
    LANES: tl.constexpr, CHUNKS: tl.constexpr, RULE: tl.constexpr, ON_STALL: tl.constexpr, ENDLESS: tl.constexpr,
):  # fmt: skip
    """One step of docs/exits.md for the prompts that have not ended and have run fewer than limit [1] loops.

    moves [B]: 0 where a prompt is held, 1 where it goes on from F, 2 from halfway to F. noted [B]: 1 where its predictions are
    those of the last check from now on.
    """
    prompt = (tl.program_id(0) * LANES + tl.arange(0, LANES)).to(tl.int64)
    here = prompt < n_prompts
    n_loops = tl.load(limit)
    done = tl.load(ints + prompt * 8 + 1, mask=here, other=1)
    running = here & (done == 0) & (tl.load(ints + prompt * 8, mask=here, other=0) < n_loops)
    zero = tl.zeros([LANES], tl.int32)
    nothing = tl.zeros([LANES], tl.float32)
    counters = recall(ints, floats, prompt, running.to(tl.int32), (zero, zero, zero, zero, zero, zero, nothing, nothing))
    t = counters[0] + 1
    damped = counters[4]
    counters = (t, counters[1], counters[2], counters[3], counters[4], counters[5], counters[6], counters[7])
    g2 = total(sums, prompt, running, n_chunks, 0, CHUNKS)
    n2 = total(sums, prompt, running, n_chunks, 1, CHUNKS)
    differing = total(sums, prompt, running, n_chunks, 2, CHUNKS)
    change2 = nothing
    size2 = nothing
    if RULE == "readout":
        change2 = total(read_sums, prompt, running, n_read_chunks, 0, CHUNKS)
        size2 = total(read_sums, prompt, running, n_read_chunks, 1, CHUNKS)
    counters, _, status, done, residual = judge(
        counters, g2, n2, differing, change2, size2, n_loops, check_every, min_loops, n_passes, window, tol, phi,
        RULE, ON_STALL, ENDLESS,
    )  # fmt: skip
    remember(ints, floats, prompt, running, counters, status, done, residual)
    tl.store(moves + prompt, tl.where(running, 1 + damped, 0), mask=here)
    tl.store(noted + prompt, (running & (t % check_every == 0)).to(tl.int32), mask=here)


@triton.jit(do_not_specialize=("n", "span"))
def advance(image, state, final, moves, n, span, BLOCK: tl.constexpr, DAMPS: tl.constexpr):
    """final and state [B, n] become image, or the state goes halfway to it, where moves says so. Without DAMPS they are one
    tensor."""
    prompt = tl.program_id(0).to(tl.int64)
    move = tl.load(moves + prompt)
    if move > 0:
        for at in range(0, span, BLOCK):
            i = tl.program_id(1).to(tl.int64) * span + at + tl.arange(0, BLOCK)
            f = tl.load(image + prompt * n + i, mask=i < n, other=0.0)
            tl.store(final + prompt * n + i, f, mask=i < n)
            if DAMPS:
                y = tl.load(state + prompt * n + i, mask=i < n, other=0.0).to(tl.float32)
                half = y + 0.5 * (f.to(tl.float32) - y)
                tl.store(state + prompt * n + i, tl.where(move == 2, half, f.to(tl.float32)).to(f.dtype), mask=i < n)


def chunks_of(n: int) -> tuple[int, int]:
    """(chunks, numbers in each) of a prompt of n numbers, by n alone."""
    n_chunks = max(1, min(MOST_CHUNKS, -(-n // BLOCK)))
    return n_chunks, max(1, -(-n // (n_chunks * BLOCK))) * BLOCK


class Settler:
    """What `decide` needs of a batch of n_prompts, in memory that stays where it is.

    ints, floats: the prompts' memory (`loopkernels.stop`). limit: int32 [1], loops in all; 0 holds every prompt. moves, noted:
    what the last step decided.
    """

    def __init__(self, ints: Tensor, floats: Tensor, stop: Stop) -> None:
        self.ints, self.floats, self.stop = ints, floats, stop
        zeros = ints.new_zeros(len(ints))
        self.moves, self.noted, self.limit = zeros, zeros.clone(), ints.new_zeros(1)

    def step(self, image: Tensor, state: Tensor, final: Tensor, read: Tensor | None = None, last: Tensor | None = None) -> None:
        """One loop's end: image is F = M(state), [B, ...]; state and final move on. read: predictions of F, and last those of
        the last check (float32), where the rule is "readout"."""
        stop, n_prompts = self.stop, len(image)
        if not image.numel():
            return
        sums, n_chunks = self._sums(image, state)
        read_sums, n_read_chunks = sums, 1
        if stop.rule == "readout":
            assert read is not None
            assert last is not None
            read_sums, n_read_chunks = self._sums(read, last)
        decide[(-(-n_prompts // LANES),)](
            sums, read_sums, self.ints, self.floats, self.moves, self.noted, self.limit,
            n_prompts, n_chunks, n_read_chunks, stop.check_every, stop.min_loops, stop.n_passes, stop.window,
            0.0 if math.isinf(stop.tol) else stop.tol, stop.phi,
            LANES=LANES, CHUNKS=triton.next_power_of_2(max(n_chunks, n_read_chunks)), RULE=stop.rule, ON_STALL=stop.on_stall,
            ENDLESS=math.isinf(stop.tol),
        )  # fmt: skip
        self._advance(image, state, final, self.moves)
        if read is not None and last is not None:
            self._advance(read, last, last, self.noted)

    def keep(self, read: Tensor, kept: Tensor) -> None:
        """kept [B, ...] becomes read where a prompt has run the last loop."""
        self._advance(read, kept, kept, self.moves)

    def _sums(self, new: Tensor, old: Tensor) -> tuple[Tensor, int]:
        n = new[0].numel()
        n_chunks, span = chunks_of(n)
        sums = torch.empty(len(new), n_chunks, SUMS, device=new.device)
        measure[(len(new), n_chunks)](new.contiguous(), old, sums, n, span, n_chunks, BLOCK=BLOCK)
        return sums, n_chunks

    def _advance(self, image: Tensor, state: Tensor, final: Tensor, moves: Tensor) -> None:
        n = image[0].numel()
        n_chunks, span = chunks_of(n)
        grid = (len(image), n_chunks)
        advance[grid](image.contiguous(), state, final, moves, n, span, BLOCK=BLOCK, DAMPS=state is not final)
