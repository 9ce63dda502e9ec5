"""`solve` and `solve_iter`: run a looped transformer on prompts until they stop changing, on the best backend there is."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from looped.accelerate import Anderson, make_acceleration
from looped.backends import cpu, device, eager, graph, triton, triton_decode
from looped.exits import PRECISION_OF, ExitRule, make_exit
from looped.loop import Interrupted, LoopResult, LoopSpec, LoopState, PromptResult
from looped.model import LoopedTransformer, clear_padding, loop_count, own_tokens
from looped.progress import OnProgress, reporter
from looped.weights import first_weight

Prompts = Tensor | np.ndarray | Sequence[Tensor | np.ndarray]

BACKENDS = ("auto", "cpu", "eager", "graph", "triton")
ON_INTERRUPT = ("raise", "return")
GOLDEN = 0.6180339887498949  # its multiples modulo 1 are far apart

log = logging.getLogger(__name__)
_logged: set[str] = set()


def solve(
    model: LoopedTransformer,
    prompts: Prompts,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    n_loops: int | None = None,
    exit: ExitRule | str | None = None,
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
        prompts: a padded batch (float [B, T, n_dims], int [B, T], or float [B, T, C] by the model's input kind) with
            `lengths`, or a list of prompts of any lengths. NumPy arrays are taken too. Inputs are never changed, and
            padding is never read.
        lengths: tokens of each prompt of a padded batch, int [B]; None means that all T are its own.
        n_loops: the most loops, a total over resumed calls; default `model.config.n_loops`. 0 returns the initial state. An
            integer or 0-d integer tensor; 4.0 is a TypeError.
        exit: an exit rule of `looped.exits`, its name, or None for all loops.
        on_stall: when a state goes on changing without coming closer to rest: ``"ignore"``, ``"exit"``, or ``"damp"``
            (Y + 0.5 (F - Y) from then on; a second stall exits). docs/exits.md has the whole rule.
        accelerate: ``"anderson"`` or `Anderson(depth)`; None for plain iteration.
        state: a `LoopState` of an earlier result, to go on from; or Y_0, [B, T, C] or a list of [T_i, C], for a model whose
            `state_init` is "given".
        return_predictions: the read-out after every loop, too.
        backend: ``"cpu"``, the C++ engine; ``"triton"``, the fused kernels on a GPU; ``"graph"``, ordinary kernels in a CUDA
            graph; ``"eager"``; or ``"auto"``, which takes the C++ engine on a CPU, and on a GPU the fused kernels or else the
            graph, where it can, and says once in the log why where it cannot. The result's `backend` and `reason` tell which
            one ran and why.
        dtype: torch.float32, float64 or bfloat16 to compute in; default the parameters' own. Prompts are converted.
        allow_batch_dependent: with ``"auto"`` on a GPU, also choose by the number of prompts: a few of them go to ``"graph"``
            where that should be faster, and their results may then differ in the last bits with the batch they come in. On a
            CPU it changes nothing, and `reason` says so.
        progress: True shows a bar on standard error when the call takes over two seconds; or a function
            `progress(n_finished, n_prompts)`, called now and then and at the end. What it raises ends the call and comes out.
        on_interrupt: what Ctrl-C does: ``"raise"`` a `looped.Interrupted`, a KeyboardInterrupt with the `result` so far, or
            ``"return"`` that result. `result.finished` says which prompts have ended; `result.state` goes on with the others
            to the bits of a call that was never stopped. The C++ engine stops within 0.1 s, eager PyTorch after an operation.

    Returns a `LoopResult` in the form of the input: padded batch or lists. No gradients are recorded.

    Raises ValueError or TypeError, naming the prompt, for what does not fit the model. A prompt that holds NaN or infinity ends
    as Status.NONFINITE and leaves its neighbours alone.
    """
    spec = _spec(model, n_loops, exit, on_stall, accelerate, return_predictions, backend, allow_batch_dependent)
    if on_interrupt not in ON_INTERRUPT:
        raise ValueError(f"solve: on_interrupt={on_interrupt!r} is not one of {', '.join(ON_INTERRUPT)}")
    batch = _Batch.of(model := _in_dtype(model, dtype), prompts, lengths, state)
    with reporter(progress, len(batch.own_lengths)) as on_progress:
        result = _run(model, batch, spec, state, backend, allow_batch_dependent, on_progress)
    if result.interrupted and on_interrupt == "raise":
        raise Interrupted(result)
    return result


