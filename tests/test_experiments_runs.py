"""Every experiment runs at the tiny preset, its numbers are those of its models, and its claims follow from the numbers."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from models import icl_model

import looped
from looped.exits import Contraction
from looped.experiments import (
    EXPERIMENTS,
    Lab,
    adaptive,
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
from looped.experiments.adaptive import Level, fixed_errors, levels, mixed_batches, used_loops
from looped.experiments.catalog import FIRST_LOOK, models_of
from looped.experiments.measure import Measured, single
from looped.icl.baselines import baselines_for
from looped.icl.curves import RunningCurve
from looped.icl.evaluate import batches
from looped.icl.predictor import LoopedPredictor
from looped.icl.probe import Probes, targets_of
from looped.icl.prompts import interleave
from looped.icl.shifts import SHIFTS
from looped.icl.tasks import LinearRegression, SparseLinearRegression
from looped.report.outcomes import COLORS, plot_outcome
from looped.train import Ramp, preset
from looped.train.shortfall import shortfall


def quick(folder, preset_name="tiny", **options):
    return Lab(preset_name, folder, **(dict(n_steps=4, n_prompts=6, progress=False) | options))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Experiments share the models that they train."""
    return tmp_path_factory.mktemp("experiments")


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


def curves(**errors):
    return {name: Measured(single(values), [], 0.0) for name, values in errors.items()}


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
    late, early = RunningCurve(), RunningCurve()
    late.add(torch.tensor([[1.0, 0.5, math.inf], [1.0, 0.5, 0.5]]))
    early.add(torch.tensor([[1.0, math.inf, math.inf], [1.0, 0.5, 0.5]]))
    for curve, holds, measured in ((late, [False, True], "not finite past the trained loops"), (early, [None, None], "-")):
        found = {kind: Measured(curve.curve(), [], 0.0) for kind in ("looped", "tied")}
        claims = fixed_point._claims({}, found, {}, 2, 1)[:2]
        assert [claim.holds for claim in claims] == holds
        assert {claim.measured for claim in claims} == {measured}


# Models whose predictions are not finite


@pytest.mark.parametrize(
    ("name", "given", "label", "about"),
    [
        ("fixed-point", "linear_regression", "looped", ("with injection", "the looped model")),
        ("loops-and-window", "linear_regression_b4_T1", "b=4", ("linear regression, T=1: ", "linear regression: a smaller")),
        ("sample-efficiency", "set_of_64_d2_looped_lr0.003", "looped", "d=2"),
        ("shift", "linear_regression", "looped", ""),
        ("functions", "linear_regression", "looped", "linear regression: the looped"),
        ("sparsity", "sparse_linear_regression", "looped", ""),
        ("architecture", "linear_regression", "1", ("with more layers", "one looped", "a wider", "the error is least")),
        ("adaptive", "linear_regression", "same loops for all", "linear regression: "),
    ],
)
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
        "of the panels; its means are of the others, and no verdict rests on it"
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
    assert list(probe._sound(lab, found)) == list(found)
    assert not lab.notes
    found["looped"][1, 2] = math.nan
    assert list(probe._sound(lab, found)) == ["unlooped", "unlooped, control"]
    assert lab.notes == ["looped: errors of its probes are not finite, and no verdict rests on it"]


# loops-and-window, sample-efficiency, architecture, sparsity, functions


def test_grid_runs_follow_the_published_recipe(folder):
    name, config = grid.published_run(Lab("small", folder), "linear_regression", 30, 12)
    assert name == "linear_regression_b30_T12"
    assert (config.model.n_loops, config.window, config.loops) == (30, 12, Ramp(12, 30, 1, 148))
    assert (config.rest_weight, config.extra_loops, config.n_steps) == (0.0, 0, 8000)
    paper = grid.published_run(Lab("paper", folder), "decision_tree", 70, 15)[1]
    assert paper == dataclasses.replace(preset("paper", "decision_tree"))


@pytest.mark.parametrize("preset_name", ["tiny", "small", "paper"])
def test_every_grid_run_has_its_loops_while_it_learns(folder, preset_name):
    """A ramp that ends where the learning rate does would leave a run of many loops and a small window without training."""
    lab = Lab(preset_name, folder)
    for (task, n_loops, window), (_, config) in grid.of_grid(lab).items():
        own, loops = lab.config(task).loops, config.loops
        assert (loops.start, loops.end, loops.increment) == (window, n_loops, own.increment)
        assert loops.every == own.every if preset_name == "paper" else loops.every <= own.every
        reached = next(step for step in range(config.n_steps) if loops.at(step) == n_loops)
        assert reached <= config.n_steps / 3, (n_loops, window)
        assert config.lr_at(max(reached, config.warmup_steps)) > 0.75 * config.lr, (n_loops, window)


