"""The plot and the tables of an experiment's outcome."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from looped.experiments.outcome import Cell, Line, Outcome, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FLOOR = 1e-9  # what a log axis shows for 0
COLORS = {
    "looped": ("#0b5cad", "#2e8540", "#00798c", "#5f4bb6", "#1b998b", "#274690", "#0077b6", "#386641"),
    "twin": ("#d1495b", "#e07a1f", "#9d4edd", "#a4161a", "#bc6c25", "#c9184a", "#ad2831", "#7f5539"),
    "baseline": ("#8d99ae", "#c9a227", "#6d597a", "#56806c", "#b08968", "#444444", "#a0a0a0", "#7a8450", "#c08497", "#5f9ea0"),
}
STYLES = {"looped": "-", "twin": "-.", "baseline": "--"}


def plot_outcome(outcome: Outcome, path: str | os.PathLike[str]) -> None:
    """Write the figure, one pair of axes for each panel; the format follows the name. Bands are 90 % bootstrap intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    n_columns = min(3, max(1, len(outcome.panels)))
    n_rows = max(1, -(-len(outcome.panels) // n_columns))
    figure = Figure(figsize=(5.6 * n_columns, 4.2 * n_rows), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(n_rows, n_columns, squeeze=False).flatten()
    for axes, panel in zip(places, outcome.panels, strict=False):
        _draw(axes, panel)
    for axes in places[len(outcome.panels) :]:
        axes.set_axis_off()
    figure.suptitle(figure_title(outcome))
    figure.savefig(path, dpi=110)


def figure_title(outcome: Outcome) -> str:
    """What was run, and below it: on how many prompts, with which models given, and for the trained ones their seeds and, where
    these are a quick look's, their steps."""
    settings = outcome.settings
    below = [f"{settings['n_prompts']:,} prompts"] if "n_prompts" in settings else []
    given = [name for name, model in outcome.models.items() if model["source"].startswith("given: ")]
    are_all_given = 0 < len(given) == len(outcome.models)
    if given:
        below.append("given: " + ("all models" if are_all_given else ", ".join(given)))
    if (seeds := settings.get("seeds")) and not are_all_given:
        below.append(f"training seed{'s' if len(seeds) > 1 else ''} {', '.join(str(seed) for seed in seeds)}")
    if (n_steps := settings.get("n_steps")) and not are_all_given:
        below.append(f"a quick look: every training {n_steps:,} steps")
    return "\n".join(
        [f"{outcome.experiment}, preset {outcome.preset} ({outcome.figures})", *(["; ".join(below)] if below else [])]
    )


def _draw(axes: Axes, panel: Panel) -> None:
    colors = {kind: 0 for kind in COLORS}
    logs = dict.fromkeys(panel.log, False)
    for line in panel.lines:
        color = COLORS[line.kind][colors[line.kind] % len(COLORS[line.kind])]
        colors[line.kind] += 1
        mean, low, high = (_shown(values, "y" in panel.log) for values in (line.curve.mean, line.curve.low, line.curve.high))
        style: dict[str, Any] = dict(color=color, linestyle=STYLES[line.kind], marker="o" if len(mean) <= 6 else None)
        axes.plot(line.xs, mean, label=line.label, markersize=4, linewidth=2 if line.kind == "looped" else 1.3, **style)
        axes.fill_between(line.xs, low, high, color=color, alpha=0.16, linewidth=0)
        for means in line.by_seed:
            axes.plot(line.xs, _shown(list(means), "y" in panel.log), color=color, linewidth=0.6, alpha=0.5)
        logs = {axis: known or _has_positive(line, axis) for axis, known in logs.items()}
    for x, text in panel.marks:
        axes.axvline(x, color="0.6", linewidth=1, linestyle=":")
        note: dict[str, Any] = dict(textcoords="offset points", xytext=(4, -4), va="top", fontsize=8, color="0.35")
        axes.annotate(text, (x, 1), xycoords=("data", "axes fraction"), **note)
    axes.set(**{f"{axis}scale": "log" for axis, is_shown in logs.items() if is_shown})
    axes.set(xlabel=panel.x, ylabel=panel.y)
    if logs.get("y") and (least := _least_of_models(panel)) > axes.get_ylim()[0] * 10:
        axes.set_ylim(bottom=least / 10)  # a baseline that is exact would leave the models no room
    axes.set_title(panel.title, fontsize=10)
    if panel.lines:
        axes.legend(fontsize=7)


def _shown(values: list[float], on_log: bool) -> np.ndarray:
    array = np.array(values, dtype=float)
    return np.where(array < FLOOR, FLOOR, array) if on_log else array


def _least_of_models(panel: Panel) -> float:
    """The least positive value of the lines that are no baselines; 0 without one."""
    values = [value for line in panel.lines if line.kind != "baseline" for value in line.curve.mean]
    return min((value for value in values if 0 < value < np.inf), default=0.0)


def _has_positive(line: Line, axis: str) -> bool:
    """Whether it has a point, finite in x and in y, that a logarithmic axis can show."""
    points = np.array([line.xs, line.curve.mean], dtype=float)
    shown = points[:, np.isfinite(points).all(axis=0)]
    return bool((shown["xy".index(axis)] > 0).any())


def outcome_tables(outcome: Outcome) -> list[Table]:
    """The experiment's table; the models it used; and what the paper claims beside what was measured."""
    sheet = Table(title=outcome.sheet.title, title_justify="left")
    for i, column in enumerate(outcome.sheet.columns):
        sheet.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for row in outcome.sheet.rows:
        sheet.add_row(*(cell_text(cell) for cell in row))
    tables = [sheet]
    if outcome.models:
        models = Table(title="models", title_justify="left")
        for column in ("name", "from", "steps", "parameters"):
            models.add_column(column, justify="right" if column in ("steps", "parameters") else "left")
        for name, model in outcome.models.items():
            models.add_row(name, model["source"], cell_text(model.get("n_steps")), cell_text(model.get("n_parameters")))
        tables.append(models)
    if outcome.claims:
        claims = Table(title="claims", title_justify="left", show_lines=True)
        for column in ("figure", "the paper", f"here, at {outcome.preset}", "holds"):
            claims.add_column(column)
        for claim in outcome.claims:
            holds = {True: "yes", False: "no", None: "not measured"}[claim.holds]
            claims.add_row(claim.figure, claim.text, claim.measured, holds)
        tables.append(claims)
    return tables


def cell_text(cell: Cell) -> str:
    """A cell of a table: three significant digits, and a dash where nothing was measured."""
    if cell is None or (isinstance(cell, float) and cell != cell):
        return "-"
    if isinstance(cell, (str, int)):
        return f"{cell:,}" if isinstance(cell, int) else cell
    return f"{cell:.3g}" if cell == 0 or 1e-3 <= abs(cell) < 1e5 else f"{cell:.2e}"
