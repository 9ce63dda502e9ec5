"""Fig. 11: sparse linear functions with more and more non-zero weights, looped beside unlooped."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from looped.experiments.lab import Lab, Run
from looped.experiments.loops_and_window import published_run
from looped.experiments.measure import Measured, by_examples, fresh, kind_of, line, mean_ratio, measure, of_baseline, sound
from looped.experiments.outcome import Cell, Claim, Outcome, Panel, Sheet
from looped.experiments.verdict import for_all, part_of
from looped.icl.baselines import Lasso

TASK = "sparse_linear_regression"
SPARSITIES = {"tiny": (1, 2), "small": (1, 2, 4, 6), "paper": (1, 3, 6, 9, 12)}
ENOUGH = 0.1  # of the variance: the error whose number of examples is compared


def run_of(lab: Lab, sparsity: int, *, unlooped: bool) -> Run:
    """The run at a sparsity; of the task's own sparsity, whether its options name it or not, the one that others train too."""
    kind = "_unlooped" if unlooped else ""
    name, own = TASK + kind, lab.config(TASK, unlooped=unlooped)
    if lab.preset == "paper" and not unlooped:  # b = 30 and T = 15 serve every sparsity
        name, own = published_run(lab, TASK, 30, 15)
    config = dataclasses.replace(own, task_options={"sparsity": sparsity})
    return (name, own) if config.make_task() == own.make_task() else (f"{TASK}_s{sparsity}{kind}", config)


def runs(lab: Lab) -> dict[tuple[int, str], Run]:
    """The models, by sparsity and kind."""
    kinds = ("looped", "unlooped")
    return {(s, kind): run_of(lab, s, unlooped=kind == "unlooped") for s in SPARSITIES[lab.preset] for kind in kinds}


def run(lab: Lab) -> Outcome:
    wanted = runs(lab)
    found: dict[int, dict[str, Measured]] = {}
    n_dims, n_points = 0, 0
    for sparsity in SPARSITIES[lab.preset]:
        config = wanted[sparsity, "looped"][1]
        task, n_dims, n_points = config.make_task(), config.dims.end, config.points.end
        models = {kind: lab.models(*wanted[sparsity, kind]) for kind in ("looped", "unlooped")}
        if any(models.values()):
            ways = {kind: by_examples(some, task, lab.preset) for kind, some in models.items()} | {
                "lasso": of_baseline(Lasso(), task)
            }
            found[sparsity] = measure(lab.watched(f"sparsity {sparsity}", fresh(task, lab.n_prompts, n_points, lab.seed)), ways)
    panels = [
        Panel(
            f"{sparsity} of {n_dims} weights are not 0",
            "examples in the prompt",
            "squared error / variance of y",
            [line(kind, range(n_points), one, kind_of(kind)) for kind, one in measured.items()],
        )
        for sparsity, measured in found.items()
    ]
    rows: list[list[Cell]] = []
    for sparsity, measured in found.items():
        for kind, one in measured.items():
            errors = one.curve.mean
            places = [errors[min(place, n_points - 1)] for place in (n_dims // 4, n_dims // 2, n_dims, n_points - 1)]
            rows.append([sparsity, kind, *places, examples_needed(errors)])
    columns = ["non-zero", "", "d/4", "d/2", "d", "all", f"examples to {ENOUGH}"]
    settings = dict(task=TASK, n_dims=n_dims, n_points=n_points, sparsities=list(SPARSITIES[lab.preset]))
    sheet = Sheet("squared error / variance of y, by examples", columns, rows)
    claims = _claims({sparsity: sound(one) for sparsity, one in found.items()}, SPARSITIES[lab.preset])
    return Outcome("sparsity", "Fig. 11", lab.preset, settings, panels, sheet, claims)


def examples_needed(errors: list[float]) -> int | None:
    """The least number of examples from which on the error stays at `ENOUGH` or below."""
    above = [i for i, error in enumerate(errors) if not error <= ENOUGH]
    first = above[-1] + 1 if above else 0
    return first if first < len(errors) else None


def _claims(found: dict[int, dict[str, Measured]], wanted: Sequence[int]) -> list[Claim]:
    both = {sparsity: one for sparsity, one in found.items() if {"looped", "unlooped"} <= set(one)}
    ratios = {s: mean_ratio(one["looped"].curve.mean, one["unlooped"].curve.mean) for s, one in both.items()}
    text = "at every sparsity the looped model is as good as the unlooped one or better (here: within 1.1 x, geometric mean)"
    measured = ", ".join(f"s={sparsity}: {ratio:.2f} x" for sparsity, ratio in ratios.items()) or "-"
    measured += part_of(len(ratios), len(wanted), "sparsities")
    claims = [Claim("Fig. 11", text, measured, for_all([ratio <= 1.1 for ratio in ratios.values()], len(wanted)))]
    needed = {s: examples_needed(one["looped"].curve.mean) for s, one in found.items() if "looped" in one}
    text = f"less sparse functions need more examples (here: to an error of {ENOUGH})"
    measured = ", ".join(f"s={sparsity}: {count or 'more'}" for sparsity, count in needed.items()) or "-"
    if needed and not any(needed.values()):
        measured = f"no error of {ENOUGH} at {', '.join(f's={sparsity}' for sparsity in needed)}"
    measured += part_of(len(needed), len(wanted), "sparsities")
    return [*claims, Claim("Fig. 11", text, measured, _grows(list(needed.values()), len(wanted)))]


def _grows(needed: Sequence[int | None], n_wanted: int) -> bool | None:
    """Whether numbers of examples grow. None of them: more than there are, of which nobody knows whether they grow."""
    known = [math.inf if count is None else count for count in needed]
    if known != sorted(known):
        return False
    if len(known) < n_wanted or known[0] == math.inf:
        return None
    return known[0] < known[-1]
