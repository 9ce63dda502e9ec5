"""Ours, PyTorch eager, torch.compile, ONNX Runtime and OpenVINO side by side: time of a loop, GFLOP/s, share of the FMA peak.

    python benches/peers.py [--threads 2] [--shapes C256H8T82B64] [--impl ours,eager] [--rounds 5] [--quick] [--json OUT]

Every shape is a looped in-context learner of width C with H heads on B prompts of T tokens, 20 loops, float32. The outputs of
every implementation are held against eager PyTorch in float64 first. Then, in every round, each implementation runs once in
turn, and the FMA peak of the same threads is measured beside them; figures are medians over the rounds. Of an implementation's
settings (benches/peer_setups.py), each on batches whole (up to 128 MB of activations) and in parts of 64 prompts, the fastest
in a trial, whose first call does not count, enters the rounds; eager enters with both allocator settings, and the better median
counts. A shape whose round takes over a minute has three.

GFLOP/s count 24 C^2 T + 2 T (T + 1) C operations a prompt-loop for every implementation; elementwise work is not counted.

--json writes one row per (shape, implementation, threads): shape, impl, threads, ms_per_loop (of the whole batch), gflops,
peak_fraction; and beside these setting, ms_p10, ms_p90 (quantiles of ms_per_loop), rounds, error (relative, against float64),
and for ours on several threads scaling: its speed-up over one thread as a share of the FMA peak's own.

Peers need the extra: pip install 'looped[bench]'. --impl leaves some out.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from heap import restart_with_heap_kept
from peer_setups import IMPLEMENTATIONS, DefaultHeapEager, in_parts, missing
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from looped.backends import cpu
from looped.bench.rounds import SAMPLE_SECONDS, Way, sample, spread
from looped.bench.shapes import operations, random_model

N_LOOPS = 20
SHAPES = "C256H8T82B1,C256H8T82B64,C256H8T82B512,C128H4T41B1,C128H4T41B64,C64H4T22B1,C64H4T22B64,C64H4T22B1024"
QUICK_SHAPES = "C256H8T82B1,C256H8T82B8,C64H4T22B1,C64H4T22B64"
PART = 64  # prompts
WHOLE_BYTES = 128e6  # of [B, T, 4 C] activations: larger batches go in parts only (OpenVINO took over 20 GB for 172 MB of them)
TOLERANCE = 1e-5  # of an output against float64, relative
N_COMPARED = 16  # prompts of a batch, spread over it
PEAK_SECONDS = 0.3
LONG_ROUND, SHORT_CALL = 60.0, 1.0  # seconds
ALONE = "ours, one thread"

LARGE_BATCH = 64
BARS_LARGE = {256: (0.85, 1.25), 128: (0.80, 1.4), 64: (0.70, 1.7)}  # by C: share of the FMA peak, times the best peer
BARS_ONE = {256: 1.3, 64: 2.0}  # by C: times the best peer
BAR_SCALING = 0.95


@dataclass
class Entry:
    """One implementation in one setting, in the rounds."""

    impl: str
    setting: str
    take: Callable[[], float]  # seconds of one call
    error: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default=str(torch.get_num_threads()), help="a list; default PyTorch's")
    parser.add_argument("--shapes", help=f"a list; default {SHAPES}")
    parser.add_argument("--impl", default=",".join(IMPLEMENTATIONS), help="a list; default all")
    parser.add_argument("--rounds", type=int, help="default 5, and 2 with --quick")
    parser.add_argument("--quick", action="store_true", help="small shapes, two rounds, no whole-graph torch.compile: minutes")
    parser.add_argument("--json", metavar="OUT", help="write the rows to this file")
    options = parser.parse_args()
    shapes = [parsed(parser, name) for name in (options.shapes or (QUICK_SHAPES if options.quick else SHAPES)).split(",")]
    impls = [name.strip() for name in options.impl.split(",")]
    for name in impls:
        if name not in IMPLEMENTATIONS:
            parser.error(f"--impl {name!r} is not one of {', '.join(IMPLEMENTATIONS)}")
        if package := missing(name):
            rest = ",".join(other for other in impls if other != name)
            parser.error(f"{name} needs {package}: pip install 'looped[bench]', or leave it out: --impl {rest}")
    if not cpu.is_there():
        parser.error(f"the FMA peak is measured by the C++ engine: {cpu.describe()}")
    n_rounds = options.rounds if options.rounds is not None else 2 if options.quick else 5
    if not options.threads.replace(",", "").isdigit() or n_rounds < 1:
        parser.error(f"--threads takes a list such as 1,2 and --rounds a number from 1 on, got {options.threads!r}, {n_rounds}")
    console = Console(width=None if sys.stdout.isatty() else 130)
    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()
    default_heap = DefaultHeapEager() if "eager" in impls else None
    try:
        for n_threads in (int(n) for n in options.threads.split(",")):
            for shape, B in shapes:
                new, peak = measure(shape, B, n_threads, impls, n_rounds, default_heap, options.quick)
                rows += new
                console.print(table(new, peak))
    finally:
        if default_heap:
            default_heap.stop()
    console.print(bars_table(rows))
    console.print(versions(impls) + f"; {time.perf_counter() - begin:.0f} s in all")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


def parsed(parser: argparse.ArgumentParser, name: str) -> tuple[str, int]:
    found = re.fullmatch(r"(C\d+H\d+T\d+)B([1-9]\d*)", name.strip())
    if not found:
        parser.error(f"--shapes takes names like C256H8T82B64, got {name!r}")
    return found[1], int(found[2])


def measure(
    shape: str, B: int, n_threads: int, impls: list[str], n_rounds: int, default_heap: DefaultHeapEager | None, quick: bool
) -> tuple[list[dict[str, Any]], float]:
    """The rows of one shape, ours first, and the FMA peak."""
    torch.set_num_threads(n_threads)
    torch._dynamo.reset()  # its limit of graphs counts those of the shapes before
    model = random_model(shape, n_loops=N_LOOPS)
    T = int(shape.partition("T")[2])
    x = torch.randn(B, T, model.config.n_dims, generator=torch.Generator().manual_seed(1))
    compared = torch.linspace(0, B - 1, min(B, N_COMPARED)).long()
    with torch.inference_mode():
        want = random_model(shape).double()(x[compared].double(), n_loops=N_LOOPS, backend="eager").numpy()
    name = f"{shape}B{B}"
    with tqdm(
        desc=f"{name}, {n_threads} thread{'s' * (n_threads > 1)}", file=sys.stderr, dynamic_ncols=True, leave=False
    ) as bar:

        def note(text: str) -> None:
            bar.set_postfix_str(text)
            bar.update()

        entries = []
        for impl in impls:
            note(f"set up {impl}")
            options = {"with_whole": False} if impl == "compile" and quick else {}
            entries.append(fastest(impl, name, model, x, n_threads, compared, want, note, **options))
        if default_heap:
            entries.append(default_heap_entry(default_heap, shape, name, x, n_threads, compared, want, note))
        if n_threads > 1 and "ours" in impls:
            entries.append(on_one_thread(next(entry for entry in entries if entry.impl == "ours"), n_threads))
        seconds: list[list[float]] = [[] for _ in entries]
        peaks: dict[int, list[float]] = {n: [] for n in sorted({1, n_threads})}
        for round_ in range(n_rounds):
            begin = time.perf_counter()
            for n, peak in peaks.items():
                peak.append(cpu._engine.fma_peak(n, PEAK_SECONDS))
            for entry, own in zip(entries, seconds, strict=True):
                note(f"round {round_ + 1}/{n_rounds}: {entry.impl} {entry.setting}")
                own.append(entry.take())
            if round_ == 2 and time.perf_counter() - begin > LONG_ROUND:
                break
    per_loop = operations(model, T) * B
    peak_here, peak_alone = (spread(peaks[n])[0] for n in (n_threads, 1))
    rows: dict[str, dict[str, Any]] = {}
    for entry, own in zip(entries, seconds, strict=True):
        median, low, high = (1e3 * s / N_LOOPS for s in spread(own))
        gflops = per_loop / median / 1e6
        if entry.impl == ALONE:
            rows["ours"]["scaling"] = rows["ours"]["peak_fraction"] / (gflops / peak_alone)
            continue
        if entry.impl in rows and rows[entry.impl]["ms_per_loop"] <= median:
            continue  # eager with the other allocator setting was faster
        rows[entry.impl] = dict(shape=name, impl=entry.impl, threads=n_threads, ms_per_loop=median, gflops=gflops)
        rows[entry.impl] |= dict(peak_fraction=gflops / peak_here, setting=entry.setting, ms_p10=low, ms_p90=high)
        rows[entry.impl] |= dict(rounds=len(own), error=entry.error)
    return list(rows.values()), peak_here


def fastest(impl, name, model, x, n_threads, compared, want, note, **options) -> Entry:
    """The best setting of an implementation by a trial, its output compared."""
    make = lambda prompts: IMPLEMENTATIONS[impl](model, prompts, N_LOOPS, n_threads, **options)  # noqa: E731
    if len(x) <= PART or len(x) % PART or impl == "ours":  # our engine takes prompts one by one, whatever the batch
        calls = make(x)
    else:
        calls = {f"{setting} in parts of {PART}".strip(): in_parts(call, PART) for setting, call in make(x[:PART]).items()}
        if len(x) * x.shape[1] * model.config.d_ff * x.element_size() <= WHOLE_BYTES:
            calls |= make(x)
    trial: dict[str, tuple[float, float]] = {}
    for setting, call in calls.items():
        note(f"trial: {impl} {setting}")
        error = compare(f"{name}: {impl} {setting}", call(x), len(x), compared, want)
        trial[setting] = (tried(lambda call=call: sample(Way(lambda: call(x)), 1)), error)
    best = min(trial, key=trial.__getitem__)
    seconds, error = trial[best]
    n_calls = math.ceil(SAMPLE_SECONDS / seconds)
    setting = f"{best} heap kept".strip() if impl == "eager" else best
    return Entry(impl, setting, lambda: sample(Way(lambda: calls[best](x)), n_calls), error)


def tried(take: Callable[[], float]) -> float:
    """Seconds of a call in a trial, after a first one that is not counted: the least of three of short ones."""
    seconds = take()
    return seconds if seconds > SHORT_CALL else min(seconds, take(), take())


def on_one_thread(mine: Entry, n_threads: int) -> Entry:
    """Ours again, for its scaling."""

    def take() -> float:
        torch.set_num_threads(1)
        try:
            return mine.take()
        finally:
            torch.set_num_threads(n_threads)

    return Entry(ALONE, mine.setting, take, mine.error)


def default_heap_entry(worker, shape, name, x, n_threads, compared, want, note) -> Entry:
    """Eager in the process with the default allocator, in the better part size by a trial."""
    worker.ask("load", shape, x, N_LOOPS, n_threads)
    trial = {}
    for size in (None, PART) if len(x) > PART and len(x) % PART == 0 else (None,):
        note("trial: eager, default heap")
        worker.ask("use", size)
        error = compare(f"{name}: eager, default heap", worker.ask("output"), len(x), compared, want)
        trial[size] = (tried(lambda: worker.ask("sample", 1)), error)
    best = min(trial, key=lambda size: trial[size][0])
    worker.ask("use", best)
    seconds, error = trial[best]
    n_calls = math.ceil(SAMPLE_SECONDS / seconds)
    setting = (f"in parts of {best} " if best else "") + "default heap"
    return Entry("eager", setting, lambda: worker.ask("sample", n_calls), error)


def compare(who: str, got: np.ndarray, B: int, compared: torch.Tensor, want: np.ndarray) -> float:
    """The relative error; a wrong implementation ends the bench before it is timed."""
    if got.shape != (B, want.shape[1]):
        raise SystemExit(f"peers.py: {who} gives {list(got.shape)}, not {[B, want.shape[1]]}; nothing is reported")
    error = float(np.linalg.norm(got[compared.numpy()] - want) / np.linalg.norm(want))
    if not error <= TOLERANCE:
        raise SystemExit(f"peers.py: {who} is off by {error:.1e} of float64, more than {TOLERANCE:g}; nothing is reported")
    return error


# What is shown ----------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]], peak: float) -> Table:
    shape, n_threads, n_rounds = (rows[0][key] for key in ("shape", "threads", "rounds"))
    title = f"{shape}, {n_threads} thread{'s' * (n_threads > 1)}, {n_rounds} rounds, FMA peak {peak:.0f} GFLOP/s"
    shown = Table(title=title, title_justify="left")
    shown.add_column("", no_wrap=True)
    shown.add_column("setting", no_wrap=True)
    for column in ("ms a loop", "p10 - p90", "GFLOP/s", "of peak", "its time / ours", "error"):
        shown.add_column(column, justify="right", no_wrap=True)
    mine = next((row["ms_per_loop"] for row in rows if row["impl"] == "ours"), None)
    for row in rows:
        cells = [f"{row['ms_per_loop']:.4g}", f"{row['ms_p10']:.4g} - {row['ms_p90']:.4g}", f"{row['gflops']:.1f}"]
        cells += [f"{row['peak_fraction']:.1%}", f"{row['ms_per_loop'] / mine:.2f}" if mine else "-", f"{row['error']:.0e}"]
        shown.add_row(row["impl"], row["setting"], *cells)
    return shown


def bars(rows: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """What must hold: a text, the bar, and what was seen."""
    found = []
    for row in rows:
        if row["impl"] != "ours":
            continue
        C, B = (int(re.search(letter + r"(\d+)", row["shape"])[1]) for letter in "CB")
        beside = [r for r in rows if (r["shape"], r["threads"]) == (row["shape"], row["threads"]) and r is not row]
        best = min(beside, key=lambda r: r["ms_per_loop"], default=None)
        ratio = best["ms_per_loop"] / row["ms_per_loop"] if best else None
        against = f"time of {best['impl']}, the best of {len(beside)}, / ours" if best else ""
        where = f"{row['shape']}, {row['threads']} thread{'s' * (row['threads'] > 1)}"
        if B >= LARGE_BATCH and C in BARS_LARGE:
            found.append((f"{where}: share of the FMA peak", BARS_LARGE[C][0], row["peak_fraction"]))
            if ratio:
                found.append((f"{where}: {against}", BARS_LARGE[C][1], ratio))
        if B == 1 and C in BARS_ONE and ratio:
            found.append((f"{where}: {against}", BARS_ONE[C], ratio))
        if "scaling" in row:
            found.append((f"{where}: speed-up over one thread / the peak's", BAR_SCALING, row["scaling"]))
    return found


def bars_table(rows: list[dict[str, Any]]) -> Table:
    found = bars(rows)
    missed = sum(seen < bar for _, bar, seen in found)
    shown = Table(title=f"bars: {len(found) - missed} hold, {missed} missed", title_justify="left")
    shown.add_column("", no_wrap=True)
    for column in ("at least", "seen", ""):
        shown.add_column(column, justify="right", no_wrap=True)
    for text, bar, seen in found:
        shown.add_row(text, f"{bar:.2f}", f"{seen:.3f}", "holds" if seen >= bar else "MISSED")
    return shown


def versions(impls: list[str]) -> str:
    packages = ["torch"] + [name for name in ("onnxruntime", "openvino") if name in impls]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages) + f"; cpu {cpu.describe()}"


if __name__ == "__main__":
    restart_with_heap_kept()
    main()
