"""Loop count against latency of one model: backends, threads, batch sizes, exit on and off."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import math
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
from looped.icl.predictor import stopping_to_dict
from looped.icl.prompts import interleave
from looped.icl.tasks import Task
from looped.model import LoopedTransformer

PEAK_SECONDS = 0.1
N_TIMED = 64  # different prompts, at least, that a way with an exit goes through, as each takes loops of its own
N_SCORED = 512  # prompts of a task that the error is taken from


@dataclass(frozen=True)
class Row:
    """One way to call `solve`, and how long it took. Times are milliseconds of one call with the whole batch.

    exit: the rule's name, or ``"off"``. n_loops: the most loops; mean_loops: those that the prompts used. n_prompts: different
    prompts that ms and mean_loops are means over: without an exit one batch, as all prompts take the same loops; with one the
    first 64 of the seed in batches of B, fewer where those take longer than `bench.rounds.PASS_SECONDS`. gflops counts the
    loops that ran (`bench.shapes.operations`); peak_fraction is its share of the FMA peak that was measured in the same rounds
    on as many threads, None where the C++ engine is not built. error: mean squared error of the last prediction / variance of
    y on the first 512 prompts of the seed, whatever the batch size; None without a task. stopping: the exit's fields, on_stall
    and the acceleration; None where it is off.
    """

    backend: str
    threads: int
    batch: int
    exit: str
    n_loops: int
    mean_loops: float
    n_prompts: int
    ms: float
    ms_p10: float
    ms_p90: float
    ms_per_loop: float
    gflops: float
    peak_fraction: float | None
    error: float | None
    stopping: dict[str, Any] | None


STOPPING = ("tol", "on_stall", "accelerate")  # columns of the exit's
SHARED = ("model", "task", "task_options", "n_dims", "n_tokens", "seed", "n_rounds")  # columns that are alike in all rows


@dataclass(frozen=True)
class Latency:
    """The rows of a measurement, and what was measured. task_options: the task's numbers beside n_dims, such as a sparsity."""

    model: str
    n_tokens: int
    seed: int
    task: str | None
    task_options: dict[str, Any] | None
    n_dims: int | None
    n_rounds: int
    rows: list[Row]
    fma_peak_gflops: dict[str, float]  # by the number of threads
    machine: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    def to_csv(self) -> str:
        """One line per row: its fields, with tol, on_stall and accelerate of its exit, and what is alike in all rows."""
        text = io.StringIO()
        names = [field.name for field in dataclasses.fields(Row) if field.name != "stopping"]
        writer = csv.DictWriter(text, [*names, *STOPPING, *SHARED], lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        shared = {name: getattr(self, name) for name in SHARED}
        shared["task_options"] = json.dumps(self.task_options) if self.task else None
        for row in self.rows:
            writer.writerow(dataclasses.asdict(row) | {name: (row.stopping or {}).get(name) for name in STOPPING} | shared)
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
    batch size. A way with an exit goes through 64 of them in every round, or as many as fit into its time: their loops differ,
    so the time of a few would be that of the seed, and would not go with the error. progress: called with what has just run,
    `1 + n_rounds` times for each of `n_ways(sweep)`. torch's number of threads is set back at the end.
    """
    if task is not None and n_tokens % 2 == 0:
        raise ValueError(f"measure: {n_tokens} tokens do not end at an x; with a task, n_tokens must be odd")
    with_exit = any(map(_stops, sweep.exits))
    prompts = {
        batch: _prompts(model, batch * (math.ceil(N_TIMED / batch) if with_exit else 1), n_tokens, task, seed).split(batch)
        for batch in sweep.batch_sizes
    }
    errors = _errors(model, sweep, n_tokens, task, seed)
    keys = list(itertools.product(sweep.backends, sweep.threads, sweep.batch_sizes, sweep.exits, sweep.loops))
    loops_used: list[dict[int, Tensor]] = [{} for _ in keys]  # of each way, by the call
    per_loop = operations(model, n_tokens)
    ways: dict[str, Way] = {}
    for i, (backend, threads, batch, rule, n_loops) in enumerate(keys):
        options: dict[str, Any] = dict(n_loops=n_loops, exit=rule, backend=backend)
        options |= sweep.help_of(rule)
        if model.config.state_init == "given":
            options["state"] = torch.zeros(batch, n_tokens, model.config.d_model)
        inputs = prompts[batch] if _stops(rule) else prompts[batch][:1]
        calls = [_call(loops_used[i], place, model, x, options) for place, x in enumerate(inputs)]
        ways[str(i)] = Way(calls[0], _setter(threads), calls[1:])
    peaks: dict[int, list[float]] = {threads: [] for threads in sweep.threads}
    seconds: list[dict[str, float]] = []
    before = torch.get_num_threads()
    try:
        for seconds_of_round in interleaved(ways, n_rounds, progress=lambda way: progress(_label(keys[int(way)]))):
            seconds.append(seconds_of_round)
            for threads, peak in peaks.items():
                if cpu._engine is not None:
                    peak.append(cpu._engine.fma_peak(threads, PEAK_SECONDS))
            rows = []
            for i, key in enumerate(keys):
                used = torch.cat(list(loops_used[i].values()))
                rule = key[3]
                stopping = None if rule is None or rule.is_fixed else stopping_to_dict(rule, sweep.on_stall, sweep.accelerate)
                seconds_of_way = [s[str(i)] for s in seconds]
                rows.append(_row(key, seconds_of_way, used, errors[key[3:]], per_loop, peaks[key[1]], stopping))
            yield Latency(
                model=name,
                n_tokens=n_tokens,
                seed=seed,
                task=task.name if task else None,
                task_options=task.options if task else None,
                n_dims=model.config.n_dims,
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
    loops_used: dict[int, Tensor], place: int, model: LoopedTransformer, x: Tensor, options: dict[str, Any]
) -> Callable[[], None]:
    def call() -> None:
        result = solve(model, x, **options)
        used = result.n_loops if result.n_loops_by_token is None else result.n_loops_by_token
        assert isinstance(used, Tensor)
        loops_used[place] = used

    return call


def _setter(threads: int) -> Callable[[], None]:
    return lambda: torch.set_num_threads(threads)


def _label(key: Key) -> str:
    backend, threads, batch, rule, n_loops = key
    sizes = f"{threads} thread{'s' * (threads != 1)}, B {batch}, {n_loops} loop{'s' * (n_loops != 1)}"
    return f"{backend}, {sizes}, exit {_exit_name(rule)}"


def _stops(rule: ExitRule | None) -> bool:
    """Whether prompts may take different loops under a rule."""
    return rule is not None and not rule.is_fixed


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


def _prompts(model: LoopedTransformer, n_prompts: int, n_tokens: int, task: Task | None, seed: int) -> Tensor:
    config = model.config
    if task is not None:
        pairs = next(batches(task, n_prompts, (n_tokens + 1) // 2, seed, n_prompts))
        return interleave(pairs.xs, pairs.ys)
    generator = torch.Generator().manual_seed(seed)
    if config.input_kind == "tokens":
        assert config.vocab_size is not None
        return torch.randint(config.vocab_size, (n_prompts, n_tokens), generator=generator)
    width = config.n_dims if config.input_kind == "features" else config.d_model
    assert width is not None
    return torch.randn(n_prompts, n_tokens, width, generator=generator)


def _row(
    key: Key,
    seconds: list[float],
    used: Tensor,
    error: float | None,
    per_loop: int,
    peaks: list[float],
    stopping: dict[str, Any] | None,
) -> Row:
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
        n_prompts=len(used),
        ms=median * 1e3,
        ms_p10=low * 1e3,
        ms_p90=high * 1e3,
        ms_per_loop=median * 1e3 / mean_loops if mean_loops else 0.0,
        gflops=gflops,
        peak_fraction=gflops / spread(peaks)[0] if peaks else None,
        error=error,
        stopping=stopping,
    )


def _machine() -> dict[str, Any]:
    return {"torch": torch.__version__, "python": platform.python_version(), "engine": cpu.describe()}
