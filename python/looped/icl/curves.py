"""Error curves over streamed prompts: means with bootstrap intervals, in memory that does not grow with the prompts."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

MAX_BLOCKS = 4096  # rows kept; above this, neighbours are averaged into blocks of 2, 4, 8, ... prompts
N_RESAMPLES = 1000
CONFIDENCE = 0.90


@dataclass(frozen=True)
class Curve:
    """A mean at each place of a curve, with the limits of its 90 % interval; NaN where nothing was measured.

    Prompts without a finite value at a place do not count there: n_missing says how many, and n_not_finite how many of these
    have a prediction that is not finite, where the others have none by design.
    """

    mean: list[float]
    low: list[float]
    high: list[float]
    n_prompts: int
    n_missing: list[int]
    n_not_finite: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        object.__setattr__(self, "n_not_finite", self.n_not_finite or [0] * len(self.mean))

    @property
    def is_finite(self) -> bool:
        """Whether all predictions are."""
        return not any(self.n_not_finite)

    @property
    def least_finite(self) -> int:
        """The place with the most predictions that are not finite."""
        return max(range(len(self.n_not_finite)), key=self.n_not_finite.__getitem__)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, None for NaN."""
        values = asdict(self)
        return {k: [None if x != x else x for x in v] if isinstance(v, list) else v for k, v in values.items()}


def errors_of_model(predictions: Tensor, ys: Tensor, scale: float) -> Tensor:
    """(prediction - y)^2 / scale in float64 on the CPU, in the shape of the predictions; NaN where there is no y.

    A model predicts every y that there is, so where its prediction is not finite neither is the error: infinite.
    """
    ys = ys.cpu().double().expand(predictions.shape)
    errors = (predictions.cpu().double() - ys).square() / scale
    return errors.masked_fill(~errors.isfinite() & ~ys.isnan(), math.inf)


class RunningCurve:
    """Collects rows [K], one per prompt, and gives their mean and its bootstrap interval.

    Up to `MAX_BLOCKS` prompts every row is kept and the bootstrap is over prompts; beyond, it is over equal blocks of prompts,
    which are as independent.
    """

    def __init__(self) -> None:
        self.block_size = 1
        self.sums: list[np.ndarray] = []  # over whole blocks, the last one still being filled
        self.counts: list[np.ndarray] = []
        self.not_finite: np.ndarray | int = 0
        self.n_open = 0  # prompts of the last block
        self.n_prompts = 0

    def add(self, rows: Tensor) -> None:
        """rows: real [B, K], one for each prompt, in order; NaN where there is no value, infinity where it is not finite."""
        for row in rows.detach().double().cpu().numpy():
            self.n_prompts += 1
            if not self.n_open:
                self.sums.append(np.zeros_like(row))
                self.counts.append(np.zeros(len(row), dtype=np.int64))
            finite = np.isfinite(row)
            self.sums[-1] = self.sums[-1] + np.where(finite, row, 0.0)  # not in place: copies share the arrays
            self.counts[-1] = self.counts[-1] + finite
            self.not_finite = self.not_finite + np.isinf(row).astype(np.int64)
            self.n_open = (self.n_open + 1) % self.block_size
            if len(self.sums) == MAX_BLOCKS and not self.n_open:
                self.sums = list(np.stack(self.sums).reshape(MAX_BLOCKS // 2, 2, -1).sum(axis=1))
                self.counts = list(np.stack(self.counts).reshape(MAX_BLOCKS // 2, 2, -1).sum(axis=1))
                self.block_size *= 2

    def copy(self) -> RunningCurve:
        """The curve as of now, which what is added later does not change."""
        other = copy.copy(self)
        other.sums, other.counts = list(self.sums), list(self.counts)
        return other

    def mean(self) -> list[float]:
        """The mean so far, NaN where nothing was measured; without the interval, which takes longer."""
        sums, counts = np.stack(self.sums).sum(axis=0), np.stack(self.counts).sum(axis=0)
        means: list[float] = np.where(counts > 0, sums / np.maximum(counts, 1), math.nan).tolist()
        return means

    def curve(self, seed: int = 0) -> Curve:
        """The curve so far. The interval needs two prompts; below that its limits are NaN."""
        if not self.n_prompts:
            return Curve([], [], [], 0, [])
        sums, counts = np.stack(self.sums), np.stack(self.counts)
        total = counts.sum(axis=0)
        measured = total > 0
        mean, low, high = (np.full(sums.shape[1], math.nan) for _ in range(3))
        mean[measured] = sums.sum(axis=0)[measured] / total[measured]
        if len(sums) >= 2 and measured.any():
            from scipy.stats import bootstrap

            def ratio(sums: np.ndarray, counts: np.ndarray, axis: int) -> np.ndarray:
                return sums.sum(axis=axis) / np.maximum(counts.sum(axis=axis), 1)

            result = bootstrap(
                (sums[:, measured], counts[:, measured]),
                ratio,
                paired=True,
                vectorized=True,
                axis=0,
                n_resamples=N_RESAMPLES,
                confidence_level=CONFIDENCE,
                method="percentile",
                batch=20,
                rng=np.random.default_rng(seed),
            )
            low[measured], high[measured] = result.confidence_interval
        missing = (self.n_prompts - total).tolist()
        not_finite: list[int] = np.asarray(self.not_finite).tolist()
        return Curve(mean.tolist(), low.tolist(), high.tolist(), self.n_prompts, missing, not_finite)
