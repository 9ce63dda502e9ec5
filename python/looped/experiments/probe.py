"""Fig. 8: how well X'y and the least-squares weights can be read from the state after each loop or unlooped layer.

Stage 0 is the embedded prompt, before any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from looped.experiments.lab import Lab, Models, Run
from looped.experiments.loops_and_window import published_run
from looped.experiments.measure import kind_of, single
from looped.experiments.outcome import Cell, Claim, Line, Outcome, Panel, Sheet
from looped.experiments.shift import unlooped_of_depth
from looped.icl.evaluate import evaluation_stream
from looped.icl.probe import TARGETS, Probes, Sample, fit_probes, sample_states
from looped.icl.prompts import interleave
from looped.icl.tasks import Pairs, Task
from looped.model import LoopedTransformer

STEPS = {"tiny": 60, "small": 2000, "paper": 10_000}
BATCH = {"tiny": 32, "small": 64, "paper": 1280}
DEPTH = {"tiny": 2, "small": 12, "paper": 20}  # of the unlooped model
LOOPS, WINDOW = 20, 15  # b and T of the published probes' looped model, as many loops as the unlooped one has layers
TITLES = {"xty": "X'y / k", "ols": "least-squares weights"}
PROBING_SEED = 0x9806E


def runs(lab: Lab) -> dict[str, Run]:
    """The models, by kind."""
    own = "linear_regression", lab.config()
    looped = published_run(lab, "linear_regression", LOOPS, WINDOW) if lab.preset == "paper" else own
    return {"looped": looped, "unlooped": unlooped_of_depth(lab, DEPTH[lab.preset])}


def run(lab: Lab) -> Outcome:
    config = runs(lab)["looped"][1]
    task, n_points = config.make_task(), config.points.end
    n_examples = [k for k in sorted({max(1, task.n_dims // 2), task.n_dims, 2 * task.n_dims}) if k <= n_points]
    by_model: dict[str, torch.Tensor] = {}  # [M, P, S] by name
    models = {kind: lab.models(*wanted) for kind, wanted in runs(lab).items()}
    for kind, some in models.items():
        for name, is_control in ((kind, False), (f"{kind}, control", True)):
            each = [_errors(lab, _fitted(lab, one, task, n_examples, is_control), one, task, n_examples) for one in some]
            if each:
                by_model[name] = torch.stack(each).mean(dim=3)
    found = {name: errors.mean(dim=0) for name, errors in by_model.items()}
    panels = [
        Panel(
            f"probes of {TITLES[target]}",
            "loops, or layers",
            "squared error / dimensions",
            [_line(name, errors[:, i], lab.n_prompts) for name, errors in by_model.items()],
        )
        for i, target in enumerate(TARGETS)
    ]
    rows: list[list[Cell]] = []
    for i, target in enumerate(TARGETS):
        for kind in models:
            if kind in found:
                errors, control = found[kind][i], found[f"{kind}, control"][i]
                best = best_of(errors)
                row = [float(errors[stage]) for stage in (0, 1, best, -1)]
                rows.append([TITLES[target], kind, *row[:3], best, row[3], float(control[best_of(control)])])
    columns = ["target", "model", "embedded prompt", "after the first", "best", "at", "after the last", "control, best"]
    settings = dict(n_dims=task.n_dims, n_examples=n_examples, steps=STEPS[lab.preset], batch=BATCH[lab.preset], lr=1e-3)
    sheet = Sheet("squared error / dimensions of the probes, mean over numbers of examples", columns, rows)
    return Outcome("probe", "Fig. 8", lab.preset, settings, panels, sheet, _claims(_sound(lab, found, models)))


def _sound(lab: Lab, found: dict[str, torch.Tensor], models: Mapping[str, Models]) -> dict[str, torch.Tensor]:
    """The kinds of which no model is missing, whose probes, and those of their control task, have finite errors; a note says of
    which others not."""
    kinds = [kind for kind in ("looped", "unlooped") if kind in found]
    bad: list[str] = [kind for kind in kinds if not all(found[name].isfinite().all() for name in (kind, f"{kind}, control"))]
    lab.notes += [f"{kind}: errors of its probes are not finite, and no verdict rests on it" for kind in bad]
    bad += [kind for kind, some in models.items() if some.n_lost]
    return {name: errors for name, errors in found.items() if name.partition(",")[0] not in bad}


def _line(name: str, errors: torch.Tensor, n_prompts: int) -> Line:
    """The mean over models of errors [M, S], with each model's where there are several."""
    mean, by_seed = single(errors.mean(dim=0).tolist(), n_prompts), errors.tolist() if len(errors) > 1 else []
    n_models, n_states = errors.shape
    return Line(name, range(n_states), mean, kind_of(name), by_seed, models_at=[n_models] * n_states)