def test_grid_claims_and_divergence(folder, monkeypatch):
    def errors(b, at_b, after):
        return [1.0] * (b - 1) + [at_b] + [after] * (4 * b)

    one = grid.Grid((2, 6), (1, 2))
    found = {(2, 1): errors(2, 0.4, 1.0), (6, 1): errors(6, 0.3, 0.3)}
    found |= {(2, 2): errors(2, 0.2, 0.9), (6, 2): errors(6, 0.1, 0.1)}
    claims = grid._claims("linear_regression", one, found)
    assert [claim.holds for claim in claims] == [True] * 5
    swapped = {key: errors(key[0], 0.1 if key[1] == 1 else 0.4, 0.01) for key in found}
    assert [claim.holds for claim in grid._claims("x", one, swapped)][::2] == [False, False, False]
    del found[2, 1]
    assert [claim.holds for claim in grid._claims("linear_regression", one, found)] == [None, None, True, True, None]
    wider = grid.Grid((2, 4, 6), (1, 2))
    found[2, 1] = errors(2, 0.4, 1.0)
    claims = grid._claims("linear_regression", wider, found)
    assert [claim.holds for claim in claims] == [True] * 4 + [None], "the first four are of the least and the largest b"
    assert claims[-1].measured == "0.35 at T=1, 0.15 at T=2 (2 of 3 values of b measured)"
    assert grid.settled_at([5.0, 1.09, 1.0, 2.0]) == [2]
    assert grid._row(single(errors(3, 0.5, 1.1)), 3)[-1] == "yes"

    def diverge(*args, **kwargs):
        raise FloatingPointError("train: the loss has exploded at step 9")

    monkeypatch.setattr("looped.experiments.lab.train", diverge)
    outcome = run_experiment("loops-and-window", quick(folder / "diverging"))
    assert all("(here: " in claim.text and "\n" not in claim.text for claim in outcome.claims)
    assert [row[-1] for row in outcome.sheet.rows] == ["training: the loss has exploded at step 9"] * 4
    assert [(claim.measured, claim.holds) for claim in outcome.claims] == [
        *[("no finite model of b=3 and b=4", None)] * 4,
        ("- (0 of 2 values of b measured)", None),
    ]


def test_a_worse_model_is_not_sooner_at_the_fixed_point():
    """It is near its own least error at once, and the better one is below that error by then."""
    worse, better = [1.0, 0.8, 0.8, 0.8, 0.8, 0.8], [1.0, 0.5, 0.3, 0.2, 0.1, 0.1]
    assert grid.settled_at(worse, better) == [2, 2]
    assert grid.settled_at(better) == [5]
    found = {(2, 1): worse, (6, 1): better}
    sooner = grid._claims("linear_regression", grid.Grid((2, 6), (1,)), found)[1]
    assert (sooner.holds, sooner.measured) == (False, "loop 2 at b=2, 2 at b=6")
    assert sooner.text.endswith("(here: b=2 before b=6, each at 1.1 x the larger of their least errors)")
    layers = {"n_core": {1: better, 2: worse}, "d_model": {}, "n_heads": {}}
    claims = architecture._claims(layers, 2, {"n_core": (1, 2), "d_model": (8, 16), "n_heads": (1, 2, 4)})
    assert (claims[0].holds, claims[0].measured) == (False, "1: loop 2, 2: loop 2")


def test_loops_to_the_fixed_point_saturate():
    """Of linear regression where the grid has 40 and 50 loops: as many loops to an error that both reach."""

    def at(loop):
        return [1.0] * (loop - 1) + [0.1] * (250 - loop)

    wide = grid.Grid((12, 40, 50), (5, 15))
    found = {(40, 15): at(20), (50, 15): at(24)}
    claim = grid._claims("linear_regression", wide, found)[-1]
    assert claim.text.startswith("linear regression, T=15: from b=40 on the loops to the fixed point do not depend on b (here:")
    assert (claim.figure, claim.holds, claim.measured) == ("Fig. 4", True, "loop 20 at b=40, 24 at b=50")
    found[50, 15] = at(25)
    assert grid._claims("linear_regression", wide, found)[-1].holds is False
    del found[40, 15]
    lost = grid._claims("linear_regression", wide, found)[-1]
    assert (lost.holds, lost.measured) == (None, "no finite model of b=40")
    for name, one in (("decision_tree", wide), ("linear_regression", grid.Grid((12, 40), (5, 15)))):
        assert not any("do not depend" in claim.text for claim in grid._claims(name, one, {}))


def test_two_tasks_at_one_b_and_window():
    """Fig. 9: linear regression diverges where sparse linear regression does not."""

    def errors(after):
        return [1.0] * 19 + [0.1] + [after] * 80

    paper = grid.GRIDS["paper"]
    sets = {"linear_regression": {(20, 10): errors(0.3)}, "sparse_linear_regression": {(20, 10): errors(0.1)}}
    (claim,) = grid._across_tasks(paper, sets)
    assert (claim.figure, claim.holds) == ("Fig. 9", True)
    assert claim.measured == "5 b / b: 3.00 x linear regression, 1.00 x sparse linear regression"
    assert claim.text == (
        "T=10, b=20: linear regression diverges and sparse linear regression does not (here: to 5 b by more than 2 x, and not)"
    )
    for linear, sparse in ((0.1, 0.1), (0.3, 0.3)):
        both = dict(zip(sets, ({(20, 10): errors(linear)}, {(20, 10): errors(sparse)}), strict=True))
        assert grid._across_tasks(paper, both)[0].holds is False
    (lost,) = grid._across_tasks(paper, sets | {"sparse_linear_regression": {}})
    assert (lost.holds, lost.measured) == (None, "no finite model of sparse linear regression")
    assert grid._across_tasks(grid.GRIDS["small"], {"linear_regression": {}}) == []


