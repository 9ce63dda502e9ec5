"""Fig. 2 and 3: does the looped model come to a fixed point? Error to five times the trained loops, injected against tied."""

from __future__ import annotations

import math

from looped.experiments.lab import Lab, Run, n_parameters
from looped.experiments.measure import (
    REACH,
    Measured,
    by_examples,
    by_loops,
    fresh,
    kind_of,
    least,
    line,
    measure,
    of_baseline,
    sound,
)
from looped.experiments.outcome import Claim, Outcome, Panel, Sheet
from looped.icl.baselines import LeastSquares

Y = "squared error / variance of y"


def runs(lab: Lab) -> dict[str, Run]:
    """The models, by kind."""
    return {
        "looped": ("linear_regression", lab.config()),
        "tied": ("linear_regression_tied", lab.config(tied=True)),
        "unlooped": ("linear_regression_unlooped", lab.config(unlooped=True)),
    }


def run(lab: Lab) -> Outcome:
    config = lab.config()
    models = {kind: lab.models(*wanted) for kind, wanted in runs(lab).items()}
    task, n_points = config.make_task(), config.points.end
    n_loops = models["looped"][0].config.n_loops if models["looped"] else config.model.n_loops
    prompts = dict(n_prompts=lab.n_prompts, n_points=n_points, seed=lab.seed)
    looping = {kind: by_loops(models[kind], task, REACH * n_loops) for kind in ("looped", "tied")}
    loops = measure(lab.watched("by loops", fresh(task, **prompts)), looping)
    ways = {kind: by_examples(found, task) for kind, found in models.items()}
    ways["least squares"] = of_baseline(LeastSquares(), task)
    examples = measure(lab.watched("by examples", fresh(task, **prompts)), ways)
    xs = range(1, REACH * n_loops + 1)
    lines = [line(kind, xs, found, kind_of(kind)) for kind, found in loops.items()]
    panels = [
        Panel(
            f"error at {n_points - 1} examples",
            "loops",
            Y,
            lines,
            "xy",
            [(n_loops, "trained loops")],
        ),
        Panel(
            f"error at the trained {n_loops} loops",
            "examples in the prompt",
            Y,
            [line(name, range(n_points), found, kind_of(name)) for name, found in examples.items()],
            marks=[(task.n_dims, "as many examples\nas dimensions")],
        ),
    ]
    return Outcome(
        "fixed-point",
        "Fig. 2, 3",
        lab.preset,
        dict(task=task.name, n_dims=task.n_dims, n_points=n_points, n_loops_trained=n_loops),
        panels,
        _sheet(models, loops, examples, n_loops),
        _claims(models, loops, sound(examples), n_loops, task.n_dims),
    )


def worst_beyond(errors: list[float], n_loops: int) -> float:
    """The largest error from the trained loops on, over that at the trained loops; NaN where none was measured."""
    beyond = [error for error in errors[n_loops - 1 :] if not math.isnan(error)]
    return max(beyond, default=math.nan) / errors[n_loops - 1]


def _sheet(models: dict, loops: dict[str, Measured], examples: dict[str, Measured], n_loops: int) -> Sheet:
    rows = []
    for name, found in examples.items():
        size = n_parameters(models[name][0]) if models.get(name) else None
        at = found.curve.mean[-1]
        if name in loops:
            errors = loops[name].curve.mean
            best = least(errors)
            at_loop = errors.index(best) + 1 if best in errors else None
            rows.append([name, size, at, best, at_loop, errors[-1], errors[-1] / at, worst_beyond(errors, n_loops)])
        else:
            rows.append([name, size, at, *[None] * 5])
    far = REACH * n_loops
    columns = ["", "parameters", "error, trained loops", "best error", "at loop", f"at {far} loops"]
    columns += [f"{far} / trained", "worst beyond / trained"]
    return Sheet("error with all examples", columns, rows)


def _beyond(found: Measured | None, n_loops: int) -> tuple[float, float]:
    """Over the error at the trained loops, the largest from there on and the last one: infinite both where predictions are not
    finite past the trained loops alone, NaN where they are not before either, or were not measured, or not of every seed."""
    if found is None or found.n_lost or any(found.curve.n_not_finite[:n_loops]):
        return math.nan, math.nan
    if any(found.curve.n_not_finite[n_loops:]):
        return math.inf, math.inf
    errors = found.curve.mean
    return worst_beyond(errors, n_loops), errors[-1] / errors[n_loops - 1]


def _said(ratio: float, holds: bool, where: str = "") -> tuple[str, bool | None]:
    """A ratio in words with its verdict; neither where it was not measured."""
    if math.isinf(ratio):
        return "not finite past the trained loops", holds
    return ("-", None) if math.isnan(ratio) else (f"{ratio:.2f} x{where}", holds)


def _claims(models: dict, loops: dict[str, Measured], examples: dict[str, Measured], n_loops: int, n_dims: int) -> list[Claim]:
    far = REACH * n_loops
    claims = []
    text = f"with injection the error stays where it is past the trained loops (here: within 1.2 x to {far} loops)"
    worst, _ = _beyond(loops.get("looped"), n_loops)
    claims.append(Claim("Fig. 2, 3", text, *_said(worst, worst <= 1.2, " at its worst")))
    text = f"weight tying alone drifts off past the trained loops (here: by more than 2 x at {far} loops)"
    _, last = _beyond(loops.get("tied"), n_loops)
    claims.append(Claim("Fig. 3", text, *_said(last, last > 2)))
    text = (
        f"the looped model is as good as the unlooped one (here: within 1.3 x at {2 * n_dims} examples, 1/8 of the parameters)"
    )
    if {"looped", "unlooped"} <= set(examples) and len(examples["looped"].curve.mean) > 2 * n_dims:
        ratio = examples["looped"].curve.mean[2 * n_dims] / examples["unlooped"].curve.mean[2 * n_dims]
        share = n_parameters(models["looped"][0]) / n_parameters(models["unlooped"][0])
        claims.append(Claim("Fig. 2", text, f"{ratio:.2f} x with 1/{1 / share:.1f}", ratio <= 1.3 and share <= 1 / 8))
    else:
        claims.append(Claim("Fig. 2", text, "-", None))
    return claims
