"""The paper's future work: tasks of mixed difficulty in one batch, each prompt (or each token) looped until it rests.

Held against the same number of loops for all: what of the accuracy of many loops is kept for the same mean cost? Linear and
sparse models are studied, and models of trees and ReLU networks where they are given, bundled or trained already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from looped.exits import Contraction, Fixed
from looped.experiments.lab import Lab, Models, Run
from looped.experiments.measure import BATCH, REACH, joined, single
from looped.experiments.outcome import Cell, Claim, Line, Outcome, Panel, Sheet
from looped.icl.curves import Curve, RunningCurve, errors_of_model
from looped.icl.evaluate import evaluation_stream
from looped.icl.predictor import LoopedPredictor
from looped.icl.tasks import (
    DecisionTree,
    LinearRegression,
    NoisyLinearRegression,
    Pairs,
    ReLURegression,
    SparseLinearRegression,
    Task,
)
from looped.train import TrainConfig

TRAINED = ("linear_regression", "sparse_linear_regression")
OPTIONAL = ("decision_tree", "relu_2nn_regression")

TOLERANCES = (0.3, 0.1, 3e-2, 1e-2, 3e-3)
SHOWN = 3e-3  # whose loops are shown by difficulty: the default of looped eval
NOISES = (0.05, 0.1)  # standard deviations; with more, what the noise leaves would hide what the loops do


@dataclass(frozen=True)
class Level:
    """Prompts of one task and difficulty; family: of what the difficulty is a number. n_live: the dimensions in use."""

    family: str
    difficulty: float
    task: Task
    n_live: int

    @property
    def variance(self) -> float:
        """Of y, its noise included."""
        if isinstance(self.task, LinearRegression) and not isinstance(self.task, SparseLinearRegression):
            return self.n_live + self.task.noise_std**2
        return float(self.task.error_scale)


class Mixed(NamedTuple):
    """A batch of all levels, shuffled: pairs, the level of each prompt [B], and the variance of its y [B]."""

    pairs: Pairs
    level: Tensor
    variance: Tensor

    @property
    def ys(self) -> Tensor:
        return self.pairs.ys


def levels(config: TrainConfig) -> list[Level]:
    """What a model can be asked after its training, task by task from easy to hard.

    Linear: linear functions of more and more live dimensions, sparse ones of more and more non-zero weights, noisy ones with
    more and more noise on every y (the one asked for too, so that their error has a floor). Sparse: the same, the linear and
    noisy ones with no more live dimensions than its own non-zero weights. Trees: of growing depth. Networks: of more and more
    hidden units.
    """
    own, n_dims = config.make_task(), config.dims.end
    if isinstance(own, DecisionTree):
        return [Level("depth", k, DecisionTree(n_dims, depth=k), n_dims) for k in range(1, own.depth + 1)]
    if isinstance(own, ReLURegression):
        sizes = sorted({max(1, own.hidden // part) for part in (8, 4, 2, 1)})
        return [Level("hidden units", k, ReLURegression(n_dims, hidden=k), n_dims) for k in sizes]
    first, last = (1, own.sparsity) if isinstance(own, SparseLinearRegression) else (config.dims.start, n_dims)
    sparse = sorted({1, max(1, n_dims // 4), max(1, n_dims // 2)})
    return [
        *(Level("dimensions", d, LinearRegression(n_dims), d) for d in range(first, last + 1)),
        *(Level("non-zero weights", s, SparseLinearRegression(n_dims, sparsity=s), n_dims) for s in sparse),
        *(Level("noise", std, NoisyLinearRegression(n_dims, std=std), last) for std in NOISES),
    ]


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
        rows.append(errors_of_model(predictions[:, :, -1], mixed.ys[:, -1:], 1.0) / mixed.variance[:, None])
    return torch.cat(rows)


def used_loops(predictor: LoopedPredictor, batches: Iterable[Mixed], exit: Contraction) -> Used:
    """What an exit costs and gives."""
    loops, errors = [], []
    for mixed in batches:
        result = predictor.run(*mixed.pairs, exit=exit, on_stall="exit")
        assert isinstance(result.prediction, Tensor)
        errors.append(errors_of_model(result.prediction[:, -1], mixed.ys[:, -1], 1.0) / mixed.variance)
        by_token = result.n_loops_by_token
        loops.append((by_token.double().mean(dim=1) if isinstance(by_token, Tensor) else result.n_loops.double()).cpu())
    return Used(torch.cat(loops), torch.cat(errors))


def over_models(some: Sequence[Used]) -> Used:
    """The means over models, prompt by prompt."""
    return Used(torch.stack([one.loops for one in some]).mean(dim=0), torch.stack([one.error for one in some]).mean(dim=0))


def runs(lab: Lab) -> dict[str, Run]:
    """The models, by task."""
    return {task: (task, lab.config(task)) for task in (*TRAINED, *OPTIONAL)}


def run(lab: Lab) -> Outcome:
    panels: list[Panel] = []
    rows: list[list[Cell]] = []
    claims: list[Claim] = []
    for name, config in runs(lab).values():
        if models := lab.models(name, config, optional=name in OPTIONAL):
            _study(lab, name, config, models, panels, rows, claims)
    columns = ["model", "task", "loops", "tol", "mean loops", "error", "same loops for all", "all loops"]
    columns += ["kept", "kept, same for all", "smaller"]
    title = (
        "squared error / variance of y with all examples, by how loops are given; kept: error of all loops / error; smaller: "
        "than that of the same loops for all, by the 90 % interval of the difference"
    )
    settings = dict(tolerances=list(TOLERANCES), reach=REACH, on_stall="exit")
    return Outcome("adaptive", "section 7, future work", lab.preset, settings, panels, Sheet(title, columns, rows), claims)


def _study(
    lab: Lab,
    name: str,
    config: TrainConfig,
    models: Models,
    panels: list[Panel],
    rows: list[list[Cell]],
    claims: list[Claim],
) -> None:
    some, cap = levels(config), REACH * models[0].config.n_loops
    predictors = [LoopedPredictor(model, n_loops=cap) for model in models]

    def batches() -> Iterator[Mixed]:
        return mixed_batches(some, lab.n_prompts, config.points.end, lab.seed)

    by_model = [fixed_errors(predictor, lab.watched(f"{name}, all loops", batches())) for predictor in predictors]
    every = torch.stack(by_model).mean(dim=0)
    ways = {"per prompt": "prompt", "per token": "prefix"}
    points: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    level = torch.cat([mixed.level for mixed in batches()])
    parts = {"all": torch.ones_like(level, dtype=torch.bool)} | _by_task(some, level)
    for way, scope in ways.items():
        verdicts: list[str] = []
        is_sound = bool(every.isfinite().all()) and not models.n_lost
        for tol in TOLERANCES:
            exit, title = Contraction(tol=tol, scope=scope), f"{name}, loops {way}, tol {tol:g}"
            each = [used_loops(predictor, lab.watched(title, batches()), exit) for predictor in predictors]
            used = over_models(each)
            # as many loops for every prompt as each model used in the mean
            same = over_models([Used(one.loops, _at(errors, one)) for errors, one in zip(by_model, each, strict=True)]).error
            for task, own in parts.items():
                if task == "all" or tol == SHOWN:
                    means = [float(x[own].mean()) for x in (used.loops, used.error, same, every[:, -1])]
                    smaller = _is_smaller(used.error[own], same[own])
                    rows.append([name, task, way, f"{tol:g}", *means, means[3] / means[1], means[3] / means[2], smaller])
                    verdicts += [smaller] if task == "all" else []
            points[way].append((float(used.loops.mean()), float(used.error.mean())))
            is_sound &= bool(used.error.isfinite().all())
            if tol == SHOWN and way == "per prompt":
                panels.append(_by_difficulty(name, some, level, used, len(models)))
                claims += _claims(name, some, level, used, is_sound)
        title = name.replace("_", " ")
        text = (
            f"{title}: for the same mean loops, loops {way} give the smaller error (here: at more than half of the tolerances, "
            "the 90 % interval of the difference, prompt by prompt, below 0)"
        )
        better, worse = verdicts.count("yes"), verdicts.count("no")
        unsound = "seeds are missing" if models.n_lost else "errors are not finite"
        measured = f"at {better} of {len(TOLERANCES)}, larger at {worse}" if is_sound else unsound
        claims.append(Claim("future work", text, measured, 2 * better > len(TOLERANCES) if is_sound else None))
    by_seed = [errors.mean(dim=0).tolist() for errors in by_model] if len(by_model) > 1 else []
    counts = [len(models)] * cap
    lines = [Line("same loops for all", range(1, cap + 1), _curve(every), "baseline", by_seed, models_at=counts)]
    for way, found in points.items():
        ordered = sorted(found)
        curve = single([error for _, error in ordered], lab.n_prompts)
        lines.append(Line(way, [mean for mean, _ in ordered], curve, models_at=[len(models)] * len(ordered)))
    title = f"{name.replace('_', ' ')}, mixed: error against mean loops"
    panels.append(Panel(title, "loops, mean over prompts (tokens)", "squared error / variance of y", lines, "xy"))


def _by_task(some: list[Level], level: Tensor) -> dict[str, Tensor]:
    """Which prompts are of each task, bool [B]; tasks without prompts are left out."""
    tasks = dict.fromkeys(one.task.name for one in some)
    found = {name: torch.tensor([one.task.name == name for one in some])[level] for name in tasks}
    return {name: own for name, own in found.items() if own.any()}


def _is_smaller(errors: Tensor, others: Tensor) -> str:
    """Whether errors of the same prompts are smaller: "yes" or "no" where the 90 % bootstrap interval of the mean difference is
    on one side of 0, else, and where not all are finite, "-"."""
    differences = errors - others
    if not differences.isfinite().all():
        return "-"
    running = RunningCurve()
    running.add(differences[:, None])
    curve = running.curve()
    return "yes" if curve.high[0] < 0 else "no" if curve.low[0] > 0 else "-"


def _at(errors: Tensor, used: Used) -> Tensor:
    """Of errors by loops [B, L], those after the mean of the loops used, [B]; between two loops on the line between theirs, as
    if a share of the prompts had one loop more."""
    mean = min(errors.shape[1], max(1.0, float(used.loops.mean())))
    below = int(mean)
    above, share = min(errors.shape[1], below + 1), mean - below
    return (1 - share) * errors[:, below - 1] + share * errors[:, above - 1]


def _curve(rows: Tensor) -> Curve:
    running = RunningCurve()
    running.add(rows)
    return running.curve()


def _by_difficulty(name: str, some: list[Level], level: Tensor, used: Used, n_models: int) -> Panel:
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
            xs, counts = [difficulty for difficulty, _ in own], [curve.n_prompts for curve in curves]
            lines.append(Line(family, xs, joined(curves), prompts_at=counts, models_at=[n_models] * len(xs)))
    return Panel(f"{name.replace('_', ' ')}: loops used at {SHOWN:g}, by difficulty", "difficulty", "loops", lines, log="")


def _claims(name: str, some: list[Level], level: Tensor, used: Used, is_sound: bool) -> list[Claim]:
    """Without a verdict where errors are not finite: loops of such a model say nothing."""
    title, claims = name.replace("_", " "), []
    for family in dict.fromkeys(one.family for one in some):
        own = [(i, one) for i, one in enumerate(some) if one.family == family and (level == i).any()]
        means = [float(used.loops[level == i].mean()) for i, _ in own]
        holds = means == sorted(means) and means[-1] > 1.05 * means[0] if len(means) > 1 and is_sound else None
        text = f"{title}: harder prompts ({family}) take more loops (here: each, and the hardest by 5 %)"
        measured = ", ".join(f"{one.difficulty:g}: {mean:.1f}" for (_, one), mean in zip(own, means, strict=True))
        claims.append(Claim("future work", text, measured, holds))
    return claims
