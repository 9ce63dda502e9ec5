"""What a call of the engine takes and gives: `LoopSpec`, `LoopState`, `LoopResult`, `Status`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from looped.accelerate import Anderson, make_acceleration
from looped.config import LoopedConfig
from looped.exits import RULES, Exact, Exit, ExitRule, Memory, make_exit
from looped.model import loop_count


class Status(IntEnum):
    """How a prompt's loop ended."""

    MAX_LOOPS = 0  # all loops were run
    CONVERGED = 1  # the exit rule passed
    STALLED = 2  # the state goes on changing without coming closer to rest
    NONFINITE = 3  # the state holds NaN or infinity
    INTERRUPTED = 4  # it has not ended: an interrupt came first, and the result's `state` goes on


ON_STALL = ("ignore", "exit", "damp")


@dataclass(frozen=True)
class LoopSpec:
    """How to loop. `n_loops` is a total: a resumed state's loops count."""

    n_loops: int
    rule: ExitRule
    on_stall: str = "ignore"
    accelerate: Anderson | None = None
    return_predictions: bool = False

    def __post_init__(self) -> None:
        if self.on_stall not in ON_STALL:
            raise ValueError(f"solve: on_stall={self.on_stall!r} is not one of {', '.join(ON_STALL)}")
        if self.rule.min_loops > self.n_loops:
            raise ValueError(f"solve: min_loops={self.rule.min_loops} is more than n_loops={self.n_loops}")
        if self.on_stall == "damp" and (self.rule.is_fixed or not self.rule.can_stall):
            is_blind = getattr(self.rule, "tol", None) == 0
            name = type(self.rule).__name__ + (" with tol=0" if is_blind else "")
            cure = "set tol above 0" if is_blind else 'give another, such as exit="contraction"'
            raise ValueError(
                f'solve: on_stall="damp" does nothing under the exit rule {name}, which never stalls; {cure}, or drop on_stall'
            )
        if isinstance(self.rule, Exact) and self.accelerate is not None:
            raise ValueError('solve: exit="exact" is for programs, which are never accelerated; drop accelerate')
        if self.rule.scope == "token":
            raise ValueError('solve: scope="token" is for language models (looped.lm); use scope="prefix" or "prompt"')
        if self.rule.scope == "prefix" and (self.accelerate is not None or self.on_stall == "damp"):
            raise ValueError(
                'solve: scope="prefix" needs plain iteration, because Anderson steps and damping make a token depend on '
                'later ones; drop accelerate and on_stall="damp", or use scope="prompt"'
            )

    @classmethod
    def of(
        cls,
        config: LoopedConfig,
        n_loops: int,
        exit: Exit,
        on_stall: str,
        accelerate: Anderson | str | None,
        return_predictions: bool,
    ) -> LoopSpec:
        """How to loop a model of this configuration; the parameters are those of `solve`.

        Raises ValueError or TypeError for what does not go together.
        """
        rule = make_exit(exit)
        if rule.scope == "prefix" and config.mask_kind != "causal":
            raise ValueError('solve: scope="prefix" needs a causal mask; use scope="prompt" with this model')
        return cls(loop_count(n_loops), rule, on_stall, make_acceleration(accelerate), return_predictions)

    @property
    def stopping(self) -> tuple[object, ...]:
        """What decides when a prompt stops; a state resumes its counters only under the same."""
        return (type(self.rule), vars(self.rule), self.on_stall, self.accelerate)

    @property
    def is_plain(self) -> bool:
        """Whether every loop continues from F itself."""
        return self.accelerate is None and self.on_stall != "damp"


