"""Fig. 6 and appendix D: prompts from other distributions than that of training, looped beside unlooped of several depths."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

from torch import Tensor

from looped.experiments.lab import Lab, Run
from looped.experiments.loops_and_window import published_run
from looped.experiments.measure import BATCH, Measured, kind_of, line, mean_ratio, measure, n_loops_tested, sound
from looped.experiments.outcome import Cell, Claim, Outcome, Panel, Sheet
from looped.icl.baselines import LeastSquares
from looped.icl.curves import errors_of_model
from looped.icl.evaluate import evaluation_stream
from looped.icl.predictor import LoopedPredictor
from looped.icl.shifts import SCALES, SHIFTS, Shift, ShiftedPairs, predict_queries, random_rotation, shifted_batches
from looped.icl.tasks import Task

TASK = "linear_regression"
LOOPS = {"paper": (20,)}  # trained loops b of more looped models; with fewer than 20 the paper finds no fixed point
DEPTHS = {"tiny": (1, 2), "small": (1, 4, 12), "paper": (1, 4, 12, 20)}  # layers of the unlooped models
RICH = ("skewed", "half_subspace", "random_orthants")  # where the paper finds depth to help, and the loop to match it
ALIKE = ("orthogonal_query", "overlapping_query")


def unlooped_of_depth(lab: Lab, n_layers: int) -> Run:
    """The unlooped model of so many layers, under the name that other experiments know it by where it is the preset's own."""
    config = lab.config(unlooped=True)
    name = f"{TASK}_unlooped"
    if n_layers == config.model.n_core:
        return name, config
    return f"{name}_L{n_layers}", dataclasses.replace(config, model=config.model.replace(n_core=n_layers))


def runs(lab: Lab) -> dict[str, Run]:
    """The models, by kind and depth."""
    unlooped = {f"unlooped L={n}": unlooped_of_depth(lab, n) for n in DEPTHS[lab.preset]}
    own = lab.config()
    looped = {f"looped b={b}": published_run(lab, TASK, b, own.window) for b in LOOPS.get(lab.preset, ())}
    return {"looped": (TASK, own), **looped, **unlooped}


def run(lab: Lab) -> Outcome:
    config = lab.config()
    task, n_points = config.make_task(), config.points.end
    models = {kind: lab.models(*wanted) for kind, wanted in runs(lab).items()}
    predictors: dict[str, list[Callable[[Tensor, Tensor], Tensor]]] = {
        name: [LoopedPredictor(model, n_loops=n_loops_tested(model, task, lab.preset)).predict for model in found]
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
            lab.watched(shift.name, prompts),
            {name: [_way(one, shift, task) for one in some] for name, some in predictors.items()},
        )
    panels = [
        Panel(
            name.replace("_", " "),
            "examples in the prompt",
            "squared error / variance of y",
            [line(one, range(n_points), got, _kind_of(one)) for one, got in measured.items()],
            marks=[(task.n_dims, "d")],
        )
        for name, measured in found.items()
    ]
    settings = dict(task=task.name, n_dims=task.n_dims, n_points=n_points)
    everywhere = set.intersection(*(set(sound(measured)) for measured in found.values()))
    everywhere -= {name for name, some in models.items() if some.n_lost}
    of_these = {shift: {name: measured[name] for name in measured if name in everywhere} for shift, measured in found.items()}
    return Outcome("shift", "Fig. 6, appendix D", lab.preset, settings, panels, _sheet(found), _claims(of_these, lab))


def _kind_of(name: str) -> str:
    return kind_of(name.partition(" b=")[0])


def _way(predict: Callable[[Tensor, Tensor], Tensor], shift: Shift, task: Task) -> Callable[[ShiftedPairs], Tensor]:
    scale = shift.error_scale(task)

    def rows(pairs: ShiftedPairs) -> Tensor:
        return errors_of_model(predict_queries(predict, pairs), pairs.query_ys, scale)

    return rows


def last_measured(*models: Sequence[float]) -> int:
    """The largest number of examples at which any of several was measured; 0 where none was."""
    return max((i for errors in models for i, error in enumerate(errors) if not math.isnan(error)), default=0)


