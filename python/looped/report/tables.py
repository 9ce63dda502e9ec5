"""Results as tables for a terminal."""

from __future__ import annotations

import math
from typing import Any

from rich.markup import escape
from rich.table import Table

from looped.icl.evaluate import Evaluation
from looped.report.titles import task_title


def evaluation_tables(evaluation: Evaluation) -> list[Table]:
    """The error of every predictor at a few numbers of examples, and what the looped models' loops did."""
    n, d = evaluation.n_points, evaluation.n_dims
    places = sorted({i for i in (d // 2, d, 2 * d, n - 1) if i < n})
    task = task_title(evaluation.task, evaluation.task_options, d)
    errors = Table(title=f"{task}: squared error / variance of y, by examples in the prompt", title_justify="left")
    errors.add_column("predictor", no_wrap=True)
    for place in places:
        errors.add_column(str(place), justify="right", no_wrap=True)
    errors.add_column(f"90 % interval at {n - 1}", justify="right", no_wrap=True)
    errors.add_column("prompts", justify="right", no_wrap=True)
    for name, score in evaluation.scores.items():
        curve = score.error_by_examples
        cells = [_number(curve.mean[place]) for place in places]
        interval = f"{_number(curve.low[-1])} - {_number(curve.high[-1])}"
        errors.add_row(escape(name.replace("_", " ")), *cells, interval, f"{curve.n_prompts:,}")
    tables = [errors]
    for name, score in evaluation.scores.items():
        if score.looped and len(score.looped["error_by_loops"]["mean"]) > 1:  # a model that runs once has no loops to tell of
            tables.append(_loops_table(name, score.looped, score.error_by_examples.mean[-1]))
    return tables


def _loops_table(name: str, looped: dict[str, Any], error: float) -> Table:
    table = Table(title=escape(f"{name}: loops"), title_justify="left", show_header=False)
    trained, by_loops = looped["n_loops_trained"], looped["error_by_loops"]["mean"]
    rule = looped["exit"]
    table.add_row(
        "exit", f"{rule['rule']}" + (f", tol {rule['tol']:g}" if "tol" in rule else "") + f", at most {rule['n_loops']}"
    )
    table.add_row("loops used, mean", f"{looped['mean_loops']:.1f}")
    table.add_row("ended as", ", ".join(f"{status} {count}" for status, count in looped["statuses"].items()))
    n, last = len(by_loops), by_loops[-1]
    change = ""
    if last and rule["n_loops"] == n and math.isfinite(error):
        share = round(error / last - 1, 3) + 0.0
        change = f" ({f'{share:+.1%}' if share < 1e3 else f'{_ratio(share + 1)} x'} against all {n} loops)"
    table.add_row("last error, with the exit", _number(error) + change)
    table.add_row(f"... at the trained {trained} loops", _number(by_loops[trained - 1]))
    ratio = f" ({_ratio(by_loops[-1] / by_loops[trained - 1])} x trained)" if by_loops[-1] and by_loops[trained - 1] else ""
    table.add_row(f"... at {len(by_loops)} loops", _number(by_loops[-1]) + ratio)
    measured = [loop for loop, error in enumerate(by_loops) if error is not None]
    if measured:
        best = min(measured, key=by_loops.__getitem__)
        table.add_row(f"... at the best, {best + 1} loops", _number(by_loops[best]))
    settling = looped.get("settling")
    if settling:
        for kind in ("plain", "damped", "anderson"):
            if kind in settling:
                share = settling[kind]
                found = f"{share['rounding']:.1%}"
                if share["mean_loops"] is not None:
                    found += f", after {share['mean_loops']:.0f} loops on average"
                if "bitwise" in share:
                    found += f"; {share['bitwise']:.1%} to the last bit"
                table.add_row(f"at rest within {settling['n_loops']} loops, {kind}", found)
        if "float32_states" in settling:
            grid = settling["float32_states"]
            table.add_row(
                "... float64 arithmetic, float32 states", f"{grid['bitwise']:.1%} of {grid['n_prompts']} to the last bit"
            )
    return table


def _number(value: float | None) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.4f}" if 1e-3 <= value < 1e5 or value == 0 else f"{value:.2e}"


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value < 1e5 else f"{value:.2e}"