def repack(model: LoopedTransformer) -> None:
    """Have the weights of a model packed again at its next call on a GPU.

    Needed after edits through `.data` only: other edits are seen, and the C++ engine sees these too.
    """
    triton.forget(model)
    graph.forget(model)
    triton_decode.forget(model)


def solve_iter(
    model: LoopedTransformer,
    prompts: Iterable[Tensor | np.ndarray],
    *,
    batch_size: int = 256,
    n_loops: int | None = None,
    exit: ExitRule | str | None = None,
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
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"solve_iter: batch_size={batch_size!r} must be an integer of at least 1")
    spec = _spec(model, n_loops, exit, on_stall, accelerate, return_predictions, backend, allow_batch_dependent)
    model = _in_dtype(model, dtype)
    reports = reporter(progress, len(prompts) if isinstance(prompts, Sized) else None)

    def results() -> Iterator[PromptResult]:
        waiting: list[Tensor | np.ndarray] = []
        n_done = 0
        with reports as on_progress:
            for prompt in prompts:
                waiting.append(prompt)
                if len(waiting) == batch_size:
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
            batch = _Batch.of(model, prompts, None, None)
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
    exit: ExitRule | str | None,
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
    rule = make_exit(exit)
    if rule.scope == "prefix" and model.config.mask_kind != "causal":
        raise ValueError('solve: scope="prefix" needs a causal mask; use scope="prompt" with this model')
    return LoopSpec(
        n_loops=loop_count(model.config.n_loops if n_loops is None else n_loops),
        rule=rule,
        on_stall=on_stall,
        accelerate=make_acceleration(accelerate),
        return_predictions=return_predictions,
    )


def _run(
    model: LoopedTransformer,
    batch: _Batch,
    spec: LoopSpec,
    state: LoopState | Prompts | None,
    backend: str,
    allow_batch_dependent: bool,
    on_progress: Callable[[int], object] | None,
) -> LoopResult:
    run, reason = _choose(model, spec, backend, batch.own_lengths if allow_batch_dependent else None, batch.tokens.shape[1])
    result = run(model, batch.tokens, batch.lengths, spec, batch.state(model, state), on_progress)
    if on_progress and not result.interrupted:
        try:
            on_progress(len(result))
        except KeyboardInterrupt:
            result = dataclasses.replace(result, interrupted=True)
    state_here = dataclasses.replace(result.state, prompt_sums=batch.sums())
    return dataclasses.replace(result, **batch.like_input(model, result), reason=reason, state=state_here)


def _choose(
    model: LoopedTransformer, spec: LoopSpec, backend: str, few: list[int] | None, n_tokens: int
) -> tuple[Callable[..., LoopResult], str]:
    """The backend that runs this, and why that one. few: lengths of the prompts, where the choice may depend on them.

    Raises ValueError where the one asked for cannot.
    """
    if backend == "eager":
        return eager.run, "asked for"
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
        return run, "asked for"
    if few is not None and on_gpu and runs["graph"][1] is None and runs["triton"][1] is None:
        reason = triton.why_not_for_few(model, few)
        if reason:
            return graph.run, reason
    reasons = {"cpu": "the fastest that runs this model on a CPU", "triton": "the fastest that runs this model on a GPU"}
    runs["eager"] = eager.run, None
    refused = list(itertools.takewhile(lambda entry: entry[1] is not None, runs.values()))
    obstacles = list(dict.fromkeys(obstacle for _, obstacle in refused if obstacle))
    name, (run, _) = list(runs.items())[len(refused)]
    reason = "; ".join(obstacles) or reasons[name]
    if obstacles and reason not in _logged:
        _logged.add(reason)
        log.info("solve: the %s backend runs this: %s", name, reason)
    if few is not None and not on_gpu:
        reason += "; allow_batch_dependent has no meaning on a CPU"
    return run, reason


