"""The paper's future work: prompts of mixed difficulty in one batch, each (or each token) looped until it rests.

Held against the same number of loops for all: what of the accuracy of many loops is kept for the same mean cost?
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from looped.exits import Contraction, Fixed
from looped.experiments.lab import Lab
from looped.experiments.measure import BATCH, joined, single
from looped.experiments.outcome import Cell, Claim, Line, Outcome, Panel, Sheet
from looped.icl.curves import Curve, RunningCurve
from looped.icl.evaluate import evaluation_stream
from looped.icl.predictor import LoopedPredictor
from looped.icl.tasks import LinearRegression, Pairs, SparseLinearRegression, Task
from looped.model import LoopedTransformer
from looped.train import TrainConfig

TOLERANCES = (0.3, 0.1, 3e-2, 1e-2, 3e-3)
SHOWN = 3e-3  # whose loops are shown by difficulty: the default of looped eval
REACH = 5  # times the trained loops, at most


@dataclass(frozen=True)
class Level:
    """Prompts of one difficulty: a task, of whose dimensions n_live are in use."""

    family: str
    difficulty: int
    task: Task
    n_live: int

    @property
    def variance(self) -> float:
        return float(self.task.error_scale if isinstance(self.task, SparseLinearRegression) else self.n_live)


class Mixed(NamedTuple):
    """A batch of all levels, shuffled: pairs, the level of each prompt [B], and the variance of its y [B]."""

    pairs: Pairs
    level: Tensor
    variance: Tensor


def levels(name: str, config: TrainConfig) -> list[Level]:
    """What a model has been trained to do, from easy to hard: live dimensions, and non-zero weights."""
    n_dims = config.dims.end
    sparse = sorted({1, max(1, n_dims // 4), max(1, n_dims // 2)})
    by_sparsity = [Level("non-zero weights", s, SparseLinearRegression(n_dims, sparsity=s), n_dims) for s in sparse]
    if name == "sparse_linear_regression":
        return by_sparsity
    by_dims = [Level("dimensions", d, LinearRegression(n_dims), d) for d in range(config.dims.start, n_dims + 1)]
    return by_dims + by_sparsity


def mixed_batches(some: list[Level], n_prompts: int, n_points: int, seed: int) -> Iterator[Mixed]:
    """n_prompts prompts, each of any level with the same chance."""
    generator = evaluation_stream(seed)
    for start in range(0, n_prompts, BATCH):
        n = min(BATCH, n_prompts - start)
        level = torch.randint(len(some), (n,), generator=generator)
        xs, ys = torch.zeros(n, n_points, some[0].task.n_dims), torch.zeros(n, n_points)
        for i, one in enumerate(some):
            rows = (level == i).nonzero().squeeze(1)
            xs[rows], ys[rows] = one.task.sample(len(rows), n_points, generator=generator, n_live=one.n_live)
        yield Mixed(Pairs(xs, ys), level, torch.tensor([one.variance for one in some], dtype=torch.float64)[level])


class Used(NamedTuple):
    """Under one exit: loops of each prompt (or mean over its tokens) and error of its last prediction, float64 [B]."""

    loops: Tensor
    error: Tensor


def fixed_errors(predictor: LoopedPredictor, batches: Iterable[Mixed]) -> Tensor:
    """Errors of the last prediction after every loop, [B, L]."""
    rows = []
    for mixed in batches:
        predictions = predictor.run(*mixed.pairs, exit=Fixed(), return_predictions=True).predictions
        assert isinstance(predictions, Tensor)
        last = predictions[:, :, -1].cpu().double()
        rows.append((last - mixed.pairs.ys[:, -1:].double()).square() / mixed.variance[:, None])
    return torch.cat(rows)


def used_loops(predictor: LoopedPredictor, batches: Iterable[Mixed], exit: Contraction) -> Used:
    """What an exit costs and gives."""
    loops, errors = [], []
    for mixed in batches:
        result = predictor.run(*mixed.pairs, exit=exit, on_stall="exit")
        assert isinstance(result.prediction, Tensor)
        last = result.prediction[:, -1].cpu().double()
        errors.append((last - mixed.pairs.ys[:, -1].double()).square() / mixed.variance)
        by_token = result.n_loops_by_token
        loops.append((by_token.double().mean(dim=1) if isinstance(by_token, Tensor) else result.n_loops.double()).cpu())
    return Used(torch.cat(loops), torch.cat(errors))


def run(lab: Lab) -> Outcome:
    panels: list[Panel] = []
    rows: list[list[Cell]] = []
    claims: list[Claim] = []
    for name in ("linear_regression", "sparse_linear_regression"):
        config = lab.config(name)
        for model in lab.models(name, config)[:1]:
            _study(lab, name, config, model, panels, rows, claims)
    columns = ["model", "loops", "tol", "mean loops", "error", "same loops for all", "all loops", "kept", "kept, same for all"]
    title = "squared error / variance of y with all examples, by how loops are given; kept: error of all loops / error"
    settings = dict(tolerances=list(TOLERANCES), reach=REACH, on_stall="exit")
    return Outcome("adaptive", "section 7, future work", lab.preset, settings, panels, Sheet(title, columns, rows), claims)


def _study(
    lab: Lab,
    name: str,
    config: TrainConfig,
    model: LoopedTransformer,
    panels: list[Panel],
    rows: list[list[Cell]],
    claims: list[Claim],
) -> None:
    some, cap = levels(name, config), REACH * model.config.n_loops
    predictor = LoopedPredictor(model, n_loops=cap)

    def batches() -> Iterator[Mixed]:
        return mixed_batches(some, lab.n_prompts, config.points.end, lab.seed)

    every = fixed_errors(predictor, batches())
    by_loop, whole = every.mean(dim=0), float(every[:, -1].mean())
    ways = {"per prompt": "prompt", "per token": "prefix"}
    points: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    level = torch.cat([mixed.level for mixed in batches()])
    for way, scope in ways.items():
        wins = 0
        for tol in TOLERANCES:
            used = used_loops(predictor, batches(), Contraction(tol=tol, scope=scope))
            mean, error = float(used.loops.mean()), float(used.error.mean())
            same = float(by_loop[min(cap, max(1, round(mean))) - 1])
            points[way].append((mean, error))
            wins += error < same
            rows.append([name, way, f"{tol:g}", mean, error, same, whole, whole / error, whole / same])
            if tol == SHOWN and way == "per prompt":
                panels.append(_by_difficulty(name, some, level, used))
                claims += _claims(name, some, level, used)
        title = name.replace("_", " ")
        text = f"{title}: for the same mean loops, loops {way} give the smaller error (here: at most tolerances)"
        claims.append(Claim("future work", text, f"at {wins} of {len(TOLERANCES)}", 2 * wins > len(TOLERANCES)))
    xs = range(1, cap + 1)
    lines = [Line("same loops for all", xs, _curve(every), "baseline")]
    for way, found in points.items():
        ordered = sorted(found)
        lines.append(Line(way, [mean for mean, _ in ordered], single([error for _, error in ordered], lab.n_prompts)))
    title = f"{name.replace('_', ' ')}, mixed: error against mean loops"
    panels.append(Panel(title, "loops, mean over prompts (tokens)", "squared error / variance of y", lines, "xy"))


def _curve(rows: Tensor) -> Curve:
    running = RunningCurve()
    running.add(rows)
    return running.curve()


def _by_difficulty(name: str, some: list[Level], level: Tensor, used: Used) -> Panel:
    lines = []
    for family in dict.fromkeys(one.family for one in some):
        own = [(one.difficulty, used.loops[level == i]) for i, one in enumerate(some) if one.family == family]
        own = [(difficulty, loops) for difficulty, loops in own if len(loops)]
        curves = []
        for _, loops in own:
            running = RunningCurve()
            running.add(loops[:, None])
            curves.append(running.curve())
        if curves:
            lines.append(Line(family, [difficulty for difficulty, _ in own], joined(curves)))
    return Panel(f"{name.replace('_', ' ')}: loops used at {SHOWN:g}, by difficulty", "difficulty", "loops", lines, log="")


def _claims(name: str, some: list[Level], level: Tensor, used: Used) -> list[Claim]:
    title, claims = name.replace("_", " "), []
    for family in dict.fromkeys(one.family for one in some):
        own = [(i, one) for i, one in enumerate(some) if one.family == family and (level == i).any()]
        means = [float(used.loops[level == i].mean()) for i, _ in own]
        holds = means == sorted(means) and means[-1] > 1.05 * means[0] if len(means) > 1 else None
        text = f"{title}: harder prompts ({family}) take more loops (here: each, and the hardest by 5 %)"
        measured = ", ".join(f"{one.difficulty}: {mean:.1f}" for (_, one), mean in zip(own, means, strict=True))
        claims.append(Claim("future work", text, measured, holds))
    return claims
