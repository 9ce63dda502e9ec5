"""Times by interleaved rounds: in every round each way runs once in turn, so that a slow minute hits all alike."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

SAMPLE_SECONDS = 0.05  # of one sample: a shorter call is repeated within it, and the sample is its mean
PASS_SECONDS = 2.0  # of one sample of a way that has several inputs: as many of them as fit
QUIET_SECONDS = 0.01  # before a sample: worker threads of the way before still spin


@dataclass(frozen=True)
class Way:
    """Something to time. call: runs it once. prepare: is called before each sample, untimed (thread counts, say).

    others: run it on other inputs, which may take other times; a sample is the mean over them all.
    """

    call: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    others: Sequence[Callable[[], object]] = ()


def sample(way: Way, n_calls: int) -> float:
    """Seconds of one call, the mean of n_calls that go round its inputs, after one that is not counted where they are many."""
    way.prepare()
    time.sleep(QUIET_SECONDS)
    if n_calls > 1:
        way.call()
    calls = (way.call, *way.others)
    begin = time.perf_counter()
    for i in range(n_calls):
        calls[i % len(calls)]()
    return (time.perf_counter() - begin) / n_calls


def warm_up(way: Way, sample_seconds: float = SAMPLE_SECONDS) -> int:
    """Runs a way twice, untimed and timed, and returns how many calls make a sample.

    They go round all its inputs a whole number of times, or take the first ones, as many as `PASS_SECONDS` has room for.
    """
    sample(way, 1)
    seconds, n = max(sample(way, 1), 1e-7), 1 + len(way.others)
    to_fill = max(1, math.ceil(sample_seconds / seconds))
    if n * seconds > PASS_SECONDS:
        return min(n, max(to_fill, int(PASS_SECONDS / seconds)))
    return math.ceil(to_fill / n) * n


def interleaved(
    ways: Mapping[str, Way],
    n_rounds: int,
    *,
    sample_seconds: float = SAMPLE_SECONDS,
    progress: Callable[[str], object] = lambda name: None,
) -> Iterator[dict[str, float]]:
    """Yields the seconds of one call of every way, after each round. The warm-up of each way is not counted.

    progress: called with a way's name after its warm-up and after each of its samples: 1 + n_rounds times in all.
    """
    if n_rounds < 1:
        raise ValueError(f"interleaved: n_rounds={n_rounds} must be at least 1")
    n_calls = {}
    for name, way in ways.items():
        n_calls[name] = warm_up(way, sample_seconds)
        progress(name)
    for _ in range(n_rounds):
        seconds = {}
        for name, way in ways.items():
            seconds[name] = sample(way, n_calls[name])
            progress(name)
        yield seconds


def spread(seconds: list[float]) -> tuple[float, float, float]:
    """Median, 10 % and 90 % quantile."""
    median, low, high = np.quantile(seconds, (0.5, 0.1, 0.9))
    return float(median), float(low), float(high)
