"""Loop count against latency of one model: backends, threads, batch sizes, exit on and off."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looped.accelerate import Anderson
from looped.backends import cpu
from looped.bench.rounds import Way, interleaved, spread
from looped.bench.shapes import operations
from looped.checkpoint import write_atomically
from looped.engine import solve
from looped.exits import ExitRule, Fixed
from looped.icl.evaluate import batches
from looped.icl.prompts import interleave
from looped.icl.tasks import Task
from looped.model import LoopedTransformer

PEAK_SECONDS = 0.1
N_SCORED = 512  # prompts of a task that the error is taken from


@dataclass(frozen=True)
class Row:
    """One way to call `solve`, and how long it took. Times are milliseconds of one call with the whole batch.

    exit: the rule's name, or ``"off"``. n_loops: the most loops; mean_loops: those that the prompts used. gflops counts the
    loops that ran (`bench.shapes.operations`); peak_fraction is its share of the FMA peak that was measured in the same
    rounds on as many threads, None where the C++ engine is not built. error: mean squared error of the last
    prediction / variance of y on 512 prompts, whatever the batch size; None without a task.
    """

    backend: str
    threads: int
    batch: int
    exit: str
    n_loops: int
    mean_loops: float
    ms: float
    ms_p10: float
    ms_p90: float
    ms_per_loop: float
    gflops: float
    peak_fraction: float | None
    error: float | None


@dataclass(frozen=True)
class Latency:
    """The rows of a measurement, and what was measured."""

    model: str
    n_tokens: int
    seed: int
    task: str | None
    n_rounds: int
    rows: list[Row]
    fma_peak_gflops: dict[str, float]  # by the number of threads
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    def to_csv(self) -> str:
        """One line per row, under the names of `Row`."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [field.name for field in dataclasses.fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in self.rows)
        return text.getvalue()

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write latency.json and latency.csv into a folder, which is made if missing."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "latency.json", json.dumps(self.to_dict(), indent=1).encode())
        write_atomically(folder / "latency.csv", self.to_csv().encode())


@dataclass(frozen=True)
class Sweep:
    """What is to be measured: every combination. An exit of None is all loops; on_stall and accelerate go with the others."""

    loops: Sequence[int]
    batch_sizes: Sequence[int] = (1, 64)
    backends: Sequence[str] = ("cpu", "eager")
    threads: Sequence[int] = (1,)
    exits: Sequence[ExitRule | None] = (None,)
    on_stall: str = "exit"
    accelerate: Anderson | None = None

    def __post_init__(self) -> None:
        for name, least in (("loops", 0), ("batch_sizes", 1), ("threads", 1)):
            values = getattr(self, name)
            if not values or any(value < least for value in values):
                raise ValueError(f"Sweep: {name}={list(values)} must be integers of at least {least}, and one or more")
        if not self.backends or not self.exits:
            raise ValueError("Sweep: at least one backend and one exit are needed")

    def help_of(self, rule: ExitRule | None) -> dict[str, Any]:
        """What `solve` takes beside an exit rule."""
        return {} if rule is None else dict(on_stall=self.on_stall, accelerate=self.accelerate)


def measure(
    model: LoopedTransformer,
    sweep: Sweep,
    *,
    name: str,
    n_tokens: int,
    task: Task | None = None,
    n_rounds: int = 5,
    seed: int = 0,
    progress: Callable[[str], object] = lambda way: None,
) -> Iterator[Latency]:
    """Yields what is known after each round, so that a stop loses no finished round.

    Prompts are those that `evaluate` scores where a task is given (n_tokens odd), else random; the same for every way of one
    batch size. progress: called with what has just run, `1 + n_rounds` times for each of `n_ways(sweep)`.
    torch's number of threads is set back at the end.
    """
    if task is not None and n_tokens % 2 == 0:
        raise ValueError(f"measure: {n_tokens} tokens do not end at an x; with a task, n_tokens must be odd")
    prompts = {batch: _prompts(model, batch, n_tokens, task, seed) for batch in sweep.batch_sizes}
    errors = _errors(model, sweep, n_tokens, task, seed)
    keys = list(itertools.product(sweep.backends, sweep.threads, sweep.batch_sizes, sweep.exits, sweep.loops))
    loops_used: dict[int, Tensor] = {}
    per_loop = operations(model, n_tokens)
    ways: dict[str, Way] = {}
    for i, (backend, threads, batch, rule, n_loops) in enumerate(keys):
        options: dict[str, Any] = dict(n_loops=n_loops, exit=rule, backend=backend)
        options |= sweep.help_of(rule)
        if model.config.state_init == "given":
            options["state"] = torch.zeros(batch, n_tokens, model.config.d_model)
        ways[str(i)] = Way(_call(loops_used, i, model, prompts[batch], options), _setter(threads))
    peaks: dict[int, list[float]] = {threads: [] for threads in sweep.threads}
    seconds: list[dict[str, float]] = []
    before = torch.get_num_threads()
    try:
        for seconds_of_round in interleaved(ways, n_rounds, progress=lambda way: progress(_label(keys[int(way)]))):
            seconds.append(seconds_of_round)
            for threads, peak in peaks.items():
                if cpu._engine is not None:
                    peak.append(cpu._engine.fma_peak(threads, PEAK_SECONDS))
            rows = [
                _row(key, [s[str(i)] for s in seconds], loops_used[i], errors[key[3:]], per_loop, peaks[key[1]])
                for i, key in enumerate(keys)
            ]
            yield Latency(
                model=name,
                n_tokens=n_tokens,
                seed=seed,
                task=task.name if task else None,
                n_rounds=len(seconds),
                rows=rows,
                fma_peak_gflops={str(threads): spread(peak)[0] for threads, peak in peaks.items() if peak},
                machine=_machine(),
            )
    finally:
        torch.set_num_threads(before)


