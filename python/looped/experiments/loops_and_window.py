"""Fig. 4, 9 and appendix B: the trained loops b and the window T of the loss. Which come to a fixed point, and how far down?"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from looped.experiments.lab import Lab, Run
from looped.experiments.measure import Measured, by_loops, fresh, line, measure
from looped.experiments.outcome import Cell, Claim, Line, Outcome, Panel, Sheet
from looped.experiments.verdict import part_of
from looped.train import Ramp

REACH = 5  # times the trained loops
DIVERGES = 2.0  # times the error at the trained loops
SETTLED = 1.1  # times the least error


@dataclass(frozen=True)
class Grid:
    """The values of b and T of a task."""

    loops: tuple[int, ...]
    windows: tuple[int, ...]


_PAPER = Grid((12, 20, 30, 40, 50), (5, 10, 15))
GRIDS = {
    "tiny": {"linear_regression": Grid((3, 4), (1, 2))},
    "small": {"linear_regression": Grid((8, 12, 20, 30), (4, 12))},
    "paper": {
        "linear_regression": _PAPER,
        "sparse_linear_regression": _PAPER,
        "decision_tree": Grid((12, 50, 70, 100), (5, 10, 15)),
        "relu_2nn_regression": _PAPER,
    },
}
STEPS = {"tiny": 2000, "small": 8000, "paper": 500_000}


def published_run(lab: Lab, task: str, n_loops: int, window: int) -> Run:
    """A run by the published recipe (no loss but the window's, no loops beyond b), with its name: the task's where that is the
    preset's own run."""
    own = lab.config(task)
    config = dataclasses.replace(own, n_steps=STEPS[lab.preset])
    config = dataclasses.replace(
        config,
        model=config.model.replace(n_loops=n_loops),
        window=window,
        loops=Ramp(window, n_loops, config.loops.increment, config.loops.every),
        rest_weight=0.0,
        extra_loops=0,
    )
    return task if config == own else f"{task}_b{n_loops}_T{window}", config


def runs(lab: Lab) -> dict[tuple[str, int, int], Run]:
    """The models, by task, b and T."""
    return {
        (task, n_loops, window): published_run(lab, task, n_loops, window)
        for task, grid in GRIDS[lab.preset].items()
        for window in grid.windows
        for n_loops in grid.loops
        if n_loops >= window
    }


def run(lab: Lab) -> Outcome:
    wanted = runs(lab)
    panels: list[Panel] = []
    rows: list[list[Cell]] = []
    claims: list[Claim] = []
    for name, grid in GRIDS[lab.preset].items():
        found: dict[tuple[int, int], Measured] = {}
        lines: dict[int, list[Line]] = {window: [] for window in grid.windows}
        for (task_name, n_loops, window), (label, config) in wanted.items():
            if task_name != name:
                continue
            models, task = lab.models(label, config), config.make_task()
            if not models:
                reason = lab.used.get(label, {}).get("reason")
                rows.append([name, n_loops, window, *[None] * 5, f"training: {reason}" if reason else "not there"])
                continue
            ways = {"looped": by_loops(models, task, REACH * n_loops)}
            one = measure(fresh(task, lab.n_prompts, config.points.end, lab.seed), ways)["looped"]
            found[n_loops, window] = one
            lines[window].append(line(f"b={n_loops}", range(1, REACH * n_loops + 1), one))
            rows.append([name, n_loops, window, *_row(one.curve.mean, n_loops)])
        y = "squared error / variance of y, all examples"
        for window, some in lines.items():
            marks = [(b, f"b={b}") for b in grid.loops if b >= window]
            panels.append(Panel(f"{name.replace('_', ' ')}, T={window}", "loops", y, some, "xy", marks))
        claims += _claims(name, grid, {key: one.curve.mean for key, one in found.items()})
    columns = ["task", "b", "T", "error at b", "best", "settled at loop", f"at {REACH} b", f"{REACH} b / b", "diverges"]
    settings = dict(reach=REACH, diverges=DIVERGES)
    sheet = Sheet("squared error / variance of y with all examples", columns, rows)
    return Outcome("loops-and-window", "Fig. 4, 9, appendix B", lab.preset, settings, panels, sheet, claims)


def settled_at(errors: list[float]) -> int:
    """The first loop whose error is within `SETTLED` of the least."""
    least = min(errors)
    return next(i for i, error in enumerate(errors, start=1) if error <= SETTLED * least)


def _row(errors: list[float], n_loops: int) -> list[Cell]:
    ratio = errors[-1] / errors[n_loops - 1]
    verdict = "yes" if ratio > DIVERGES else "no"
    return [errors[n_loops - 1], min(errors), settled_at(errors), errors[-1], ratio, verdict]


def _claims(name: str, grid: Grid, found: dict[tuple[int, int], list[float]]) -> list[Claim]:
    title, claims = name.replace("_", " "), []

    def ratio(b: int, window: int) -> float:
        return found[b, window][-1] / found[b, window][b - 1]

    for window in grid.windows:
        wanted = [b for b in grid.loops if b >= window]
        small, large = wanted[0], wanted[-1]
        if small == large:
            continue
        lost = [f"b={b}" for b in (small, large) if (b, window) not in found]
        measured, rises, sooner = [f"no model of {' and '.join(lost)}"] * 2, None, None
        if not lost:
            few, many = ratio(small, window), ratio(large, window)
            first, last = settled_at(found[small, window]), settled_at(found[large, window])
            measured = [f"{REACH} b / b: {few:.2f} x at b={small}, {many:.2f} x at b={large}"]
            measured += [f"loop {first} at b={small}, {last} at b={large}"]
            rises, sooner = few > DIVERGES >= many, first < last
        text = f"{title}, T={window}: with small b the error rises again past b, with large b it does not"
        claims.append(Claim("Fig. 4", text, measured[0], rises))
        text = f"{title}, T={window}: with small b the fixed point is reached sooner"
        claims.append(Claim("Fig. 4", text, measured[1], sooner))
    narrow, wide = min(grid.windows), max(grid.windows)
    wanted = [b for b in grid.loops if b >= wide]
    if narrow < wide and wanted:
        both = [b for b in wanted if {(b, narrow), (b, wide)} <= set(found)]
        errors = {window: sum(found[b, window][b - 1] for b in both) / max(1, len(both)) for window in (narrow, wide)}
        text = f"{title}: a smaller window leaves a larger error"
        measured_both = f"{errors[narrow]:.3g} at T={narrow}, {errors[wide]:.3g} at T={wide}" if both else "-"
        measured_both += part_of(len(both), len(wanted), "values of b")
        claims.append(Claim("appendix B", text, measured_both, errors[narrow] > errors[wide] if both == wanted else None))
    return claims
