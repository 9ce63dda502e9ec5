"""A looped transformer as an in-context predictor, beside the baselines."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from looped.accelerate import Anderson
from looped.engine import solve
from looped.exits import Exit, ExitRule, make_exit
from looped.icl.prompts import interleave
from looped.loop import LoopResult, LoopSpec
from looped.model import LoopedTransformer, unwrapped


@dataclass(frozen=True)
class LoopedPredictor:
    """Predicts y_i from the i pairs before it by looping the interleaved prompt.

    n_loops: the most loops; default the trained count, `model.config.n_loops`. exit, on_stall, accelerate: as in `solve`.
    Raises ValueError for a model that does not read such prompts, and for what does not go together, before anything runs.
    """

    model: LoopedTransformer
    name: str = "looped"
    n_loops: int | None = None
    exit: Exit = None
    on_stall: str = "ignore"
    accelerate: Anderson | str | None = None

    cost: ClassVar[str] = "cheap"
    why_unavailable: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", unwrapped(self.model, "LoopedPredictor"))
        config = self.model.config
        if (config.input_kind, config.readout, config.read_stride) != ("features", "scalar", 2):
            raise ValueError(
                "LoopedPredictor: the model must read features and give a scalar at every second token, got "
                f"input_kind={config.input_kind!r}, readout={config.readout!r}, read_stride={config.read_stride}"
            )
        if config.mask_kind != "causal":
            raise ValueError('LoopedPredictor: with mask_kind="full" a prediction sees its own answer; use a causal model')
        if config.n_loops < 1:
            raise ValueError("LoopedPredictor: the model's n_loops is 0; set it to the trained loops")
        loops = self.n_loops_trained if self.n_loops is None else self.n_loops
        spec = LoopSpec.of(config, loops, self.exit, self.on_stall, self.accelerate, return_predictions=False)
        object.__setattr__(self, "exit", spec.rule)
        object.__setattr__(self, "accelerate", spec.accelerate)

    @property
    def rule(self) -> ExitRule:
        """The exit rule."""
        return make_exit(self.exit)

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
        n_loops = self.n_loops if self.n_loops is not None else self.n_loops_trained
        return stopping_to_dict(self.rule, self.on_stall, self.accelerate) | {"n_loops": n_loops}


def stopping_to_dict(rule: ExitRule, on_stall: str, accelerate: Anderson | str | None) -> dict[str, Any]:
    """An exit rule by its name and fields, on_stall and the acceleration, as plain JSON values."""
    fields = {name: value for name, value in dataclasses.asdict(rule).items() if not isinstance(value, list)}
    if math.isinf(fields.get("tol", 0)):
        fields["tol"] = "inf"
    return {
        "rule": type(rule).__name__.lower(),
        **fields,
        "on_stall": on_stall,
        "accelerate": f"anderson({accelerate.depth})" if isinstance(accelerate, Anderson) else None,
    }