@dataclass(frozen=True)
class LoopState:
    """Everything that resuming needs, for B prompts: pass it to `solve` as `state` with the same prompts.

    y [B, T, C] is the last F. `memory` holds the solver's other tensors, prompts first. Under another exit rule, on_stall or
    accelerate the loops go on from the state, with new counters. Without memory no loop has begun, and y is Y_0 where the model
    has that given.
    """

    y: Tensor
    memory: Memory
    stopping: tuple[object, ...]
    prompt_sums: Tensor | None = None  # int64 [B], `PromptBatch.sums`, tells other prompts from the same ones
    weights_sum: int | None = None  # `looped.weights.checksum`, tells other weights from the same ones

    def select(self, prompts: Sequence[int] | Tensor) -> LoopState:
        """The states of some prompts: their numbers, or a bool mask [B]."""
        rows = torch.as_tensor(prompts, device=self.y.device)
        if rows.dim() != 1 or (len(rows) and rows.is_floating_point()):
            raise ValueError(f"LoopState.select: takes a list of prompt numbers or a mask, got {prompts!r}")
        if rows.dtype == torch.bool:
            if rows.shape != self.y.shape[:1]:
                raise ValueError(f"LoopState.select: a mask must be [{len(self.y)}], got {list(rows.shape)}")
            rows = rows.nonzero().squeeze(-1)
        rows = rows.long()
        memory = {name: tensor[rows] for name, tensor in self.memory.items()}
        sums = None if self.prompt_sums is None else self.prompt_sums[rows]
        return LoopState(self.y[rows], memory, self.stopping, sums, self.weights_sum)

    def __repr__(self) -> str:
        done = _loops(self.memory["t"]) if "t" in self.memory else "; no loop has begun"
        return f"LoopState({_prompts(len(self.y))}, y {list(self.y.shape)} {self.y.dtype}{done})"


torch.serialization.add_safe_globals([LoopState, Anderson, *RULES.values()])  # weights_only=True reads a saved state


@dataclass(frozen=True)
class PromptResult:
    """One prompt's result, in memory of its own: the fields of `LoopResult` without the batch."""

    y: Tensor
    prediction: Tensor
    n_loops: int
    status: Status
    residual: float
    predictions: Tensor | None
    n_loops_by_token: Tensor | None
    state: LoopState

    def __repr__(self) -> str:
        shapes = f"y {list(self.y.shape)} {self.y.dtype}, prediction {list(self.prediction.shape)}"
        return f"PromptResult({self.status.name} after {self.n_loops} loops, residual {self.residual:.3g}, {shapes})"


@dataclass(frozen=True)
class LoopResult:
    """What `solve` returns.

    y: final states F, [B, T, C], or a list of [T_i, C] where the prompts came as a list. Rows of padding are 0.
    prediction: their read-out, [B, N] (scalar) or [B, N, classes], or a list; the state itself without a read-out.
    n_loops: int64 [B], applications of M, confirming ones included.
    status: int64 [B], values of `Status`.
    residual: float64 [B], ||F - Y|| / ||F|| of the last loop; NaN where no loop has run.
    predictions: after every loop, [B, L, ...] or a list of [L, ...], when asked for; entries after a prompt's exit
        repeat its last one. A resumed call gives the loops it ran, from the least advanced prompt on; the entries of loops
        that a prompt had behind it are NaN.
    n_loops_by_token: int64 [B, T], the loop at which a token was frozen (scope="prefix"), else None.
    state: resumes, see `LoopState`. It shares its memory with y.
    backend, reason: what ran it, and why that one. Of a GPU's batch of short and long prompts: "triton and graph".
    interrupted: whether Ctrl-C stopped the call. Prompts that had not finished then have Status.INTERRUPTED, the state of their
        last complete loop, and NaN for what has not been read.
    """

    y: Tensor | list[Tensor]
    prediction: Tensor | list[Tensor]
    n_loops: Tensor
    status: Tensor
    residual: Tensor
    predictions: Tensor | list[Tensor] | None
    n_loops_by_token: Tensor | list[Tensor] | None
    state: LoopState
    backend: str
    reason: str
    interrupted: bool = False

    @property
    def finished(self) -> Tensor:
        """bool [B]: which prompts have ended; all of them unless the call was interrupted."""
        return self.status != Status.INTERRUPTED

    def __len__(self) -> int:
        return len(self.n_loops)

    def __repr__(self) -> str:
        counts = Counter(self.status.tolist())
        ended = ", ".join(f"{count} {Status(status).name}" for status, count in sorted(counts.items()))
        return f"LoopResult({_prompts(len(self))}, backend {self.backend}{': ' * bool(ended)}{ended}{_loops(self.n_loops)})"

    def __getitem__(self, i: int) -> PromptResult:
        """The result of prompt i."""
        predictions, by_token = self.predictions, self.n_loops_by_token
        return PromptResult(
            y=self.y[i].clone(),
            prediction=self.prediction[i].clone(),
            n_loops=int(self.n_loops[i]),
            status=Status(int(self.status[i])),
            residual=float(self.residual[i]),
            predictions=None if predictions is None else predictions[i].clone(),
            n_loops_by_token=None if by_token is None else by_token[i].clone(),
            state=self.state.select([range(len(self))[i]]),
        )


