"""The eager backend: docs/exits.md in PyTorch, the truth that the fast backends are held to. Read it beside that page.

Prompts that finish leave the batch and cost nothing more. Every tensor in `live` has the prompts still running first; names
with a dot belong to a rule or a method and are carried along like the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from looped.backends.eager_prefix import PrefixScope
from looped.exits import PRECISION_OF, ROUNDING_LEVEL, Memory, Step, Watch
from looped.loop import LoopResult, LoopSpec, LoopState, Status, check_weights, not_begun
from looped.model import LoopedTransformer, clear_padding, own_tokens
from looped.weights import checksum, weights_of

DAMPING = 0.5  # a in Y' = Y + a (F - Y), once a prompt has stalled under on_stall="damp"


class Scope(Protocol):
    """What a unit is, and how M is applied to the units that still move."""

    def start(self, P: Tensor, lengths: Tensor) -> Memory:
        """The scope's own memory."""

    def image(self, live: Memory) -> Tensor:
        """F = M(Y)."""

    def norm(self, live: Memory, x: Tensor) -> Tensor:
        """float64 norms of x [n, T, C] per unit, over own tokens."""

    def of_prompt(self, live: Memory, g: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Per prompt: g of what moves (stalls are judged by it), and g and n of all own tokens (residual)."""

    def at_rest(self, live: Memory, enough: Tensor) -> Tensor:
        """Which prompts have come to rest, given the units with enough passes."""

    def all_pass(self, live: Memory, passed: Tensor) -> Tensor:
        """Which prompts have no moving unit that failed, given the units that passed."""


class PromptScope:
    """A unit is a prompt: one rule, one exit."""

    def __init__(self, model: LoopedTransformer) -> None:
        self.model = model

    def start(self, P: Tensor, lengths: Tensor) -> Memory:
        return {}

    def image(self, live: Memory) -> Tensor:
        return self.model.step(live["Y"], live["P"], live.get("lengths"))

    def norm(self, live: Memory, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=(1, 2), dtype=torch.float64)  # padding is zero

    def of_prompt(self, live: Memory, g: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return g, g, n

    def at_rest(self, live: Memory, enough: Tensor) -> Tensor:
        return enough

    def all_pass(self, live: Memory, passed: Tensor) -> Tensor:
        return passed


@torch.no_grad()
def run(
    model: LoopedTransformer,
    prompts: Tensor,
    lengths: Tensor | None,
    spec: LoopSpec,
    state: LoopState | Tensor | None = None,
    on_progress: Callable[[int], object] | None = None,
) -> LoopResult:
    """Loop a padded batch until every prompt has finished, or until a KeyboardInterrupt (`LoopResult.interrupted`).

    prompts and lengths as in `LoopedTransformer.embed`; state: Y_0 where the model wants one given, or a `LoopState`;
    on_progress: called after each loop with the number of prompts that have finished.
    """
    try:
        weights_sum = checksum(weights_of(model).values())
    except KeyboardInterrupt:
        return _not_begun(model, prompts, lengths, spec, state)
    check_weights(state, weights_sum)
    with torch.autocast(prompts.device.type, enabled=False):  # the dtype asked for is the dtype computed in
        result = _run(model, prompts, lengths, spec, state, on_progress)
    return dataclasses.replace(result, state=dataclasses.replace(result.state, weights_sum=weights_sum))


def _run(
    model: LoopedTransformer,
    prompts: Tensor,
    lengths: Tensor | None,
    spec: LoopSpec,
    state: LoopState | Tensor | None,
    on_progress: Callable[[int], object] | None,
) -> LoopResult:
    loop = EagerLoop(model, spec)
    try:
        live = loop.start(prompts, lengths, state)
    except KeyboardInterrupt:
        return _not_begun(model, prompts, lengths, spec, state)
    first_t = live["t"].clone()
    finished = Finished(live)
    before = dict(live)  # as the last complete loop left it: no tensor of it is changed in place
    try:
        finished.take(live, live["done"] | (live["t"] >= spec.n_loops))
        while len(live["t"]):
            leaving = loop.once(live)
            if spec.return_predictions:
                finished.note_predictions(live, loop.prediction)
            finished.take(live, leaving)
            before = dict(live)
            if on_progress:
                on_progress(finished.n_prompts - len(live["t"]))
    except KeyboardInterrupt:
        finished.interrupt(before, spec.n_loops)
    return finished.result(model, lengths, spec, first_t)


def _not_begun(
    model: LoopedTransformer, prompts: Tensor, lengths: Tensor | None, spec: LoopSpec, state: LoopState | Tensor | None
) -> LoopResult:
    dtype = next(model.parameters()).dtype
    return not_begun(model.config, prompts, lengths, dtype, spec, state, "eager", model.read)


class EagerLoop:
    """The body of the loop."""

    def __init__(self, model: LoopedTransformer, spec: LoopSpec) -> None:
        self.model, self.spec = model, spec
        self.watch = Watch(spec.rule)
        self.scope: Scope = PrefixScope(model) if spec.rule.scope == "prefix" else PromptScope(model)
        self.prediction: Tensor | None = None

    def start(self, prompts: Tensor, lengths: Tensor | None, state: LoopState | Tensor | None) -> Memory:
        """The live prompts at t = 0, or as a `LoopState` left them."""
        P = self.model.embed(prompts, lengths)
        live: Memory = {"P": P} if lengths is None else {"P": P, "lengths": lengths}
        given = state if isinstance(state, Tensor) else None
        if isinstance(state, LoopState):
            live |= {"F": state.y, "Y": state.memory.get("Y", state.y)}
            live |= {name: state.memory[name] for name in ("t", "done", "status", "residual")}
            if state.stopping == self.spec.stopping:
                return live | state.memory
            live["done"] = live["status"] == Status.NONFINITE
            live["status"] = torch.where(live["done"], live["status"], Status.MAX_LOOPS)
        else:
            Y = clear_padding(self.model.initial_state(P, given).clone(), own_tokens(P.shape[1], lengths))
            zeros = torch.zeros(len(P), dtype=torch.int64, device=P.device)
            live |= {"F": Y, "Y": Y, "t": zeros, "done": zeros.bool(), "status": zeros + Status.MAX_LOOPS}
            live["residual"] = torch.full_like(zeros, torch.nan, dtype=torch.float64)
        live |= self.watch.start(torch.zeros_like(self.scope.norm(live, live["Y"])))
        live["damped"] = torch.zeros_like(live["done"])
        own = lengths if lengths is not None else torch.full_like(live["t"], P.shape[1])
        live |= self.scope.start(P, own)
        if self.spec.accelerate is not None:
            live |= self.spec.accelerate.start(live["Y"])
        return live

    def once(self, live: Memory) -> Tensor:
        """One loop of every live prompt. Returns which of them have finished, bool [n]."""
        spec, scope, Y = self.spec, self.scope, live["Y"]
        F = scope.image(live)
        g, n = scope.norm(live, F - Y), scope.norm(live, F)
        moving_g, prompt_g, prompt_n = scope.of_prompt(live, g, n)
        live["F"], live["t"] = F, live["t"] + 1
        live["residual"] = torch.where(prompt_g == 0, 0.0, prompt_g / prompt_n)  # 0 / 0 = 0
        self.prediction = None

        next_Y, s = self.next_state(live, Y, F, g)
        step = self.describe(live, Y, F, g, n, s)
        nonfinite = ~(torch.isfinite(prompt_g) & torch.isfinite(prompt_n))
        at_rest = scope.at_rest(live, self.watch.enough(live, step)) & ~nonfinite
        passing = scope.all_pass(live, live["passes"] > 0)
        stalled = self.watch.stalled(live, live["t"], moving_g, passing)
        live["Y"] = self.confirm_plainly(live, next_Y, F, g)

        acts = stalled & (live["t"] % spec.rule.check_every == 0)
        ends_by_stall = acts & (live["damped"] if spec.on_stall == "damp" else spec.on_stall == "exit")
        if spec.on_stall == "damp":
            starts = acts & ~live["damped"]
            live["damped"] = live["damped"] | starts
            self.watch.reset(live, starts)
        status = torch.where(stalled, Status.STALLED, Status.MAX_LOOPS)
        status = torch.where(at_rest, Status.CONVERGED, status)
        live["status"] = torch.where(nonfinite, Status.NONFINITE, status)
        live["done"] = nonfinite | at_rest | ends_by_stall
        return live["done"] | (live["t"] >= spec.n_loops)

    def next_state(self, live: Memory, Y: Tensor, F: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Y' and s = ||Y' - Y||: F, or the damped step, or the Anderson step."""
        if self.spec.is_plain:
            return F, g
        next_Y = F
        if self.spec.accelerate is not None:
            mixed, dropped = self.spec.accelerate.step(live, Y, F, g)
            self.watch.forget_rate(live, dropped)
            plain = dropped | live["damped"] | (live["passes"] > 0)
            next_Y = torch.where(plain[:, None, None], F, mixed)
        next_Y = torch.where(live["damped"][:, None, None], Y + DAMPING * (F - Y), next_Y)
        return next_Y, self.scope.norm(live, next_Y - Y)

    def confirm_plainly(self, live: Memory, next_Y: Tensor, F: Tensor, g: Tensor) -> Tensor:
        """After a first pass of an accelerated prompt the next loop starts from F, so that it gives the map's own rate."""
        if self.spec.accelerate is None:
            return next_Y
        confirming = (live["passes"] > 0) & ~live["damped"]
        live["s_prev"] = torch.where(confirming & (live["t_prev"] == live["t"]), g, live["s_prev"])
        return torch.where(confirming[:, None, None], F, next_Y)

    def describe(self, live: Memory, Y: Tensor, F: Tensor, g: Tensor, n: Tensor, s: Tensor) -> Step:
        def predict() -> Tensor:
            if self.prediction is None:
                self.prediction = self.model.read(F, live.get("lengths"))
            return self.prediction

        if self.spec.return_predictions:
            predict()
        phi = ROUNDING_LEVEL[PRECISION_OF[F.dtype]]
        rho = torch.full_like(g, torch.nan)  # the watch knows the check before
        return Step(live["t"], g, n, s, rho, Y, F, predict, phi, self.model.config.prediction_stride)


class Finished:
    """Where prompts go when they leave the batch; and, with them, the order they came in."""

    def __init__(self, live: Memory) -> None:
        self.n_prompts = len(live["t"])
        self.memory: Memory | None = None
        self.predictions: list[tuple[Tensor, Tensor, Tensor]] = []
        self.interrupted = False
        self.unfinished = torch.zeros_like(live["done"])
        live["index"] = torch.arange(self.n_prompts, device=live["t"].device)

    def take(self, live: Memory, leaving: Tensor) -> None:
        """Move the leaving prompts out of `live`."""
        if leaving.all() and self.memory is None:  # all at once: nothing to copy
            self.memory = dict(live)
            live.update({name: tensor[:0] for name, tensor in live.items()})
            return
        if not leaving.any():
            return
        if self.memory is None:
            self.memory = {}
        for name, tensor in live.items():
            if name not in self.memory:
                self.memory[name] = tensor.new_zeros(self.n_prompts, *tensor.shape[1:])
            self.memory[name][live["index"][leaving]] = tensor[leaving]
        live.update({name: tensor[~leaving] for name, tensor in live.items()})

    def interrupt(self, live: Memory, n_loops: int) -> None:
        """Take prompts that have not finished, as their last complete loop left them."""
        self.interrupted = True
        self.unfinished[live["index"]] = ~live["done"] & (live["t"] < n_loops)
        if len(live["t"]) == self.n_prompts:
            self.memory = None  # nobody has left yet, or has only begun to
        self.take(dict(live), torch.ones_like(live["done"]))

    def note_predictions(self, live: Memory, prediction: Tensor | None) -> None:
        """Keep the predictions of this loop."""
        assert prediction is not None
        self.predictions.append((live["index"], live["t"], prediction))

    def result(self, model: LoopedTransformer, lengths: Tensor | None, spec: LoopSpec, first_t: Tensor) -> LoopResult:
        """All prompts in the order they came in."""
        assert self.memory is not None
        memory = {name: tensor for name, tensor in self.memory.items() if name not in ("P", "lengths", "index")}
        y = memory.pop("F")
        if spec.is_plain and bool((memory["t"] > first_t).all()):
            memory.pop("Y")  # F itself
        prediction = model.read(y, lengths)
        if self.interrupted:
            prediction = prediction.clone()
            prediction[self.unfinished] = torch.nan
        predictions = self._stack(prediction, memory["t"], first_t, spec.n_loops) if spec.return_predictions else None
        return LoopResult(
            y=y,
            prediction=prediction,
            n_loops=memory["t"],
            status=torch.where(self.unfinished, Status.INTERRUPTED, memory["status"]),
            residual=memory["residual"],
            predictions=predictions,
            n_loops_by_token=memory.get("prefix.n_loops"),
            state=LoopState(y, memory, spec.stopping),
            backend="eager",
            reason="",
            interrupted=self.interrupted,
        )

    def _stack(self, last: Tensor, t: Tensor, first_t: Tensor, n_loops: int) -> Tensor:
        """[B, L, ...] from the notes; entries after a prompt's exit hold still, those before its first loop here are NaN."""
        start = int(first_t.min()) if len(first_t) else 0
        stacked = last[:, None].repeat(1, max(0, n_loops - start), *[1] * (last.dim() - 1))
        behind = torch.arange(start, start + stacked.shape[1], device=t.device) < first_t[:, None]
        stacked[behind] = torch.nan
        for index, at, prediction in self.predictions:
            complete = at <= t[index]  # the loop that an interrupt broke off may have been noted
            stacked[index[complete], at[complete] - start - 1] = prediction[complete]
        return stacked
