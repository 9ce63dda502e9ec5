"""Fig. 6 and appendix D: prompts from other distributions than that of training, looped beside unlooped of several depths."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from torch import Tensor

from looped.experiments.lab import Lab, Run
from looped.experiments.measure import BATCH, Measured, kind_of, line, mean_ratio, measure, tested_loops
from looped.experiments.outcome import Cell, Claim, Outcome, Panel, Sheet
from looped.icl.baselines import LeastSquares
from looped.icl.evaluate import evaluation_stream
from looped.icl.predictor import LoopedPredictor
from looped.icl.shifts import SHIFTS, Shift, ShiftedPairs, predict_queries, random_rotation, shifted_batches
from looped.icl.tasks import Task

DEPTHS = {"tiny": (1, 2), "small": (1, 4, 12), "paper": (1, 4, 12, 20)}  # layers of the unlooped models
RICH = ("skewed", "half_subspace", "random_orthants")  # where the paper finds depth to help, and the loop to match it
ALIKE = ("orthogonal_query", "overlapping_query")


def unlooped_of_depth(lab: Lab, n_layers: int) -> Run:
    """The unlooped model of so many layers, under the name that other experiments know it by where it is the preset's own."""
    config = lab.config(unlooped=True)
    name = "linear_regression_unlooped"
    if n_layers == config.model.n_core:
        return name, config
    return f"{name}_L{n_layers}", dataclasses.replace(config, model=config.model.replace(n_core=n_layers))


def runs(lab: Lab) -> dict[str, Run]:
    """The models, by kind and depth."""
    unlooped = {f"unlooped L={n}": unlooped_of_depth(lab, n) for n in DEPTHS[lab.preset]}
    return {"looped": ("linear_regression", lab.config()), **unlooped}


def run(lab: Lab) -> Outcome:
    config = lab.config()
    task, n_points = config.make_task(), config.points.end
    models = {kind: lab.models(*wanted) for kind, wanted in runs(lab).items()}
    predictors: dict[str, list[Callable[[Tensor, Tensor], Tensor]]] = {
        name: [LoopedPredictor(model, n_loops=tested_loops(model, task, lab.preset)).predict for model in found]
        for name, found in models.items()
        if found
    }
    predictors["least squares"] = [lambda xs, ys: LeastSquares().predict(xs, ys, progress=lambda *_: None)]
    rotation = random_rotation(task.n_dims, lab.seed)
    found = {}
    for shift in SHIFTS.values():
        prompts = shifted_batches(
            shift,
            task,
            lab.n_prompts,
            n_points,
            generator=evaluation_stream(lab.seed),
            rotation=rotation,
            batch_size=BATCH,
        )
        found[shift.name] = measure(
            prompts, {name: [_way(one, shift, task) for one in some] for name, some in predictors.items()}
        )
    panels = [
        Panel(
            name.replace("_", " "),
            "examples in the prompt",
            "squared error / variance of y",
            [line(one, range(n_points), got, kind_of(one)) for one, got in measured.items()],
            marks=[(task.n_dims, "d")],
        )
        for name, measured in found.items()
    ]
    settings = dict(task=task.name, n_dims=task.n_dims, n_points=n_points)
    return Outcome("shift", "Fig. 6, appendix D", lab.preset, settings, panels, _sheet(found), _claims(found, lab))


def _way(predict: Callable[[Tensor, Tensor], Tensor], shift: Shift, task: Task) -> Callable[[ShiftedPairs], Tensor]:
    scale = shift.error_scale(task)

    def rows(pairs: ShiftedPairs) -> Tensor:
        return (predict_queries(predict, pairs).cpu().double() - pairs.query_ys.double()).square() / scale

    return rows


def last_measured(errors: Sequence[float]) -> int:
    """The largest number of examples at which anything was measured."""
    return max(i for i, error in enumerate(errors) if not math.isnan(error))


def mean_error(errors: Sequence[float]) -> float:
    """Over all numbers of examples from 1 on that were measured."""
    there = [error for error in errors[1:] if not math.isnan(error)]
    return sum(there) / len(there)


def _sheet(found: dict[str, dict[str, Measured]]) -> Sheet:
    names = list(next(iter(found.values())))
    rows: list[list[Cell]] = []
    for shift, measured in found.items():
        last = last_measured(measured[names[0]].curve.mean)
        rows.append([shift, last, *(measured[name].curve.mean[last] for name in names)])
        rows.append(["", f"mean 1..{last}", *(mean_error(measured[name].curve.mean) for name in names)])
    return Sheet("squared error / variance of y", ["shift", "examples", *names], rows)


def _claims(found: dict[str, dict[str, Measured]], lab: Lab) -> list[Claim]:
    depths = [f"unlooped L={n}" for n in DEPTHS[lab.preset]]
    if not {"looped", *depths} <= set(found["standard"]):
        return [Claim("Fig. 6", "looped beside unlooped models of several depths", "-", None)]

    def ratio_of(shift: str, name: str, other: str) -> float:
        return mean_ratio(found[shift][name].curve.mean, found[shift][other].curve.mean)

    claims = []
    for shift in RICH:
        ratio = max(ratio_of(shift, "looped", depth) for depth in depths)  # to the best of them
        text = f"{shift}: the looped model is as good as the deepest unlooped one, or better (here: within 1.1 x of the best)"
        claims.append(Claim("Fig. 6", text, f"{ratio:.2f} x", ratio <= 1.1))
    for shift in ALIKE:
        ratio = ratio_of(shift, "looped", depths[-1])
        text = f"{shift}: looped and unlooped are alike (here: within a factor of 1.3)"
        claims.append(Claim("appendix D", text, f"{ratio:.2f} x", 1 / 1.3 <= ratio <= 1.3))
    if len(depths) > 2:
        text = f"x scaled by 2: the looped model is like one of few layers (here: nearer to {depths[1]} than to {depths[-1]})"
        shallow, deep = (ratio_of("x_times_2", "looped", depth) for depth in (depths[1], depths[-1]))
        measured = f"{shallow:.2f} x {depths[1]}, {deep:.2f} x {depths[-1]}"
        claims.append(Claim("appendix D", text, measured, abs(math.log(shallow)) < abs(math.log(deep))))
    return claims
