"""The table and the figure of `looped bench`, from its JSON values (`Latency.to_dict`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from rich.table import Table

COLORS = {"cpu": "#0b5cad", "eager": "#d1495b"}
MARKERS = "os^Dvx+*"


def latency_table(latency: Mapping[str, Any]) -> Table:
    """One line per way: time with its spread, speed, and the task's error where there is one."""
    peaks = ", ".join(f"{peak:.0f} GFLOP/s on {threads}" for threads, peak in latency["fma_peak_gflops"].items())
    title = f"{latency['model']}, {latency['n_tokens']} tokens, {latency['n_rounds']} rounds"
    table = Table(title=title + (f"; FMA peak by threads: {peaks}" if peaks else ""), title_justify="left")
    for name in ("backend", "exit"):
        table.add_column(name, no_wrap=True)
    numbers = ["threads", "B", "loops", "used", "ms", "p10 - p90", "ms a loop", "GFLOP/s", "of peak"]
    has_error = any(row["error"] is not None for row in latency["rows"])
    for name in numbers + ["error"] * has_error:
        table.add_column(name, justify="right", no_wrap=True)
    for row in latency["rows"]:
        cells = [str(row["threads"]), str(row["batch"]), str(row["n_loops"]), f"{row['mean_loops']:.1f}", _ms(row["ms"])]
        cells += [f"{_ms(row['ms_p10'])} - {_ms(row['ms_p90'])}", _ms(row["ms_per_loop"]), f"{row['gflops']:.1f}"]
        cells += ["-" if row["peak_fraction"] is None else f"{row['peak_fraction']:.0%}"]
        cells += [f"{row['error']:.4f}"] if has_error else []
        table.add_row(row["backend"], row["exit"], *cells)
    return table


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def plot_latency(latency: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Milliseconds against loops, a line per backend (and threads, batch, exit); beside it error against milliseconds.

    The format follows the name (png, pdf, svg). Bands are the 10 to 90 % quantiles of the rounds.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = latency["rows"]
    has_error = any(row["error"] is not None for row in rows)
    figure = Figure(figsize=(11 if has_error else 6.5, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 1 + has_error, squeeze=False)[0]
    lines: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        lines.setdefault(tuple(row[name] for name in ("backend", "threads", "batch", "exit")), []).append(row)
    varied = {i for i in range(4) if len({key[i] for key in lines}) > 1}
    settings = sorted({key[1:3] for key in lines})
    for (backend, threads, batch, exit), line in lines.items():
        line = sorted(line, key=lambda row: row["n_loops"])
        parts = [backend, f"{threads} thread{'s' * (threads > 1)}", f"B {batch}", f"exit {exit}"]
        style: dict[str, Any] = dict(
            color=COLORS.get(backend, "#444444"),
            marker=MARKERS[settings.index((threads, batch)) % len(MARKERS)],
            linestyle="-" if exit == "off" else "--",
            markersize=4,
            label=", ".join(part for i, part in enumerate(parts) if i == 0 or i in varied),
        )
        ms = [row["ms"] for row in line]
        panels[0].plot([row["n_loops"] for row in line], ms, **style)
        bands = [[row[name] for row in line] for name in ("ms_p10", "ms_p90")]
        panels[0].fill_between([row["n_loops"] for row in line], *bands, color=style["color"], alpha=0.18, linewidth=0)
        if has_error:
            panels[1].plot(ms, [row["error"] for row in line], **style)
    panels[0].set(xlabel="loops, at most", ylabel="milliseconds", yscale="log")
    panels[0].set_title("latency by loops")
    panels[0].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=4 if has_error else 2)
    if has_error:
        panels[1].set(xlabel="milliseconds", ylabel="squared error / variance of y", xscale="log", yscale="log")
        panels[1].set_title(f"error by latency, {latency['task'].replace('_', ' ')}")
    figure.suptitle(f"{latency['model']}, {latency['n_tokens']} tokens")
    figure.savefig(path, dpi=110)