def mean_error(errors: Sequence[float]) -> float | None:
    """Over all numbers of examples from 1 on that were measured; None where nothing was."""
    there = [error for error in errors[1:] if not math.isnan(error)]
    return sum(there) / len(there) if there else None


def _sheet(found: dict[str, dict[str, Measured]]) -> Sheet:
    names = list(next(iter(found.values())))
    rows: list[list[Cell]] = []
    for shift, measured in found.items():
        last = last_measured(*(one.curve.mean for one in measured.values()))
        rows.append([shift, last, *(measured[name].curve.mean[last] for name in names)])
        rows.append(["", f"mean 1..{last}", *(mean_error(measured[name].curve.mean) for name in names)])
    return Sheet("squared error / variance of y", ["shift", "examples", *names], rows)


def _claims(found: dict[str, dict[str, Measured]], lab: Lab) -> list[Claim]:
    """Each of the models that it is about; no verdict where one of these is not there."""
    depths = [f"unlooped L={n}" for n in DEPTHS[lab.preset]]
    config, deepest = lab.config(), depths[-1]
    claims: list[Claim] = []

    def ratio_of(shift: str, name: str, other: str) -> float:
        return mean_ratio(found[shift][name].curve.mean, found[shift][other].curve.mean)

    def at_d(name: str) -> float:
        return found["noisy_output"][name].curve.mean[config.dims.end]

    def claim(figure: str, text: str, models: Sequence[str], judge: Callable[[], tuple[str, bool]]) -> None:
        lost = [name for name in models if name not in found["standard"]]
        measured, holds = judge() if not lost else (f"no finite model of {', '.join(lost)}", None)
        claims.append(Claim(figure, text, measured, holds))

    def as_the_best(shift: str) -> tuple[str, bool]:
        ratio = max(ratio_of(shift, "looped", depth) for depth in depths)
        return f"{ratio:.2f} x", ratio <= 1.1

    def alike(shift: str) -> tuple[str, bool]:
        ratio = ratio_of(shift, "looped", deepest)
        return f"{ratio:.2f} x", 1 / 1.3 <= ratio <= 1.3

    def nearer(ratios: Sequence[float]) -> tuple[str, bool]:
        shallow, deep = ratios
        return f"{shallow:.2f} x {depths[1]}, {deep:.2f} x {deepest}", abs(math.log(shallow)) < abs(math.log(deep))

    def few_layers(shift: str, models: Sequence[str]) -> tuple[str, bool]:
        return nearer([ratio_of(shift, "looped", depth) for depth in models[1:]])

    def below(name: str, other: str) -> tuple[str, bool]:
        return f"{at_d(name):.3g} against {at_d(other):.3g}", at_d(name) < at_d(other)

    for shift in RICH:
        text = f"{shift}: the looped model is as good as the deepest unlooped one, or better (here: within 1.1 x of the best)"
        claim("Fig. 6", text, ["looped", *depths], functools.partial(as_the_best, shift))
    for shift in ALIKE:
        text = f"{shift}: looped and unlooped are alike (here: within a factor of 1.3)"
        claim("appendix D", text, ["looped", deepest], functools.partial(alike, shift))
    noise = "noise on y (standard deviation 1)"
    text = f"{noise}: the looped model's peak is lower than the deepest one's (here: its error at d examples below {deepest}'s)"
    claim("appendix D", text, ["looped", deepest], lambda: below("looped", deepest))
    for b in LOOPS.get(lab.preset, ()):
        more = config.model.n_loops
        text = f"{noise}: the larger b, the lower the peak (here: the error at d examples, b={more} below b={b})"
        claim("appendix D", text, ["looped", f"looped b={b}"], functools.partial(below, "looped", f"looped b={b}"))
    if len(depths) > 2:
        rule, models = f"nearer to {depths[1]} than to {deepest}", ["looped", depths[1], deepest]
        text = f"{noise}: at d examples the looped model is like one of few layers (here: {rule})"
        claim("appendix D", text, models, lambda: nearer([at_d("looped") / at_d(depth) for depth in models[1:]]))
        for what, scale in itertools.product("xw", SCALES):
            text = f"{what} scaled by {scale}: the looped model is like one of few layers (here: {rule})"
            claim("appendix D", text, models, functools.partial(few_layers, f"{what}_times_{scale}", models))
    return claims
