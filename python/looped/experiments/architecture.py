"""Fig. 7: layers inside the loop, width and heads, one at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from looped.experiments.lab import Lab, Run, n_parameters
from looped.experiments.loops_and_window import published_run, settled_at
from looped.experiments.measure import Measured, by_loops, fresh, line, measure
from looped.experiments.outcome import Cell, Claim, Outcome, Panel, Sheet
from looped.experiments.verdict import part_of

TASK = "linear_regression"
REACH = 3  # times the trained loops
VALUES: dict[str, dict[str, tuple[int, ...]]] = {  # by preset and field of the model
    "tiny": {"n_core": (1, 2), "d_model": (16, 32), "n_heads": (1, 2)},
    "small": {"n_core": (1, 2, 3), "d_model": (32, 64, 128), "n_heads": (1, 2, 4, 8)},
    "paper": {"n_core": (1, 2, 4), "d_model": (64, 128, 256, 512), "n_heads": (2, 4, 8, 16)},
}
TITLES = {"n_core": "layers in the loop", "d_model": "width", "n_heads": "heads"}


def run_with(lab: Lab, field: str, value: int) -> Run:
    """The published run with one field of the model changed, under the plain name where that is its own value."""
    own = lab.config(TASK)
    name, config = published_run(lab, TASK, own.model.n_loops, own.window)
    model = config.model.replace(**{field: value})
    return (name, config) if model == config.model else (f"{name}_{field}{value}", dataclasses.replace(config, model=model))


def runs(lab: Lab) -> dict[tuple[str, int], Run]:
    """The models, by field and value."""
    return {(field, value): run_with(lab, field, value) for field, values in VALUES[lab.preset].items() for value in values}


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
            one = measure(prompts, {name: by_loops(models, task, REACH * n_loops)})[name]
            found[field][value], errors = one, one.curve.mean
            row: list[Cell] = [
                TITLES[field],
                value,
                n_parameters(models[0]),
                errors[n_loops - 1],
                min(errors),
                settled_at(errors),
                errors[-1],
            ]
            rows.append(row)
        xs = range(1, REACH * n_loops + 1)
        lines = [line(f"{value}", xs, one) for value, one in found[field].items()]
        y = "squared error / variance of y, all examples"
        panels.append(Panel(TITLES[field], "loops", y, lines, "xy", [(n_loops, "trained loops")]))
    columns = ["", "value", "parameters", "error at b", "best", "settled at loop", f"at {REACH} b"]
    settings = dict(n_loops=n_loops, values={field: list(values) for field, values in VALUES[lab.preset].items()})
    sheet = Sheet("squared error / variance of y with all examples", columns, rows)
    errors_of = {field: {v: one.curve.mean for v, one in some.items()} for field, some in found.items()}
    return Outcome(
        "architecture", "Fig. 7", lab.preset, settings, panels, sheet, _claims(errors_of, n_loops, VALUES[lab.preset])
    )


def _claims(found: dict[str, dict[int, list[float]]], n_loops: int, wanted: Mapping[str, Sequence[int]]) -> list[Claim]:
    """Of the first and the last value where a claim is about these alone, and of all values where it is about the best."""
    layers = {value: settled_at(errors) for value, errors in found["n_core"].items()}
    width, heads = ({value: one[n_loops - 1] for value, one in found[field].items()} for field in ("d_model", "n_heads"))

    def falls(values: dict[int, Any], field: str) -> bool | None:
        first, last = wanted[field][0], wanted[field][-1]
        return values[last] < values[first] if {first, last} <= set(values) else None

    best = min(heads, key=heads.__getitem__) if set(heads) == set(wanted["n_heads"]) and len(heads) > 2 else None
    in_the_middle = best not in (wanted["n_heads"][0], wanted["n_heads"][-1]) if best is not None else None
    claims = []
    for field, text, values, holds in (
        ("n_core", "with more layers in the loop fewer loops are needed", layers, falls(layers, "n_core")),
        ("d_model", "a wider model has the smaller error", width, falls(width, "d_model")),
        ("n_heads", "the error is least at a middle number of heads", heads, in_the_middle),
    ):
        unit = "loop " if field == "n_core" else ""
        measured = ", ".join(f"{value}: {unit}{one:.3g}" for value, one in values.items()) or "-"
        claims.append(Claim("Fig. 7", text, measured + part_of(len(values), len(wanted[field]), "values"), holds))
    return claims
