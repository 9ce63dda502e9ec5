"""Fig. 10: four families of functions, the looped and the unlooped model beside every baseline."""

from __future__ import annotations

from collections.abc import Mapping

from looped.experiments.lab import Lab, Models, Run, n_parameters
from looped.experiments.measure import (
    Measured,
    by_examples,
    fresh,
    kind_of,
    line,
    mean_ratio,
    measure,
    n_loops_tested,
    of_baseline,
    on_shared,
    sound,
)
from looped.experiments.outcome import Cell, Claim, Outcome, Panel, Sheet
from looped.icl.baselines import Lasso, baselines_for

SPARSE = "sparse_linear_regression"
TASKS = ("linear_regression", SPARSE, "decision_tree", "relu_2nn_regression")
RIVALS = {  # kinds of baselines, by task; the least of their errors is what the looped model is held against
    "decision_tree": ("decision_tree", "xgboost"),
    "relu_2nn_regression": ("gd_network",),
}
FEW = 8  # times as many prompts of few examples: errors there have heavy tails, and lasso's lies close


def runs(lab: Lab) -> dict[tuple[str, str], Run]:
    """The models, by task and kind."""
    wanted: dict[tuple[str, str], Run] = {}
    for name in TASKS:
        wanted[name, "looped"] = name, lab.config(name)
        wanted[name, "unlooped"] = f"{name}_unlooped", lab.config(name, unlooped=True)
    return wanted


def run(lab: Lab) -> Outcome:
    wanted = runs(lab)
    panels: list[Panel] = []
    rows: list[list[Cell]] = []
    claims: list[Claim] = []
    seconds: dict[str, float] = {}
    n_points: dict[str, int] = {}
    n_loops: dict[str, int] = {}
    for name in TASKS:
        config = lab.config(name)
        models = {kind: lab.models(*wanted[name, kind]) for kind in ("looped", "unlooped")}
        if not any(models.values()):
            continue
        task, n_points[name] = config.make_task(), config.points.end
        baselines = {baseline.name: baseline for baseline in baselines_for(task)}
        for baseline in baselines.values():
            if baseline.why_unavailable:
                lab.notes.append(f"left out: {baseline.why_unavailable}")
        ways = {kind: by_examples(found, task, lab.preset) for kind, found in models.items()}
        ways |= {label: of_baseline(baseline, task) for label, baseline in baselines.items()}
        if models["looped"]:
            n_loops[name] = n_loops_tested(models["looped"][0], task, lab.preset)
        slow = [label for label, one in baselines.items() if one.cost == "slow" and not isinstance(one, Lasso)]
        slow = [] if lab.preset == "paper" else slow  # the published figure has all prompts
        found = measure(lab.watched(name, fresh(task, lab.n_prompts, n_points[name], lab.seed)), ways, slow=slow)
        seconds |= {f"{name}: {label}": round(one.seconds, 2) for label, one in found.items()}
        panels.append(_panel(name, found, task.n_dims, n_points[name], n_loops.get(name)))
        rows += _rows(name, found, models, task.n_dims)
        claims += _claims(name, sound(found))
        n_few = (task.n_dims + 1) // 2  # points: fewer than d / 2 examples
        if name == SPARSE and not models["looped"]:
            claims.append(_below_lasso({}))
        elif name == SPARSE and n_few > 1:
            few, n_prompts = f"{name}, few examples", FEW * lab.n_prompts
            prompts = lab.watched(few, fresh(task, n_prompts, n_few, lab.seed), n_prompts)
            found = measure(prompts, {label: way for label, way in ways.items() if label in (*models, "lasso")})
            seconds |= {f"{few}: {label}": round(one.seconds, 2) for label, one in found.items()}
            panels.append(_panel(few, found, task.n_dims, n_few, n_loops[name]))
            claims.append(_below_lasso(sound(found)))
    boosted = sum(value for label, value in seconds.items() if "xgboost" in label)
    lab.notes.append(f"measured in {sum(seconds.values()) - boosted:.0f} s, and XGBoost in {boosted:.0f} s beside it")
    sheet = Sheet(
        "squared error / variance of y, by examples", ["task", "", "parameters", "d/2", "d", "all", "prompts", "seconds"], rows
    )
    settings = {"n_points": n_points, "n_loops": n_loops, "seconds_by_predictor": seconds}
    return Outcome("functions", "Fig. 10", lab.preset, settings, panels, sheet, claims)


