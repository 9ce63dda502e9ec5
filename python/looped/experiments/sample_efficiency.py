"""Fig. 5 and appendix C: training on a fixed set of distinct prompts, looped and unlooped, each at its best learning rate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from looped.experiments.lab import Lab, Run
from looped.experiments.measure import Measured, by_examples, fresh, kind_of, line_of_last, measure, sound
from looped.experiments.outcome import Cell, Claim, Outcome, Panel, Sheet
from looped.experiments.verdict import for_most, part_of
from looped.model import LoopedTransformer
from looped.train import Ramp, TrainConfig


@dataclass(frozen=True)
class Sizes:
    """Dimensions with their learning rates to choose from; numbers of distinct prompts; steps of a run."""

    lrs: dict[int, tuple[float, ...]]
    sets: tuple[int, ...]
    n_steps: int


SIZES = {
    "tiny": Sizes({2: (3e-3,)}, (4, 64, 1000), 2000),
    "small": Sizes({5: (3e-4, 1e-3)}, (100, 300, 1000, 3000, 10_000), 4000),
    "paper": Sizes(
        {5: (1e-4,), 10: (1e-5, 1e-4), 20: (1e-5, 1e-4, 1e-3)},
        (1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000),
        500_000,
    ),
}
MODELS = ("looped", "unlooped")
VALIDATION = 0x5A  # added to the seed of the prompts that choose a learning rate


def run_on(lab: Lab, n_dims: int, n_distinct: int, lr: float, *, unlooped: bool) -> Run:
    """A run without any curriculum, that of the loops included: b loops from the first step on."""
    config = lab.config(unlooped=unlooped)
    config = dataclasses.replace(
        config,
        model=config.model.replace(n_dims=n_dims),
        dims=Ramp(n_dims, n_dims),
        points=Ramp(2 * n_dims + 1, 2 * n_dims + 1),
        loops=Ramp(config.loops.end, config.loops.end),
        n_distinct=n_distinct,
        n_steps=SIZES[lab.preset].n_steps,
        lr=lr,
        rest_weight=0.0,
        extra_loops=0,
    )
    return f"set_of_{n_distinct}_d{n_dims}_{'unlooped' if unlooped else 'looped'}_lr{lr:g}", config


def runs(lab: Lab) -> dict[tuple[int, int, str, float], Run]:
    """The models, by dimensions, number of distinct prompts, kind and learning rate."""
    sizes = SIZES[lab.preset]
    return {
        (n_dims, n_distinct, kind, lr): run_on(lab, n_dims, n_distinct, lr, unlooped=kind == "unlooped")
        for n_dims, lrs in sizes.lrs.items()
        for n_distinct in sizes.sets
        for kind in MODELS
        for lr in lrs
    }


def run(lab: Lab) -> Outcome:
    sizes, wanted = SIZES[lab.preset], runs(lab)
    panels: list[Panel] = []
    rows: list[list[Cell]] = []
    claims: list[Claim] = []
    for n_dims, lrs in sizes.lrs.items():
        found: dict[str, dict[int, Measured]] = {kind: {} for kind in MODELS}
        for n_distinct in sizes.sets:
            for kind in MODELS:
                best = _best(lab, {lr: wanted[n_dims, n_distinct, kind, lr] for lr in lrs})
                if best is None:
                    continue
                lr, models, config = best
                prompts = fresh(config.make_task(), lab.n_prompts, config.points.end, lab.seed)
                ways = {kind: by_examples(models, config.make_task(), lab.preset)}
                found[kind][n_distinct] = one = measure(lab.watched(f"{kind}, {n_distinct} prompts", prompts), ways)[kind]
                rows.append([n_dims, n_distinct, kind, f"{lr:g}", one.curve.mean[n_dims], one.curve.mean[-1]])
        lines = [line_of_last(kind, list(some), list(some.values()), kind_of(kind)) for kind, some in found.items() if some]
        panels.append(
            Panel(f"d={n_dims}, {2 * n_dims} examples", "distinct prompts", "squared error / variance of y", lines, "xy")
        )
        errors = {kind: {n: one.curve.mean[-1] for n, one in sound(some).items()} for kind, some in found.items()}
        claims.append(_claim(n_dims, errors, sizes.sets))
    columns = ["d", "distinct prompts", "", "best lr", "error at d", "error at 2 d"]
    settings = dict(sets=list(sizes.sets), lrs={str(d): list(lrs) for d, lrs in sizes.lrs.items()})
    sheet = Sheet("squared error / variance of y on fresh prompts", columns, rows)
    return Outcome("sample-efficiency", "Fig. 5, appendix C", lab.preset, settings, panels, sheet, claims)


def _best(lab: Lab, by_lr: Mapping[float, Run]) -> tuple[float, list[LoopedTransformer], TrainConfig] | None:
    """The learning rate with the least error over all points, on prompts that are not those of the figure.

    One of which models are missing, as a diverged one is, loses against one that has more of them, and one with predictions
    that are not finite against one with fewer.
    """
    scored = []
    for lr, (name, config) in by_lr.items():
        if models := lab.models(name, config):
            task = config.make_task()
            prompts = fresh(task, lab.n_prompts, config.points.end, (lab.seed + VALIDATION) % 2**32)
            errors = measure(lab.watched(name, prompts), {"": by_examples(models, task, lab.preset)})[""].curve
            n_missing = 0 if name in lab.given else len(lab.seeds) - len(models)
            scored.append((n_missing, sum(errors.n_not_finite), sum(errors.mean), lr, models, config))
    if not scored:
        return None
    *_, lr, models, config = min(scored, key=lambda one: one[:3])
    return lr, models, config


def _claim(n_dims: int, errors: dict[str, dict[int, float]], wanted: Sequence[int]) -> Claim:
    rule = "below the unlooped one on more than half of the sets"
    text = f"d={n_dims}: the looped model learns from fewer distinct prompts (here: {rule})"
    both = sorted(set(errors["looped"]) & set(errors["unlooped"]))
    measured = ", ".join(f"{n:,}: {errors['looped'][n]:.3g} against {errors['unlooped'][n]:.3g}" for n in both) or "-"
    measured += part_of(len(both), len(wanted), "sets")
    return Claim("Fig. 5", text, measured, for_most([errors["looped"][n] < errors["unlooped"][n] for n in both], len(wanted)))
