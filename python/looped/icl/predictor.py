"""A looped transformer as an in-context predictor, beside the baselines."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from looped.accelerate import Anderson
from looped.engine import solve
from looped.exits import ExitRule, Fixed
from looped.icl.prompts import interleave
from looped.loop import LoopResult
from looped.model import LoopedTransformer


@dataclass(frozen=True)
class LoopedPredictor:
    """Predicts y_i from the i pairs before it by looping the interleaved prompt.

    n_loops: the most loops; default the trained count, `model.config.n_loops`. exit, on_stall, accelerate: as in `solve`.
    """

    model: LoopedTransformer
    name: str = "looped"
    n_loops: int | None = None
    exit: ExitRule = field(default_factory=Fixed)
    on_stall: str = "ignore"
    accelerate: Anderson | None = None

    cost: ClassVar[str] = "cheap"
    why_unavailable: ClassVar[str | None] = None

    @property
    def n_loops_trained(self) -> int:
        return self.model.config.n_loops

    def run(self, xs: Tensor, ys: Tensor, **options: Any) -> LoopResult:
        """`solve` on the pairs xs [B, n, d], ys [B, n]; options replace the predictor's own."""
        chosen = dict(n_loops=self.n_loops, exit=self.exit, on_stall=self.on_stall, accelerate=self.accelerate)
        return solve(self.model, interleave(xs, ys), **(chosen | options))

    def predict(self, xs: Tensor, ys: Tensor) -> Tensor:
        """Predictions [B, n]."""
        prediction = self.run(xs, ys).prediction
        assert isinstance(prediction, torch.Tensor)
        return prediction

    def exit_to_dict(self) -> dict[str, Any]:
        """How it stops, as plain JSON values."""
        rule = {name: value for name, value in dataclasses.asdict(self.exit).items() if not isinstance(value, list)}
        if math.isinf(rule.get("tol", 0)):
            rule["tol"] = "inf"
        return {
            "rule": type(self.exit).__name__.lower(),
            **rule,
            "on_stall": self.on_stall,
            "accelerate": None if self.accelerate is None else f"anderson({self.accelerate.depth})",
            "n_loops": self.n_loops if self.n_loops is not None else self.n_loops_trained,
        }
