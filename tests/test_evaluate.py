"""Evaluation: errors, intervals, streaming, loops used and how states settle."""

import csv
import io
import json
import logging
import math
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from models import icl_model

import looped
from looped.exits import Contraction, Relative
from looped.icl import curves
from looped.icl import evaluate as evaluation_module
from looped.icl.baselines import Averaging, LeastSquares
from looped.icl.curves import RunningCurve
from looped.icl.evaluate import Evaluation, EvaluationInterrupted, batches, evaluate, evaluation_stream
from looped.icl.predictor import LoopedPredictor
from looped.icl.prompts import interleave
from looped.icl.settling import Settling, Traced, first_rest, rests_on_float32_states
from looped.icl.tasks import LinearRegression, SparseLinearRegression, make_task
from looped.loop import Status


@dataclass
class Always:
    """Predicts one number; NaN at the places given."""

    value: float
    name: str = "always"
    missing: tuple = ()
    cost: str = "cheap"
    why_unavailable: str | None = None

    def predict(self, xs, ys):
        self.shapes = [*getattr(self, "shapes", []), tuple(xs.shape)]
        prediction = torch.full_like(ys, self.value)
        prediction[:, list(self.missing)] = math.nan
        return prediction


@pytest.mark.parametrize("n_prompts", [1, 100])
def test_every_prompt_once_with_a_partial_last_batch(n_prompts):
    task = SparseLinearRegression(4, sparsity=2)
    predictor = Always(0.5)
    result = evaluate(task, [predictor], n_prompts=n_prompts, n_points=3, seed=3, batch_size=64)
    assert sum(shape[0] for shape in predictor.shapes) == n_prompts
    pairs = task.sample(n_prompts, 3, generator=evaluation_stream(3))
    expected = ((0.5 - pairs.ys) ** 2 / 2).mean(0)  # the error scale of the task is its sparsity
    curve = result.scores["always"].error_by_examples
    torch.testing.assert_close(torch.tensor(curve.mean), expected.double(), check_dtype=False)
    assert curve.n_prompts == n_prompts
    assert math.isnan(curve.low[0]) == (n_prompts == 1)


def test_batch_size_does_not_change_prompts_or_scores():
    task = LinearRegression(3)
    one = torch.cat([pairs.xs for pairs in batches(task, 10, 4, 7, batch_size=10)])
    many = torch.cat([pairs.xs for pairs in batches(task, 10, 4, 7, batch_size=3)])
    assert torch.equal(one, many)
    model = LoopedPredictor(icl_model(std=0.1, dtype=torch.float32), exit=Contraction(), n_loops=20)
    a, b = (
        evaluate(task, [model, LeastSquares()], n_prompts=10, n_points=4, batch_size=size, n_loops_settling=25).to_dict()
        for size in (10, 3)
    )
    assert a["predictors"]["looped"]["loops_used"] == b["predictors"]["looped"]["loops_used"]
    for name in ("looped", "least_squares"):
        np.testing.assert_allclose(*(x["predictors"][name]["error_by_examples"]["mean"] for x in (a, b)), rtol=1e-5)


def test_evaluation_draws_no_training_prompts():
    task = LinearRegression(3)
    for seed in (0, 7, 42):
        training = task.sample(4, 5, generator=torch.Generator().manual_seed(seed))
        evaluation = next(batches(task, 4, 5, seed, 4))
        assert not (training.xs == evaluation.xs).any()
    assert not torch.equal(next(batches(task, 4, 5, 0, 4)).xs, next(batches(task, 4, 5, 1, 4)).xs)
    with pytest.raises(ValueError, match="must lie in"):
        evaluate(task, [], n_points=3, seed=2**32)


