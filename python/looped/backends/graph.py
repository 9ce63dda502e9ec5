"""Ordinary kernels in a CUDA graph: the eager model's own loop, and the stopping rule on the device.

For blocks too wide for the fused kernels, and for a few prompts that would leave most of the chip idle there. A graph holds
LOOPS_AT_ONCE loops on buffers that stay where they are; each prompt has its own count and its own exit, and one that has ended
is held while the others go on. The host looks once a graph, and when at least half have ended the rest goes on in a smaller
graph.

The body (`Loops.body`) says no word to the host. On a CPU, in Triton's interpreter, it runs without being captured: that is
how it is tested. Library products choose their kernels by size, so a result depends on the batch in its last bits, as with
eager.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from looped.backends import device
from looped.backends.device import (
    DTYPES,
    after_every_loop,
    is_interpreted,
    kernels,
    memory_of,
    remembered,
    stop_of,
    why_not_spec,
)
from looped.exits import PRECISION_OF, Readout
from looped.loop import LoopResult, LoopSpec, LoopState, Status, not_begun
from looped.model import LoopedTransformer, clear_padding, own_tokens
from looped.weights import weights_of

LOOPS_AT_ONCE = 8
LEAST_TO_SHRINK = 32  # prompts; the products of fewer take the same time, and a new graph takes some milliseconds
KEPT = 4  # graphs under one first weight

# What the choice for few prompts is reckoned with, on an H100 or H200; none of it has been measured (docs/kernels.md).
US_PER_KERNEL = 2.5  # of a graph's small kernels, one after the other
KERNELS_PER_LAYER, KERNELS_PER_LOOP = 11, 7
L2_BYTES_PER_US = 112e3  # that one processor reads
MATRIX_FLOP_PER_US = {"bf16": 6.0e6, "tf32": 3.0e6, "bf16x3": 2.0e6, "fp32": 0.45e6}  # of one processor in a fused kernel
LIBRARY_FLOP_PER_US = {"bf16": 2.4e6, "tf32": 1.2e6, "bf16x3": 0.2e6, "fp32": 0.2e6}  # in a library's small products

_idle: Any = WeakTensorKeyDictionary()  # the first weight: {key: Loops}, those that no call is using
_lock = threading.Lock()


def why_not(model: LoopedTransformer, spec: LoopSpec | None = None) -> str | None:
    """Why this backend cannot run the model this way, and None where it can."""
    weight = next(iter(weights_of(model).values()))
    if not device.is_on_gpu(weight) and not is_interpreted():
        return f"a CUDA graph needs a GPU and the model is on {weight.device}"
    settle = kernels("settle")
    if isinstance(settle, str):
        return settle
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph cannot be captured inside another"
    if weight.dtype not in DTYPES:
        return f"the rule on the GPU sums in float32 and the model is {weight.dtype}"
    return model.why_not_as_configured() or (None if spec is None else why_not_spec(spec))


def describe() -> str:
    """Whether it works in this installation; else why not."""
    settle = kernels("settle")
    if isinstance(settle, str):
        return settle
    if is_interpreted():
        return "works (not captured: in Triton's interpreter)"
    return "works (any width)" if torch.cuda.is_available() else "needs a GPU, and none is here"


def why_better(block: Any, launch: Any, lengths: list[int], processors: int) -> str | None:
    """Why so few prompts are likely to be done sooner here than in the fused kernel of this launch row, by arithmetic; None
    where they are not."""
    rows = [kernels().slot_rows(length, launch.rows) for length in lengths]
    n_tiles = math.ceil(sum(min(r, launch.rows) for r in rows) / launch.rows)
    if not rows or n_tiles > processors:
        return None
    n_layers, C, tokens = len(block.layers), block.width, sum(lengths)
    weights = n_layers * (4 * block.n_heads * block.head_dim + (1 + block.up_parts) * block.hidden) * C
    n_bytes = 0 if launch.resident else weights * {"bf16": 2, "bf16x3": 4}.get(launch.precision, 4)
    blocks = max(1, max(rows) // launch.rows)
    fused = blocks * max(n_bytes / L2_BYTES_PER_US, 2 * weights * launch.rows / MATRIX_FLOP_PER_US[launch.precision])
    launches = (n_layers * KERNELS_PER_LAYER + KERNELS_PER_LOOP) * US_PER_KERNEL
    graph = launches + 2 * weights * tokens / (LIBRARY_FLOP_PER_US[launch.precision] * processors)
    if graph >= fused:
        return None
    return (
        f"allow_batch_dependent, and so few prompts take about {graph:.0f} us a loop in a CUDA graph of ordinary kernels, by "
        f"arithmetic, and {fused:.0f} in the fused kernel, which would use {n_tiles} of {processors} processors"
    )


@dataclasses.dataclass
class Board:
    """All prompts in the order they came in, between graphs. last: predictions of the last check. reads [B, loops, ...]:
    predictions of every loop of this call, or None."""

    P: Tensor
    lengths: Tensor | None
    state: Tensor
    final: Tensor
    ints: Tensor
    floats: Tensor
    last: Tensor | None
    reads: Tensor | None

    def running(self, n_loops: int) -> Tensor:
        """bool [B]: which prompts have loops to run."""
        return (self.ints[:, 1] == 0) & (self.ints[:, 0] < n_loops)


class Loops:
    """Some loops of n prompts at a time, on buffers of their own; captured where there is a GPU."""

    def __init__(self, board: Board, stop: Any, n: int, n_at_once: int) -> None:
        self.stop, self.n_at_once = stop, n_at_once
        self.P, self.state = (torch.zeros_like(x[:1]).repeat(n, 1, 1) for x in (board.P, board.state))
        self.final = torch.zeros_like(self.state) if self.stop.on_stall == "damp" else self.state
        self.lengths = None if board.lengths is None else board.lengths.new_zeros(n)
        self.last = None if board.last is None else board.last.new_zeros(n, *board.last.shape[1:])
        self.reads = None
        if board.reads is not None:
            self.reads = board.reads.new_zeros(n_at_once, n, *board.reads.shape[2:])
        ints, floats = kernels().fresh_memory(n, board.P.device)
        self.settler = kernels("settle").Settler(ints, floats, self.stop)
        self.graph: Any = None
        self.is_free: Any = None  # since when no stream uses the buffers

    def body(self, model: LoopedTransformer, i: int) -> None:
        """One loop of all prompts, the i-th of the graph: M, what is read, and the rule. No word to the host."""
        image = model.step(self.state, self.P, self.lengths)
        read = None
        if self.last is not None or self.reads is not None:
            read = model.read(image, self.lengths)
        self.settler.step(image, self.state, self.final, read, self.last)
        if self.reads is not None:
            self.settler.keep(read, self.reads[i])

    def load(self, board: Board, index: Tensor, n_loops: int) -> None:
        """Take the prompts of `index`, to run n_loops in all; the rest of the buffers holds prompts that have ended."""
        if self.is_free is not None:
            torch.cuda.current_stream().wait_event(self.is_free)
        n, settler = len(index), self.settler
        pairs = [(self.P, board.P), (self.state, board.state), (self.final, board.final), (self.lengths, board.lengths)]
        if self.final is self.state:
            del pairs[2]
        for own, theirs in (*pairs, (self.last, board.last), (settler.ints, board.ints), (settler.floats, board.floats)):
            if own is not None and theirs is not None:
                own[:n] = theirs[index]
        settler.ints[n:, 1] = 1
        settler.limit.fill_(n_loops)

    def save(self, board: Board, index: Tensor) -> None:
        """The inverse of `load`."""
        n, settler = len(index), self.settler
        pairs = [
            (board.state, self.state),
            (board.final, self.final),
            (board.ints, settler.ints),
            (board.floats, settler.floats),
        ]
        for theirs, own in (*pairs, (board.last, self.last)):
            if own is not None and theirs is not None:
                theirs[index] = own[:n]
        if self.P.is_cuda:
            self.is_free = torch.cuda.current_stream().record_event()

    def running(self) -> Tensor:
        """bool [n]: which prompts have loops to run."""
        return (self.settler.ints[:, 1] == 0) & (self.settler.ints[:, 0] < self.settler.limit)

    def replay(self, model: LoopedTransformer) -> None:
        """The next loops."""
        if self.graph is None:
            for i in range(self.n_at_once):
                self.body(model, i)
        else:
            self.graph.replay()

    def capture(self, model: LoopedTransformer) -> None:
        """Make the graph. Before it, all of it runs once with every prompt held, so that libraries and kernels have what they
        need."""
        self.settler.limit.zero_()
        side, here = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for i in range(self.n_at_once):
                self.body(model, i)
        here.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for i in range(self.n_at_once):
                self.body(model, i)
        self.graph = graph


@torch.no_grad()
def run(
    model: LoopedTransformer,
    prompts: Tensor,
    lengths: Tensor | None,
    spec: LoopSpec,
    state: LoopState | Tensor | None = None,
    on_progress: Callable[[int], object] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> LoopResult:
    """`eager.run` in CUDA graphs: the same arguments and results.

    weights: the tensors that the model holds, where the caller has them by name. Between graphs `on_progress` is called and
    Ctrl-C is seen.
    """
    weights = weights_of(model) if weights is None else weights
    with torch.autocast(prompts.device.type, enabled=False), torch.cuda.device_of(prompts):
        try:
            board, first_t = _start(model, prompts, lengths, spec, state)
        except KeyboardInterrupt:
            return not_begun(
                model.config, prompts, lengths, next(iter(weights.values())).dtype, spec, state, "graph", model.read
            )
        is_interrupted = False
        try:
            _run(model, weights, board, spec, first_t, on_progress)
        except KeyboardInterrupt:
            is_interrupted = True
        return _result(model, board, spec, lengths, first_t if isinstance(state, LoopState) else None, is_interrupted)


def _start(
    model: LoopedTransformer, prompts: Tensor, lengths: Tensor | None, spec: LoopSpec, state: LoopState | Tensor | None
) -> tuple[Board, Tensor]:
    P = model.embed(prompts, lengths)
    own = own_tokens(P.shape[1], lengths)
    last = None
    if isinstance(state, LoopState):
        final = state.y.clone()
        start = clear_padding(state.memory.get("Y", final).to(P.dtype), own).clone()
        (ints, floats), last = memory_of(state, spec)
    else:
        start = clear_padding(model.initial_state(P, state).clone(), own)
        final = start.clone()
        ints, floats = kernels().fresh_memory(len(P), P.device)
    shape = model.config.prediction_shape(len(P), P.shape[1])
    if isinstance(spec.rule, Readout) and not spec.rule.is_fixed:
        last = torch.zeros(shape, device=P.device) if last is None else last
    else:
        last = None
    first_t = ints[:, 0].clone()
    reads = None
    if spec.return_predictions:
        n_loops = max(0, spec.n_loops - (int(first_t.min()) if len(first_t) else 0))
        reads = P.new_zeros(shape[0], n_loops, *shape[1:])
    return Board(P, lengths, start, final, ints, floats, last, reads), first_t


def _run(
    model: LoopedTransformer,
    weights: Mapping[str, Tensor],
    board: Board,
    spec: LoopSpec,
    first_t: Tensor,
    on_progress: Callable[[int], object] | None,
) -> None:
    """All loops. Every prompt that runs has run as many loops of this call as the others."""
    index = board.running(spec.n_loops).nonzero().flatten()
    n, done, first = len(index), 0, int(first_t.min()) if len(first_t) else 0
    while len(index):
        loops, key = _take(model, weights, board, spec, n, int(spec.n_loops - first_t[index].min()) - done)
        loops.load(board, index, spec.n_loops)
        try:
            n_running = n
            while n_running and not (n >= LEAST_TO_SHRINK and 2 * _size_for(n_running) <= n):
                loops.replay(model)
                _note(board, loops, index, first_t[index].long() - first + done)
                done += loops.n_at_once
                runs = loops.running().cpu()
                n_running = int(runs.sum())
                if on_progress:
                    on_progress(len(board.P) - n_running)
        finally:
            loops.save(board, index)
            _give_back(weights, key, loops)
        index = index[runs[: len(index)].to(index.device)]
        n = _size_for(len(index))


def _size_for(n: int) -> int:
    """The power of two that holds n prompts, so that graphs of few sizes are made."""
    return 1 << (n - 1).bit_length() if n else 0


def _note(board: Board, loops: Loops, index: Tensor, at: Tensor) -> None:
    """Keep the predictions of a graph's loops, each where its loop's number says: at [n], for the first of them."""
    if board.reads is None or loops.reads is None or not board.reads.shape[1]:
        return
    last = board.reads.shape[1] - 1
    for i, reads in enumerate(loops.reads[:, : len(index)]):
        place = (index, (at + i).clamp(max=last))
        is_there = (at + i <= last).reshape(-1, *[1] * (reads.dim() - 1))
        board.reads[place] = torch.where(is_there, reads, board.reads[place])


def _take(
    model: LoopedTransformer, weights: Mapping[str, Tensor], board: Board, spec: LoopSpec, n: int, n_to_go: int
) -> tuple[Loops, Any]:
    """Loops of this kind that no call is using, or new ones."""
    n_graphs = -(-n_to_go // LOOPS_AT_ONCE)
    n_at_once = -(-n_to_go // n_graphs)  # so that the last graph has few loops too many
    first = next(iter(weights.values()))
    settings = (torch.get_float32_matmul_precision(), board.P.dtype, board.P.device, board.P.shape[1], board.lengths is None)
    places = tuple(weight.data_ptr() for weight in weights.values())
    stop = kernels().with_stop(stop_of(spec, PRECISION_OF[board.P.dtype]), n_loops=0)  # the count is read from memory
    key = (model.config, places, settings, n, n_at_once, stop, spec.return_predictions)
    with _lock:
        loops = _idle.setdefault(first, {}).pop(key, None)
    if loops is None:
        loops = Loops(board, stop, n, n_at_once)
        if board.P.is_cuda:
            loops.capture(model)
    return loops, key


def _give_back(weights: Mapping[str, Tensor], key: Any, loops: Loops) -> None:
    with _lock:
        kept = _idle.setdefault(next(iter(weights.values())), {})
        kept[key] = loops
        if len(kept) > KEPT:
            del kept[next(iter(kept))]


def _result(
    model: LoopedTransformer, board: Board, spec: LoopSpec, lengths: Tensor | None, first_t: Tensor | None, is_interrupted: bool
) -> LoopResult:
    y = board.final
    memory = remembered(board.ints, board.floats, board.last)
    if spec.on_stall == "damp":
        memory["Y"] = board.state
    prediction = model.read(y, lengths)
    status = memory["status"]
    if is_interrupted:
        unfinished = board.running(spec.n_loops)
        status = torch.where(unfinished, Status.INTERRUPTED, status)
        prediction = prediction.clone()
        prediction[unfinished] = torch.nan
    predictions = None
    if board.reads is not None:
        first = int(first_t.min()) if first_t is not None and len(first_t) else 0
        predictions = after_every_loop(model, board.reads, prediction, memory["t"], lengths, first, first_t)
    return LoopResult(
        y=y,
        prediction=prediction,
        n_loops=memory["t"],
        status=status,
        residual=memory["residual"],
        predictions=predictions,
        n_loops_by_token=None,
        state=LoopState(y, memory, spec.stopping),
        backend="graph",
        reason="",
        interrupted=is_interrupted,
    )


def forget(model: LoopedTransformer) -> None:
    """Drop the graphs of a model."""
    with _lock:
        _idle.pop(next(iter(weights_of(model).values())), None)