def _panel(name: str, found: dict[str, Measured], n_dims: int, n_points: int, n_loops: int | None) -> Panel:
    lines = []
    for label, one in found.items():
        kind = kind_of(label)
        few = f" ({one.curve.n_prompts} prompts)" if kind == "baseline" and one.curve.n_prompts <= 128 else ""
        lines.append(line(label.replace("_", " ") + few, range(n_points), one, kind))
    y = "squared error / variance of y"
    title = name.replace("_", " ") + (f", looped {n_loops} times" if n_loops else "")
    return Panel(title, "examples in the prompt", y, lines, marks=[(n_dims, "d")])


def _rows(name: str, found: dict[str, Measured], models: Mapping[str, Models], n_dims: int) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for label, one in found.items():
        errors = one.curve.mean
        size = n_parameters(models[label][0]) if models.get(label) else None
        places = [min(place, len(errors) - 1) for place in (n_dims // 2, n_dims, len(errors) - 1)]
        first = name if not rows else ""
        rows.append([first, label, size, *(errors[place] for place in places), one.curve.n_prompts, round(one.seconds, 1)])
    return rows


def _claims(name: str, found: dict[str, Measured]) -> list[Claim]:
    title, claims = name.replace("_", " "), []
    text = f"{title}: the looped model is as good as the unlooped one or better (here: within 1.1 x, geometric mean)"
    if {"looped", "unlooped"} <= set(found):
        ratio = mean_ratio(found["looped"].curve.mean, found["unlooped"].curve.mean)
        claims.append(Claim("Fig. 10", text, f"{ratio:.2f} x", ratio <= 1.1))
    else:
        claims.append(Claim("Fig. 10", text, "-", None))
    if name not in RIVALS:
        return claims
    rivals = [label for label in found if label.startswith(RIVALS[name])]
    if "looped" not in found or not rivals:
        text = f"{title}: the looped model is below {' and '.join(RIVALS[name])} (here: with all examples)"
        return [*claims, Claim("Fig. 10", text, "-", None)]
    n_shared, (looped, *others) = on_shared([found["looped"], *(found[rival] for rival in rivals)])
    best = min(errors[-1] for errors in others)
    text = f"{title}: the looped model is below {', '.join(rivals)} (here: with all examples)"
    measured = f"{looped[-1]:.3g} against {best:.3g}"
    if n_shared < found["looped"].curve.n_prompts:
        measured += f", on the first {n_shared} prompts"
    return [*claims, Claim("Fig. 10", text, measured, looped[-1] < best)]


def _below_lasso(found: dict[str, Measured]) -> Claim:
    """Of prompts of fewer examples than half as many as dimensions."""
    text = "sparse linear regression: the looped model is below lasso (alpha 0.01) with few examples (here: fewer than d/2)"
    if not {"looped", "lasso"} <= set(found):
        return Claim("Fig. 10", text, "-", None)
    looped, lasso = found["looped"].curve, found["lasso"].curve
    pairs = list(zip(looped.mean, lasso.mean, strict=True))[1:]
    measured = ", ".join(f"{i}: {own:.3g} against {other:.3g}" for i, (own, other) in enumerate(pairs, 1))
    holds = all(own < other for own, other in pairs)
    return Claim("Fig. 10", text, f"{measured}, on {looped.n_prompts:,} prompts", holds)
