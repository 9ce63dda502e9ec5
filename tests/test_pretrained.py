"""The shipped models are as good as their cards say, on prompts that no test or training has drawn before."""

import json
from pathlib import Path

import pytest
import torch

import looped
from looped.checkpoint import load_model
from looped.cli import EVAL_TOLERANCE
from looped.exits import ROUNDING_LEVEL, Contraction
from looped.icl.baselines import Averaging, KNearestNeighbours, LeastSquares
from looped.icl.evaluate import batches
from looped.icl.prompts import interleave
from looped.icl.settling import rests_on_float32_states
from looped.icl.tasks import LinearRegression
from looped.loop import Status
from looped.pretrained import bundled_models, load_pretrained
from looped.train import TrainConfig, preset

N_PROMPTS = 512


@pytest.fixture(scope="module")
def pairs():
    return next(batches(LinearRegression(5), N_PROMPTS, 11, seed=77, batch_size=N_PROMPTS))


@pytest.fixture(scope="module")
def model():
    return load_pretrained("linear_regression")


def errors(prediction, pairs):
    """Mean normalised squared error by examples."""
    return ((prediction - pairs.ys) ** 2).mean(0) / 5


def test_error_and_fixed_point(model, pairs):
    x = interleave(*pairs)
    every = looped.solve(model, x, n_loops=5 * model.config.n_loops, return_predictions=True).predictions
    trained, far = (errors(every[:, loops - 1], pairs)[10] for loops in (model.config.n_loops, 5 * model.config.n_loops))
    assert trained <= 0.003
    assert far <= 1.15 * trained
    for baseline in (KNearestNeighbours(3), Averaging()):
        assert trained <= errors(baseline.predict(*pairs), pairs)[10] / 10


def test_the_default_exit_costs_at_most_one_percent(model, pairs):
    x = interleave(*pairs)
    limit = 5 * model.config.n_loops
    full = looped.solve(model, x, n_loops=limit)
    exited = looped.solve(model, x, n_loops=limit, exit=Contraction(tol=EVAL_TOLERANCE), on_stall="exit")
    full_error, error = errors(full.prediction, pairs), errors(exited.prediction, pairs)
    assert abs(error.mean() / full_error.mean() - 1) <= 0.01
    assert abs(error[10] / full_error[10] - 1) <= 0.01
    assert exited.n_loops.double().mean() < 0.75 * limit


def test_states_come_to_rest(model, pairs):
    x = interleave(pairs.xs[:128], pairs.ys[:128])
    rest = Contraction(tol=ROUNDING_LEVEL["fp32"])
    for options in ({}, {"on_stall": "damp"}, {"accelerate": "anderson"}):
        result = looped.solve(model, x, n_loops=300, exit=rest, **options)
        assert (result.status == Status.CONVERGED).double().mean() >= 0.95
    assert rests_on_float32_states(model, x[:64], 600).double().mean() >= 0.9


@pytest.mark.parametrize(("name", "most"), [("decision_tree", 0.1), ("relu_2nn_regression", 0.12)])
def test_functions_that_are_not_linear(name, most):
    task = preset("small", name).make_task()
    xs, ys = next(batches(task, N_PROMPTS, 21, seed=77, batch_size=N_PROMPTS))

    def error(prediction):
        return ((prediction - ys) ** 2).mean(0)[20] / task.error_scale

    found = error(looped.solve(load_pretrained(name), interleave(xs, ys)).prediction)
    assert found <= most
    for baseline in (KNearestNeighbours(3), LeastSquares()):
        assert found <= error(baseline.predict(xs, ys)) / 2


def test_injection_buys_something(model, pairs):
    """The weight-tied twin, trained the same way, is as good at its trained loops, and drifts away past them."""
    twin = load_pretrained("linear_regression_tied")
    assert (twin.config.inject, twin.config.state_init) == ("none", "embedding")
    x = interleave(*pairs)
    trained, limit = twin.config.n_loops, 5 * twin.config.n_loops
    near, far = (errors(looped.solve(twin, x, n_loops=n).prediction, pairs)[10] for n in (trained, limit))
    assert near <= 0.003
    assert far > 2 * near
    assert far > 2 * errors(looped.solve(model, x, n_loops=limit).prediction, pairs)[10]


def test_one_layer_is_as_good_as_twelve(model, pairs):
    """At its trained loops, with 10 examples of 5 dimensions: at most 1.3 times the twin's error, with 1/8 of its weights."""
    twin = load_pretrained("linear_regression_unlooped")
    x = interleave(*pairs)
    one, twelve = (errors(looped.solve(each, x).prediction, pairs)[10] for each in (model, twin))
    assert one <= 1.3 * twelve
    sizes = [sum(parameter.numel() for parameter in each.parameters()) for each in (model, twin)]
    assert 8 * sizes[0] <= sizes[1]


def test_every_model_has_its_card_and_the_configuration_it_was_trained_with():
    models = bundled_models()
    names = ("linear_regression", "sparse_linear_regression")
    assert {
        *(name + twin for name in names for twin in ("", "_tied", "_unlooped")),
        "decision_tree",
        "relu_2nn_regression",
        "relu_2nn_regression_unlooped",
    } <= set(models)
    assert sum(f.stat().st_size for folder in models.values() for f in Path(folder).iterdir()) < 6_000_000
    for name, folder in models.items():
        card = (Path(folder) / "README.md").read_text()
        config = TrainConfig.from_dict(json.loads((Path(folder) / "train.json").read_text()))
        twins = {twin: name.endswith(f"_{twin}") for twin in ("tied", "unlooped")}
        assert config == preset("small", name.removesuffix("_tied").removesuffix("_unlooped"), **twins)
        assert config.model == load_pretrained(name).config
        assert f"seed {config.seed}" in card
        assert f"{config.n_steps:,} steps" in card
        assert "looped train --preset small" in card
        assert all(p.dtype == torch.float32 for p in load_pretrained(name).parameters())
        in_file = {p.dtype for p in load_model(folder).parameters()}
        assert in_file == {torch.float16 if twins["unlooped"] else torch.float32}
    with pytest.raises(ValueError, match="did you mean 'linear_regression'"):
        load_pretrained("linear_regresion")
