"""Error curves over streamed prompts: means with bootstrap intervals, in memory that does not grow with the prompts."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

MAX_BLOCKS = 4096  # rows kept; above this, neighbours are averaged into blocks of 2, 4, 8, ... prompts
N_RESAMPLES = 1000
CONFIDENCE = 0.90


@dataclass(frozen=True)
class Curve:
    """A mean at each place of a curve, with the limits of its 90 % interval; NaN where nothing was measured."""

    mean: list[float]
    low: list[float]
    high: list[float]
    n_prompts: int

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, None for NaN."""
        values = asdict(self)
        return {k: [None if math.isnan(x) else x for x in v] if isinstance(v, list) else v for k, v in values.items()}


class RunningCurve:
    """Collects rows [K], one per prompt, and gives their mean and its bootstrap interval.

    Up to `MAX_BLOCKS` prompts every row is kept and the bootstrap is over prompts; beyond, it is over means of equal blocks of
    prompts, which are as independent.
    """

    def __init__(self) -> None:
        self.block_size = 1
        self.blocks: list[np.ndarray] = []  # means of whole blocks
        self.open: list[np.ndarray] = []  # rows of the block being filled
        self.n_prompts = 0

    def add(self, rows: Tensor) -> None:
        """rows: real [B, K], one for each prompt, in order."""
        for row in rows.detach().double().cpu().numpy():
            self.n_prompts += 1
            self.open.append(row)
            if len(self.open) == self.block_size:
                self.blocks.append(np.mean(self.open, axis=0))
                self.open = []
                if len(self.blocks) == MAX_BLOCKS:
                    self.blocks = list(np.stack(self.blocks).reshape(MAX_BLOCKS // 2, 2, -1).mean(axis=1))
                    self.block_size *= 2

    def curve(self, seed: int = 0) -> Curve:
        """The curve so far. The interval needs two blocks; below that its limits are NaN."""
        if not self.n_prompts:
            return Curve([], [], [], 0)
        weights = [self.block_size] * len(self.blocks) + ([len(self.open)] if self.open else [])
        means = [*self.blocks, *([np.mean(self.open, axis=0)] if self.open else [])]
        mean = np.average(np.stack(means), axis=0, weights=weights)
        low, high = np.full_like(mean, math.nan), np.full_like(mean, math.nan)
        measured = np.isfinite(mean)
        if len(self.blocks) >= 2 and measured.any():
            from scipy.stats import bootstrap

            result = bootstrap(
                (np.stack(self.blocks)[:, measured],),
                np.mean,
                axis=0,
                n_resamples=N_RESAMPLES,
                confidence_level=CONFIDENCE,
                method="percentile",
                batch=20,
                rng=np.random.default_rng(seed),
            )
            low[measured], high[measured] = result.confidence_interval
        return Curve(mean.tolist(), low.tolist(), high.tolist(), self.n_prompts)
