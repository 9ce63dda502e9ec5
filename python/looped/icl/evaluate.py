"""Score in-context predictors on fresh prompts of a task: squared error by examples seen and, for looped models, by loops."""

from __future__ import annotations

import copy
import csv
import io
import json
import logging
import math
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from looped.checkpoint import write_atomically
from looped.exits import Fixed
from looped.icl.curves import Curve, RunningCurve, errors_of_model
from looped.icl.predictor import LoopedPredictor
from looped.icl.settling import Settling
from looped.icl.tasks import Pairs, Task
from looped.loop import LoopResult, Status

log = logging.getLogger(__name__)

EVALUATION_STREAM = 0x1C1  # what a seed is mixed with, so that evaluation draws other prompts than training
N_PROMPTS = 1280  # of the papers' figures
SLOW_PROMPTS = 128  # at most, for a baseline whose cost is "slow"
SETTLING_PROMPTS = 1280  # at most, for the study of states far past the trained loops


class Predictor(Protocol):
    """Anything that predicts ys from the pairs before: the baselines, a looped model, or your own."""

    @property
    def name(self) -> str: ...

    @property
    def cost(self) -> str:
        """``"cheap"`` or ``"slow"``."""

    @property
    def why_unavailable(self) -> str | None:
        """Why it cannot run here, or None."""

    def predict(self, xs: Tensor, ys: Tensor) -> Tensor:
        """[B, n] from xs [B, n, d] and ys [B, n]; entry i uses pairs 0 .. i-1 and x_i. NaN where there is no prediction."""


@dataclass(frozen=True)
class Score:
    """One predictor's results. error_by_examples[i]: normalised squared error with i examples."""

    error_by_examples: Curve
    looped: dict[str, Any] | None = None  # of a looped model: error_by_loops, mean_loops, exit, ...

    def to_dict(self) -> dict[str, Any]:
        return {"error_by_examples": self.error_by_examples.to_dict()} | (self.looped or {})