def test_the_grid_names_the_figures_that_it_has(folder, monkeypatch):
    """Fig. 9 is of several tasks; the unlooped model is there where it has as many layers as a model has loops."""
    models = {2: icl_model(std=0.1, n_dims=2, n_points=5, n_loops=2, dtype=torch.float32)}
    twin = icl_model(
        std=0.2, n_dims=2, n_points=5, n_loops=1, n_core=2, inject="none", state_init="embedding", dtype=torch.float32
    )
    monkeypatch.setattr(
        Lab, "models", lambda self, name, config: [twin] if config.model.n_loops == 1 else [models[config.model.n_loops]]
    )
    one, both = grid.Grid((2,), (1, 2)), {}
    for tasks in (1, 2):
        monkeypatch.setitem(grid.GRIDS, "tiny", dict.fromkeys(("linear_regression", "sparse_linear_regression")[:tasks], one))
        outcome = both[tasks] = run_experiment("loops-and-window", quick(folder, n_prompts=9))
        assert outcome.figures == ("Fig. 4, appendix B", "Fig. 4, 9, appendix B")[tasks - 1]
    pairs = next(batches(LinearRegression(2), 9, 5, 0, 9))
    looped_error, error = (
        (LoopedPredictor(model).predict(*pairs)[:, -1] - pairs.ys[:, -1]).square().mean().item() / 2
        for model in (models[2], twin)
    )
    row = next(row for row in both[1].sheet.rows if row[1] == "2 unlooped layers")
    assert row == ["linear_regression", "2 unlooped layers", None, pytest.approx(error, rel=1e-4), *[None] * 5]
    claim = both[1].claims[-1]
    ratio = looped_error / error
    assert claim.text == (
        "linear regression: b=2 does not match the unlooped model of 2 layers (here: more than 1.3 x its error, at every T)"
    )
    assert (claim.measured, claim.holds) == (f"{ratio:.2f} x at T=1, {ratio:.2f} x at T=2", ratio > 1.3)


def test_the_grid_beside_the_unlooped_model(folder, monkeypatch):
    lab = Lab("small", folder, n_prompts=8)
    run = grid.runs(lab)[grid.UNLOOPED]
    assert run == ("linear_regression_unlooped", preset("small", unlooped=True))
    assert grid.UNLOOPED not in grid.runs(Lab("tiny", folder))
    assert grid.runs(Lab("paper", folder))[grid.UNLOOPED][1] == preset("paper", unlooped=True)
    twin = icl_model(std=0.1, n_dims=5, n_points=11, dtype=torch.float32)
    monkeypatch.setattr(Lab, "models", lambda self, name, config: [twin])
    rows = []
    grid._beside_unlooped(lab, run, {}, rows)
    error = rows[0][3]
    found = {(12, window): [9.0] * 11 + [ratio * error] for window, ratio in ((4, 1.4), (12, 1.31))}
    claim = grid._beside_unlooped(lab, run, found, rows)
    told = "; trained for 8,000 steps, the unlooped one for 16,000"
    assert (claim.holds, claim.measured) == (True, f"1.40 x at T=4, 1.31 x at T=12{told}")
    found[12, 12][11] = 1.2 * error
    assert grid._beside_unlooped(lab, run, found, rows).holds is False
    found[12, 12][11] = 1.4 * error
    del found[12, 4]
    part = grid._beside_unlooped(lab, run, found, rows)
    assert (part.holds, part.measured) == (None, f"1.40 x at T=12 (1 of 2 windows measured){told}")
    monkeypatch.setattr(Lab, "models", lambda self, name, config: [])
    assert grid._beside_unlooped(Lab("small", folder, n_steps=9), run, found, rows).measured == "- (0 of 2 windows measured)"
    assert len(rows) == 4, "one for each time that there was a model"


def test_one_looped_layer_beside_unlooped_layers(folder, monkeypatch):
    lab = Lab("small", folder, n_prompts=8)
    wanted = architecture.runs(lab)
    assert wanted["unlooped", 12] == ("linear_regression_unlooped", preset("small", unlooped=True)), "a bundled one"
    assert architecture.runs(Lab("paper", folder))["unlooped", 8][1].model.n_core == 8
    twin = icl_model(std=0.1, n_dims=5, n_points=11, dtype=torch.float32)
    monkeypatch.setattr(Lab, "models", lambda self, name, config: [twin])
    rows = []

    def claim_of(*errors):
        by_layers = {1: Measured(single(list(errors)), [], 0.0)} if errors else {}
        return architecture._beside_unlooped(lab, wanted, by_layers, rows)

    assert (claim_of().holds, claim_of().measured) == (None, "-")
    error, told = rows[0][3], "; trained for 8,000 steps, the unlooped one for 16,000"
    assert rows[0] == ["unlooped layers", 12, sum(p.numel() for p in twin.parameters()), error, None, None, None]
    later, sooner, never = ([9.0 * error] * n + [1.29 * error] * (20 - n) for n in (12, 11, 20))
    assert (claim_of(*later).holds, claim_of(*later).measured) == (True, f"loop 13{told}")
    assert (claim_of(*sooner).holds, claim_of(*sooner).measured) == (False, f"loop 12{told}")
    assert (claim_of(*never).holds, claim_of(*never).measured) == (False, f"none of 20 loops, at the best 9.00 x{told}")
    text = "one looped layer matches 12 unlooped layers, after more loops than these are (here: its first loop within 1.3 x of "
    assert claim_of(*later).text == text + "their error)"
    monkeypatch.setattr(Lab, "models", lambda self, name, config: [])
    assert claim_of(*later).holds is None


def test_sets_of_prompts_have_no_curriculum(folder):
    name, config = sets.run_on(Lab("paper", folder), 10, 5000, 1e-5, unlooped=False)
    assert name == "set_of_5000_d10_looped_lr1e-05"
    assert (config.dims, config.points, config.loops) == (Ramp(10, 10), Ramp(21, 21), Ramp(30, 30))
    assert (config.n_distinct, config.lr, config.window, config.model.n_dims) == (5000, 1e-5, 15, 10)
    unlooped = sets.run_on(Lab("paper", folder), 10, 5000, 1e-5, unlooped=True)[1]
    assert (unlooped.model.n_core, unlooped.loops, unlooped.window) == (12, Ramp(1, 1), 1)
    errors = {"looped": {10: 0.2, 20: 0.1, 30: 0.3}, "unlooped": {10: 0.5, 20: 0.2, 30: 0.1}}
    assert sets._claim(5, errors, (10, 20, 30)).holds
    assert sets._claim(5, errors, (10, 20, 30)).text.endswith("(here: below the unlooped one on more than half of the sets)")
    assert sets._claim(5, {"looped": {10: 0.2}, "unlooped": {}}, (10, 20)).holds is None
    part = sets._claim(5, errors, (10, 20, 30, 40))
    assert (part.holds, part.measured.endswith("30: 0.3 against 0.1 (3 of 4 sets measured)")) == (None, True)
    assert sets._claim(5, {"looped": errors["unlooped"], "unlooped": errors["looped"]}, (10, 20, 30, 40)).holds is False