def _in_dtype(model: LoopedTransformer, dtype: torch.dtype | None) -> LoopedTransformer:
    own = first_weight(model).dtype
    if (dtype or own) not in PRECISION_OF:
        raise ValueError(f"solve: dtype={dtype or own} is not one of {', '.join(map(str, PRECISION_OF))}")
    if dtype in (None, own):
        return model
    converted = copy.deepcopy(model).to(dtype)
    cpu.stands_for(converted, model)
    return converted


@dataclasses.dataclass
class _Batch:
    """Prompts as the backends take them: padded, no longer than needed, checked; and how to give results back."""

    tokens: Tensor
    lengths: Tensor | None
    own_lengths: list[int]
    n_tokens: int
    is_list: bool

    @classmethod
    def of(cls, model: LoopedTransformer, prompts: Prompts, lengths: Tensor | Sequence[int] | None, state: Any) -> _Batch:
        is_list = not isinstance(prompts, (Tensor, np.ndarray))
        if is_list:
            if lengths is not None:
                raise ValueError("solve: lengths go with a padded batch; prompts in a list have their own")
            tokens, own_lengths = _pad(model, [_tensor(model, prompt, f"prompt {i}") for i, prompt in enumerate(prompts)])
        else:
            tokens = _tensor(model, prompts, "prompts")
            if tokens.dim() != _dims(model) + 1:
                raise ValueError(f"solve: prompts must be {_shape(model, batched=True)}, got {list(tokens.shape)}")
            own_lengths = _lengths(tokens, lengths)
        longest = max(own_lengths, default=0)
        config = model.config
        if config.pos_kind == "learned" and longest > config.n_positions:
            raise ValueError(
                f"solve: prompt {own_lengths.index(longest)} has {longest} tokens but the model has {config.n_positions} "
                "positions; shorten it or use a model with more positions"
            )
        n_tokens = tokens.shape[1]
        width = max(1, longest)  # at least one row of padding, so that no backend meets an empty dimension
        if isinstance(state, LoopState):
            width = max(width, state.y.shape[1])  # it may come from a batch with longer prompts
        tokens = _resize(tokens, 1, width)
        is_full = all(length == tokens.shape[1] for length in own_lengths)
        # A full batch needs no copy from the host, which a CUDA graph could not capture.
        of_prompts = None if is_full else torch.tensor(own_lengths, dtype=torch.int64, device=tokens.device)
        batch = cls(tokens, of_prompts, own_lengths, n_tokens, is_list)
        if config.input_kind == "tokens":
            batch.check_ids(model, own_tokens(tokens.shape[1], of_prompts))
        return batch

    def sums(self) -> Tensor:
        """What tells a prompt from another, float64 [B]: its length, and a sum with a weight of its own for every number."""
        own = own_tokens(self.tokens.shape[1], self.lengths)
        tokens = clear_padding(self.tokens.double() if self.tokens.dtype == torch.bfloat16 else self.tokens, own).flatten(1)
        n_tokens = self.tokens.shape[1] if self.lengths is None else self.lengths
        if tokens.device.type != "cpu":  # weights made there: a copy from the host could not be captured in a CUDA graph
            places = torch.arange(1, tokens.shape[1] + 1, dtype=torch.float64, device=tokens.device)
            return (tokens.double() * (0.5 + places * GOLDEN % 1)).sum(dim=1) + n_tokens
        weights = _weights_of_places(tokens.shape[1])
        # NumPy's own thread: PyTorch's others would spin for a while after this, on the processors that the engine needs.
        with np.errstate(invalid="ignore", over="ignore"):
            sums = (tokens.numpy() * weights).sum(axis=1)
            return torch.from_numpy(sums + (n_tokens if isinstance(n_tokens, int) else n_tokens.numpy()))

    def check_ids(self, model: LoopedTransformer, own: Tensor | None) -> None:
        size = model.config.vocab_size or 0
        wrong = (self.tokens < 0) | (self.tokens >= size)
        if own is not None:
            wrong &= own
        if wrong.any():
            row, column = (int(x) for x in wrong.nonzero()[0])
            raise ValueError(
                f"solve: prompt {row} holds token id {int(self.tokens[row, column])} at position {column}, "
                f"but ids must lie in 0 .. {size - 1}"
            )

    def state(self, model: LoopedTransformer, state: LoopState | Prompts | None) -> LoopState | Tensor | None:
        """The caller's state, padded like the tokens."""
        if state is None:
            return None
        if isinstance(state, LoopState):
            expected = (*self.tokens.shape[:2], model.config.d_model)
            if state.y.shape != expected:
                raise ValueError(
                    f"solve: state is {list(state.y.shape)} but the prompts have {list(expected)}; resume with the same ones"
                )
            if state.prompt_sums is not None:
                same = torch.isclose(state.prompt_sums, self.sums(), rtol=1e-6, atol=1e-6, equal_nan=True)
                if not same.all():
                    raise ValueError(
                        f"solve: state is of another prompt {int((~same).nonzero()[0])}; resume with the same ones"
                    )
            if state.y.dtype != first_weight(model).dtype:
                raise ValueError(f"solve: state is {state.y.dtype}; resume with the same dtype")
            if state.memory:
                return state
            return state.y if model.config.state_init == "given" else None  # interrupted before its first loop
        parameter = first_weight(model)
        if not isinstance(state, (Tensor, np.ndarray)):
            states = [_from_array(y) for y in state]
            for i, (y, length) in enumerate(zip(states, self.own_lengths, strict=False)):
                if y.shape != (length, model.config.d_model):
                    raise ValueError(f"solve: state {i} must be {[length, model.config.d_model]}, got {list(y.shape)}")
            width = model.config.d_model
            state = torch.nn.utils.rnn.pad_sequence(states, batch_first=True) if states else torch.zeros(0, 1, width)
        state = _from_array(state)
        padded = state.new_zeros(len(self.tokens), self.tokens.shape[1], model.config.d_model)
        if state.shape[0] != len(self.tokens) or state.shape[2:] != padded.shape[2:] or state.shape[1] < max(self.own_lengths):
            raise ValueError(
                f"solve: state must be [{len(self.tokens)}, {self.n_tokens}, {model.config.d_model}], got {list(state.shape)}"
            )
        T = min(state.shape[1], padded.shape[1])
        padded[:, :T] = state[:, :T]
        return padded.to(parameter)

    def like_input(self, model: LoopedTransformer, result: LoopResult) -> dict[str, Any]:
        """The fields of a result that are lists, or padded to as many tokens as the input."""
        stride = model.config.prediction_stride
        fields: dict[str, Any] = {}
        for name, dim, per in (("y", 1, 1), ("prediction", 1, stride), ("predictions", 2, stride), ("n_loops_by_token", 1, 1)):
            tensor = getattr(result, name)
            if tensor is None:
                continue
            if self.is_list:
                sizes = [-(-length // per) for length in self.own_lengths]
                fields[name] = [tensor[i].narrow(dim - 1, 0, size) for i, size in enumerate(sizes)]
            else:
                fields[name] = _resize(tensor, dim, -(-self.n_tokens // per))
        return fields


@functools.lru_cache(maxsize=4)
def _weights_of_places(n: int) -> np.ndarray:
    """n numbers in [0.5, 1.5), all of them different."""
    weights: np.ndarray = 0.5 + np.arange(1, n + 1) * GOLDEN % 1
    return weights


def _resize(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Cut or zero-extend one dimension."""
    if tensor.shape[dim] == size:
        return tensor
    out = tensor.new_zeros(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])
    kept = min(size, tensor.shape[dim])
    out.narrow(dim, 0, kept).copy_(tensor.narrow(dim, 0, kept))
    return out


def _dims(model: LoopedTransformer) -> int:
    return 1 if model.config.input_kind == "tokens" else 2


def _width(model: LoopedTransformer) -> int:
    """Numbers in one token of a feature or state prompt."""
    config = model.config
    return (config.n_dims or 0) if config.input_kind == "features" else config.d_model


def _shape(model: LoopedTransformer, batched: bool) -> str:
    width = "" if model.config.input_kind == "tokens" else f", {_width(model)}"
    return f"{model.config.input_kind} [{'B, ' if batched else ''}T{width}]"


def _from_array(values: Any) -> Tensor:
    """A tensor as it is, or a copy of an array in native byte order: arrays may be read-only, reversed or big-endian."""
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError("solve: masked arrays are not taken; shorten the prompt, or fill it and give lengths")
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("="), order="C"))
    if not isinstance(values, Tensor):
        raise TypeError(f"solve: a prompt or a state must be a tensor or an array, got {type(values).__name__}")
    if values.is_complex() or values.layout != torch.strided or values.is_nested:
        raise TypeError(f"solve: prompts and states must be dense and real, got {values.dtype}, {values.layout}")
    values = values.detach()
    return values.clone() if values.data_ptr() % values.element_size() else values  # of a buffer that is not aligned


def _tensor(model: LoopedTransformer, prompt: Any, name: str) -> Tensor:
    """A prompt or a batch as a tensor on the model's device: float prompts in its dtype, token ids int64."""
    parameter = first_weight(model)
    tensor = _from_array(prompt)
    if model.config.input_kind == "tokens":
        if tensor.is_floating_point() or tensor.dtype == torch.bool:
            raise TypeError(f"solve: token prompts must hold integers, got {tensor.dtype}")
        return tensor.to(parameter.device, torch.int64)
    if tensor.dim() < 2 or tensor.shape[-1] != _width(model):
        raise ValueError(f"solve: {name} must be {_shape(model, batched=name == 'prompts')}, got {list(tensor.shape)}")
    return tensor.to(parameter)


def _pad(model: LoopedTransformer, prompts: list[Tensor]) -> tuple[Tensor, list[int]]:
    for i, prompt in enumerate(prompts):
        if prompt.dim() != _dims(model):
            raise ValueError(f"solve: prompt {i} must be {_shape(model, batched=False)}, got {list(prompt.shape)}")
    if prompts:
        return torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True), [len(prompt) for prompt in prompts]
    config, parameter = model.config, first_weight(model)
    if config.input_kind == "tokens":
        return torch.zeros(0, 1, dtype=torch.int64, device=parameter.device), []
    return parameter.new_zeros(0, 1, _width(model)), []


def _lengths(tokens: Tensor, lengths: Any) -> list[int]:
    if lengths is None:
        return [tokens.shape[1]] * tokens.shape[0]
    values = _from_array(lengths) if isinstance(lengths, np.ndarray) else torch.as_tensor(lengths)
    if not values.numel():
        values = values.to(torch.int64)
    if values.dim() != 1 or len(values) != len(tokens) or values.is_floating_point() or values.is_complex():
        raise ValueError(f"solve: lengths must be {len(tokens)} integers, got {values.dtype} {list(values.shape)}")
    values = values.to(torch.int64)
    wrong = ((values < 0) | (values > tokens.shape[1])).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise ValueError(f"solve: prompt {i} has length {int(values[i])}, which must lie in 0 .. {tokens.shape[1]}")
    return [int(length) for length in values]
