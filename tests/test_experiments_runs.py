"""Every experiment runs at the tiny preset, its numbers are those of its models, and its claims follow from the numbers."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from labs import curves, quick
from models import icl_model

import looped
from looped.experiments import (
    EXPERIMENTS,
    Lab,
    architecture,
    fixed_point,
    functions,
    probe,
    run_experiment,
    shift,
    sparsity,
)
from looped.experiments import loops_and_window as grid
from looped.experiments import sample_efficiency as sets
from looped.experiments.catalog import FIRST_LOOK, models_of
from looped.experiments.lab import Models
from looped.experiments.measure import Measured
from looped.icl.curves import RunningCurve
from looped.icl.evaluate import batches
from looped.icl.predictor import LoopedPredictor
from looped.icl.prompts import interleave
from looped.icl.tasks import LinearRegression
from looped.report.outcomes import plot_outcome
from looped.train import Ramp, preset
from looped.train.shortfall import shortfall


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name != "tabular"])  # that one is run in test_tabular.py
def test_every_experiment_runs(folder, name):
    outcome = run_experiment(name, quick(folder))
    assert outcome.experiment == name
    assert outcome.figures == EXPERIMENTS[name].figures
    report = json.loads(json.dumps(outcome.to_dict()), parse_constant=lambda text: pytest.fail(text))
    assert report["table"]["rows"]
    assert report["panels"]
    assert report["claims"]
    assert all(len(row) == len(report["table"]["columns"]) for row in report["table"]["rows"])
    assert all(line["mean"] for panel in report["panels"] for line in panel["lines"])
    is_model = [(line["kind"] != "baseline", set(line["models_at"])) for panel in report["panels"] for line in panel["lines"]]
    assert all(counts == {1} for of_model, counts in is_model if of_model)
    assert all(model["source"].startswith("trained") for model in report["models"].values())
    assert not any("left out" in note for note in report["notes"])


def test_presets_share_their_runs_names(folder):
    """What two experiments train under one name is one run, or the second would find another configuration there."""
    for name in ("tiny", "small", "paper"):
        lab, known = Lab(name, folder), {}
        runs = [("linear_regression", lab.config()), ("linear_regression_unlooped", lab.config(unlooped=True))]
        runs += [shift.unlooped_of_depth(lab, n) for n in shift.DEPTHS[name]]
        runs += [(task, lab.config(task)) for task in functions.TASKS]
        runs += [(f"{task}_unlooped", lab.config(task, unlooped=True)) for task in functions.TASKS]
        runs += [sparsity.run_of(lab, s, unlooped=u) for s in sparsity.SPARSITIES[name] for u in (False, True)]
        for task, one in grid.GRIDS[name].items():
            runs += [grid.published_run(lab, task, b, T) for b in one.loops for T in one.windows if b >= T]
        runs += [run for one in (grid, shift, probe, architecture) for run in one.runs(lab).values()]
        runs += [architecture.run_with(lab, f, v) for f, values in architecture.VALUES[name].items() for v in values]
        for label, config in runs:
            assert known.setdefault(label, config) == config, label
        same = {}  # whether its options name what is the task's default or not
        for label, config in known.items():
            what = config.to_dict() | {"task_options": {}}
            assert same.setdefault(json.dumps([what, repr(config.make_task())]), label) == label


def test_every_run_is_as_long_as_its_curriculum(folder):
    for name in EXPERIMENTS:
        for preset_name in ("tiny", "small", "paper"):
            short = {label: shortfall(config) for label, config in models_of(name, Lab(preset_name, folder)).items()}
            assert not {label: what for label, what in short.items() if what}, (name, preset_name)


def test_models_of_short_runs_are_noted(tmp_path):
    notes = run_experiment("fixed-point", quick(tmp_path, seeds=[42, 7])).notes
    looped_ones = "linear_regression; linear_regression, seed 7; linear_regression_tied; linear_regression_tied, seed 7"
    assert notes == [
        f"trained for too few steps (dims end at 1, not 2; loops end at 3, not 4): {looped_ones}",
        "trained for too few steps (dims end at 1, not 2): linear_regression_unlooped; linear_regression_unlooped, seed 7",
        FIRST_LOOK,
    ]


def test_small_runs_of_functions_are_the_presets_own():
    lab = Lab("small", "x")
    assert lab.config("sparse_linear_regression") == preset("small", "sparse_linear_regression")
    assert sparsity.run_of(lab, 2, unlooped=True) == (
        "sparse_linear_regression_unlooped",
        preset("small", "sparse_linear_regression", unlooped=True),
    )
    lab = Lab("paper", "x")
    for s in (3, 6):
        name, config = sparsity.run_of(lab, s, unlooped=False)
        assert (config.model.n_loops, config.window, config.loops) == (30, 15, Ramp(15, 30, 2, 500))
        assert config.make_task().sparsity == s
        assert name == ("sparse_linear_regression_b30_T15" if s == 3 else "sparse_linear_regression_s6")
    task, unlooped = "sparse_linear_regression", "sparse_linear_regression_unlooped"
    assert sparsity.run_of(lab, 3, unlooped=True) == (unlooped, lab.config(task, unlooped=True))
    assert sparsity.run_of(lab, 6, unlooped=True)[0] == "sparse_linear_regression_s6_unlooped"


# fixed-point


def test_fixed_point_reports_what_its_models_do(tmp_path):
    models = {"linear_regression": icl_model(std=0.1, n_dims=2, n_points=5, dtype=torch.float32, n_loops=4)}
    models["linear_regression_tied"] = icl_model(
        std=0.2, n_dims=2, n_points=5, dtype=torch.float32, n_loops=4, inject="none", state_init="embedding"
    )
    for name, model in models.items():
        looped.save_model(model, tmp_path / name)
    given = {name: str(tmp_path / name) for name in models}
    outcome = run_experiment("fixed-point", quick(tmp_path, given=given, may_train=False, n_prompts=9))
    pairs = next(batches(LinearRegression(2), 9, 5, 0, 9))
    rows = {row[0]: row for row in outcome.sheet.rows}
    for kind, model in zip(("looped", "tied"), models.values(), strict=True):
        every = model(interleave(*pairs), n_loops=20, return_predictions=True)[:, :, -1].double()
        errors = ((every.detach() - pairs.ys[:, -1:].double()) ** 2).mean(dim=0) / 2
        np.testing.assert_allclose(outcome.panels[0].lines[kind == "tied"].curve.mean, errors.detach(), rtol=1e-4)
        expected = [errors[3], errors.min(), int(errors.argmin()) + 1, errors[19], errors[19] / errors[3]]
        np.testing.assert_allclose(rows[kind][2:7], [float(x) for x in expected], rtol=1e-4)
    assert ["linear_regression_unlooped is left out" in note for note in outcome.notes].count(True) == 1
    assert outcome.claims[2].holds is None


def test_fixed_point_claims():
    models = {kind: [icl_model(d_model=width)] for kind, width in (("looped", 16), ("tied", 16), ("unlooped", 64))}
    flat, rising = [1.0] * 3 + [0.5] * 2 + [0.55] * 5, [0.5] * 2 + [1.2] * 8
    loops = curves(looped=flat, tied=rising)
    examples = curves(looped=[1.0, 1, 0.13], unlooped=[1.0, 1, 0.1])
    claims = fixed_point._claims(models, loops, examples, 2, 1)
    assert [claim.holds for claim in claims] == [True, True, True]
    claims = fixed_point._claims(
        models, curves(looped=rising, tied=flat), curves(looped=[1.0, 1, 0.14], unlooped=[1, 1, 0.1]), 2, 1
    )
    assert [claim.holds for claim in claims] == [False, False, False]
    assert fixed_point.worst_beyond([9.0, 2.0, 3.0, 1.0], 2) == 1.5
    same = {kind: [icl_model()] for kind in models}
    assert not fixed_point._claims(same, loops, examples, 2, 1)[2].holds, "as many parameters"


def test_models_that_overflow_past_the_trained_loops_drift_off():
    late, early, healed = RunningCurve(), RunningCurve(), RunningCurve()
    healed.add(torch.tensor([[math.inf, 0.5, 0.5], [1.0, 0.5, 0.5]]))
    late.add(torch.tensor([[1.0, 0.5, math.inf], [1.0, 0.5, 0.5]]))
    early.add(torch.tensor([[1.0, math.inf, math.inf], [1.0, 0.5, 0.5]]))
    drifts, unknown = ([False, True], "not finite past the trained loops"), ([None, None], "-")
    for curve, (holds, measured) in ((late, drifts), (early, unknown), (healed, unknown)):
        found = {kind: Measured(curve.curve(), [], 0.0) for kind in ("looped", "tied")}
        claims = fixed_point._claims({}, found, {}, 2, 1)[:2]
        assert [claim.holds for claim in claims] == holds
        assert {claim.measured for claim in claims} == {measured}


# Models whose predictions are not finite


RESTING = [  # experiments, a model of each, the label of its line, and how the claims about it begin
    ("fixed-point", "linear_regression", "looped", ("with injection", "the looped model")),
    ("loops-and-window", "linear_regression_b4_T1", "b=4", ("linear regression, T=1: ", "linear regression: a smaller")),
    ("sample-efficiency", "set_of_64_d2_looped_lr0.003", "looped", "d=2"),
    ("shift", "linear_regression", "looped", ""),
    ("functions", "linear_regression", "looped", "linear regression: the looped"),
    ("sparsity", "sparse_linear_regression", "looped", ""),
    ("architecture", "linear_regression", "1", ("with more layers", "one looped", "a wider", "the error is least")),
    ("adaptive", "linear_regression", "same loops for all", "linear regression: "),
]


@pytest.mark.parametrize(("name", "given", "label", "about"), RESTING)
def test_no_verdict_rests_on_a_model_that_gives_nan(folder, tmp_path, name, given, label, about):
    """The experiment runs to its end, says so, draws its figure, and decides what does not rest on the model."""
    model = icl_model(std=0.1, n_dims=2, n_points=5, n_loops=4, d_model=32, dtype=torch.float32)
    with torch.no_grad():
        model.read_out.weight.fill_(math.nan)
    looped.save_model(model, tmp_path / "nan")
    outcome = run_experiment(name, quick(folder, given={given: str(tmp_path / "nan")}))
    note = next(note for note in outcome.notes if "not finite" in note)
    assert note.startswith(f"{label}: not finite for 6 of 6 prompts at ")
    claims = [claim for claim in outcome.claims if claim.text.startswith(about)]
    assert claims
    assert [claim.holds for claim in claims] == [None] * len(claims)
    assert json.dumps(outcome.to_dict(), allow_nan=False)
    plot_outcome(outcome, tmp_path / "it.png")
    assert (tmp_path / "it.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("name", "lost", "about"), [(name, given, about) for name, given, _, about in RESTING])
def test_no_verdict_rests_on_the_seeds_that_are_left(folder, monkeypatch, name, lost, about):
    one = Lab._one

    def without_the_second(lab, label, config, optional):
        is_lost = label == lost and config.seed == 43
        return None if is_lost else one(lab, label, dataclasses.replace(config, seed=42), optional)

    monkeypatch.setattr(Lab, "_one", without_the_second)
    outcome = run_experiment(name, quick(folder, seeds=[42, 43]))
    assert f"{lost}: its numbers are of 1 of 2 seeds, without 43, and no verdict rests on it" in outcome.notes
    claims = [claim for claim in outcome.claims if claim.text.startswith(about)]
    assert {claim.holds for claim in claims} == {None}


def test_no_verdict_on_probes_rests_on_the_seeds_that_are_left(folder):
    flat = {f"{kind}{rest}": torch.ones(2, 4) for kind in ("looped", "unlooped") for rest in ("", ", control")}
    cut = Models()
    cut.n_lost = 1
    assert list(probe._sound(quick(folder), flat, {"looped": cut, "unlooped": Models()})) == ["unlooped", "unlooped, control"]


def test_a_model_is_not_judged_on_the_prompts_that_it_survives(folder, monkeypatch):
    """Where it is all but exact on a third of the prompts and gives NaN or infinity on the others."""
    predict = LoopedPredictor.predict

    def broken(self, xs, ys):
        if self.model.config.n_loops == 1:
            return predict(self, xs, ys)
        predictions = ys + 1e-3
        predictions[::3, 3], predictions[1::3, 2:] = math.nan, math.inf
        return predictions

    monkeypatch.setattr(LoopedPredictor, "predict", broken)
    outcome = run_experiment("functions", quick(folder, n_prompts=9))
    looped_line = outcome.panels[0].lines[0]
    assert (looped_line.label, looped_line.curve.n_not_finite) == ("looped", [0, 0, 3, 6, 3])
    assert max(looped_line.curve.mean) < 1e-5
    assert all(claim.holds is None for claim in outcome.claims)
    (note,) = (note for note in outcome.notes if "not finite" in note)
    assert note == (
        "looped: not finite for 6 of 9 prompts at 3 examples in the prompt (linear regression, looped 20 times), and in 3 more "
        "of the panels; its means are of the others, and no verdict rests on these"
    )


def test_a_learning_rate_whose_model_gives_nan_loses(folder, monkeypatch):
    models = {lr: icl_model(std=lr, n_dims=2, n_points=5, n_loops=4, dtype=torch.float32) for lr in (0.1, 0.2)}
    with torch.no_grad():
        models[0.1].read_out.weight.fill_(math.nan)
    monkeypatch.setattr(Lab, "models", lambda self, name, config: [models[config.lr]])
    lab = quick(folder)
    by_lr = {lr: sets.run_on(lab, 2, 4, lr, unlooped=False) for lr in models}
    assert sets._best(lab, by_lr)[0] == 0.2


def test_predictions_that_cease_to_be_finite_diverge():
    errors = RunningCurve()
    errors.add(torch.tensor([[1.0, 0.5, 0.5, math.inf], [1.0, 0.5, 0.5, 0.375]]))
    assert grid._row(errors.curve(), 2) == [0.5, 0.375, 4, 0.375, 0.75, "yes"]
    assert grid._row(errors.curve(), 4)[-1] is None
    lost = RunningCurve()
    lost.add(torch.full((2, 3), math.inf))
    row = grid._row(lost.curve(), 2)
    assert (row[2], row[5]) == (None, None)


def test_shifts_without_any_finite_error_have_none():
    assert shift.mean_error([1.0, math.nan]) is None
    assert shift.last_measured([math.nan], [math.nan]) == 0


def test_probes_that_are_not_finite_are_noted_and_not_judged(folder):
    flat = torch.ones(2, 4)
    found = {"looped": flat.clone(), "looped, control": flat, "unlooped": flat, "unlooped, control": flat}
    lab = quick(folder)
    whole = {"looped": Models(), "unlooped": Models()}
    assert list(probe._sound(lab, found, whole)) == list(found)
    assert not lab.notes
    found["looped"][1, 2] = math.nan
    assert list(probe._sound(lab, found, whole)) == ["unlooped", "unlooped, control"]
    assert lab.notes == ["looped: errors of its probes are not finite, and no verdict rests on it"]


@pytest.mark.parametrize("name", ["functions", "sparsity", "shift", "sample-efficiency"])
def test_curves_by_examples_go_past_the_trained_loops(tmp_path, monkeypatch, name):
    """Five times the trained 4 at "tiny"; `fixed-point` alone stays at these, as its by-examples panel is about them."""
    loops = set()
    whole = LoopedPredictor.run

    def run(self, xs, ys, **options):
        loops.add((self.model.config.n_loops, self.n_loops or self.n_loops_trained))
        return whole(self, xs, ys, **options)

    monkeypatch.setattr(LoopedPredictor, "run", run)
    run_experiment(name, quick(tmp_path))
    assert (1, 1) in loops  # the unlooped one
    assert len(loops) > 1
    assert all(n == (1 if trained == 1 else 5 * trained) for trained, n in loops)


@pytest.mark.parametrize(("preset_name", "is_capped"), [("tiny", True), ("paper", False)])
def test_slow_baselines_see_all_prompts_at_paper(tmp_path, monkeypatch, preset_name, is_capped):
    capped = []

    def measured(prompts, ways, *, slow=()):
        capped.append(list(slow))
        return {}

    monkeypatch.setattr(functions, "measure", measured)
    model = icl_model(std=0.1, n_dims=3, n_points=4)
    monkeypatch.setattr(Lab, "models", lambda self, name, config, **how: [model])
    run_experiment("functions", Lab(preset_name, tmp_path, progress=False))
    assert len(capped) == 4 + (not is_capped)  # at "tiny" no prompts have fewer than d / 2 examples, but none
    assert any(capped) == is_capped
