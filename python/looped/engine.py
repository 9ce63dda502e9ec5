"""`solve` and `solve_iter`: run a looped transformer on prompts until they stop changing, on the best backend there is."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from looped import conversion
from looped.accelerate import Anderson
from looped.backends import cpu, device, eager, graph, triton, triton_decode
from looped.exits import Exit
from looped.loop import Interrupted, LoopResult, LoopSpec, LoopState, PromptResult
from looped.model import LoopedTransformer, unwrapped
from looped.parts import Part, by_length, run_parts
from looped.progress import OnProgress, reporter
from looped.prompt_batch import PromptBatch, Prompts
from looped.weights import first_weight

BACKENDS = ("auto", "cpu", "eager", "graph", "triton")
ON_INTERRUPT = ("raise", "return")

log = logging.getLogger(__name__)
_logged: set[str] = set()


def solve(
    model: LoopedTransformer,
    prompts: Prompts,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    n_loops: int | None = None,
    exit: Exit = None,
    on_stall: str = "ignore",
    accelerate: Anderson | str | None = None,
    state: LoopState | Prompts | None = None,
    return_predictions: bool = False,
    backend: str = "auto",
    dtype: torch.dtype | None = None,
    allow_batch_dependent: bool = False,
    progress: bool | OnProgress | None = None,
    on_interrupt: str = "raise",
) -> LoopResult:
    """Loop each prompt to rest: `Y <- M(inject(Y, P))`.

    Parameters
        model: a `LoopedTransformer`; wrappers of torch.compile, DataParallel and DistributedDataParallel are looked through.
        prompts: a padded batch (float [B, T, n_dims], int [B, T], or float [B, T, C] by the model's input kind) with
            `lengths`, or a list of prompts of any lengths. NumPy arrays are taken too. Inputs are never changed, and
            padding is never read.
        lengths: tokens of each prompt of a padded batch, int [B]; None means that all T are its own.
        n_loops: the most loops, a total over resumed calls; default `model.config.n_loops`. 0 returns the initial state. An
            integer or 0-d integer tensor; 4.0 is a TypeError.
        exit: an exit rule of `looped.exits`, its name, a mapping ``{"rule": name, field: value, ...}``, or None for all loops.
        on_stall: when a state goes on changing without coming closer to rest: ``"ignore"``, ``"exit"``, or ``"damp"``
            (Y + 0.5 (F - Y) from then on; a second stall exits). A rule that never stalls, as exit=None, goes with the first
            two alone. docs/exits.md has the whole rule.
        accelerate: ``"anderson"`` or `Anderson(depth)`; None for plain iteration.
        state: a `LoopState` of an earlier result, to go on from; or Y_0, [B, T, C] or a list of [T_i, C], for a model whose
            `state_init` is "given".
        return_predictions: the read-out after every loop, too.
        backend: ``"cpu"``, the C++ engine; ``"triton"``, the fused kernels on a GPU; ``"graph"``, ordinary kernels in a CUDA
            graph; ``"eager"``; or ``"auto"``, which takes the C++ engine on a CPU, and on a GPU the fused kernels or else the
            graph, where it can, each prompt by its own length, and says once in the log why where it cannot. The result's
            `backend` and `reason` tell which ran and why.
        dtype: torch.float32, float64 or bfloat16 to compute in; default the parameters' own. Prompts are converted.
        allow_batch_dependent: with ``"auto"`` on a GPU, also choose by the number of prompts: a few of them go to ``"graph"``
            where that should be faster, and their results may then differ in the last bits with the batch they come in. On a
            CPU it changes nothing, and `reason` says so.
        progress: True shows a bar on standard error when the call takes over two seconds; or a function
            `progress(n_finished, n_prompts)`, called now and then and at the end. What it raises ends the call and comes out.
        on_interrupt: what Ctrl-C does: ``"raise"`` a `looped.Interrupted`, a KeyboardInterrupt with the `result` so far, or
            ``"return"`` that result. `result.finished` says which prompts have ended; `result.state` goes on with the others
            to the bits of a call that was never stopped (`graph`: to rounding). The C++ engine stops within 0.1 s, eager
            PyTorch after an operation, `graph` after up to 8 loops, `triton` after a launch.

    Returns a `LoopResult` in the form of the input: padded batch or lists. No gradients are recorded.

    Raises ValueError or TypeError, naming the prompt, for what does not fit the model. A prompt that holds NaN or infinity ends
    as Status.NONFINITE and leaves its neighbours alone.
    """
    model = unwrapped(model, "solve")
    spec = _spec(model, n_loops, exit, on_stall, accelerate, return_predictions, backend, allow_batch_dependent)
    if on_interrupt not in ON_INTERRUPT:
        raise ValueError(f"solve: on_interrupt={on_interrupt!r} is not one of {', '.join(ON_INTERRUPT)}")
    batch = PromptBatch.of(model := conversion.in_dtype(model, dtype), prompts, lengths, state)
    with reporter(progress, len(batch.own_lengths)) as on_progress:
        result = _run(model, batch, spec, state, backend, allow_batch_dependent, on_progress)
    if result.interrupted and on_interrupt == "raise":
        raise Interrupted(result)
    return result


def repack(model: LoopedTransformer) -> None:
    """Have the weights of a model packed, and converted for `solve(dtype=...)`, again at its next call on a GPU.

    Needed after edits through `.data` only: other edits are seen, and on a CPU these are seen, too.
    """
    model = unwrapped(model, "repack")
    conversion.forget(model)
    triton.forget(model)
    graph.forget(model)
    triton_decode.forget(model)


def solve_iter(
    model: LoopedTransformer,
    prompts: Iterable[Tensor | np.ndarray],
    *,
    batch_size: int = 256,
    n_loops: int | None = None,
    exit: Exit = None,
    on_stall: str = "ignore",
    accelerate: Anderson | str | None = None,
    return_predictions: bool = False,
    backend: str = "auto",
    dtype: torch.dtype | None = None,
    allow_batch_dependent: bool = False,
    progress: bool | OnProgress | None = None,
) -> Iterator[PromptResult]:
    """`solve` for any number of prompts, in order, in memory bounded by `batch_size` prompts.

    prompts: an iterable of single prompts ([T_i, n_dims], [T_i] or [T_i, C]), read as results are asked for. The other
    parameters are those of `solve`. Raises at once for wrong ones, and names the batch of a wrong prompt when it comes to it.
    progress is told n_prompts=None where `prompts` has no length. Ctrl-C raises `looped.Interrupted` with the result of the
    batch that ran; what was given out before stays good, and the iteration is over.
    """
    try:
        most = 0 if isinstance(batch_size, bool) else operator.index(batch_size)
    except TypeError:
        most = 0
    if most < 1:
        raise ValueError(f"solve_iter: batch_size={batch_size!r} must be an integer of at least 1")
    model = unwrapped(model, "solve_iter")
    spec = _spec(model, n_loops, exit, on_stall, accelerate, return_predictions, backend, allow_batch_dependent)
    model = conversion.in_dtype(model, dtype)
    reports = reporter(progress, len(prompts) if isinstance(prompts, Sized) else None)

    def results() -> Iterator[PromptResult]:
        waiting: list[Tensor | np.ndarray] = []
        n_done = 0
        with reports as on_progress:
            for prompt in prompts:
                waiting.append(prompt)
                if len(waiting) == most:
                    yield from one_batch(waiting, n_done, on_progress)
                    n_done += len(waiting)
                    waiting = []
            if waiting:
                yield from one_batch(waiting, n_done, on_progress)

    def one_batch(
        prompts: list[Tensor | np.ndarray], n_done: int, on_progress: Callable[[int], object] | None
    ) -> Iterator[PromptResult]:
        of_all = None if on_progress is None else lambda n_finished: on_progress(n_done + n_finished)
        try:
            batch = PromptBatch.of(model, prompts, None, None)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{error} (prompts of this batch are counted from {n_done})") from error
        result = _run(model, batch, spec, None, backend, allow_batch_dependent, of_all)
        if result.interrupted:
            raise Interrupted(result, n_done)
        for i in range(len(result)):
            yield result[i]

    return results()


def _spec(
    model: LoopedTransformer,
    n_loops: int | None,
    exit: Exit,
    on_stall: str,
    accelerate: Anderson | str | None,
    return_predictions: bool,
    backend: str,
    allow_batch_dependent: bool,
) -> LoopSpec:
    if backend not in BACKENDS:
        raise ValueError(f"solve: backend={backend!r} is not one of {', '.join(BACKENDS)}")
    if allow_batch_dependent and backend != "auto":
        raise ValueError(
            'solve: allow_batch_dependent is for backend="auto", which may then choose by the number of prompts; drop it: '
            f"backend={backend!r} leaves no choice"
        )
    most = model.config.n_loops if n_loops is None else n_loops
    return LoopSpec.of(model.config, most, exit, on_stall, accelerate, return_predictions)


def _run(
    model: LoopedTransformer,
    batch: PromptBatch,
    spec: LoopSpec,
    state: LoopState | Prompts | None,
    backend: str,
    allow_batch_dependent: bool,
    on_progress: Callable[[int], object] | None,
) -> LoopResult:
    own_state, own_lengths = batch.state(model, state), batch.own_lengths
    choices, reason = _choose(model, spec, backend, own_lengths, allow_batch_dependent)
    if choices[0].name in ("cpu", "eager"):
        result = choices[0].run(model, batch.tokens, batch.lengths, spec, own_state, on_progress)
    else:
        parts = [Part(choice.rows, functools.partial(choice.run, model, spec=spec)) for choice in choices]
        result = run_parts(model.config, parts, batch.tokens, batch.lengths, own_lengths, own_state, on_progress)
    if on_progress and not result.interrupted:
        try:
            on_progress(len(result))
        except KeyboardInterrupt:
            result = dataclasses.replace(result, interrupted=True)
    state_here = dataclasses.replace(result.state, prompt_sums=batch.sums())
    return dataclasses.replace(result, **batch.like_input(model, result), reason=reason, state=state_here)


class _Choice(NamedTuple):
    name: str
    run: Callable[..., LoopResult]
    rows: Sequence[int]  # numbers of the prompts that it runs


def _choose(
    model: LoopedTransformer, spec: LoopSpec, backend: str, own_lengths: list[int], allow_batch_dependent: bool
) -> tuple[list[_Choice], str]:
    """The backends that run prompts of these lengths, and why those: each prompt's follows from its own length, unless it may
    depend on the batch.

    Raises ValueError where the one asked for cannot.
    """
    everyone = range(len(own_lengths))
    if backend != "auto" or not device.is_on_gpu(first_weight(model)):
        name, run, reason = _choose_one(model, spec, backend, max(own_lengths, default=0))
        if allow_batch_dependent:
            reason += "; allow_batch_dependent has no meaning on a CPU"
        return [_Choice(name, run, everyone)], reason
    choices, reasons = [], []
    short, long = by_length(own_lengths, lambda length: triton.too_long(length) is None)
    for rows in ([short] if short or not long else []) + ([long] if long else []):
        lengths = [own_lengths[i] for i in rows]
        name, run, reason = _choose_one(model, spec, backend, max(lengths, default=0))
        if allow_batch_dependent and name == "triton" and graph.why_not(model, spec) is None:
            few = triton.why_not_for_few(model, lengths)
            name, run, reason = ("graph", graph.run, few) if few else (name, run, reason)
        choices.append(_Choice(name, run, rows))
        reasons.append(reason)
    if len({choice.name for choice in choices}) == 1:
        return [_Choice(choices[0].name, choices[0].run, everyone)], "; ".join(dict.fromkeys(reasons))
    return choices, "; ".join(f"{choice.name}: {reason}" for choice, reason in zip(choices, reasons, strict=True))


def _choose_one(
    model: LoopedTransformer, spec: LoopSpec, backend: str, n_tokens: int
) -> tuple[str, Callable[..., LoopResult], str]:
    """The backend that runs prompts of up to so many tokens, by its name, and why that one."""
    if backend == "eager":
        return "eager", eager.run, "asked for"
    runs: dict[str, tuple[Callable[..., LoopResult], str | None]] = {}
    on_gpu = device.is_on_gpu(first_weight(model))
    if backend == "cpu" or (backend == "auto" and not on_gpu):
        runs["cpu"] = cpu.run, cpu.why_not(model, spec)
    if backend == "triton" or (backend == "auto" and on_gpu):
        runs["triton"] = triton.run, triton.why_not(model, spec) or triton.too_long(n_tokens)
    if backend == "graph" or (backend == "auto" and on_gpu):
        runs["graph"] = graph.run, graph.why_not(model, spec)
    if backend != "auto":
        run, obstacle = runs[backend]
        if obstacle:
            raise ValueError(f'solve: backend="{backend}" cannot run this: {obstacle}; use backend="auto" or "eager"')
        return backend, run, "asked for"
    reasons = {"cpu": "the fastest that runs this model on a CPU", "triton": "the fastest that runs this model on a GPU"}
    runs["eager"] = eager.run, None
    refused = list(itertools.takewhile(lambda entry: entry[1] is not None, runs.values()))
    obstacles = list(dict.fromkeys(obstacle for _, obstacle in refused if obstacle))
    name, (run, _) = list(runs.items())[len(refused)]
    reason = "; ".join(obstacles) or reasons[name]
    if obstacles and reason not in _logged:
        _logged.add(reason)
        log.info("solve: the %s backend runs this: %s", name, reason)
    return name, run, reason
