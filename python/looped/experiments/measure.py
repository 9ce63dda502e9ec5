"""Measuring models and baselines on the same prompts, streamed: `measure`, and what there is to measure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from looped.exits import Fixed
from looped.experiments.outcome import Line
from looped.icl.baselines import Baseline
from looped.icl.curves import Curve, RunningCurve, errors_of_model
from looped.icl.evaluate import SLOW_PROMPTS, batches
from looped.icl.predictor import LoopedPredictor
from looped.icl.shifts import ShiftedPairs
from looped.icl.tasks import Pairs, Task
from looped.model import LoopedTransformer

BATCH = 128
TESTED, TESTED_OF = 500, {"decision_tree": 200}  # loops of the published curves by examples, whatever the trained ones
REACH = 5  # times the trained loops: how far past them is looked, and those of these curves at the other presets
KINDS = {"looped": "looped", "tied": "twin", "unlooped": "twin"}  # of a line, by the model's kind

Prompts = TypeVar("Prompts", Pairs, ShiftedPairs)
Name = TypeVar("Name")
Way = Callable[[Pairs], Tensor]  # prompts -> rows [B, K]


class Ways(list[Callable[[Any], Tensor]]):
    """A way for each model of a name. n_lost: as of `looped.experiments.lab.Models`."""

    n_lost = 0

    @classmethod
    def of(cls, models: Sequence[LoopedTransformer], way: Callable[[LoopedTransformer], Callable[[Any], Tensor]]) -> Ways:
        ways = cls(way(model) for model in models)
        ways.n_lost = getattr(models, "n_lost", 0)
        return ways


@dataclass(frozen=True)
class Measured:
    """A curve over prompts, each prompt's value being the mean over models (seeds); that of each model; the seconds taken.

    first: the means over the first 128 prompts, which slow ways see alone, where the curve is over more. n_lost: seeds whose
    model is not among these.
    """

    curve: Curve
    by_model: list[list[float]]
    seconds: float
    first: Sequence[float] = ()
    n_lost: int = 0


def measure(
    prompts: Iterable[Prompts], ways: Mapping[str, Sequence[Callable[[Prompts], Tensor]]], *, slow: Iterable[str] = ()
) -> dict[str, Measured]:
    """Run every way on all prompts and average. Names in `slow` see the first 128 prompts only; ways without functions none."""
    n_lost = {name: getattr(functions, "n_lost", 0) for name, functions in ways.items()}
    ways = {name: list(functions) for name, functions in ways.items() if functions}
    slow = set(slow)
    running = {name: [RunningCurve() for _ in range(len(functions) + 1)] for name, functions in ways.items()}
    first = {name: RunningCurve() for name in ways}
    seconds = dict.fromkeys(ways, 0.0)
    for pairs in prompts:
        for name, functions in ways.items():
            room = SLOW_PROMPTS - running[name][0].n_prompts if name in slow else len(pairs.ys)
            if room <= 0:
                continue
            own = pairs if room >= len(pairs.ys) else first_of(pairs, room)
            begin = time.perf_counter()
            rows: list[Tensor] = [function(own).double().cpu() for function in functions]
            seconds[name] += time.perf_counter() - begin
            mean = torch.stack(rows).mean(dim=0)
            for curve, one in zip(running[name], [mean, *rows], strict=True):
                curve.add(one)
            first[name].add(mean[: SLOW_PROMPTS - first[name].n_prompts])
    return {
        name: Measured(
            curve.curve(),
            [one.mean() for one in by_model],
            seconds[name],
            first[name].mean() if curve.n_prompts > SLOW_PROMPTS else (),
            n_lost[name],
        )
        for name, (curve, *by_model) in running.items()
    }


def on_shared(some: Sequence[Measured]) -> tuple[int, list[list[float]]]:
    """The number of prompts that all of several have seen, and their means over these."""
    n_shared = min(one.curve.n_prompts for one in some)
    return n_shared, [one.curve.mean if one.curve.n_prompts == n_shared else list(one.first) for one in some]


def sound(found: Mapping[Name, Measured]) -> dict[Name, Measured]:
    """What claims may rest on: without the models that have a prediction that is not finite, and those of fewer seeds than
    were asked for, as if these were not there."""
    return {name: one for name, one in found.items() if one.curve.is_finite and not one.n_lost}


def least(errors: Iterable[float]) -> float:
    """The least of what was measured; NaN where nothing was."""
    return min((error for error in errors if not math.isnan(error)), default=math.nan)


def kind_of(name: str) -> str:
    """How the line of a model ("looped", "tied", "unlooped", "unlooped L=4") or of a baseline is drawn."""
    return KINDS.get(name.partition(" L=")[0], "baseline")


def line(label: str, xs: Sequence[float], found: Measured, kind: str = "looped") -> Line:
    """What was measured as a line of a panel, with that of each model where there are several."""
    by_seed = found.by_model if len(found.by_model) > 1 else ()
    return Line(label, xs, found.curve, kind, by_seed, models_at=[n_models(found, kind)] * len(xs))


def line_of_last(label: str, xs: Sequence[float], found: Sequence[Measured], kind: str) -> Line:
    """The last places of what was measured at each of xs, with the prompts and models behind each."""
    prompts_at, models_at = [one.curve.n_prompts for one in found], [n_models(one, kind) for one in found]
    return Line(label, xs, joined([one.curve for one in found]), kind, prompts_at=prompts_at, models_at=models_at)


def n_models(found: Measured, kind: str) -> int:
    """How many models are behind what was measured; none of a baseline."""
    return 0 if kind == "baseline" else len(found.by_model)


def first_of(pairs: Prompts, n_prompts: int) -> Prompts:
    """The first prompts of a batch."""
    cut: dict[str, Any] = {name: part[:n_prompts] for name, part in pairs._asdict().items() if isinstance(part, Tensor)}
    return pairs._replace(**cut)


def fresh(task: Task, n_prompts: int, n_points: int, seed: int) -> Iterable[Pairs]:
    """Evaluation prompts, batch by batch."""
    return batches(task, n_prompts, n_points, seed, BATCH)


def n_loops_tested(model: LoopedTransformer, task: Task, preset: str) -> int:
    """The loops of a model in curves by examples: past the trained ones, as published. A model that runs once does so here."""
    n_loops = model.config.n_loops
    if n_loops == 1:
        return 1
    return TESTED_OF.get(task.name, TESTED) if preset == "paper" else REACH * n_loops


def by_examples(models: Sequence[LoopedTransformer], task: Task, preset: str = "") -> Ways:
    """Error at every point, after the trained loops, or the `n_loops_tested` of a preset."""

    def way(model: LoopedTransformer) -> Way:
        predictor = LoopedPredictor(model, n_loops=n_loops_tested(model, task, preset) if preset else None)
        return lambda pairs: errors_of_model(predictor.predict(pairs.xs, pairs.ys), pairs.ys, task.error_scale)

    return Ways.of(models, way)


def by_loops(models: Sequence[LoopedTransformer], task: Task, n_loops: int) -> Ways:
    """Error at the last point, after every loop up to n_loops."""

    def way(model: LoopedTransformer) -> Way:
        predictor = LoopedPredictor(model, n_loops=n_loops, exit=Fixed())

        def rows(pairs: Pairs) -> Tensor:
            predictions = predictor.run(pairs.xs, pairs.ys, return_predictions=True).predictions
            assert isinstance(predictions, Tensor)
            return errors_of_model(predictions[:, :, -1], pairs.ys[:, -1:], task.error_scale)

        return rows

    return Ways.of(models, way)


def of_baseline(baseline: Baseline, task: Task) -> Ways:
    """A baseline's error at every point; none where it cannot run here."""
    if baseline.why_unavailable:
        return Ways()
    return Ways([lambda pairs: squared(baseline.predict(pairs.xs, pairs.ys, progress=lambda *_: None), pairs.ys, task)])


def squared(predictions: Tensor, ys: Tensor, task: Task) -> Tensor:
    """(prediction - y)^2 / the variance of y, of a baseline: NaN where it has no prediction."""
    return (predictions.cpu().double() - ys.cpu().double()).square() / task.error_scale


def mean_ratio(errors: Sequence[float], others: Sequence[float]) -> float:
    """The geometric mean of errors / others over the places from 1 on where both were measured; NaN where there are none."""
    logs = [math.log(a / b) for a, b in zip(errors[1:], others[1:], strict=True) if a > 0 and b > 0]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def joined(curves: Sequence[Curve]) -> Curve:
    """The last places of several curves as the places of one; n_prompts is the least of theirs."""
    names = ("mean", "low", "high", "n_missing", "n_not_finite")
    mean, low, high, n_missing, n_not_finite = ([getattr(curve, name)[-1] for curve in curves] for name in names)
    return Curve(mean, low, high, min(curve.n_prompts for curve in curves), n_missing, n_not_finite)


def single(values: Sequence[float], n_prompts: int = 0) -> Curve:
    """A curve of numbers that have no interval."""
    none = [math.nan] * len(values)
    return Curve(list(values), none, list(none), n_prompts, [0] * len(values))