def n_ways(sweep: Sweep) -> int:
    """Rows of a sweep."""
    return len(sweep.backends) * len(sweep.threads) * len(sweep.batch_sizes) * len(sweep.exits) * len(sweep.loops)


Key = tuple[str, int, int, ExitRule | None, int]


def _call(
    loops_used: dict[int, Tensor], i: int, model: LoopedTransformer, x: Tensor, options: dict[str, Any]
) -> Callable[[], None]:
    def call() -> None:
        result = solve(model, x, **options)
        used = result.n_loops if result.n_loops_by_token is None else result.n_loops_by_token
        assert isinstance(used, Tensor)
        loops_used[i] = used

    return call


def _setter(threads: int) -> Callable[[], None]:
    return lambda: torch.set_num_threads(threads)


def _label(key: Key) -> str:
    backend, threads, batch, rule, n_loops = key
    sizes = f"{threads} thread{'s' * (threads != 1)}, B {batch}, {n_loops} loop{'s' * (n_loops != 1)}"
    return f"{backend}, {sizes}, exit {_exit_name(rule)}"


def _exit_name(rule: ExitRule | None) -> str:
    return "off" if rule is None or isinstance(rule, Fixed) else type(rule).__name__.lower()


def _errors(
    model: LoopedTransformer, sweep: Sweep, n_tokens: int, task: Task | None, seed: int
) -> dict[tuple[ExitRule | None, int], float | None]:
    """The task's error by exit rule and loops; backends agree to rounding."""
    keys = list(itertools.product(sweep.exits, sweep.loops))
    if task is None:
        return dict.fromkeys(keys)
    pairs = next(batches(task, N_SCORED, (n_tokens + 1) // 2, seed, N_SCORED))
    errors: dict[tuple[ExitRule | None, int], float | None] = {}
    for rule, n_loops in keys:
        result = solve(model, interleave(pairs.xs, pairs.ys), n_loops=n_loops, exit=rule, **sweep.help_of(rule))
        assert isinstance(result.prediction, Tensor)
        wrong = result.prediction[:, -1] - pairs.ys[:, -1]
        errors[rule, n_loops] = wrong.double().square().mean().item() / task.error_scale
    return errors


def _prompts(model: LoopedTransformer, batch: int, n_tokens: int, task: Task | None, seed: int) -> Tensor:
    config = model.config
    if task is not None:
        pairs = next(batches(task, batch, (n_tokens + 1) // 2, seed, batch))
        return interleave(pairs.xs, pairs.ys)
    generator = torch.Generator().manual_seed(seed)
    if config.input_kind == "tokens":
        assert config.vocab_size is not None
        return torch.randint(config.vocab_size, (batch, n_tokens), generator=generator)
    width = config.n_dims if config.input_kind == "features" else config.d_model
    assert width is not None
    return torch.randn(batch, n_tokens, width, generator=generator)


def _row(key: Key, seconds: list[float], used: Tensor, error: float | None, per_loop: int, peaks: list[float]) -> Row:
    backend, threads, batch, rule, n_loops = key
    mean_loops = used.double().mean().item()
    median, low, high = spread(seconds)
    gflops = per_loop * batch * mean_loops / median / 1e9
    return Row(
        backend=backend,
        threads=threads,
        batch=batch,
        exit=_exit_name(rule),
        n_loops=n_loops,
        mean_loops=mean_loops,
        ms=median * 1e3,
        ms_p10=low * 1e3,
        ms_p90=high * 1e3,
        ms_per_loop=median * 1e3 / mean_loops if mean_loops else 0.0,
        gflops=gflops,
        peak_fraction=gflops / spread(peaks)[0] if peaks else None,
        error=error,
    )


def _machine() -> dict[str, Any]:
    return {"torch": torch.__version__, "python": platform.python_version(), "engine": cpu.describe()}