def test_the_best_learning_rate_is_chosen_on_other_prompts(folder, monkeypatch):
    seeds = []
    monkeypatch.setattr(sets, "fresh", lambda task, n, k, seed: seeds.append(seed) or batches(task, n, k, seed, 128))
    lab = quick(folder / "lrs", seed=3)
    best = sets._best(lab, {lr: sets.run_on(lab, 2, 4, lr, unlooped=False) for lr in (1e-3, 0.9)})
    assert set(seeds) == {3 + sets.VALIDATION}
    by_lr = {}
    for lr in (1e-3, 0.9):
        (model,) = lab.models(*sets.run_on(lab, 2, 4, lr, unlooped=False))
        pairs = next(batches(LinearRegression(2), 6, 5, 3 + sets.VALIDATION, 6))
        by_lr[lr] = (LoopedPredictor(model).predict(*pairs) - pairs.ys).square().mean().item()
    assert best[0] == min(by_lr, key=by_lr.get)


def test_a_learning_rate_that_some_seeds_diverge_at_loses(tmp_path, monkeypatch):
    """The mean over the seeds that are left would be the least."""
    lab = quick(tmp_path, seeds=[42, 7])
    by_lr = {lr: sets.run_on(lab, 2, 4, lr, unlooped=False) for lr in (1e-3, 3e-3)}
    good, bad = (icl_model(std=std, n_dims=2, n_points=5, n_loops=4, dtype=torch.float32) for std in (0.01, 0.3))
    models = {by_lr[1e-3][0]: [bad, bad], by_lr[3e-3][0]: [good]}
    monkeypatch.setattr(Lab, "models", lambda self, name, config: models[name])
    assert sets._best(lab, by_lr)[:2] == (1e-3, [bad, bad])
    models[by_lr[3e-3][0]].append(good)
    assert sets._best(lab, by_lr)[:2] == (3e-3, [good, good])
    models[by_lr[3e-3][0]].pop()
    lab.given = {by_lr[3e-3][0]: "one for all seeds"}
    assert sets._best(lab, by_lr)[:2] == (3e-3, [good])


def test_architecture_and_sparsity_claims():
    found = {"n_core": {1: [1.0, 1, 0.1], 2: [0.1, 0.1, 0.1]}, "d_model": {8: [1.0, 0.9, 0.5], 16: [1, 0.4, 0.2]}}
    found["n_heads"] = {1: [1.0, 0.3, 0.3], 2: [1, 0.1, 0.1], 4: [1, 0.2, 0.2]}
    wanted = {field: tuple(some) for field, some in found.items()}
    claims = architecture._claims(found, 2, wanted)
    assert [claim.holds for claim in claims] == [True, True, True]
    assert [claim.measured for claim in claims] == ["1: loop 3, 2: loop 1", "8: 0.9, 16: 0.4", "1: 0.3, 2: 0.1, 4: 0.2"]
    assert [claim.text.partition(" (here: ")[2] for claim in claims] == [
        "2 before 1, each to 1.1 x the largest of their least errors)",
        "16 below 8, after b loops)",
        "at neither the fewest nor the most, after b loops)",
    ]
    more = {"n_core": (1, 2, 3), "d_model": (8, 12, 16), "n_heads": (1, 2, 3, 4)}
    claims = architecture._claims(found, 2, more)
    assert [claim.holds for claim in claims] == [None, True, None]
    assert claims[2].measured == "1: 0.3, 2: 0.1, 4: 0.2 (3 of 4 values measured)"
    found["n_heads"][4] = [1.0, 0.05, 0.05]
    assert architecture._claims(found, 2, wanted)[2].holds is False
    by_s = {1: curves(looped=[1.0, 0.05, 0.01], unlooped=[1.0, 0.05, 0.01])}
    by_s[2] = curves(looped=[1.0, 0.5, 0.01], unlooped=[1.0, 0.4, 0.01])
    claims = sparsity._claims(by_s, (1, 2))
    assert [claim.holds for claim in claims] == [False, True]
    assert [claim.measured for claim in claims] == ["s=1: 1.00 x, s=2: 1.12 x", "s=1: 1, s=2: 2"]
    part = sparsity._claims({1: by_s[1]}, (1, 2))
    assert [claim.holds for claim in part] == [None, None]
    assert [claim.measured for claim in part] == [
        "s=1: 1.00 x (1 of 2 sparsities measured)",
        "s=1: 1 (1 of 2 sparsities measured)",
    ]
    assert [claim.holds for claim in sparsity._claims(by_s, (1, 2, 4))] == [False, None], "one against it is enough"
    assert sparsity._claims({1: by_s[2], 2: by_s[1]}, (1, 2, 4))[1].holds is False
    assert sparsity._claims({1: by_s[1], 2: by_s[1]}, (1, 2))[1].holds is False
    assert [claim.holds for claim in sparsity._claims({1: by_s[1], 2: by_s[1]}, (1, 2, 4))] == [None, None]
    never = curves(looped=[1.0, 0.5, 0.3], unlooped=[1.0, 0.5, 0.3])
    claim = sparsity._claims({1: never, 2: never}, (1, 2))[1]
    assert (claim.holds, claim.measured) == (None, "no error of 0.1 at s=1, s=2")
    assert sparsity._claims({1: by_s[1], 2: never}, (1, 2))[1].holds
    assert [claim.holds for claim in sparsity._claims({}, (1, 2))] == [None, None]
    assert sparsity.examples_needed([1.0, 0.05, 0.2, 0.1, 0.01]) == 3
    assert sparsity.examples_needed([1.0, 0.5]) is None


