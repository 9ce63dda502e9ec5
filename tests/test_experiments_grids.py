"""The grids of loops-and-window, sample-efficiency, architecture and sparsity, and functions: runs and claims."""

import dataclasses

import pytest
import torch
from labs import curves, quick
from models import icl_model

from looped.experiments import (
    Lab,
    architecture,
    functions,
    run_experiment,
    sparsity,
)
from looped.experiments import loops_and_window as grid
from looped.experiments import sample_efficiency as sets
from looped.experiments.measure import Measured, single
from looped.icl.baselines import baselines_for
from looped.icl.evaluate import batches
from looped.icl.predictor import LoopedPredictor
from looped.icl.tasks import LinearRegression
from looped.report.outcomes import COLORS
from looped.train import Ramp, preset


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
    outcome = run_experiment("loops-and-window", quick(folder / "diverging", seeds=[7]))
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
    found = curves(looped=[1.0, 0.5, 0.3], unlooped=[1.0, 0.5, 0.3], lasso=[1.0, 0.6, 0.29])
    assert [claim.holds for claim in functions._claims("sparse_linear_regression", found)] == [True]
    claim = functions._below_lasso(found)
    assert (claim.measured, claim.holds) == ("1: 0.5 against 0.6, 2: 0.3 against 0.29, on 0 prompts", False)
    assert functions._below_lasso(curves(looped=[1.0, 0.5], lasso=[0.9, 0.6])).holds, "without examples is no claim"
    assert functions._below_lasso(curves(looped=[1.0, 0.5])).holds is None
    unmeasured = functions._claims("decision_tree", curves(xgboost=[1.0, 0.3]))
    assert [(claim.measured, claim.holds) for claim in unmeasured] == [("-", None)] * 2
    trees = curves(looped=[1.0, 0.2], decision_tree_signs=[1.0, 0.3], xgboost=[1.0, 0.25])
    assert functions._claims("decision_tree", trees)[1].holds
    trees["xgboost"] = Measured(single([1.0, 0.1]), [], 0.0)
    assert not functions._claims("decision_tree", trees)[1].holds
    assert functions._claims("decision_tree", trees)[0].holds is None


def test_few_examples_are_held_against_lasso_on_more_prompts(tmp_path, monkeypatch):
    """The bundled model's 8 dimensions: 1, 2 and 3 examples, on 8 times the prompts, and no other baseline."""
    monkeypatch.setattr(functions, "TASKS", ("sparse_linear_regression",))
    lab = Lab("small", tmp_path, may_train=False, n_prompts=40, progress=False)
    outcome = run_experiment("functions", lab)
    panel = next(panel for panel in outcome.panels if "few examples" in panel.title)
    assert [(line.label, list(line.xs), line.curve.n_prompts) for line in panel.lines] == [
        (label, [0, 1, 2, 3], 320) for label in ("looped", "unlooped", "lasso")
    ]
    (claim,) = (claim for claim in outcome.claims if "lasso" in claim.text)
    lines = {line.label: line.curve.mean for line in panel.lines}
    pairs = ", ".join(f"{i}: {lines['looped'][i]:.3g} against {lines['lasso'][i]:.3g}" for i in (1, 2, 3))
    assert claim.measured == f"{pairs}, on 320 prompts"


def test_every_baseline_of_a_task_has_a_colour_of_its_own():
    colours = COLORS["baseline"]
    assert len(set(colours)) == len(colours) >= max(len(baselines_for(task)) for task in functions.TASKS)
