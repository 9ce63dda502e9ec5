"""What exits save, by the protocol of Yang et al. (2024): 500 loops on 1,280 prompts, here of the bundled model.

    python benches/exit.py [--rounds 3] [--threads 2] [--json OUT]

Every way runs once in each round, in turn, on the same prompts. Printed are medians over the rounds of wall time, its ratio to
eager with all loops, the loops used, and how far the task's error moved from all loops on the same backend. The share of
the FMA peak counts the loops that ran, 24 C^2 T + 2 T (T + 1) C operations each; the peak is measured between the rounds.
Eager runs with the heap kept and with glibc's defaults, and the better median counts.
"""

import argparse
import json
import statistics
import time

import torch
from heap import restart_with_heap_kept
from peer_setups import DefaultHeapEager

import looped
from looped.backends import cpu
from looped.bench.shapes import operations
from looped.exits import Contraction
from looped.icl.evaluate import batches
from looped.icl.prompts import interleave
from looped.icl.tasks import LinearRegression

N_LOOPS = 500
WAYS = {
    "eager, all loops": dict(backend="eager"),
    "eager, exit": dict(backend="eager", exit=Contraction(tol=3e-3), on_stall="exit"),
    "cpu, all loops": dict(backend="cpu"),
    "cpu, exit": dict(backend="cpu", exit=Contraction(tol=3e-3), on_stall="exit"),
    "cpu, prefix freezing": dict(backend="cpu", exit=Contraction(tol=3e-3, scope="prefix"), on_stall="exit"),
    "cpu, exit with Anderson": dict(backend="cpu", exit=Contraction(tol=3e-3), on_stall="exit", accelerate="anderson"),
}
MODEL = "linear_regression"


def run_way(way, parts, n_threads):
    """Seconds of one way on batches of prompts, and its results."""
    torch.set_num_threads(n_threads)
    model = looped.load_pretrained(MODEL)
    begin = time.perf_counter()
    results = [looped.solve(model, part, n_loops=N_LOOPS, **way) for part in parts]
    return time.perf_counter() - begin, results


def seconds_of_way(way, parts, n_threads):
    return run_way(way, parts, n_threads)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=1280)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", help="write one row per way to this file")
    options = parser.parse_args()
    if not cpu.is_there():
        parser.error(f"this bench is of the C++ engine, which also measures the FMA peak: {cpu.describe()}")
    torch.set_num_threads(options.threads)
    model = looped.load_pretrained(MODEL)
    pairs = next(batches(LinearRegression(5), options.prompts, 11, seed=0, batch_size=options.prompts))
    # Batches of 128 stay in the cache: the better setting for eager; the engine does not care.
    parts = interleave(*pairs).split(128)
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in WAYS}  # by the allocator's setting
    results, peaks = {}, []
    default_heap = DefaultHeapEager()
    try:
        for round_ in range(options.rounds):
            peaks.append(cpu._engine.fma_peak(options.threads, 0.3))
            for name, way in WAYS.items():
                took, results[name] = run_way(way, parts, options.threads)
                seconds[name].setdefault("kept", []).append(took)
                if way["backend"] == "eager":
                    again = default_heap.ask("call", seconds_of_way, way, parts, options.threads)
                    seconds[name].setdefault("default", []).append(again)
                said = ", ".join(f"{own[-1]:.2f} s (heap {setting})" for setting, own in seconds[name].items())
                print(f"round {round_ + 1}/{options.rounds}: {name} {said}", flush=True)
    finally:
        default_heap.stop()
    rows = [row(name, results, seconds, pairs, model, statistics.median(peaks)) for name in WAYS]
    print(f"\nFMA peak {statistics.median(peaks):.0f} GFLOP/s on {options.threads} threads, {cpu.describe()}")
    print(f"{'':26}{'seconds':>9}{'x eager':>9}{'loops':>8}{'of tokens':>11}{'error':>10}{'change':>9}{'peak':>7}  heap")
    for r in rows:
        cells = f"{r['seconds']:9.2f}{r['speedup']:9.1f}{r['mean_loops']:8.1f}{r['mean_token_loops']:11.1f}"
        print(f"{r['way']:26}{cells}{r['error']:10.5f}{r['error_change']:+9.2%}{r['peak_fraction']:7.1%}  {r['heap']}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


def better(seconds):
    """The allocator's setting with the least median of seconds, and that."""
    return min(((setting, statistics.median(own)) for setting, own in seconds.items()), key=lambda entry: entry[1])


def row(name, results, seconds, pairs, model, peak):
    """One way's figures."""

    def error(way):
        prediction = torch.cat([part.prediction for part in results[way]])
        return ((prediction - pairs.ys) ** 2).mean(0)[-1].item() / 5

    loops = torch.cat([part.n_loops for part in results[name]]).double()
    by_token = [part.n_loops_by_token for part in results[name]]
    token_loops = loops if by_token[0] is None else torch.cat(by_token).double()
    setting, took = better(seconds[name])
    backend = name.split(",")[0]
    done = token_loops.mean().item() * len(loops) * operations(model, results[name][0].y.shape[1])
    return {
        "way": name,
        "heap": setting,
        "seconds": took,
        "speedup": better(seconds["eager, all loops"])[1] / took,
        "mean_loops": loops.mean().item(),
        "mean_token_loops": token_loops.mean().item(),
        "error": error(name),
        "error_change": error(name) / error(f"{backend}, all loops") - 1,
        "peak_fraction": done / took / 1e9 / peak,
    }


if __name__ == "__main__":
    restart_with_heap_kept()
    main()
