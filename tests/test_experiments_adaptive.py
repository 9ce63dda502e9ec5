"""The experiment adaptive: levels, mixed batches, and loops at the same mean cost."""

import math

import numpy as np
import pytest
import torch
from labs import quick
from models import icl_model

import looped
from looped.exits import Contraction
from looped.experiments import (
    adaptive,
    run_experiment,
)
from looped.experiments.adaptive import Level, fixed_errors, levels, mixed_batches, used_loops
from looped.icl.predictor import LoopedPredictor
from looped.icl.prompts import interleave
from looped.icl.tasks import LinearRegression, SparseLinearRegression
from looped.train import preset


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
