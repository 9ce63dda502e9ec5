"""The figure of an evaluation: error by examples, error by loops, loops used, and how states settle."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from looped.icl.evaluate import Evaluation, Score
from looped.report.titles import task_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FLOOR = 1e-9  # what a log axis shows for an error or a change of 0


def plot_evaluation(evaluation: Evaluation, path: str | os.PathLike[str]) -> None:
    """Write the figure; the format follows the name (png, pdf, svg). Bands are 90 % bootstrap intervals."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    looped = {name: score for name, score in evaluation.scores.items() if score.looped}
    figure = Figure(figsize=(12, 8.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2)
    colors = _colors(evaluation.scores)
    _error_by_examples(panels[0, 0], evaluation, colors)
    _error_by_loops(panels[0, 1], evaluation, looped, colors)
    _loops_used(panels[1, 0], looped, colors)
    _change_by_loops(panels[1, 1], looped, colors)
    task = task_title(evaluation.task, evaluation.task_options, evaluation.n_dims)
    figure.suptitle(f"{task.replace('_', ' ')}, {evaluation.n_prompts:,} prompts")
    figure.savefig(path, dpi=110)


def _colors(scores: dict[str, Score]) -> dict[str, Any]:
    strong, muted = (
        iter(["#0b5cad", "#d1495b", "#2e8540"]),
        iter(["#8d99ae", "#c9a227", "#6d597a", "#56806c", "#b08968", "#444444"] * 3),
    )
    return {name: next(strong if score.looped else muted) for name, score in scores.items()}


def _curve(axes: Axes, xs: Any, curve: dict[str, Any], color: str, **style: Any) -> None:
    mean, low, high = (np.array([np.nan if v is None else max(v, FLOOR) for v in curve[k]]) for k in ("mean", "low", "high"))
    axes.plot(xs, mean, color=color, **style)
    axes.fill_between(xs, low, high, color=color, alpha=0.18, linewidth=0)


def _error_by_examples(axes: Axes, evaluation: Evaluation, colors: dict[str, Any]) -> None:
    for name, score in evaluation.scores.items():
        style: dict[str, Any] = dict(linewidth=2.2, zorder=3) if score.looped else dict(linewidth=1.2, linestyle="--")
        label = name.replace("_", " ")
        if score.error_by_examples.n_prompts < evaluation.n_prompts:
            label += f" ({score.error_by_examples.n_prompts} prompts)"
        _curve(axes, range(evaluation.n_points), score.error_by_examples.to_dict(), colors[name], label=label, **style)
    _log_scale(axes, "y")
    axes.axvline(evaluation.n_dims, color="0.75", linewidth=1, zorder=0)
    axes.annotate("as many examples\nas dimensions", (evaluation.n_dims, 1), xycoords=("data", "axes fraction"), **_NOTE)
    axes.set(xlabel="examples in the prompt", ylabel="squared error / variance of y", ylim=(1e-4, None))
    axes.set_title("error by examples")
    axes.legend(fontsize=8, loc="lower left")


def _error_by_loops(axes: Axes, evaluation: Evaluation, looped: dict[str, Score], colors: dict[str, Any]) -> None:
    for name, score in looped.items():
        assert score.looped
        curve = score.looped["error_by_loops"]
        _curve(axes, range(1, len(curve["mean"]) + 1), curve, colors[name], label=name, linewidth=2)
    _log_scale(axes, "xy")
    trained = evaluation.to_dict()["n_loops_trained"]
    if trained:
        axes.axvline(trained, color="0.4", linewidth=1, linestyle=":")
        axes.annotate("trained loops", (trained, 1), xycoords=("data", "axes fraction"), **_NOTE)
        axes.legend(fontsize=8)
    axes.set(xlabel="loops", ylabel="squared error / variance of y")
    axes.set_title(f"error at {evaluation.n_points - 1} examples, by loops")


def _log_scale(axes: Axes, which: str) -> None:
    """Logarithmic axes where the lines so far have a point to show on them: to be called before there are marks."""
    if any(np.isfinite(line.get_xydata()).all(axis=1).any() for line in axes.get_lines()):
        axes.set(**{f"{axis}scale": "log" for axis in which})


def _loops_used(axes: Axes, looped: dict[str, Score], colors: dict[str, Any]) -> None:
    for name, score in looped.items():
        assert score.looped
        used = {int(loops): count for loops, count in score.looped["loops_used"].items()}
        if len(used) < 2:
            continue  # a fixed number of loops
        edges = np.arange(min(used), max(used) + 2) - 0.5
        axes.hist(list(used), bins=edges.tolist(), weights=list(used.values()), color=colors[name], alpha=0.85, label=name)
        mean = score.looped["mean_loops"]
        axes.axvline(mean, color="0.3", linewidth=1, linestyle=":")
        axes.annotate(f"mean {mean:.1f}", (mean, 1), xycoords=("data", "axes fraction"), **_NOTE)
        rule = score.looped["exit"]
        title = f"loops used, exit {rule['rule']}" + (f" at {rule['tol']:g}" if "tol" in rule else "")
        axes.set_title(title)
    axes.set(xlabel="loops", ylabel="prompts")


def _change_by_loops(axes: Axes, looped: dict[str, Score], colors: dict[str, Any]) -> None:
    for name, score in looped.items():
        assert score.looped
        settling = score.looped.get("settling")
        if not settling:
            continue
        change = np.maximum(np.array(settling["change_by_loops"], dtype=float), FLOOR)  # [L, quantiles], None as NaN
        column = {q: i for i, q in enumerate(settling["quantiles"])}
        loops = np.arange(1, len(change) + 1)
        axes.plot(loops, change[:, column[0.5]], color=colors[name], linewidth=2, label=f"{name}: median prompt")
        axes.fill_between(loops, change[:, column[0.05]], change[:, column[0.95]], color=colors[name], alpha=0.18, linewidth=0)
        axes.plot(loops, change[:, column[1.0]], color=colors[name], linewidth=0.9, linestyle=":", label="slowest prompt")
    _log_scale(axes, "xy")
    for score in looped.values():
        if score.looped and (settling := score.looped.get("settling")):
            axes.axhline(settling["rounding_level"], color="0.6", linewidth=0.8)
            axes.legend(fontsize=8)
    axes.set(xlabel="loops", ylabel="change of the state / its norm")
    axes.set_title("do states come to rest? (band: 5 to 95 % of prompts)")


_NOTE: dict[str, Any] = dict(textcoords="offset points", xytext=(4, -4), va="top", fontsize=8, color="0.35")
