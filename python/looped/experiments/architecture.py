"""Fig. 7: layers inside the loop, width and heads, one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from looped.experiments.lab import Lab, Run, n_parameters
from looped.experiments.loops_and_window import MATCHES, SETTLED, published_run, settled, settled_at, steps_apart
from looped.experiments.measure import Measured, by_examples, by_loops, fresh, least, line, measure, sound
from looped.experiments.outcome import Cell, Claim, Outcome, Panel, Sheet
from looped.experiments.shift import unlooped_of_depth
from looped.experiments.verdict import part_of

TASK = "linear_regression"
REACH = 3  # times the trained loops
VALUES: dict[str, dict[str, tuple[int, ...]]] = {  # by preset and field of the model
    "tiny": {"n_core": (1, 2), "d_model": (16, 32), "n_heads": (1, 2)},
    "small": {"n_core": (1, 2, 3), "d_model": (32, 64, 128), "n_heads": (1, 2, 4, 8)},
    "paper": {"n_core": (1, 2, 4), "d_model": (64, 128, 256, 512), "n_heads": (2, 4, 8, 16)},
}
UNLOOPED = {"tiny": 2, "small": 12, "paper": 8}  # layers of the unlooped model beside one looped layer; 8 in the paper
TITLES = {"n_core": "layers in the loop", "d_model": "width", "n_heads": "heads"}


def run_with(lab: Lab, field: str, value: int) -> Run:
    """The published run with one field of the model changed, under the plain name where that is its own value."""
    own = lab.config(TASK)
    name, config = published_run(lab, TASK, own.model.n_loops, own.window)
    model = config.model.replace(**{field: value})
    return (name, config) if model == config.model else (f"{name}_{field}{value}", dataclasses.replace(config, model=model))


def runs(lab: Lab) -> dict[tuple[str, int], Run]:
    """The models, by field and value, and the unlooped one by its layers."""
    varied = {(field, value): run_with(lab, field, value) for field, values in VALUES[lab.preset].items() for value in values}
    return varied | {("unlooped", UNLOOPED[lab.preset]): unlooped_of_depth(lab, UNLOOPED[lab.preset])}


def run(lab: Lab) -> Outcome:
    wanted = runs(lab)
    found: dict[str, dict[int, Measured]] = {}
    rows: list[list[Cell]] = []
    panels: list[Panel] = []
    n_loops = lab.config(TASK).model.n_loops
    for field, values in VALUES[lab.preset].items():
        found[field] = {}
        for value in values:
            name, config = wanted[field, value]
            models, task = lab.models(name, config), config.make_task()
            if not models:
                continue
            prompts = fresh(task, lab.n_prompts, config.points.end, lab.seed)
            one = measure(lab.watched(name, prompts), {name: by_loops(models, task, REACH * n_loops)})[name]
            found[field][value], errors = one, one.curve.mean
            row: list[Cell] = [
                TITLES[field],
                value,
                n_parameters(models[0]),
                errors[n_loops - 1],
                least(errors),
                settled(errors),
                errors[-1],
            ]
            rows.append(row)
        xs = range(1, REACH * n_loops + 1)
        lines = [line(f"{value}", xs, one) for value, one in found[field].items()]
        y = "squared error / variance of y, all examples"
        panels.append(Panel(TITLES[field], "loops", y, lines, "xy", [(n_loops, "trained loops")]))
    beside = _beside_unlooped(lab, wanted, sound(found["n_core"]), rows)
    columns = ["", "value", "parameters", "error at b", "best", "settled at loop", f"at {REACH} b"]
    settings = dict(n_loops=n_loops, values={field: list(values) for field, values in VALUES[lab.preset].items()})
    sheet = Sheet("squared error / variance of y with all examples", columns, rows)
    errors_of = {field: {v: one.curve.mean for v, one in sound(some).items()} for field, some in found.items()}
    claims = [*_claims(errors_of, n_loops, VALUES[lab.preset]), beside]
    return Outcome("architecture", "Fig. 7", lab.preset, settings, panels, sheet, claims)


def _claims(found: dict[str, dict[int, list[float]]], n_loops: int, wanted: Mapping[str, Sequence[int]]) -> list[Claim]:
    """Of the widest and the narrowest where a claim is about these alone, and of all values where all are compared."""
    some = found["n_core"]
    layers = dict(zip(some, settled_at(*some.values()), strict=True)) if some else {}
    width, heads = ({value: one[n_loops - 1] for value, one in found[field].items()} for field in ("d_model", "n_heads"))
    few, most = wanted["n_core"][0], wanted["n_core"][-1]
    narrow, wide = wanted["d_model"][0], wanted["d_model"][-1]
    fewer = layers[most] < layers[few] if set(layers) == set(wanted["n_core"]) else None  # else of another common error
    smaller = width[wide] < width[narrow] if {narrow, wide} <= set(width) else None
    best = min(heads, key=heads.__getitem__) if set(heads) == set(wanted["n_heads"]) and len(heads) > 2 else None
    in_the_middle = best not in (wanted["n_heads"][0], wanted["n_heads"][-1]) if best is not None else None
    claims = []
    common = f"each to {SETTLED} x the largest of their least errors"
    for field, text, rule, values, holds in (
        ("n_core", "with more layers in the loop fewer loops are needed", f"{most} before {few}, {common}", layers, fewer),
        ("d_model", "a wider model has the smaller error", f"{wide} below {narrow}, after b loops", width, smaller),
        (
            "n_heads",
            "the error is least at a middle number of heads",
            "at neither the fewest nor the most, after b loops",
            heads,
            in_the_middle,
        ),
    ):
        unit = "loop " if field == "n_core" else ""
        measured = ", ".join(f"{value}: {unit}{one:.3g}" for value, one in values.items()) or "-"
        measured += part_of(len(values), len(wanted[field]), "values")
        claims.append(Claim("Fig. 7", f"{text} (here: {rule})", measured, holds))
    return claims


def _beside_unlooped(
    lab: Lab, wanted: Mapping[tuple[str, int], Run], by_layers: Mapping[int, Measured], rows: list[list[Cell]]
) -> Claim:
    """One looped layer and the unlooped model, which gets a row of the table."""
    depth = UNLOOPED[lab.preset]
    name, config = wanted["unlooped", depth]
    error, task = None, config.make_task()
    if models := lab.models(name, config):
        prompts = fresh(task, lab.n_prompts, config.points.end, lab.seed)
        found = measure(lab.watched(name, prompts), {name: by_examples(models, task)})
        error = found[name].curve.mean[-1]
        rows.append(["unlooped layers", depth, n_parameters(models[0]), error, *[None] * 3])
        error = error if sound(found) else None
    text = f"one looped layer matches {depth} unlooped layers, after more loops than these are"
    text += f" (here: its first loop within {MATCHES} x of their error)"
    if error is None or 1 not in by_layers:
        return Claim("Fig. 7", text, "-", None)
    errors = by_layers[1].curve.mean
    first = next((i for i, one in enumerate(errors, start=1) if one <= MATCHES * error), None)
    measured = f"loop {first}" if first else f"none of {len(errors)} loops, at the best {min(errors) / error:.2f} x"
    measured += steps_apart(lab, wanted["n_core", 1], wanted["unlooped", depth])
    return Claim("Fig. 7", text, measured, first is not None and first > depth)
