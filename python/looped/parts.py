"""A batch in parts, each on a backend of its own, and their results as one.

The fused kernels of a GPU take prompts up to a length. Which backend runs a prompt follows from its own length, and not from
the batch it comes in, because its bits do.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from looped.config import LoopedConfig
from looped.exits import Memory
from looped.loop import LoopResult, LoopState
from looped.prompt_batch import resize

STATES = ("Y", "F32")  # of a GPU's memory, [B, T, C]; the predictions of the check before are "rule.prediction" [B, N, ...]

OnFinished = Callable[[int], object]


class Run(Protocol):
    """A backend with its model, and how to loop."""

    def __call__(
        self, prompts: Tensor, lengths: Tensor | None, *, state: LoopState | Tensor | None, on_progress: OnFinished | None
    ) -> LoopResult: ...


class Part(NamedTuple):
    """Some prompts of a batch, by their numbers, and what runs them."""

    rows: Sequence[int]
    run: Run


def by_length(own_lengths: Sequence[int], fits: Callable[[int], bool]) -> tuple[list[int], list[int]]:
    """Numbers of the prompts whose length fits, and of the others."""
    does_fit = {length: fits(length) for length in set(own_lengths)}
    parts: tuple[list[int], list[int]] = ([], [])
    for i, length in enumerate(own_lengths):
        parts[0 if does_fit[length] else 1].append(i)
    return parts


def run_parts(
    config: LoopedConfig,
    parts: Sequence[Part],
    prompts: Tensor,
    lengths: Tensor | None,
    own_lengths: Sequence[int],
    state: LoopState | Tensor | None,
    on_progress: OnFinished | None,
) -> LoopResult:
    """Each part in its turn, its prompts cut to the longest of them; the result is that of the whole batch, [B, T, ...].

    prompts, lengths and state as a backend's `run` takes them; own_lengths: the lengths on the host. Parts after one that was
    interrupted stop where they first look for an interrupt.
    """
    results: list[LoopResult] = []
    n_before, is_interrupted = 0, False
    for part in parts:
        rows = None if len(parts) == 1 else torch.tensor(part.rows, device=prompts.device)
        longest = max((own_lengths[i] for i in part.rows), default=0)
        width = min(max(1, longest), prompts.shape[1])  # a row of padding where no prompt has tokens, if the batch has one
        own_prompts, own_state = resize(_taken(prompts, rows), 1, width), _state_of(config, state, rows, width)
        run = functools.partial(part.run, own_prompts, None if lengths is None else _taken(lengths, rows), state=own_state)
        counts = None if on_progress is None else _counting_from(n_before, on_progress)
        result = run(on_progress=_interrupt if is_interrupted else counts)
        is_interrupted |= result.interrupted
        while result.interrupted and not result.state.memory and len(parts) > 1:
            result = run(on_progress=_interrupt)  # it had not begun, and the other parts' memory needs its own beside it
        results.append(result)
        n_before += len(part.rows)
    result = _joined(config, [part.rows for part in parts], results, prompts.shape[1])
    return dataclasses.replace(result, interrupted=is_interrupted)


def _counting_from(n_before: int, on_progress: OnFinished) -> OnFinished:
    return lambda n_finished: on_progress(n_before + n_finished)


def _interrupt(n_finished: int) -> None:
    raise KeyboardInterrupt


def _taken(tensor: Tensor, rows: Tensor | None) -> Tensor:
    return tensor if rows is None else tensor[rows]


def _state_of(
    config: LoopedConfig, state: LoopState | Tensor | None, rows: Tensor | None, width: int
) -> LoopState | Tensor | None:
    """What a part needs of the batch's state."""
    if state is None:
        return None
    if isinstance(state, Tensor):
        return resize(_taken(state, rows), 1, width)
    if rows is not None:
        state = state.select(rows)
    return dataclasses.replace(state, y=resize(state.y, 1, width), memory=_resized(config, state.memory, width))


def _resized(config: LoopedConfig, memory: Memory, n_tokens: int) -> Memory:
    """Memory of prompts with so many rows each, cut or extended with zeros."""
    sizes = dict.fromkeys(STATES, n_tokens) | {"rule.prediction": config.prediction_shape(1, n_tokens)[1]}
    return {name: resize(tensor, 1, sizes[name]) if name in sizes else tensor for name, tensor in memory.items()}


def _joined(config: LoopedConfig, rows: list[Sequence[int]], results: list[LoopResult], n_tokens: int) -> LoopResult:
    """One result of all parts, whose prompts are these rows of it, with n_tokens rows a prompt."""
    n_read = config.prediction_shape(1, n_tokens)[1]

    def together(tensors: list[Tensor]) -> Tensor:
        if len(tensors) == 1:
            return tensors[0]
        out = tensors[0].new_zeros(sum(map(len, rows)), *tensors[0].shape[1:])
        for own, tensor in zip(rows, tensors, strict=True):
            out[torch.tensor(own, device=out.device)] = tensor
        return out

    y = together([resize(_tensor(result.y), 1, n_tokens) for result in results])
    memories = [_resized(config, result.state.memory, n_tokens) for result in results]
    for name, tensor in {name: tensor for memory in memories for name, tensor in memory.items()}.items():
        for memory, result in zip(memories, results, strict=True):
            if name not in memory and name in STATES:  # of a backend that goes on from y itself
                memory[name] = resize(result.state.y, 1, n_tokens).to(tensor.dtype)
            elif name not in memory:  # of a rule that never passes, and needs none
                memory[name] = tensor.new_zeros(len(result), *tensor.shape[1:])
    memory = {name: together([memory[name] for memory in memories]) for name in memories[0]}
    predictions = None
    if results[0].predictions is not None:
        own = [resize(_tensor(result.predictions), 2, n_read) for result in results]
        predictions = together([_with_loops_before(tensor, max(x.shape[1] for x in own)) for tensor in own])
    return dataclasses.replace(
        results[0],
        y=y,
        prediction=together([resize(_tensor(result.prediction), 1, n_read) for result in results]),
        n_loops=together([result.n_loops for result in results]),
        status=together([result.status for result in results]),
        residual=together([result.residual for result in results]),
        predictions=predictions,
        state=dataclasses.replace(results[0].state, y=y, memory=memory),
        backend=" and ".join(dict.fromkeys(result.backend for result in results)),
    )


def _tensor(field: Tensor | list[Tensor] | None) -> Tensor:
    assert isinstance(field, Tensor)  # backends give padded batches
    return field


def _with_loops_before(predictions: Tensor, n_loops: int) -> Tensor:
    """Predictions [B, L, ...] with NaN for loops that the prompts of another part had still to run, n_loops in all."""
    n_before = n_loops - predictions.shape[1]
    if not n_before:
        return predictions
    return torch.cat([predictions.new_full((len(predictions), n_before, *predictions.shape[2:]), math.nan), predictions], dim=1)