def test_wrong_predictions_are_refused_and_pairs_are_protected():
    @dataclass
    class Wrong(Always):
        def predict(self, xs, ys):
            prediction = ys[:, :1].clone()
            ys.zero_()
            xs.zero_()
            return prediction

    with pytest.raises(ValueError, match=r"always predicts \[8, 1\] for ys \[8, 3\]"):
        evaluate(LinearRegression(2), [Wrong(0.0)], n_prompts=8, n_points=3)
    pairs = []

    class Clearing(Always):
        def predict(self, xs, ys):
            pairs.append(ys.clone())
            return ys.zero_()

    evaluate(LinearRegression(2), [Clearing(0.0, "a"), Clearing(0.0, "b")], n_prompts=8, n_points=3)
    assert torch.equal(*pairs)
    for changes, message in (
        (dict(mask_kind="full"), "sees its own answer"),
        (dict(read_stride=1), "every second token"),
        (dict(n_loops=0), "n_loops is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            LoopedPredictor(icl_model(**changes))
    for options, message in (
        (dict(on_stall="damp"), "give another, such as"),
        (dict(on_stall="damp", exit=Contraction(tol=0)), "set tol above 0"),
        (dict(exit=Contraction(min_loops=9), n_loops=8), "min_loops=9 is more"),
    ):
        with pytest.raises(ValueError, match=message):
            LoopedPredictor(icl_model(), **options)
    assert LoopedPredictor(icl_model(), exit="contraction", accelerate="anderson").exit_to_dict()["accelerate"] == "anderson(3)"


def test_impossible_cells_are_absent_not_zero():
    result = evaluate(LinearRegression(4), [Always(0.0, missing=(4, 5, 6))], n_prompts=20, n_points=7)
    cells = result.to_dict()["predictors"]["always"]["error_by_examples"]["mean"]
    assert cells[4:] == [None] * 3
    assert all(cell > 0 for cell in cells[:4])
    rows = list(csv.reader(io.StringIO(result.to_csv())))
    assert rows[0] == ["predictor", "by", "at", "error", "low", "high", "n_prompts"]
    assert [row[3] == "" for row in rows[1:]] == [False] * 4 + [True] * 3
    assert "NaN" not in json.dumps(result.to_dict())


def test_predictions_of_a_model_that_are_not_finite_are_counted_and_told():
    """Apart from those that a predictor does not make by design."""
    model = icl_model(dtype=torch.float32, n_loops=2)
    with torch.no_grad():
        model.read_out.weight.fill_(math.nan)
    result = evaluate(
        LinearRegression(3), [LoopedPredictor(model), Always(0.0, missing=(4,))], n_prompts=5, n_points=6, n_loops_settling=0
    )
    scores = result.to_dict()["predictors"]
    assert scores["looped"]["error_by_examples"]["n_not_finite"] == [5] * 6
    assert scores["looped"]["error_by_loops"]["n_not_finite"] == [5] * 10
    assert scores["always"]["error_by_examples"]["n_not_finite"] == [0] * 6
    assert scores["always"]["error_by_examples"]["n_missing"] == [0, 0, 0, 0, 5, 0]
    assert result.remarks() == ["looped: not finite for 5 of 5 prompts with 0 examples; its means are of the others"]


def test_slow_and_missing_predictors_are_reported(caplog, monkeypatch):
    monkeypatch.setattr(evaluation_module, "SLOW_PROMPTS", 5)
    slow, missing = Always(0.0, "slow", cost="slow"), Always(0.0, "missing", why_unavailable="missing: pip install it")
    with caplog.at_level(logging.WARNING):
        result = evaluate(LinearRegression(2), [slow, missing, Always(0.0)], n_prompts=12, n_points=3, batch_size=4)
    assert [shape[0] for shape in slow.shapes] == [4, 1]
    assert result.scores["slow"].error_by_examples.n_prompts == 5
    assert "missing" not in result.scores
    assert "left out: missing: pip install it" in caplog.text
    with pytest.raises(ValueError, match="names of their own"):
        evaluate(LinearRegression(2), [Always(0.0), Always(1.0)], n_points=3)
    with pytest.raises(ValueError, match="n_prompts=0"):
        evaluate(LinearRegression(2), [], n_prompts=0, n_points=3)


# Intervals ------------------------------------------------------------------------------------------------------------


def test_bootstrap_interval_covers_as_it_says():
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(40):
        running = RunningCurve()
        running.add(torch.randn(200, 5, generator=generator, dtype=torch.float64) + 3)
        curve = running.curve()
        hits += sum(low <= 3 <= high for low, high in zip(curve.low, curve.high, strict=True))
        width = np.array(curve.high) - np.array(curve.low)
        np.testing.assert_allclose(width, 2 * 1.645 / math.sqrt(200), rtol=0.35)
    assert 0.82 < hits / 200 < 0.97  # 90 %


def test_memory_is_bounded_and_the_mean_stays_exact(monkeypatch):
    monkeypatch.setattr(curves, "MAX_BLOCKS", 64)
    rows = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    running = RunningCurve()
    for part in rows.split(37):
        running.add(part)
        assert len(running.sums) <= 64
    curve = running.curve()
    torch.testing.assert_close(torch.tensor(curve.mean, dtype=torch.float64), rows.mean(0))
    width = np.array(curve.high) - np.array(curve.low)
    np.testing.assert_allclose(width, 2 * 1.645 / math.sqrt(1000), rtol=0.4)
    assert RunningCurve().curve().mean == []


def interrupting(monkeypatch, owner, method, at_call):
    """Ctrl-C in a call of a method, when it has done its work."""
    calls, plain = [], getattr(owner, method)

    def call(*arguments, **options):
        calls.append(plain(*arguments, **options))
        if len(calls) == at_call:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(owner, method, call)


@pytest.mark.parametrize("max_blocks", [4, 4096])
@pytest.mark.parametrize(
    ("owner", "method", "at_call"),
    [(LeastSquares, "predict", 3), (LoopedPredictor, "run", 10), (Settling, "add", 3), (RunningCurve, "add", 13)],
)
def test_an_interrupt_keeps_whole_batches(owner, method, at_call, max_blocks, monkeypatch):
    monkeypatch.setattr(curves, "MAX_BLOCKS", max_blocks)
    model = LoopedPredictor(icl_model(std=0.05, dtype=torch.float32), exit=Contraction(tol=0.01), n_loops=20)
    options = dict(n_points=4, batch_size=3, n_loops_settling=250)
    few = evaluate(LinearRegression(3), [model, LeastSquares(), Averaging()], n_prompts=6, **options)
    assert few.scores["looped"].looped["settling"]["anderson"]["mean_loops"]  # some come to rest
    with monkeypatch.context() as patch:
        interrupting(patch, owner, method, at_call)
        with pytest.raises(EvaluationInterrupted, match=r"interrupted after 6 of 11 prompts$") as stopped:
            evaluate(LinearRegression(3), [model, LeastSquares(), Averaging()], n_prompts=11, **options)
    assert stopped.value.result.to_dict() == few.to_dict()
    again = pickle.loads(pickle.dumps(stopped.value))
    assert str(again) == str(stopped.value)
    assert again.result.to_dict() == few.to_dict()


def test_an_interrupt_of_the_first_batch_keeps_those_that_are_through(monkeypatch):
    task, three = LinearRegression(3), [Always(0.5), LeastSquares(), Averaging()]
    interrupting(monkeypatch, LeastSquares, "predict", 1)
    with pytest.raises(EvaluationInterrupted, match=r"after 4 of 20 prompts \(without least_squares, averaging\)$") as stopped:
        evaluate(task, three, n_prompts=20, n_points=4, batch_size=4)
    assert stopped.value.result.to_dict() == evaluate(task, three[:1], n_prompts=4, n_points=4).to_dict()
    interrupting(monkeypatch, Always, "predict", 1)
    with pytest.raises(KeyboardInterrupt, match="interrupted before any of 20 prompts was scored"):
        evaluate(task, three, n_prompts=20, n_points=4, batch_size=4)
    interrupting(monkeypatch, RunningCurve, "curve", 1)
    with pytest.raises(EvaluationInterrupted, match="after 20 of 20 prompts"):
        evaluate(task, three, n_prompts=20, n_points=4, batch_size=4)


# Looped models --------------------------------------------------------------------------------------------------------


def test_a_looped_models_report_is_what_solve_gives():
    model = icl_model(std=0.12, seed=5, dtype=torch.float32)
    task = LinearRegression(3)
    rule = Relative(tol=1e-2)
    predictor = LoopedPredictor(model, exit=rule, n_loops=25)
    result = evaluate(task, [predictor], n_prompts=9, n_points=4, seed=1, batch_size=4, n_loops_settling=40)
    pairs = task.sample(9, 4, generator=evaluation_stream(1))
    x = interleave(*pairs)
    solved = looped.solve(model, x, exit=rule, n_loops=25)
    report = result.to_dict()["predictors"]["looped"]
    errors = lambda p: ((p - pairs.ys) ** 2 / 3).mean(0).tolist()  # noqa: E731
    np.testing.assert_allclose(report["error_by_examples"]["mean"], errors(solved.prediction), rtol=1e-4)
    assert report["mean_loops"] == solved.n_loops.double().mean().item()
    assert sum(report["loops_used"].values()) == 9
    assert report["exit"]["rule"] == "relative"
    assert report["exit"]["tol"] == 1e-2
    assert report["n_loops_trained"] == 6
    by_loops = report["error_by_loops"]["mean"]
    assert len(by_loops) == 30  # 5 times the trained loops
    for t in (1, 6, 30):
        at_t = errors(looped.solve(model, x, n_loops=t).prediction)
        np.testing.assert_allclose(by_loops[t - 1], at_t[-1], rtol=1e-4)
    np.testing.assert_allclose(
        report["error_at_trained_loops"]["mean"], errors(looped.solve(model, x, n_loops=6).prediction), rtol=1e-4
    )
    assert result.to_dict()["n_loops_trained"] == 6
    bare = evaluate(task, [predictor], n_prompts=9, n_points=4, seed=1, batch_size=4, n_loops_settling=0).to_dict()
    np.testing.assert_allclose(bare["predictors"]["looped"]["error_by_loops"]["mean"], by_loops, rtol=1e-4)
    assert "settling" not in bare["predictors"]["looped"]


def test_settling_counts_rest_and_cycles():
    model = icl_model(std=0.05, dtype=torch.float32)  # contracts
    xs, ys = LinearRegression(3).sample(6, 4, generator=torch.Generator().manual_seed(0))
    study = Settling(LoopedPredictor(model), 250)
    plain = study.add(xs[:4], ys[:4])
    study.add(xs[4:], ys[4:])
    report = study.report()
    assert plain.predictions.shape == (4, 250, 4)
    for kind in ("plain", "damped", "anderson"):
        assert report[kind]["rounding"] == 1.0
        assert report[kind]["mean_loops"] < 200
    on_grid = rests_on_float32_states(model, interleave(xs, ys), 250).double().mean().item()
    assert report["float32_states"] == {"bitwise": on_grid, "n_prompts": 6}
    assert on_grid > 0
    assert np.array(report["change_by_loops"]).shape == (250, len(report["quantiles"]))
    residual = looped.solve(model, interleave(xs, ys), n_loops=3).residual
    np.testing.assert_allclose(report["change_by_loops"][2][-1], residual.max().item(), rtol=1e-3)

    cycling = icl_model(std=0.05, dtype=torch.float32)
    with torch.no_grad():
        cycling.final_norm.weight *= -3  # the state changes its sign every loop
    study = Settling(LoopedPredictor(cycling), 60)
    study.add(xs, ys)
    report = study.report()
    assert report["plain"] == {"rounding": 0.0, "bitwise": 0.0, "mean_loops": None}
    assert report["change_by_loops"][-1][0] > 1.0
    assert report["damped"] == {"rounding": 0.0, "mean_loops": None}


def test_first_rest_needs_two_in_a_row():
    changes = torch.tensor([[1.0, 0.1, 1.0, 0.1, 0.1], [1.0, 1.0, 0.1, 1.0, 0.1], [0.1, 0.1, 1.0, 1.0, 1.0]])
    found, loops = first_rest(changes, 0.5)
    assert found.tolist() == [True, False, True]
    assert loops.tolist() == [5, 5, 2]
    assert first_rest(torch.tensor([[1.0, 0.0, 1.0]]), 0.5)[1].tolist() == [2]  # no change at all is rest at once


def test_float32_states_agree_with_rounding_by_hand():
    model = icl_model(std=0.1, dtype=torch.float32)
    x = torch.randn(5, 7, 3)
    exact = icl_model(std=0.1, dtype=torch.float32).double()
    for n_loops in (3, 80):
        P = exact.embed(x.double())
        Y = torch.zeros_like(P)
        for _ in range(n_loops):
            before, Y = Y, exact.step(Y, P).float().double().detach()
        assert rests_on_float32_states(model, x, n_loops).tolist() == (before == Y).flatten(1).all(1).tolist()


def test_traced_rule_changes_nothing():
    model, x = icl_model(), torch.randn(3, 7, 3)
    trace = Traced()
    traced, plain = (looped.solve(model, x, n_loops=9, exit=rule, backend="eager") for rule in (trace, None))
    assert torch.equal(traced.y, plain.y)
    assert traced.status.tolist() == [Status.MAX_LOOPS] * 3
    assert len(trace.changes) == 9
    torch.testing.assert_close(trace.changes[-1], plain.residual)


def test_files_hold_what_the_evaluation_says(tmp_path):
    result = evaluate(LinearRegression(2), [LeastSquares(), Averaging()], n_prompts=20, n_points=5)
    result.save(tmp_path / "new" / "folder")
    read = json.loads((tmp_path / "new" / "folder" / "evaluation.json").read_text())
    assert read == json.loads(json.dumps(result.to_dict()))
    assert {"task", "n_prompts", "n_loops_trained", "predictors"} <= set(read)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "new" / "folder" / "evaluation.csv").read_text())))
    assert len(rows) == 10
    assert float(rows[2]["error"]) == read["predictors"]["least_squares"]["error_by_examples"]["mean"][2]
    assert isinstance(result, Evaluation)


def test_an_evaluation_of_a_task_with_numbers_of_numpy_is_saved(tmp_path):
    task = make_task("sparse_linear_regression", np.int64(3), sparsity=np.int32(2))
    evaluate(task, [LeastSquares()], n_prompts=2, n_points=3, seed=0).save(tmp_path)
    assert json.loads((tmp_path / "evaluation.json").read_text())["task_options"] == {"sparsity": 2}
    assert make_task("noisy_linear_regression", 3, std=np.float32(0.5)).options == {"std": 0.5}
    for name, wrong in (("sparsity", 1.5), ("sparsity", True), ("sparsity", "2")):
        with pytest.raises(ValueError, match=f"{name}=.* must be an integer"):
            make_task("sparse_linear_regression", 3, **{name: wrong})
    with pytest.raises(ValueError, match="std='x' must be a number"):
        make_task("noisy_linear_regression", 3, std="x")