def test_lasso_is_measured_on_the_prompts_of_the_models(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(sparsity, "of_baseline", lambda lasso, task: [lambda pairs: asked.append(len(pairs.ys)) or pairs.ys])
    model = icl_model(std=0.1, n_dims=2, n_points=5, n_loops=4, dtype=torch.float32)
    monkeypatch.setattr(Lab, "models", lambda self, name, config: [model] if name == "sparse_linear_regression" else [])
    outcome = run_experiment("sparsity", quick(tmp_path, n_prompts=130))
    assert asked == [128, 2]
    assert [line.prompts_at for line in outcome.panels[0].lines] == [[130] * 5] * 2


def test_functions_claims():
    found = curves(looped=[1.0, 0.5, 0.3, 0.2, 0.1], unlooped=[1.0, 0.5, 0.3, 0.2, 0.1], lasso=[1, 0.6, 0.29, 0.01, 0.001])
    both = functions._claims("sparse_linear_regression", found, 4)
    assert [claim.holds for claim in both] == [True, True], "fewer than half of 4 is 1"
    assert not functions._claims("sparse_linear_regression", found, 6)[1].holds
    assert functions._claims("sparse_linear_regression", found, 4, "; told")[0].measured == "1.00 x; told"
    trees = curves(looped=[1.0, 0.2], decision_tree_signs=[1.0, 0.3], xgboost=[1.0, 0.25])
    assert functions._claims("decision_tree", trees, 1)[1].holds
    trees["xgboost"] = Measured(single([1.0, 0.1]), [], 0.0)
    assert not functions._claims("decision_tree", trees, 1)[1].holds
    assert functions._claims("decision_tree", trees, 1)[0].holds is None


def test_every_baseline_of_a_task_has_a_colour_of_its_own():
    colours = COLORS["baseline"]
    assert len(set(colours)) == len(colours) >= max(len(baselines_for(task)) for task in functions.TASKS)


SMALL_MODELS = ("looped", "unlooped L=1", "unlooped L=4", "unlooped L=12")


def shifted(names, at_d=None, **errors):
    """Curves up to 10 examples: 0.5 from the first on but where `errors` has another value; another one at 5 examples."""
    values = {name: [1.0] + [errors.get(name.replace(" ", "_").replace("=", ""), 0.5)] * 10 for name in names}
    for name, value in (at_d or {}).items():
        values[name][5] = value
    return curves(**values)


def test_shift_claims():
    lab = Lab("small", "x")
    found = {name: shifted(SMALL_MODELS) for name in SHIFTS}
    found["x_times_2"] = shifted(SMALL_MODELS, unlooped_L12=0.1)
    found["w_times_1/3"] = shifted(SMALL_MODELS, unlooped_L4=0.1)
    found["skewed"] = shifted(SMALL_MODELS, looped=0.6)
    found["orthogonal_query"] = curves(
        **{name: [1.0, 0.9 if name == "looped" else 0.5] + [math.nan] * 9 for name in SMALL_MODELS}
    )
    found["noisy_output"] = shifted(SMALL_MODELS, {"looped": 0.55, "unlooped L=12": 0.7}, looped=0.9)
    every = shift._claims(found, lab)
    claims = {claim.text.partition(":")[0]: claim.holds for claim in every if not claim.text.startswith("noise")}
    assert claims == {
        "skewed": False,
        "half_subspace": True,
        "random_orthants": True,
        "orthogonal_query": False,
        "overlapping_query": True,
        **{f"{what} scaled by {scale}": False for what in "xw" for scale in ("1/3", "1/2", "2", "3")},  # as near to either
        "x scaled by 2": True,
        "w scaled by 1/3": False,
    }
    noise = {claim.text.partition(": ")[2]: (claim.holds, claim.measured) for claim in every if claim.text.startswith("noise")}
    lower = "the looped model's peak is lower than the deepest one's (here: its error at d examples below unlooped L=12's)"
    like = "at d examples the looped model is like one of few layers (here: nearer to unlooped L=4 than to unlooped L=12)"
    assert noise == {
        lower: (True, "0.55 against 0.7"),
        like: (True, "1.10 x unlooped L=4, 0.79 x unlooped L=12"),
    }, "of the errors at d = 5 examples, and not of the others"
    assert {claim.figure for claim in every if claim.text.startswith("noise")} == {"appendix D"}
    assert all("(here: " in claim.text and "\n" not in claim.text for claim in every)
    found["noisy_output"] = shifted(SMALL_MODELS, {"looped": 0.71, "unlooped L=12": 0.7})
    assert [claim.holds for claim in shift._claims(found, lab) if claim.text.startswith("noise")] == [False, False]
    assert shift.last_measured([1.0, 0.5, math.nan]) == 1


@pytest.mark.parametrize(
    ("lost", "without"),
    [
        ("unlooped L=1", {"skewed", "half_subspace", "random_orthants"}),
        ("unlooped L=4", {"skewed", "half_subspace", "random_orthants", "x scaled", "w scaled", "like one of few"}),
        ("looped", {""}),
    ],
)
def test_shift_claims_without_a_model(lost, without):
    """No verdict on what is about a model that is not there, and one on all the rest."""
    names = [name for name in SMALL_MODELS if name != lost]
    claims = shift._claims({name: shifted(names) for name in SHIFTS}, Lab("small", "x"))
    assert len(claims) == 15
    for claim in claims:
        is_without = any(part in claim.text for part in without)
        assert (claim.holds is None) == is_without, claim
        assert (claim.measured == f"no finite model of {lost}") == is_without


def test_shift_at_paper_has_two_looped_models():
    lab = Lab("paper", "x")
    wanted = shift.runs(lab)
    assert [name for name in wanted if name.startswith("looped")] == ["looped", "looped b=20"]
    name, config = wanted["looped b=20"]
    assert (name, config.model.n_loops, config.window) == ("linear_regression_b20_T15", 20, 15)
    assert wanted["looped"] == ("linear_regression", preset("paper"))
    assert [shift._kind_of(name) for name in ("looped b=20", "unlooped L=4", "least squares")] == ["looped", "twin", "baseline"]
    found = {name: curves(**{one: [0.5] * 41 for one in wanted}) for name in SHIFTS}
    values = [0.5] * 41
    values[20] = 0.6
    found["noisy_output"]["looped b=20"] = Measured(single(values), [], 0.0)
    (claim,) = (one for one in shift._claims(found, lab) if "larger b" in one.text)
    assert claim.text.endswith("the larger b, the lower the peak (here: the error at d examples, b=30 below b=20)")
    assert (claim.holds, claim.measured) == (True, "0.5 against 0.6")


def test_shift_draws_absent_cells_as_absent(folder):
    outcome = run_experiment("shift", quick(folder))
    panel = next(panel for panel in outcome.panels if panel.title == "orthogonal query")
    report = outcome.to_dict()
    for line in panel.lines:
        assert [math.isnan(x) for x in line.curve.mean] == [False, False, True, True, True]
    rows = [line for line in outcome.to_csv().splitlines() if line.startswith("orthogonal query,looped")]
    assert rows[2].split(",")[4:7] == ["", "", ""]
    row = next(row for row in report["table"]["rows"] if row[0] == "orthogonal_query")
    assert row[1] == 1, "the last number of examples to which two dimensions leave an orthogonal query"
    assert all(cell > 0 for cell in row[2:])


# probe


def test_probe_errors_are_means_over_fresh_prompts(tmp_path):
    """Probes that answer 0 at the embedded prompt and after the first loop, 0.5 after the second, against plain numpy."""
    model, lab = icl_model(dtype=torch.float32, n_dims=2, n_points=5, n_loops=2), quick(tmp_path, n_prompts=300)
    task, n_examples = LinearRegression(2), [1, 4]
    probes = Probes(2, 3, n_examples, 16, 2)
    with torch.no_grad():
        for parameter in probes.parameters():
            parameter.zero_()
        probes.b2[1, 2] = 0.5  # of the least-squares weights after the second loop
    got = probe._errors(lab, probes, model, task, n_examples)
    generator = probe.evaluation_stream(0)
    parts = [task.sample(n, 4, generator=generator) for n in (256, 44)]
    xs, ys = (torch.cat([part[i] for part in parts]) for i in (0, 1))
    targets = targets_of(xs, ys, n_examples).numpy()  # [P, K, B, d]
    expected = np.stack([[(targets**2).mean(axis=(2, 3))[p]] * 3 for p in range(2)])  # [P, S, K]
    expected[1, 2] = ((targets[1] - 0.5) ** 2).mean(axis=(1, 2))
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_probe_claims():
    def planted(looped, unlooped, control):
        both = {"looped": looped, "unlooped": unlooped, "looped, control": control, "unlooped, control": control}
        return {name: torch.tensor([values] * 2) for name, values in both.items()}

    claims = probe._claims(planted([0.1, 0.9, 0.2, 0.21], [0.1, 0.8, 0.3, 0.5], [0.1, 1.0, 0.9, 0.9]))
    assert [claim.holds for claim in claims] == [True] * 10, "what the embedded prompt tells is no loop's and no layer's"
    assert claims[0].measured == "1.05 x, 0.9 to 0.21"
    assert claims[1].measured == "1.67 x, 0.8 to 0.3 at 2"
    assert claims[2].measured == "0.21 against 0.3"
    assert claims[4].measured == "0.3 against 0.9"
    claims = probe._claims(planted([1.0, 0.9, 0.2, 0.4], [1.0, 0.8, 0.4, 0.3], [1.0, 1.0, 0.3, 0.9]))
    assert [claim.holds for claim in claims] == [False] * 10
    alone = probe._claims({name: torch.tensor([[1.0, 0.9, 0.2]] * 2) for name in ("looped", "looped, control")})
    assert len(alone) == 4, "nothing is claimed of a model that is not there"


@pytest.mark.parametrize("curve", [[1.0, 0.5, 0.5, 0.5], [1.0, 0.5, 0.47, 0.46], [1.0, 0.5, 0.51, 0.52], [1.0, 0.5, 0.7, 0.9]])
def test_a_flat_or_worsening_probe_does_not_improve(curve):
    found = {name: torch.tensor([curve] * 2) for name in ("looped", "unlooped", "looped, control", "unlooped, control")}
    claims = [claim for claim in probe._claims(found) if "improves" in claim.text or "inner layer" in claim.text]
    assert [claim.holds for claim in claims] == [False] * 4
    assert claims[0].text.endswith("(here: the last below 0.9 x the first and within 1.1 x of the best)")
    assert claims[1].text.endswith("(here: its best below 0.9 x the first, the last above 1.1 x the best)")


def test_probes_at_paper_are_of_as_many_loops_as_layers(folder):
    wanted = probe.runs(Lab("paper", folder))
    (name, config), (_, unlooped) = wanted["looped"], wanted["unlooped"]
    assert (name, config.model.n_loops, config.window, config.loops) == (
        "linear_regression_b20_T15",
        20,
        15,
        Ramp(15, 20, 2, 500),
    )
    assert (unlooped.model.n_core, unlooped.model.n_loops) == (20, 1)
    for other in ("tiny", "small"):
        lab = Lab(other, folder)
        assert probe.runs(lab)["looped"] == ("linear_regression", lab.config())


@pytest.mark.parametrize("unlooped", [False, True])
def test_stage_0_of_the_probes_is_the_embedded_prompt(tmp_path, unlooped):
    changes = dict(n_core=3, n_loops=1, inject="none", state_init="embedding") if unlooped else dict(n_loops=3)
    model = icl_model(std=0.2, dtype=torch.float32, n_dims=2, n_points=5, **changes)
    draw = probe._drawer(quick(tmp_path), model, LinearRegression(2), [1, 4], 6, False)
    states = draw(torch.Generator().manual_seed(0)).states
    pairs = LinearRegression(2).sample(6, 4, generator=torch.Generator().manual_seed(0))
    prompts = interleave(*pairs, keep_last_y=True)
    assert states.shape == (4, 6, 8, 16)
    assert not states.requires_grad
    torch.testing.assert_close(states[0], model.read_in(prompts).detach())
    torch.testing.assert_close(states[1], model.core[0](states[0] + model.positions.weight[:8]).detach())


def test_probe_and_adaptive_measure_every_seed(tmp_path):
    for name in ("probe", "adaptive"):
        runs = {seeds: run_experiment(name, quick(tmp_path, seeds=seeds)) for seeds in ((42,), (7,), (42, 7))}
        first = next(line for line in runs[42, 7].panels[-1].lines if line.label in ("unlooped", "same loops for all"))
        alone = [next(one for one in runs[seed,].panels[-1].lines if one.label == first.label) for seed in (42, 7)]
        assert alone[0].curve.mean != alone[1].curve.mean
        np.testing.assert_allclose(first.by_seed, [one.curve.mean for one in alone])
        np.testing.assert_allclose(first.curve.mean, np.mean(first.by_seed, axis=0))
        assert all(set(line.models_at) == {2} for panel in runs[42, 7].panels for line in panel.lines)
        assert {"linear_regression", "linear_regression, seed 7"} <= set(runs[42, 7].models)
        if name == "adaptive":
            rows = [[row[4:8] for row in outcome.sheet.rows] for outcome in runs.values()]
            np.testing.assert_allclose(rows[2], np.mean(rows[:2], axis=0), rtol=1e-6)


# adaptive


def test_levels_are_what_the_models_can_be_asked():
    def of(task):
        return [(one.task.name, one.difficulty, one.n_live, one.variance) for one in levels(preset("small", task))]

    assert of("linear_regression") == [
        *(("linear_regression", d, d, d) for d in (2, 3, 4, 5)),
        *(("sparse_linear_regression", s, 5, s) for s in (1, 2)),
        *(("noisy_linear_regression", std, 5, 5 + std**2) for std in (0.05, 0.1)),
    ]
    assert of("sparse_linear_regression") == [
        *(("linear_regression", d, d, d) for d in (1, 2)),
        *(("sparse_linear_regression", s, 8, s) for s in (1, 2, 4)),
        *(("noisy_linear_regression", std, 2, 2 + std**2) for std in (0.05, 0.1)),
    ]
    assert of("decision_tree") == [("decision_tree", depth, 4, 1) for depth in (1, 2)]
    assert of("relu_2nn_regression") == [("relu_2nn_regression", hidden, 4, 4) for hidden in (1, 2, 4, 8)]


@pytest.mark.parametrize("task", [*adaptive.TRAINED, *adaptive.OPTIONAL])
def test_every_level_has_the_variance_that_its_errors_are_divided_by(task):
    for one in levels(preset("small", task)):
        ys = one.task.sample(20_000, 1, generator=torch.Generator().manual_seed(1), n_live=one.n_live).ys.double()
        assert ys.square().mean().item() == pytest.approx(one.variance, rel=0.1), one


def test_models_of_other_tasks_are_studied_where_they_are_there(tmp_path, monkeypatch):
    models = {name: icl_model(std=0.1, dtype=torch.float32, n_dims=2, n_points=5, n_loops=4) for name in ("a", "b")}
    for name, model in models.items():
        looped.save_model(model, tmp_path / name)
    given = {"decision_tree": str(tmp_path / "a"), "linear_regression": str(tmp_path / "b")}
    outcome = run_experiment("adaptive", quick(tmp_path, given=given, may_train=False, n_prompts=40))
    assert set(outcome.models) == {"decision_tree", "linear_regression"}
    assert {row[1] for row in outcome.sheet.rows if row[0] == "decision_tree"} == {"all", "decision_tree"}
    assert ["sparse_linear_regression is left out" in note for note in outcome.notes].count(True) == 1


def test_mixed_batches_hold_every_level_at_its_variance():
    some = [
        Level("dimensions", 2, LinearRegression(4), 2),
        Level("non-zero weights", 1, SparseLinearRegression(4, sparsity=1), 4),
    ]
    mixed = list(mixed_batches(some, 6000, 6, seed=1))
    level = torch.cat([one.level for one in mixed])
    xs, ys = (torch.cat([one.pairs[i] for one in mixed]).double() for i in (0, 1))
    assert 2800 < (level == 0).sum() < 3200
    assert (xs[level == 0][..., 2:] == 0).all()
    assert (xs[level == 1][..., 2:] != 0).any()
    for i, one in enumerate(some):
        assert ys[level == i].square().mean().item() == pytest.approx(one.variance, rel=0.1)
    assert torch.equal(torch.cat([one.variance for one in mixed]), torch.tensor([2.0, 1.0], dtype=torch.float64)[level])


def test_loops_and_errors_are_those_of_solve():
    model = icl_model(std=0.1, dtype=torch.float32, n_dims=3, n_points=6)
    some = [Level("dimensions", d, LinearRegression(3), d) for d in (1, 3)]
    predictor = LoopedPredictor(model, n_loops=12)
    (mixed,) = mixed_batches(some, 5, 4, seed=0)
    x, ys = interleave(*mixed.pairs), mixed.pairs.ys[:, -1].double()
    every = model(x, n_loops=12, return_predictions=True)[:, :, -1].double()
    expected = (every - ys[:, None]) ** 2 / mixed.variance[:, None]
    torch.testing.assert_close(fixed_errors(predictor, [mixed]), expected.detach(), rtol=1e-4, atol=1e-7)
    for scope in ("prompt", "prefix"):
        rule = Contraction(tol=0.1, scope=scope)
        used = used_loops(predictor, [mixed], rule)
        result = looped.solve(model, x, n_loops=12, exit=rule, on_stall="exit")
        by_token = result.n_loops_by_token
        loops = result.n_loops.double() if scope == "prompt" else by_token.double().mean(dim=1)
        assert torch.equal(used.loops, loops)
        assert (used.loops < 12).any()
        torch.testing.assert_close(used.error, (result.prediction[:, -1].double() - ys) ** 2 / mixed.variance)


def test_the_same_loops_for_all_need_not_be_whole():
    errors = torch.tensor([[4.0, 2.0, 1.0], [8.0, 6.0, 2.0]], dtype=torch.float64)
    expected = {2.25: [1.75, 5.0], 1.5: [3.0, 7.0], 2.0: [2.0, 6.0], 3.0: [1.0, 2.0], 7.0: [1.0, 2.0], 0.5: [4.0, 8.0]}
    for mean, values in expected.items():
        used = adaptive.Used(torch.tensor([mean - 0.25, mean + 0.25], dtype=torch.float64), errors[:, 0])
        assert adaptive._at(errors, used).tolist() == values


def test_adaptive_compares_at_the_same_mean_cost(tmp_path, monkeypatch):
    looped.save_model(icl_model(std=0.1, dtype=torch.float32, n_dims=2, n_points=5, n_loops=4), tmp_path / "m")
    lab = quick(tmp_path, given={"linear_regression": str(tmp_path / "m")}, may_train=False, n_prompts=40)
    compared = []

    def verdict(errors, others):
        compared.append([errors.mean().item(), others.mean().item()])
        return ("yes", "no", "-")[len(compared) % 3]

    monkeypatch.setattr(adaptive, "_is_smaller", verdict)
    outcome = run_experiment("adaptive", lab)
    assert [row[5:7] for row in outcome.sheet.rows] == compared
    fixed = next(line for line in outcome.panels[-1].lines if line.label == "same loops for all").curve.mean
    assert len(fixed) == 20
    of_all = [row for row in outcome.sheet.rows if row[1] == "all"]
    assert len(of_all) == 2 * len(adaptive.TOLERANCES)
    for _, _, _, _, mean, error, same, whole, kept, kept_same, _ in of_all:
        assert same == pytest.approx(np.interp(mean, range(1, 21), fixed))
        assert whole == pytest.approx(fixed[-1])
        assert (kept, kept_same) == (pytest.approx(whole / error), pytest.approx(whole / same))
    level = torch.cat([mixed.level for mixed in mixed_batches(levels(lab.config()), 40, 5, 0)])
    tasks = [one.task.name for one in levels(lab.config())]
    for way in ("per prompt", "per token"):
        by_task = {row[1]: row for row in outcome.sheet.rows if row[2] == way and row[3] == f"{adaptive.SHOWN:g}"}
        whole_mix = by_task.pop("all")
        assert list(by_task) == list(dict.fromkeys(tasks)), "linear, sparse and noisy"
        shares = [sum(tasks[i] == task for i in level.tolist()) / 40 for task in by_task]
        for place in range(4, 8):  # loops and errors of the tasks add up to those of the mix
            assert sum(share * row[place] for share, row in zip(shares, by_task.values(), strict=True)) == pytest.approx(
                whole_mix[place]
            )
    verdicts = [[row[10] for row in of_all if row[2] == way] for way in ("per prompt", "per token")]
    found = [claim for claim in outcome.claims if "same mean" in claim.text]
    assert [(claim.measured, claim.holds) for claim in found] == [
        (f"at {some.count('yes')} of 5, larger at {some.count('no')}", some.count("yes") > 2.5) for some in verdicts
    ]
    assert all("(here: at more than half of the tolerances, the 90 % interval" in claim.text for claim in found)


def test_a_smaller_error_is_one_beyond_chance():
    errors = torch.rand(400, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(400, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    clear, within = (
        errors + 0.01 + 0.01 * noise,
        errors + 0.0001 + 0.01 * noise,
    )  # a paired difference is seen through the spread of errors
    assert adaptive._is_smaller(errors, clear) == "yes"
    assert adaptive._is_smaller(clear, errors) == "no"
    assert adaptive._is_smaller(errors, within) == "-"
    clear[0] = math.nan
    assert adaptive._is_smaller(errors, clear) == "-"


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
    assert len(capped) == 4
    assert any(capped) == is_capped
