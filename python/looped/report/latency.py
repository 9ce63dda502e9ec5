"""The table and the figure of `looped bench`, from its JSON values (`Latency.to_dict`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from looped.report.titles import task_title

COLORS = {"cpu": "#0b5cad", "eager": "#d1495b"}
MARKERS = "os^Dvx+*"
LEAST_NEEDED = ("ms a loop", "GFLOP/s", "of peak")  # columns that a narrow terminal does without, the first one first


def latency_table(latency: Mapping[str, Any], width: int | None = None) -> Table:
    """One line per way: time with its spread, speed, and the task's error where there is one.

    width: of the terminal. Where the table does not fit, it goes without the columns of `LEAST_NEEDED`.
    """
    rows, all_threads = latency["rows"], sorted({row["threads"] for row in latency["rows"]})
    title = f"{_about(latency)}, {_rounds(latency)}"
    peaks = latency["fma_peak_gflops"]
    if len(all_threads) == 1:
        title += f", {_threads(all_threads[0])}" + "".join(f"; FMA peak {peak:.0f} GFLOP/s" for peak in peaks.values())
    elif peaks:
        shown = ", ".join(f"{peak:.0f} GFLOP/s on {threads}" for threads, peak in peaks.items())
        title += f"; FMA peak by threads: {shown}"
    columns: dict[str, list[str]] = {name: [row[name] for row in rows] for name in ("backend", "exit")}
    if len(all_threads) > 1:
        columns["threads"] = [str(row["threads"]) for row in rows]
    columns["B"] = [str(row["batch"]) for row in rows]
    columns["loops"] = [str(row["n_loops"]) for row in rows]
    columns["used"] = [f"{row['mean_loops']:.1f}" for row in rows]
    columns["ms"] = [_ms(row["ms"]) for row in rows]
    columns["p10 - p90"] = [f"{_ms(row['ms_p10'])} - {_ms(row['ms_p90'])}" for row in rows]
    columns["ms a loop"] = [_ms(row["ms_per_loop"]) for row in rows]
    columns["GFLOP/s"] = [f"{row['gflops']:.1f}" for row in rows]
    columns["of peak"] = ["-" if row["peak_fraction"] is None else f"{row['peak_fraction']:.0%}" for row in rows]
    if any(row["error"] is not None for row in rows):
        columns["error"] = [f"{row['error']:.2g}" for row in rows]
    for name in LEAST_NEEDED:
        if width is None or sum(max(map(len, [head, *cells])) + 3 for head, cells in columns.items()) + 1 <= width:
            break
        del columns[name]
    table = Table(title=title, title_justify="left", caption=_of_prompts(rows), caption_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in ("backend", "exit") else "right", no_wrap=True)
    for row_cells in zip(*columns.values(), strict=True):
        table.add_row(*row_cells)
    return table


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _threads(n: int) -> str:
    return f"{n} thread{'s' * (n != 1)}"


def _about(latency: Mapping[str, Any]) -> str:
    """The model, what it is scored on, and the length of prompts."""
    n, task = latency["n_tokens"], latency["task"]
    scored = f" on {task_title(task, latency['task_options'], latency['n_dims'])}" if task else ""
    return f"{latency['model']}{scored}, {n} token{'s' * (n != 1)}"


def _of_prompts(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """What the rows with an exit are means over."""
    counts = sorted({row["n_prompts"] for row in rows if row["exit"] != "off"})
    if not counts:
        return None
    least_to_most = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
    return f"with an exit, ms and loops used are means over {least_to_most} prompts"


def _rounds(latency: Mapping[str, Any]) -> str:
    n = latency["n_rounds"]
    return f"{n} round{'s' * (n != 1)}"


def plot_latency(latency: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Milliseconds against loops, a line per backend (and threads, batch, exit); beside it error against milliseconds.

    The color is the backend; lines are whole and markers filled without an exit, dashed and hollow with one. The format follows
    the name (png, pdf, svg). Bands are the 10 to 90 % quantiles of the rounds.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = latency["rows"]
    has_error = any(row["error"] is not None for row in rows)
    figure = Figure(figsize=(12 if has_error else 6.5, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 1 + has_error, squeeze=False)[0]
    lines: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        lines.setdefault(tuple(row[name] for name in ("backend", "threads", "batch", "exit")), []).append(row)
    varied = {i for i in range(4) if len({key[i] for key in lines}) > 1}
    settings = sorted({key[1:3] for key in lines})
    for (backend, threads, batch, exit), line in lines.items():
        line = sorted(line, key=lambda row: row["n_loops"])
        parts = [backend, _threads(threads), f"B {batch}", f"exit {exit}"]
        color = COLORS.get(backend, "#444444")
        style: dict[str, Any] = dict(
            color=color,
            marker=MARKERS[settings.index((threads, batch)) % len(MARKERS)],
            markerfacecolor=color if exit == "off" else "white",
            linestyle="-" if exit == "off" else "--",
            markersize=5,
            label=", ".join(part for i, part in enumerate(parts) if i == 0 or i in varied),
        )
        loops, ms = [row["n_loops"] for row in line], [row["ms"] for row in line]
        panels[0].plot(loops, ms, **style)
        bands = [[row[name] for row in line] for name in ("ms_p10", "ms_p90")]
        panels[0].fill_between(loops, *bands, color=color, alpha=0.18, linewidth=0)
        if has_error:
            panels[1].plot(ms, [row["error"] for row in line], **style)
            above = exit == "off"  # so that the two lines of a backend, close together, do not write over each other
            for row in line:
                panels[1].annotate(
                    str(row["n_loops"]),
                    (row["ms"], row["error"]),
                    xytext=(0, 5 if above else -5),
                    textcoords="offset points",
                    ha="center",
                    va="bottom" if above else "top",
                    fontsize=7,
                    color=color,
                )
    measured = sorted({row["n_loops"] for row in rows})
    panels[0].set_xscale("symlog" if measured[0] == 0 else "log", **({"linthresh": 1} if measured[0] == 0 else {}))
    panels[0].set_xticks(ticks := _apart(measured), [str(tick) for tick in ticks])
    panels[0].set_xticks([], minor=True)
    panels[0].set(xlabel="loops, at most", ylabel="milliseconds of a call", yscale="log")
    panels[0].set_title("latency by loops")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=4 if has_error else 2)
    if has_error:
        panels[1].set(xlabel="milliseconds of a call", ylabel="squared error / variance of y", xscale="log", yscale="log")
        panels[1].set_title(f"error by latency, {latency['task'].replace('_', ' ')}; numbers are loops, at most")
    same = [_threads(settings[0][0])] if 1 not in varied else []
    same += [f"B {settings[0][1]}"] if 2 not in varied else []
    about = ", ".join([_about(latency), *same])
    spread = "" if latency["n_rounds"] == 1 else f"medians of {_rounds(latency)}, bands from their 10 to their 90 % quantile"
    figure.suptitle(f"{about}\n{spread or _rounds(latency)}", fontsize=11)
    figure.savefig(path, dpi=110)


def _apart(loops: list[int]) -> list[int]:
    """Those of sorted loop counts that have room as ticks of a logarithmic axis; the last always."""
    room = (1 + loops[-1]) / (1 + loops[0])
    kept = [loops[-1]]
    for loop in reversed(loops[:-1]):
        if (1 + kept[-1]) / (1 + loop) > room**0.05:
            kept.append(loop)
    return kept[::-1]