def best_of(errors: torch.Tensor) -> int:
    """The loop or layer with the least of errors [S], from 1 on: at 0 there is the embedded prompt."""
    return int(errors[1:].argmin()) + 1


def _with_ones(pairs: Pairs) -> Pairs:
    """The control task: the same inputs, w all ones. A probe trained on it can learn of the inputs alone."""
    return Pairs(pairs.xs, pairs.xs.sum(dim=2))


def _drawer(
    lab: Lab, model: LoopedTransformer, task: Task, n_examples: list[int], batch: int, is_control: bool
) -> Callable[[torch.Generator], Sample]:
    def draw(generator: torch.Generator) -> Sample:
        pairs = task.sample(batch, max(n_examples), generator=generator)
        xs, ys = (part.to(lab.device) for part in (_with_ones(pairs) if is_control else pairs))
        return _with_prompt(model, sample_states(model, xs, ys, n_loops=model.config.n_loops, n_examples=n_examples), xs, ys)

    return draw


@torch.no_grad()
def _with_prompt(model: LoopedTransformer, sample: Sample, xs: torch.Tensor, ys: torch.Tensor) -> Sample:
    """A sample of prompts xs, ys with what the first loop or layer is given as stage 0: P, without positions where these are
    added in each loop."""
    n_points = sample.states.shape[2] // 2
    P = model.embed(interleave(xs[:, :n_points], ys[:, :n_points], keep_last_y=True).to(sample.states))
    return sample._replace(states=torch.cat([P[None], sample.states]))


def _fitted(lab: Lab, model: LoopedTransformer, task: Task, n_examples: list[int], is_control: bool) -> Probes:
    draw = _drawer(lab, model, task, n_examples, BATCH[lab.preset], is_control)
    return fit_probes(draw, n_examples, n_steps=STEPS[lab.preset], seed=PROBING_SEED, progress=lab.progress)


@torch.no_grad()
def _errors(lab: Lab, probes: Probes, model: LoopedTransformer, task: Task, n_examples: list[int]) -> torch.Tensor:
    """[P, S, K] on fresh prompts with random w."""
    generator = evaluation_stream(lab.seed)
    sizes = [min(256, lab.n_prompts - start) for start in range(0, lab.n_prompts, 256)]
    total = sum(probes.errors(_drawer(lab, model, task, n_examples, size, False)(generator)) * size for size in sizes)
    assert isinstance(total, torch.Tensor)
    return total.cpu() / lab.n_prompts


def _claims(found: dict[str, torch.Tensor]) -> list[Claim]:
    claims = []
    for i, target in enumerate(TARGETS):
        title = TITLES[target]
        looped = found["looped"][i] if "looped" in found else None
        unlooped = found["unlooped"][i] if "unlooped" in found else None
        if looped is not None:
            first, best, last = (float(looped[stage]) for stage in (1, best_of(looped), -1))
            rule = "the last below 0.9 x the first and within 1.1 x of the best"
            text = f"{title}: the looped model improves loop by loop and stays (here: {rule})"
            holds = last < 0.9 * first and last <= 1.1 * best
            claims.append(Claim("Fig. 8", text, f"{last / best:.2f} x, {first:.3g} to {last:.3g}", holds))
        if unlooped is not None:
            at = best_of(unlooped)
            first, best, last = (float(unlooped[stage]) for stage in (1, at, -1))
            rule = "its best below 0.9 x the first, the last above 1.1 x the best"
            text = f"{title}: the unlooped model is best at an inner layer and turns to something else (here: {rule})"
            holds = best < 0.9 * first and last > 1.1 * best
            claims.append(Claim("Fig. 8", text, f"{last / best:.2f} x, {first:.3g} to {best:.3g} at {at}", holds))
        if looped is not None and unlooped is not None:
            last, best = float(looped[-1]), float(unlooped[best_of(unlooped)])
            text = f"{title}: after its loops the looped model is below the unlooped one's best layer"
            claims.append(Claim("Fig. 8", text, f"{last:.3g} against {best:.3g}", last < best))
        for kind in ("looped", "unlooped"):
            if kind in found:
                own, control = (float(one[best_of(one)]) for one in (found[kind][i], found[f"{kind}, control"][i]))
                text = f"{title}, {kind}: probes are far below the control task (here: less than half)"
                claims.append(Claim("Fig. 8", text, f"{own:.3g} against {control:.3g}", own < control / 2))
    return claims