@dataclass(frozen=True)
class Evaluation:
    """Scores of several predictors on the same prompts.

    task_options: the task's numbers beside n_dims, such as a sparsity. sources: where the models come from, by their role
    (``{"model": "runs/loop"}``), where the caller says so; entries of `to_dict` of their own.
    """

    task: str
    task_options: dict[str, Any]
    n_dims: int
    n_points: int
    n_prompts: int
    seed: int
    error_scale: float
    scores: dict[str, Score]
    sources: dict[str, str | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; NaN is null."""
        names = ("task", "task_options", "n_dims", "n_points", "n_prompts", "seed", "error_scale")
        head = self.sources | {name: getattr(self, name) for name in names}
        trained = [s.looped["n_loops_trained"] for s in self.scores.values() if s.looped]
        head["n_loops_trained"] = trained[0] if trained else None
        return head | {"predictors": {name: score.to_dict() for name, score in self.scores.items()}}

    def remarks(self) -> list[str]:
        """Which models have predictions that are not finite, without which their means are."""
        remarks = []
        for name, score in self.scores.items():
            curve = score.error_by_examples
            if not curve.is_finite:
                at = curve.least_finite
                n_lost = f"{curve.n_not_finite[at]} of {curve.n_prompts}"
                remarks.append(f"{name}: not finite for {n_lost} prompts with {at} examples; its means are of the others")
            by_loops = score.looped["error_by_loops"] if score.looped else {"n_not_finite": []}
            if curve.is_finite and any(by_loops["n_not_finite"]):  # the exit came before
                n_lost = f"{max(by_loops['n_not_finite'])} of {by_loops['n_prompts']}"
                remarks.append(
                    f"{name}: without the exit not finite for {n_lost} prompts; its means by loops are of the others"
                )
        return remarks

    def to_csv(self) -> str:
        """One row per predictor and place: predictor, by (examples or loops), at, error, low, high, n_prompts."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["predictor", "by", "at", "error", "low", "high", "n_prompts"])
        for name, score in self.scores.items():
            curves: list[tuple[str, int, dict[str, Any]]] = [("examples", 0, score.error_by_examples.to_dict())]
            if score.looped:
                curves.append(("loops", 1, score.looped["error_by_loops"]))
            for by, first, curve in curves:
                for i, row in enumerate(zip(curve["mean"], curve["low"], curve["high"], strict=True)):
                    writer.writerow([name, by, i + first, *row, curve["n_prompts"]])
        return text.getvalue()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write evaluation.json and evaluation.csv into a folder, which is made if missing."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "evaluation.json", json.dumps(self.to_dict(), indent=1).encode())
        write_atomically(folder / "evaluation.csv", self.to_csv().encode())


@contextmanager
def another_interrupt_ignored() -> Iterator[None]:
    """Ctrl-C does nothing inside, so that what a first one left is not lost to a second. A no-op outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class EvaluationInterrupted(KeyboardInterrupt):
    """Ctrl-C stopped `evaluate`. `result` scores the prompts of the finished batches, as an evaluation of so many does.

    In the first batch it has the predictors that were through with it.
    """

    def __init__(self, result: Evaluation, n_asked: int, left_out: Sequence[str]) -> None:
        without = f" (without {', '.join(left_out)})" if left_out else ""
        super().__init__(f"interrupted after {result.n_prompts} of {n_asked} prompts{without}")
        self.result, self.n_asked, self.left_out = result, n_asked, left_out

    def __reduce__(self) -> tuple[type[EvaluationInterrupted], tuple[Evaluation, int, Sequence[str]]]:
        return type(self), (self.result, self.n_asked, self.left_out)


def evaluate(
    task: Task,
    predictors: Sequence[Predictor],
    *,
    n_prompts: int = N_PROMPTS,
    n_points: int,
    seed: int = 0,
    batch_size: int = 128,
    n_loops_shown: int | None = None,
    n_loops_settling: int = 300,
    progress: Callable[[str, int], None] | None = None,
) -> Evaluation:
    """Score predictors on fresh prompts.

    Every prompt is used once, the last batch may be smaller, and prompts are drawn and forgotten batch by batch: memory does
    not grow with n_prompts. Errors are squared and divided by `task.error_scale`; intervals are 90 % bootstrap ones. Predictors
    that are not available are left out with a notice in the log; those marked slow see the first 128 prompts only (their curve
    says how many).

    n_loops_shown: length of a looped model's error_by_loops, at the last point, not less than its trained loops; default 5
        times these, and 1 where that is 1: an unlooped model, of which no settling is studied either.
    n_loops_settling: loops of the study of rest, not less than those shown, on at most 1,280 prompts; 0 leaves it out. The
        first looped model is also studied damped, accelerated and on float32 states, the others plain alone.
    progress: called with a predictor's name and the number of prompts it has just finished.

    Ctrl-C raises `EvaluationInterrupted`, a KeyboardInterrupt whose `result` has what is finished; a plain one where nothing
    is.
    """
    if n_prompts < 1 or n_points < 1 or batch_size < 1:
        raise ValueError(f"evaluate: n_prompts={n_prompts}, n_points={n_points} and batch_size={batch_size} must be at least 1")
    names = [predictor.name for predictor in predictors]
    if len(set(names)) < len(names):
        raise ValueError(f"evaluate: predictors need names of their own, got {', '.join(names)}")
    scorers: list[_Scorer] = []
    for predictor in predictors:
        if predictor.why_unavailable:
            log.warning("left out: %s", predictor.why_unavailable)
            continue
        if isinstance(predictor, LoopedPredictor):
            is_first = not any(isinstance(scorer, _LoopedScorer) for scorer in scorers)
            scorers.append(_LoopedScorer(predictor, task, n_loops_shown, n_loops_settling, with_helps=is_first))
        else:
            scorers.append(_Scorer(predictor, task))

    def evaluation(scorers: Sequence[_Scorer], n_prompts: int) -> Evaluation:
        scores = {scorer.predictor.name: scorer.score() for scorer in scorers}
        return Evaluation(task.name, task.options, task.n_dims, n_points, n_prompts, seed, task.error_scale, scores)

    kept: tuple[list[_Scorer], int] = [], 0
    try:
        for pairs in batches(task, n_prompts, n_points, seed, batch_size):
            n_before, through = kept[1], []
            for scorer in scorers:
                n_done = scorer.add(pairs)
                through.append(scorer.copy())
                if not n_before or len(through) == len(scorers):
                    kept = list(through), n_before + len(pairs.ys)
                if progress and n_done:
                    progress(scorer.predictor.name, n_done)
        return evaluation(scorers, n_prompts)
    except KeyboardInterrupt:
        finished, n_scored = kept
        if not finished:
            raise KeyboardInterrupt(f"interrupted before any of {n_prompts} prompts was scored") from None
        left_out = [scorer.predictor.name for scorer in scorers[len(finished) :]]
        with another_interrupt_ignored():  # scoring takes a second or two
            result = evaluation(finished, n_scored)
        raise EvaluationInterrupted(result, n_prompts, left_out) from None


def batches(task: Task, n_prompts: int, n_points: int, seed: int, batch_size: int) -> Iterator[Pairs]:
    """The first n_prompts prompts of a seed's `evaluation_stream`; the batch size does not change them."""
    generator = evaluation_stream(seed)
    for start in range(0, n_prompts, batch_size):
        yield task.sample(min(batch_size, n_prompts - start), n_points, generator=generator)


def evaluation_stream(seed: int) -> torch.Generator:
    """A generator apart from that of a training run with this seed, or with any small one.

    PyTorch keeps 32 bits of a seed, so they are mixed, not added to: some training seed has this very stream, one in 2^32 that
    nobody chooses (for seed 0 it is 2288894632).
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"evaluate: seed={seed} must lie in 0 .. 2^32 - 1")
    mixed = np.random.SeedSequence([EVALUATION_STREAM, seed]).generate_state(1)[0]
    return torch.Generator().manual_seed(int(mixed))


class _Scorer:
    """Collects one predictor's errors."""

    def __init__(self, predictor: Predictor, task: Task) -> None:
        self.predictor, self.task = predictor, task
        self.by_examples = RunningCurve()
        self.limit = SLOW_PROMPTS if predictor.cost == "slow" else math.inf

    def add(self, pairs: Pairs) -> int:
        """Score a batch; returns how many of its prompts were used."""
        room = int(min(len(pairs.ys), self.limit - self.by_examples.n_prompts))
        if room > 0:
            xs, ys = pairs.xs[:room], pairs.ys[:room]
            predictions = self.predictions(xs.clone(), ys.clone())  # a predictor may not change what the next one sees
            if predictions.shape != ys.shape:
                raise ValueError(
                    f"evaluate: {self.predictor.name} predicts {list(predictions.shape)} for ys {list(ys.shape)}; "
                    "a prediction for every point is needed, NaN where there is none"
                )
            self.by_examples.add(self.errors(predictions, ys))
        return max(room, 0)

    def predictions(self, xs: Tensor, ys: Tensor) -> Tensor:
        return self.predictor.predict(xs, ys)

    def errors(self, predictions: Tensor, ys: Tensor) -> Tensor:
        return (predictions.cpu().double() - ys.double()).square() / self.task.error_scale

    def copy(self) -> _Scorer:
        """The scores as of now, which what is added later does not change."""
        other = copy.copy(self)
        other.by_examples = self.by_examples.copy()
        return other

    def score(self) -> Score:
        return Score(self.by_examples.curve())


class _LoopedScorer(_Scorer):
    """Also collects errors by loops, the loops that the exit used, and how states settle."""

    predictor: LoopedPredictor

    def __init__(
        self, predictor: LoopedPredictor, task: Task, n_loops_shown: int | None, n_loops_settling: int, *, with_helps: bool
    ) -> None:
        super().__init__(predictor, task)
        trained = predictor.n_loops_trained
        more = 5 * trained if trained > 1 else 1  # an unlooped model is meant to run once
        self.n_loops_shown = max(trained, more if n_loops_shown is None else n_loops_shown)
        self.settling: Settling | None = None
        if n_loops_settling and trained > 1:
            self.settling = Settling(predictor, max(n_loops_settling, self.n_loops_shown), with_helps=with_helps)
        self.n_settling = 0
        self.by_loops, self.at_trained_loops = RunningCurve(), RunningCurve()
        self.loops_used: Counter[int] = Counter()
        self.statuses: Counter[str] = Counter()

    def predictions(self, xs: Tensor, ys: Tensor) -> Tensor:
        result = self.predictor.run(xs, ys)
        self.loops_used.update(result.n_loops.tolist())
        self.statuses.update(Status(status).name for status in result.status.tolist())
        room = SETTLING_PROMPTS - self.n_settling if self.settling else 0
        if self.settling and room > 0:
            self.n_settling += len(ys[:room])
            self.add_loops(self.settling.add(xs[:room], ys[:room]), ys[:room])
        if len(ys) > room:
            plain: dict[str, Any] = dict(exit=Fixed(), on_stall="ignore", accelerate=None)
            every = self.predictor.run(xs[room:], ys[room:], n_loops=self.n_loops_shown, return_predictions=True, **plain)
            self.add_loops(every, ys[room:])
        assert isinstance(result.prediction, Tensor)
        return result.prediction

    def errors(self, predictions: Tensor, ys: Tensor) -> Tensor:
        return errors_of_model(predictions, ys, self.task.error_scale)

    def add_loops(self, every: LoopResult, ys: Tensor) -> None:
        """Errors after every loop of plain iteration."""
        assert isinstance(every.predictions, Tensor)
        self.by_loops.add(self.errors(every.predictions[:, : self.n_loops_shown, -1], ys[:, -1:]))
        self.at_trained_loops.add(self.errors(every.predictions[:, self.predictor.n_loops_trained - 1], ys))

    def copy(self) -> _LoopedScorer:
        other = cast(_LoopedScorer, super().copy())
        other.by_loops, other.at_trained_loops = self.by_loops.copy(), self.at_trained_loops.copy()
        other.loops_used, other.statuses = self.loops_used.copy(), self.statuses.copy()
        other.settling = self.settling and self.settling.copy()
        return other

    def score(self) -> Score:
        n_prompts = sum(self.loops_used.values())
        looped: dict[str, Any] = {
            "n_loops_trained": self.predictor.n_loops_trained,
            "exit": self.predictor.exit_to_dict(),
            "mean_loops": sum(loops * count for loops, count in self.loops_used.items()) / n_prompts,
            "loops_used": {str(loops): count for loops, count in sorted(self.loops_used.items())},
            "statuses": dict(self.statuses),
            "error_at_trained_loops": self.at_trained_loops.curve().to_dict(),
            "error_by_loops": self.by_loops.curve().to_dict(),
        }
        if self.settling:
            looped["settling"] = self.settling.report()
        return Score(self.by_examples.curve(), looped)
