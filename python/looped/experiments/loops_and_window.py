"""Fig. 4, 9 and appendix B: the trained loops b and the window T of the loss. Which come to a fixed point, and how far down?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from looped.experiments.lab import Lab, Run
from looped.experiments.measure import REACH, Measured, by_examples, by_loops, fresh, least, line, measure, sound
from looped.experiments.outcome import Cell, Claim, Line, Outcome, Panel, Sheet
from looped.experiments.verdict import for_all, part_of
from looped.icl.curves import Curve
from looped.train import Ramp

TASK = "linear_regression"  # of Fig. 4
UNLOOPED = ("unlooped", 1, 1)  # among models by task, b and T: one pass
SPARSE = "sparse_linear_regression"
DIVERGES = 2.0  # times the error at the trained loops
SETTLED = 1.1  # times the least error
MATCHES = 1.3  # times the error of the unlooped model: what fixed-point calls as good
SATURATED, ALIKE = (40, 50), 1.2  # values of b that the paper finds to converge alike; the factor between their loops
ACROSS = (20, 10)  # b and T at which Fig. 9 sets two tasks side by side


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
    preset's own run.

    Loops grow at the preset's own pace, or faster where b would be reached after a third of the steps: a learning rate that
    decays leaves nothing to train what comes late.
    """
    own, n_steps = lab.config(task), STEPS[lab.preset]
    config = dataclasses.replace(own, n_steps=n_steps)
    n_rises = -(-(n_loops - window) // own.loops.increment)
    every = min(own.loops.every, max(1, n_steps // (3 * max(1, n_rises))))
    config = dataclasses.replace(
        config,
        model=config.model.replace(n_loops=n_loops),
        window=window,
        loops=Ramp(window, n_loops, own.loops.increment, every),
        rest_weight=0.0,
        extra_loops=0,
    )
    return task if config == own else f"{task}_b{n_loops}_T{window}", config


def runs(lab: Lab) -> dict[tuple[str, int, int], Run]:
    """The models: those of the grid, and the unlooped one where a b of the grid is the number of its layers."""
    twin = lab.config(TASK, unlooped=True)
    is_wanted = twin.model.n_core in GRIDS[lab.preset][TASK].loops
    return of_grid(lab) | ({UNLOOPED: (f"{TASK}_unlooped", twin)} if is_wanted else {})


def of_grid(lab: Lab) -> dict[tuple[str, int, int], Run]:
    """The models of the grid, by task, b and T."""
    return {
        (task, n_loops, window): published_run(lab, task, n_loops, window)
        for task, grid in GRIDS[lab.preset].items()
        for window in grid.windows
        for n_loops in grid.loops
        if n_loops >= window
    }


def run(lab: Lab) -> Outcome:
    wanted = of_grid(lab)
    by_task: dict[str, dict[tuple[int, int], list[float]]] = {}
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
                reasons = lab.reasons(label)
                rows.append([name, n_loops, window, *[None] * 5, f"training: {reasons[0]}" if reasons else "not there"])
                continue
            ways = {"looped": by_loops(models, task, REACH * n_loops)}
            one = measure(lab.watched(label, fresh(task, lab.n_prompts, config.points.end, lab.seed)), ways)["looped"]
            found[n_loops, window] = one
            lines[window].append(line(f"b={n_loops}", range(1, REACH * n_loops + 1), one))
            rows.append([name, n_loops, window, *_row(one.curve, n_loops)])
        y = "squared error / variance of y, all examples"
        for window, some in lines.items():
            marks = [(b, f"b={b}") for b in grid.loops if b >= window]
            panels.append(Panel(f"{name.replace('_', ' ')}, T={window}", "loops", y, some, "xy", marks))
        by_task[name] = {key: one.curve.mean for key, one in sound(found).items()}
        claims += _claims(name, grid, by_task[name])
    if UNLOOPED in (every := runs(lab)):
        claims.append(_beside_unlooped(lab, every[UNLOOPED], by_task[TASK], rows))
    claims += _across_tasks(GRIDS[lab.preset], by_task)
    columns = ["task", "b", "T", "error at b", "best", "settled at loop", f"at {REACH} b", f"{REACH} b / b", "diverges"]
    settings = dict(reach=REACH, diverges=DIVERGES)
    sheet = Sheet("squared error / variance of y with all examples", columns, rows)
    figures = "Fig. 4, 9, appendix B" if len(GRIDS[lab.preset]) > 1 else "Fig. 4, appendix B"  # Fig. 9 is about several tasks
    return Outcome("loops-and-window", figures, lab.preset, settings, panels, sheet, claims)


def settled_at(*models: Sequence[float]) -> list[int]:
    """For the errors of one or several models by loops, each one's first loop with at most `SETTLED` times the largest of their
    least errors: the same error for all, as a worse model is sooner near a least error of its own."""
    level = SETTLED * max(least(errors) for errors in models)
    return [next(i for i, error in enumerate(errors, start=1) if error <= level) for errors in models]


def settled(errors: Sequence[float]) -> int | None:
    """`settled_at` of one model; None where nothing was measured."""
    return None if math.isnan(least(errors)) else settled_at(errors)[0]


def steps_apart(lab: Lab, one: Run, unlooped: Run) -> str:
    """The end of what was measured, where a model and an unlooped one are trained for unlike numbers of steps."""
    (name, config), (other, twin) = one, unlooped
    if lab.n_steps or config.n_steps == twin.n_steps or {name, other} & set(lab.given):
        return ""
    return f"; trained for {config.n_steps:,} steps, the unlooped one for {twin.n_steps:,}"


def _row(curve: Curve, n_loops: int) -> list[Cell]:
    """A model whose predictions cease to be finite past its b loops diverges; of one with such at b nothing is said."""
    errors, lost = curve.mean, curve.n_not_finite
    ratio = errors[-1] / errors[n_loops - 1]
    verdict = None if lost[n_loops - 1] else "yes" if lost[-1] or ratio > DIVERGES else "no"
    return [errors[n_loops - 1], least(errors), settled(errors), errors[-1], ratio, verdict]


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
        measured, rises, sooner = [f"no finite model of {' and '.join(lost)}"] * 2, None, None
        if not lost:
            few, many = ratio(small, window), ratio(large, window)
            first, last = settled_at(found[small, window], found[large, window])
            measured = [f"{REACH} b / b: {few:.2f} x at b={small}, {many:.2f} x at b={large}"]
            measured += [f"loop {first} at b={small}, {last} at b={large}"]
            rises, sooner = few > DIVERGES >= many, first < last
        rule = f"to {REACH} b by more than {DIVERGES:g} x at b={small}, not at b={large}"
        text = f"{title}, T={window}: with small b the error rises again past b, with large b it does not (here: {rule})"
        claims.append(Claim("Fig. 4", text, measured[0], rises))
        rule = f"b={small} before b={large}, each at {SETTLED} x the larger of their least errors"
        text = f"{title}, T={window}: with small b the fixed point is reached sooner (here: {rule})"
        claims.append(Claim("Fig. 4", text, measured[1], sooner))
    narrow, wide = min(grid.windows), max(grid.windows)
    wanted = [b for b in grid.loops if b >= wide]
    if narrow < wide and wanted:
        both = [b for b in wanted if {(b, narrow), (b, wide)} <= set(found)]
        errors = {window: sum(found[b, window][b - 1] for b in both) / max(1, len(both)) for window in (narrow, wide)}
        text = f"{title}: a smaller window leaves a larger error (here: at b, the mean over b, T={narrow} against T={wide})"
        measured_both = f"{errors[narrow]:.3g} at T={narrow}, {errors[wide]:.3g} at T={wide}" if both else "-"
        measured_both += part_of(len(both), len(wanted), "values of b")
        claims.append(Claim("appendix B", text, measured_both, errors[narrow] > errors[wide] if both == wanted else None))
    if name == TASK and set(SATURATED) <= set(grid.loops):
        claims.append(_saturation(title, wide, found))
    return claims


def _saturation(title: str, window: int, found: Mapping[tuple[int, int], list[float]]) -> Claim:
    fewer, more = SATURATED
    lost = [f"b={b}" for b in SATURATED if (b, window) not in found]
    measured, holds = f"no finite model of {' and '.join(lost)}", None
    if not lost:
        first, last = settled_at(found[fewer, window], found[more, window])
        measured, holds = f"loop {first} at b={fewer}, {last} at b={more}", max(first, last) <= ALIKE * min(first, last)
    rule = f"b={fewer} and b={more} within {ALIKE} x, each at {SETTLED} x the larger of their least errors"
    text = f"{title}, T={window}: from b={fewer} on the loops to the fixed point do not depend on b (here: {rule})"
    return Claim("Fig. 4", text, measured, holds)


def _beside_unlooped(lab: Lab, unlooped: Run, found: Mapping[tuple[int, int], list[float]], rows: list[list[Cell]]) -> Claim:
    """The model whose b is the number of layers of an unlooped one, which gets a row of the table."""
    name, config = unlooped
    depth, task = config.model.n_core, config.make_task()
    errors: list[float] = []
    if models := lab.models(name, config):
        ways = {name: by_examples(models, task)}
        prompts = lab.watched(name, fresh(task, lab.n_prompts, config.points.end, lab.seed))
        found_unlooped = measure(prompts, ways)
        errors = found_unlooped[name].curve.mean
        rows.append([TASK, f"{depth} unlooped layers", None, errors[-1], *[None] * 5])
        errors = errors if sound(found_unlooped) else []
    windows = [window for window in GRIDS[lab.preset][TASK].windows if window <= depth]
    ratios = {w: found[depth, w][depth - 1] / errors[-1] for w in windows if errors and (depth, w) in found}
    measured = ", ".join(f"{ratio:.2f} x at T={window}" for window, ratio in ratios.items()) or "-"
    measured += part_of(len(ratios), len(windows), "windows")
    measured += steps_apart(lab, of_grid(lab)[TASK, depth, windows[0]], unlooped)
    rule = f"more than {MATCHES} x its error, at every T"
    text = f"{TASK.replace('_', ' ')}: b={depth} does not match the unlooped model of {depth} layers (here: {rule})"
    return Claim("Fig. 4", text, measured, for_all([ratio > MATCHES for ratio in ratios.values()], len(windows)))


def _across_tasks(grids: Mapping[str, Grid], found: Mapping[str, Mapping[tuple[int, int], list[float]]]) -> list[Claim]:
    """Fig. 9, where both tasks are there at its b and T."""
    (b, window), both = ACROSS, (TASK, SPARSE)
    if not all(name in grids and b in grids[name].loops and window in grids[name].windows for name in both):
        return []
    titles = {name: name.replace("_", " ") for name in both}
    lost = [titles[name] for name in both if (b, window) not in found[name]]
    measured, holds = f"no finite model of {' and '.join(lost)}", None
    if not lost:
        ratios = {name: found[name][b, window][-1] / found[name][b, window][b - 1] for name in both}
        measured = f"{REACH} b / b: " + ", ".join(f"{ratio:.2f} x {titles[name]}" for name, ratio in ratios.items())
        holds = ratios[TASK] > DIVERGES >= ratios[SPARSE]
    rule = f"to {REACH} b by more than {DIVERGES:g} x, and not"
    text = f"T={window}, b={b}: {titles[TASK]} diverges and {titles[SPARSE]} does not (here: {rule})"
    return [Claim("Fig. 9", text, measured, holds)]