def _prompts(n: int) -> str:
    return f"{n} prompt{'s' * (n != 1)}"


def _loops(counts: Tensor) -> str:
    """The end of a summary: loops of the prompts, int64 [B]; nothing where there is nothing to read."""
    if not len(counts) or counts.is_meta:
        return ""
    return f"; loops min {int(counts.min())}, mean {float(counts.double().mean()):.4g}, max {int(counts.max())}"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C stopped `solve` or `solve_iter`. `result` holds what is finished, and a state from which the rest goes on.

    `result.finished` says which prompts have ended. Of `solve_iter`, `result` is of the batch that ran, whose prompts are
    counted from `n_before`; those of the batches before were given out already. Of `solve`, `n_before` is None.
    """

    def __init__(self, result: LoopResult, n_before: int | None = None) -> None:
        done = f"{int(result.finished.sum())} of {len(result)} prompts"
        if n_before is None:
            text = f"{done} had finished; solve(..., state=interrupt.result.state) goes on from here"
        else:
            text = f"{done} of the batch that begins with prompt {n_before} had finished; go on with the prompts from there"
        super().__init__(f"interrupted: {text}")
        self.result, self.n_before = result, n_before

    def __reduce__(self) -> tuple[type[Interrupted], tuple[LoopResult, int | None]]:
        return type(self), (self.result, self.n_before)


def not_begun(
    config: LoopedConfig,
    prompts: Tensor,
    lengths: Tensor | None,
    dtype: torch.dtype,
    spec: LoopSpec,
    state: LoopState | Tensor | None,
    backend: str,
    read: Callable[[Tensor, Tensor | None], Tensor],
) -> LoopResult:
    """The result of a run that was interrupted before its first loop. Prompts of a state that had ended are read."""
    n_prompts, n_tokens = prompts.shape[:2]
    if not isinstance(state, LoopState):
        y = torch.zeros(n_prompts, n_tokens, config.d_model, dtype=dtype, device=prompts.device) if state is None else state
        state = LoopState(y, {}, spec.stopping)
    prediction = state.y.new_full(config.prediction_shape(n_prompts, n_tokens), torch.nan)
    t = state.memory.get("t", torch.zeros(n_prompts, dtype=torch.int64, device=prompts.device))
    status, ended = torch.full_like(t, Status.INTERRUPTED), torch.zeros_like(t, dtype=torch.bool)
    if state.memory:
        before, ended = state.memory["status"], state.memory["done"]
        if state.stopping != spec.stopping:
            ended = before == Status.NONFINITE
            before = torch.where(ended, before, Status.MAX_LOOPS)
        ended = ended | (t >= spec.n_loops)
        status = torch.where(ended, before, status)
    if ended.any():
        prediction[ended] = read(state.y[ended], None if lengths is None else lengths[ended])
    predictions = None
    if spec.return_predictions:
        first = min(int(t.min()), spec.n_loops) if n_prompts else 0
        loops = torch.arange(first, spec.n_loops, device=t.device)
        predictions = prediction[:, None].repeat(1, len(loops), *[1] * (prediction.dim() - 1))
        predictions[loops < t[:, None]] = torch.nan
    return LoopResult(
        y=state.y,
        prediction=prediction,
        n_loops=t,
        status=status,
        residual=state.memory.get("residual", torch.full_like(t, torch.nan, dtype=torch.float64)),
        predictions=predictions,
        n_loops_by_token=state.memory.get("prefix.n_loops") if spec.rule.scope == "prefix" else None,
        state=state,
        backend=backend,
        reason="",
        interrupted=True,
    )


def check_weights(state: LoopState | Tensor | None, weights_sum: int) -> None:
    """Raises ValueError where a state was made with other weights."""
    if isinstance(state, LoopState) and state.weights_sum not in (None, weights_sum):
        raise ValueError(
            "solve: state was made with other weights than the model has now; start without state, or put those weights back"
        )
