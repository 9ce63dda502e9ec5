"""Do looped states come to rest? Far past the trained loops, plain, damped and accelerated."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from looped.accelerate import Anderson
from looped.exits import PRECISION_OF, ROUNDING_LEVEL, Contraction, ExitRule, Fixed, Memory, Step
from looped.icl.predictor import LoopedPredictor
from looped.icl.prompts import interleave
from looped.loop import LoopResult, Status
from looped.model import LoopedTransformer

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
GRID_PROMPTS = 256  # at most, for the study in float64 arithmetic


@dataclass(frozen=True, kw_only=True)
class Traced(Fixed):
    """`Fixed`, keeping ||F - Y|| / ||F|| of every prompt after every loop."""

    changes: list[Tensor] = field(default_factory=list, compare=False)

    def update(self, memory: Memory, step: Step) -> Tensor:
        self.changes.append(torch.where(step.g == 0, 0.0, step.g / step.n).cpu())
        return super().update(memory, step)

    def table(self, n_loops: Tensor) -> Tensor:
        """The changes, float64 [B, L], of prompts that ran n_loops int64 [B]; NaN after a prompt left (it was not finite)."""
        rows = torch.full((len(n_loops), len(self.changes)), torch.nan, dtype=torch.float64)
        for loop, live in enumerate(self.changes):
            rows[n_loops.cpu() > loop, loop] = live
        return rows


class Settling:
    """Studies batches of prompts, `add` by `add`, for n_loops loops; `report` sums up.

    The report, in plain JSON values: ``change_by_loops``, the `QUANTILES` over prompts of the relative change of the state at
    each loop; and the share of prompts at rest, ``bitwise`` (no bit of the state changes any more) and at the ``rounding``
    level (two changes in a row within phi of docs/exits.md, or none at all), with the mean loops that these took, for

    ``plain``: plain iteration in the model's own precision; ``damped``: on_stall="damp"; ``anderson``: Anderson(3);
    ``float32_states``: plain iteration with the state rounded to float32 after each loop and float64 arithmetic inside a loop,
    which tells the motion of the map from the rounding noise of float32 arithmetic. Without `with_helps`, plain alone.
    """

    def __init__(self, predictor: LoopedPredictor, n_loops: int, *, with_helps: bool = True) -> None:
        self.predictor, self.n_loops, self.with_helps = predictor, n_loops, with_helps
        self.changes: list[Tensor] = []
        self.moving: list[Tensor] = []
        self.at_rest: dict[str, list[Tensor]] = {}
        self.loops: dict[str, list[Tensor]] = {}
        self.on_grid: list[Tensor] = []
        self.precision = PRECISION_OF[next(predictor.model.parameters()).dtype]
        self.rest = Contraction(tol=ROUNDING_LEVEL[self.precision])

    def add(self, xs: Tensor, ys: Tensor) -> LoopResult:
        """Study a batch; returns the plain result over all loops, with its predictions after every loop."""
        trace = Traced()
        plain = self._run(xs, ys, trace, return_predictions=True, backend="eager")  # the trace is a rule in Python
        changes = trace.table(plain.n_loops)
        self.changes.append(changes)
        self.moving.append(changes[:, -1] != 0)
        self._note("plain", *first_rest(changes, self.rest.tol))
        if not self.with_helps:
            return plain
        for name, options in (("damped", {"on_stall": "damp"}), ("anderson", {"accelerate": Anderson(3)})):
            result = self._run(xs, ys, self.rest, **options)
            self._note(name, result.status == Status.CONVERGED, result.n_loops)
        room = GRID_PROMPTS - sum(map(len, self.on_grid))
        if room > 0 and self.precision == "fp32":
            prompts = interleave(xs, ys)[:room]
            self.on_grid.append(rests_on_float32_states(self.predictor.model, prompts, self.n_loops))
        return plain

    def copy(self) -> Settling:
        """The study as of now, which what is added later does not change."""
        other = copy.copy(self)
        other.changes, other.moving, other.on_grid = list(self.changes), list(self.moving), list(self.on_grid)
        other.at_rest = {name: list(batches) for name, batches in self.at_rest.items()}
        other.loops = {name: list(batches) for name, batches in self.loops.items()}
        return other

    def report(self) -> dict[str, Any]:
        changes = torch.cat(self.changes)
        quantiles = torch.nan_to_num(changes, nan=torch.inf).quantile(
            torch.tensor(QUANTILES, dtype=changes.dtype), dim=0, interpolation="nearest"
        )
        report: dict[str, Any] = {
            "n_loops": self.n_loops,
            "n_prompts": len(changes),
            "rounding_level": self.rest.tol,
            "quantiles": list(QUANTILES),
            "change_by_loops": [[x if math.isfinite(x) else None for x in row] for row in quantiles.T.tolist()],
        }
        for name, at_rest in self.at_rest.items():
            rested, loops = torch.cat(at_rest), torch.cat(self.loops[name]).double()
            report[name] = {
                "rounding": rested.double().mean().item(),
                "mean_loops": loops[rested].mean().item() if rested.any() else None,
            }
        report["plain"]["bitwise"] = 1 - torch.cat(self.moving).double().mean().item()
        if self.on_grid:
            grid = torch.cat(self.on_grid)
            report["float32_states"] = {"bitwise": grid.double().mean().item(), "n_prompts": len(grid)}
        return report

    def _run(self, xs: Tensor, ys: Tensor, rule: ExitRule, **options: Any) -> LoopResult:
        chosen = {"on_stall": "ignore", "accelerate": None} | options
        return self.predictor.run(xs, ys, exit=rule, n_loops=self.n_loops, **chosen)

    def _note(self, name: str, at_rest: Tensor, loops: Tensor) -> None:
        self.at_rest.setdefault(name, []).append(at_rest.cpu())
        self.loops.setdefault(name, []).append(loops.cpu())


def first_rest(changes: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Which rows of changes [B, L] have two in a row within the level, or a 0; and the loop of that (L where none)."""
    small = changes <= level
    rests = changes == 0
    rests[:, 1:] |= small[:, 1:] & small[:, :-1]
    found = rests.any(dim=1)
    return found, torch.where(found, rests.long().argmax(dim=1) + 1, changes.shape[1])


@torch.no_grad()
def rests_on_float32_states(model: LoopedTransformer, prompts: Tensor, n_loops: int) -> Tensor:
    """bool [B]: whether the state, rounded to float32 after each loop of float64 arithmetic, comes to rest bit for bit."""
    exact = copy.deepcopy(model).double()
    P = exact.embed(prompts.to(next(exact.parameters())))
    Y = exact.initial_state(P)
    moving = torch.arange(len(prompts), device=P.device)
    for _ in range(n_loops):
        F = exact.step(Y, P).float().double()
        changed = (F != Y).flatten(1).any(dim=1)
        moving, Y, P = moving[changed], F[changed], P[changed]
        if not len(moving):
            break
    at_rest = torch.ones(len(prompts), dtype=torch.bool)
    at_rest[moving.cpu()] = False
    return at_rest
