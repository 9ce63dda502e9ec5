"""In-context baselines against other implementations, one prefix at a time, and the promises they share."""

import itertools
import math
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge as SklearnRidge
from sklearn.neighbors import KNeighborsRegressor
from sklearn.tree import DecisionTreeRegressor
from torch import Tensor

from looped.icl.baselines import (
    BASELINES,
    LASSO_ALPHAS,
    Averaging,
    Baseline,
    DecisionTreeBaseline,
    GradientDescentNetwork,
    KNearestNeighbours,
    Lasso,
    LeastSquares,
    Ridge,
    XGBoost,
    baselines_for,
    make_baseline,
)
from looped.icl.tasks import TASKS, Pairs, make_task

ALL = (
    LeastSquares(),
    Ridge(alpha=0.5),
    KNearestNeighbours(),
    Averaging(),
    GradientDescentNetwork(hidden=16, n_steps=20, batch_size=4),
    Lasso(alpha=0.05),
    DecisionTreeBaseline(),
    DecisionTreeBaseline(max_depth=2),
    XGBoost(n_estimators=5),
)
every_baseline = pytest.mark.parametrize("baseline", ALL, ids=lambda b: b.name)
devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)

# Predictions are float64 sums rounded to float32: half a unit in the last place, and the same again where a library may
# choose the order of its sums by the number of prompts.
ROUNDING = {"rtol": 2.0**-23, "atol": 1e-10, "equal_nan": True}


@pytest.fixture(autouse=True)
def _skip_missing_package(request: pytest.FixtureRequest) -> None:
    baseline = request.node.callspec.params.get("baseline") if hasattr(request.node, "callspec") else None
    if isinstance(baseline, Baseline) and not baseline.is_available():
        pytest.skip(str(baseline.why_unavailable))


def pairs(n_prompts: int = 3, n_points: int = 11, n_dims: int = 5, task: str = "relu_2nn_regression", seed: int = 0) -> Pairs:
    return make_task(task, n_dims).sample(n_prompts, n_points, generator=torch.Generator().manual_seed(seed))


def per_prefix(xs: Tensor, ys: Tensor, predict: Callable[[np.ndarray, np.ndarray, np.ndarray], float]) -> np.ndarray:
    """The oracle loop: predict(X [i, d], y [i], x_i [d]) for every prompt and point, 0 at the first."""
    X, y = xs.double().numpy(), ys.double().numpy()
    out = np.zeros(y.shape)
    for b, i in itertools.product(range(y.shape[0]), range(1, y.shape[1])):
        out[b, i] = predict(X[b, :i], y[b, :i], X[b, i])
    return out


def weights(baseline: Baseline, X: np.ndarray, y: np.ndarray) -> np.ndarray:
    """w [d] of a linear baseline fitted to X [i, d], y [i]: its predictions at the unit vectors, one prompt each."""
    n_pairs, n_dims = X.shape
    xs = torch.cat([torch.tensor(X).expand(n_dims, -1, -1), torch.eye(n_dims, dtype=torch.float64)[:, None]], dim=1)
    ys = torch.cat([torch.tensor(y), torch.tensor([math.nan])]).expand(n_dims, -1)
    return baseline.predict(xs, ys)[:, n_pairs].double().numpy()


# Least squares


@pytest.mark.parametrize(
    ("X", "y", "w"),
    [
        ([[1, 2, 3], [1, 2, 3]], [1, 1], [1 / 14, 2 / 14, 3 / 14]),
        ([[1, 2, 3], [4, 5, 6], [7, 8, 9]], [1, 4, 7], [5 / 6, 1 / 3, -1 / 6]),
        ([[0, 2, 0]], [3], [0, 1.5, 0]),
        ([[1, 0, 0], [1, 0, 0], [0, 0, 2]], [1, 3, 4], [2, 0, 2]),  # repeated x, two answers: their mean
        ([[0, 0, 0], [0, 0, 0]], [1, 2], [0, 0, 0]),
    ],
)
@devices
def test_least_squares_has_minimum_norm_where_rank_is_lost(X: list, y: list, w: list, device: str) -> None:
    xs, queries = torch.tensor(X, dtype=torch.float32), torch.eye(3)[:, None]
    prompts = torch.cat([xs.expand(3, -1, -1), queries], dim=1).to(device)
    ys = torch.tensor([*y, math.nan], device=device).expand(3, -1)
    predictions = LeastSquares().predict(prompts, ys)
    assert predictions.device.type == device
    np.testing.assert_allclose(predictions[:, -1].cpu(), w, atol=1e-5)


@pytest.mark.parametrize(("n_points", "n_dims"), [(11, 5), (7, 11), (3, 1), (41, 20)])
@pytest.mark.parametrize("repeats", [1, 3])
@devices
def test_least_squares_equals_numpy(n_points: int, n_dims: int, repeats: int, device: str) -> None:
    xs, ys = pairs(3, n_points, n_dims)
    xs = xs[:, [i - i % repeats for i in range(n_points)]]  # every x `repeats` times, with a y of its own each time

    def oracle(X: np.ndarray, y: np.ndarray, query: np.ndarray) -> float:
        w = np.linalg.lstsq(X, y, rcond=np.finfo(np.float32).eps * max(X.shape))[0]
        return float(query @ w)

    predictions = LeastSquares().predict(xs.to(device), ys.to(device)).cpu()
    np.testing.assert_allclose(predictions, per_prefix(xs, ys, oracle), rtol=1e-6, atol=1e-6)


def test_least_squares_keeps_a_rank_lost_to_rounding_lost() -> None:
    xs, _ = pairs(20, 4, 3)
    xs[:, 2] = xs[:, 0] + xs[:, 1]  # but for its last bits
    ys = (xs @ torch.tensor([1.0, -2.0, 0.5])).float()
    without = LeastSquares().predict(xs[:, [0, 1, 3]], ys[:, [0, 1, 3]])
    np.testing.assert_allclose(LeastSquares().predict(xs, ys)[:, 3], without[:, 2], rtol=1e-3, atol=1e-3)


def test_least_squares_solves_noiseless_regression_from_d_pairs_on() -> None:
    xs, ys = pairs(50, 9, 4, task="linear_regression")
    errors = (LeastSquares().predict(xs, ys) - ys).abs()
    assert errors[:, 4:].max() < 1e-3
    assert (errors[:, :4] > 1e-3).all()


# Ridge, nearest neighbours, averaging


@pytest.mark.parametrize("alpha", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize(("n_points", "n_dims"), [(11, 5), (7, 11), (3, 1)])
@devices
def test_ridge_equals_scikit_learn(alpha: float, n_points: int, n_dims: int, device: str) -> None:
    xs, ys = pairs(3, n_points, n_dims)
    xs[1, 2] = xs[1, 1]
    expected = per_prefix(
        xs, ys, lambda X, y, query: float(query @ SklearnRidge(alpha=alpha, fit_intercept=False, solver="svd").fit(X, y).coef_)
    )
    predictions = Ridge(alpha=alpha).predict(xs.to(device), ys.to(device)).cpu()
    np.testing.assert_allclose(predictions, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("k", [1, 3, 6, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nearest_neighbours_equal_scikit_learn(k: int, dtype: torch.dtype) -> None:
    xs, ys = pairs(3, 13, 4)

    def oracle(X: np.ndarray, y: np.ndarray, query: np.ndarray) -> float:
        return float(KNeighborsRegressor(n_neighbors=min(k, len(y))).fit(X, y).predict(query[None])[0])

    predictions = KNearestNeighbours(k).predict(xs.to(dtype), ys.to(dtype))
    np.testing.assert_allclose(predictions, per_prefix(xs, ys, oracle), rtol=1e-6)


def test_nearest_neighbours_at_equal_distance_are_the_earliest() -> None:
    xs = torch.tensor([[[1.0], [-1.0], [1.0], [-1.0], [5.0], [0.0]]])
    ys = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 0.0]])
    assert KNearestNeighbours(k=3).predict(xs, ys)[0, -1].item() == pytest.approx(7 / 3)


def test_averaging_equals_a_plain_loop() -> None:
    xs, ys = pairs(2, 6, 3)
    for b, i in itertools.product(range(2), range(1, 6)):
        w = [sum(float(xs[b, j, c]) * float(ys[b, j]) for j in range(i)) / i for c in range(3)]
        expected = sum(w[c] * float(xs[b, i, c]) for c in range(3))
        assert Averaging().predict(xs, ys)[b, i].item() == pytest.approx(expected, rel=1e-6)


# Lasso: the conditions of the optimum, X'(y - Xw) / i = alpha sign(w), and at most alpha where w = 0


@pytest.mark.parametrize("alpha", [*LASSO_ALPHAS, 3.0, 0.02])
@pytest.mark.parametrize("task", ["sparse_linear_regression", "relu_2nn_regression"])
def test_lasso_is_at_its_optimum(alpha: float, task: str) -> None:
    for n_pairs in (1, 4, 8, 12):
        X, y = (t[0].double().numpy() for t in pairs(1, n_pairs, 8, task=task, seed=n_pairs))
        w = weights(Lasso(alpha), X, y)
        slope = X.T @ (y - X @ w) / n_pairs
        tolerance = 1e-4 * alpha + 2e-6  # w comes rounded to float32
        np.testing.assert_allclose(slope[w != 0], alpha * np.sign(w[w != 0]), atol=tolerance)
        assert (np.abs(slope[w == 0]) <= alpha + tolerance).all()


def test_lasso_finds_a_sparse_support_before_least_squares_can() -> None:
    xs, ys = pairs(20, 16, 20, task="sparse_linear_regression")
    lasso, least_squares = ((b.predict(xs, ys) - ys)[:, -1].square().mean() for b in (Lasso(), LeastSquares()))
    assert lasso < 0.1 * least_squares


# Networks and trees


def test_gd_network_equals_a_module_trained_on_one_prompt() -> None:
    xs, ys = pairs(2, 6, 3)
    baseline = GradientDescentNetwork(hidden=7, n_steps=30, lr=0.01, seed=4)

    def oracle(X: np.ndarray, y: np.ndarray, query: np.ndarray) -> float:
        generator = torch.Generator().manual_seed(4)

        def uniforms(*shape: int) -> Tensor:
            return 2 * torch.rand(*shape, dtype=torch.float64, generator=generator) - 1

        first, second = torch.nn.Linear(3, 7, dtype=torch.float64), torch.nn.Linear(7, 1, dtype=torch.float64)
        with torch.no_grad():
            first.weight.copy_(uniforms(3, 7).T / math.sqrt(3))
            first.bias.copy_(uniforms(7) / math.sqrt(3))
            second.weight.copy_(uniforms(7, 1).T / math.sqrt(7))
            second.bias.copy_(uniforms(1) / math.sqrt(7))
        network = torch.nn.Sequential(first, torch.nn.ReLU(), second)
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
        for _ in range(30):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(network(torch.tensor(X)).squeeze(1), torch.tensor(y)).backward()
            optimizer.step()
        return network(torch.tensor(query)[None]).item()

    np.testing.assert_allclose(baseline.predict(xs, ys), per_prefix(xs, ys, oracle), rtol=1e-6, atol=1e-7)


def test_gd_network_fits_a_pair_it_has_seen() -> None:
    xs, ys = pairs(2, 6, 3)
    xs[:, 5] = xs[:, 2]
    predictions = GradientDescentNetwork(n_steps=400).predict(xs, ys)
    np.testing.assert_allclose(predictions[:, 5], ys[:, 2], atol=0.05)


def test_gd_network_takes_batches_of_the_prefix_and_follows_its_seed() -> None:
    xs, ys = pairs(2, 9, 3)
    small, whole, other = (
        GradientDescentNetwork(hidden=8, n_steps=15, batch_size=size, seed=seed) for size, seed in ((5, 0), (100, 0), (5, 1))
    )
    predictions = small.predict(xs, ys)
    torch.testing.assert_close(small.predict(xs, ys), predictions, rtol=0, atol=0)
    differs = (predictions - whole.predict(xs, ys)).abs() > 1e-6
    assert not differs[:, :6].any(), "up to five pairs are one whole batch"
    assert differs[:, 6:].all()
    assert ((predictions - other.predict(xs, ys)).abs() > 1e-6)[:, 1:].all()


@pytest.mark.parametrize("max_depth", [None, 2, 4])
@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("signs", [False, True])
def test_tree_equals_scikit_learn(max_depth: int | None, seed: int, signs: bool) -> None:
    xs, ys = pairs(2, 12, 4, task="decision_tree")
    seen = xs.sign() if signs else xs

    def oracle(X: np.ndarray, y: np.ndarray, query: np.ndarray) -> float:
        return float(DecisionTreeRegressor(max_depth=max_depth, random_state=seed).fit(X, y).predict(query[None])[0])

    predictions = DecisionTreeBaseline(max_depth, seed, signs).predict(xs, ys)
    np.testing.assert_allclose(predictions, per_prefix(seen, ys, oracle), rtol=1e-6)


def test_xgboost_equals_its_native_interface() -> None:
    xgboost = pytest.importorskip("xgboost")
    xs, ys = pairs(2, 8, 4, task="decision_tree")
    options = {"max_depth": 2, "learning_rate": 0.1, "tree_method": "exact", "nthread": 1}

    def oracle(X: np.ndarray, y: np.ndarray, query: np.ndarray) -> float:
        booster = xgboost.train(options, xgboost.DMatrix(X, label=y), num_boost_round=7)
        return float(booster.predict(xgboost.DMatrix(query[None]))[0])

    predictions = XGBoost(n_estimators=7, max_depth=2, learning_rate=0.1).predict(xs, ys)
    np.testing.assert_allclose(predictions, per_prefix(xs, ys, oracle), rtol=1e-6)


# Promises of all


@every_baseline
def test_first_prediction_is_zero_and_the_rest_is_not(baseline: Baseline) -> None:
    xs, ys = pairs()
    predictions = baseline.predict(xs, ys)
    assert predictions.dtype == torch.float32
    assert (predictions[:, 0] == 0).all()
    assert (predictions[:, 1:] != 0).any(dim=1).all()


@every_baseline
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e30])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_prediction_reads_earlier_pairs_alone(baseline: Baseline, poison: float) -> None:
    xs, ys = pairs(2, 8, 3)
    clean = baseline.predict(xs, ys)
    for i in (0, 1, 4, 7):
        later_xs, later_ys = xs.clone(), ys.clone()
        later_xs[:, i + 1 :] = poison
        later_ys[:, i:] = poison
        torch.testing.assert_close(baseline.predict(later_xs, later_ys)[:, : i + 1], clean[:, : i + 1], **ROUNDING)


@every_baseline
def test_prediction_does_not_depend_on_the_batch(baseline: Baseline) -> None:
    xs, ys = pairs(19, 7, 4)
    together = baseline.predict(xs, ys)
    alone = torch.cat([baseline.predict(xs[b : b + 1], ys[b : b + 1]) for b in range(19)])
    torch.testing.assert_close(alone, together, **ROUNDING)
    order = torch.randperm(19, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(baseline.predict(xs[order], ys[order]), together[order], **ROUNDING)


@every_baseline
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39])
def test_non_finite_pairs_spoil_their_own_prompt_from_there_on(baseline: Baseline, bad: float) -> None:
    xs, ys = (t.double() for t in pairs(5, 7, 3))
    expected = baseline.predict(xs, ys)
    xs[0, 3, 1] = bad  # x_3: read by predictions 3, 4, ...
    expected[0, 3:] = math.nan
    ys[2, 3] = bad  # y_3: read by predictions 4, 5, ...
    expected[2, 4:] = math.nan
    xs[3, 0, 0] = bad  # prediction 0 reads nothing
    expected[3, 1:] = math.nan
    ys[4, 6] = bad
    torch.testing.assert_close(baseline.predict(xs, ys), expected, **ROUNDING)


@every_baseline
def test_prompts_all_non_finite(baseline: Baseline) -> None:
    predictions = baseline.predict(torch.full((2, 4, 3), math.nan), torch.full((2, 4), math.nan))
    assert (predictions[:, 0] == 0).all()
    assert predictions[:, 1:].isnan().all()


@every_baseline
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning", "ignore:overflow:RuntimeWarning")
def test_extreme_prompt_leaves_its_neighbour_alone(baseline: Baseline, scale: float) -> None:
    xs, ys = pairs(2, 6, 3)
    clean = baseline.predict(xs, ys)
    xs[0], ys[0] = xs[0] * scale, ys[0] * scale
    predictions = baseline.predict(xs, ys)
    torch.testing.assert_close(predictions[1], clean[1], **ROUNDING)
    assert scale or not predictions[0].isnan().any()


@every_baseline
@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (0, 0, 3), (2, 1, 3), (1, 6, 1), (3, 2, 7)])
def test_empty_and_small_shapes(baseline: Baseline, shape: tuple[int, int, int]) -> None:
    xs, ys = pairs(*shape)
    predictions = baseline.predict(xs, ys)
    assert predictions.shape == shape[:2]
    assert predictions.isfinite().all()


@every_baseline
@pytest.mark.parametrize(
    ("xs", "ys"), [((4, 3), (4,)), ((2, 4, 3), (2, 3)), ((2, 4, 3), (2, 4, 1)), ((2, 4, 0), (2, 4)), ((2, 4), (2, 4))]
)
def test_wrong_shapes_are_named(baseline: Baseline, xs: tuple[int, ...], ys: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as error:
        baseline.predict(torch.ones(xs), torch.ones(ys))
    message = f"{baseline.kind}: xs must be [B, n, d] with d >= 1 and ys [B, n], got {list(xs)} and {list(ys)}; add"
    assert str(error.value).startswith(message)


@every_baseline
def test_what_is_not_a_real_tensor_is_named(baseline: Baseline) -> None:
    xs, ys = pairs(1, 3, 2)
    with pytest.raises(TypeError, match=rf"{baseline.kind}: .* got ndarray and torch\.float32; wrap"):
        baseline.predict(xs.numpy(), ys)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got torch\.float32 and torch\.complex64"):
        baseline.predict(xs, ys + 0j)


@every_baseline
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_read_only_arrays_are_read_only(baseline: Baseline) -> None:
    xs, ys = pairs(2, 6, 3)
    for dtype in (np.float32, np.float64):
        arrays = [t.numpy().astype(dtype) for t in (xs, ys)]
        copies = [a.copy() for a in arrays]
        for a in arrays:
            a.flags.writeable = False
        predictions = baseline.predict(*(torch.from_numpy(a) for a in arrays))
        torch.testing.assert_close(predictions, baseline.predict(xs, ys), **ROUNDING)
        for a, copy in zip(arrays, copies, strict=True):
            np.testing.assert_array_equal(a, copy)


@every_baseline
def test_whole_numbers_views_and_gradient_modes(baseline: Baseline) -> None:
    whole = [(4 * t).round().int() for t in pairs(2, 6, 3)]
    expected = baseline.predict(whole[0].float(), whole[1].float())
    torch.testing.assert_close(baseline.predict(*whole), expected, **ROUNDING)
    xs = whole[0].float().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    predictions = baseline.predict(xs, whole[1])
    assert not predictions.requires_grad
    torch.testing.assert_close(predictions, expected, **ROUNDING)
    with torch.inference_mode():
        xs, ys = (t.double() for t in whole)
        torch.testing.assert_close(baseline.predict(xs, ys), expected, **ROUNDING)


@every_baseline
def test_progress_counts_the_predictions_made(baseline: Baseline) -> None:
    xs, ys = pairs(20, 4, 2)
    ys[3, 1] = math.nan  # predictions 2 and 3 of that prompt are not made
    calls: list[tuple[int, int]] = []
    baseline.predict(xs, ys, progress=lambda done, total: calls.append((done, total)))
    done = [call[0] for call in calls]
    assert done == sorted(set(done))
    assert {call[1] for call in calls} == {58}
    assert done[-1] == 58


@every_baseline
def test_generator_of_the_caller_is_left_alone(baseline: Baseline) -> None:
    state = torch.get_rng_state()
    baseline.predict(*pairs(1, 8, 2))
    assert torch.equal(torch.get_rng_state(), state)


# Choosing


@pytest.mark.parametrize("task", TASKS)
def test_every_task_has_baselines_with_names_of_their_own(task: str) -> None:
    names = [b.name for b in baselines_for(task)]
    assert names[:3] == ["least_squares", "nearest_neighbours", "averaging"]
    assert len(set(names)) == len(names)


def test_baselines_of_a_task_are_those_published() -> None:
    more = {task: baselines_for(task)[3:] for task in TASKS}
    assert more["linear_regression"] == more["quadratic_regression"] == []
    assert more["noisy_linear_regression"] == [Ridge(alpha=0.01)]
    assert make_task("noisy_linear_regression", 3).noise_std ** 2 == pytest.approx(0.01)
    assert more["sparse_linear_regression"] == [Lasso(alpha=0.01)]
    assert more["relu_2nn_regression"] == [GradientDescentNetwork()]
    trees = {(tree.signs, tree.max_depth) for tree in more["decision_tree"] if isinstance(tree, DecisionTreeBaseline)}
    assert {(False, 2), (True, 4)} < trees, "the two of Fig. 10"
    assert trees == {(False, None), (False, 2), (False, 4), (True, None), (True, 4)}
    assert [one for one in more["decision_tree"] if one.kind != "decision_tree"] == [XGBoost(), XGBoost(signs=True)]


def test_baselines_fit_the_numbers_of_a_task() -> None:
    assert baselines_for(make_task("noisy_linear_regression", 3, std=3.0))[3:] == [Ridge(alpha=9.0)]
    assert baselines_for(make_task("noisy_linear_regression", 3, std=0.0))[3:] == []
    both = [GradientDescentNetwork(), GradientDescentNetwork(hidden=8)]
    assert baselines_for(make_task("relu_2nn_regression", 3, hidden=8))[3:] == both
    on_x = [DecisionTreeBaseline(), DecisionTreeBaseline(max_depth=2)]
    on_signs = [DecisionTreeBaseline(signs=True), DecisionTreeBaseline(max_depth=3, signs=True)]
    assert baselines_for(make_task("decision_tree", 3, depth=3))[3:8] == [*on_x, DecisionTreeBaseline(max_depth=3), *on_signs]
    for depth in (0, 2):
        trees = [one for one in baselines_for(make_task("decision_tree", 3, depth=depth)) if one.kind == "decision_tree"]
        as_deep = [DecisionTreeBaseline(max_depth=depth, signs=True)] if depth else []
        assert trees == [*on_x, on_signs[0], *as_deep], "each once"


def test_trees_on_signs_are_trees_of_the_signs() -> None:
    pytest.importorskip("xgboost")
    xs, ys = pairs(2, 9, 3)
    for baseline in (DecisionTreeBaseline, XGBoost):
        on_signs = baseline(signs=True).predict(xs, ys)
        assert torch.equal(on_signs, baseline().predict(xs.sign(), ys))
        assert not torch.equal(on_signs, baseline().predict(xs, ys))


def test_costs() -> None:
    cheap = {kind for kind, baseline in BASELINES.items() if baseline().cost == "cheap"}
    assert cheap == {"least_squares", "ridge", "nearest_neighbours", "averaging"}


def test_make_baseline_names_what_it_made() -> None:
    assert {kind: make_baseline(kind).name for kind in BASELINES} == {kind: kind for kind in BASELINES}
    assert make_baseline("lasso", alpha=0.1) == Lasso(alpha=0.1)
    assert make_baseline("lasso", alpha=0.1).name == "lasso_alpha=0.1"
    assert make_baseline("decision_tree", max_depth=4, seed=2).name == "decision_tree_max_depth=4_seed=2"


@pytest.mark.parametrize(
    ("choose", "name", "nearest"),
    [(make_baseline, "least_square", "least_squares"), (baselines_for, "decision_trees", "decision_tree")],
)
def test_unknown_names_get_the_nearest(choose: Callable[[str], object], name: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'; did you mean '{nearest}'"):
        choose(name)


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        ("ridge", "alpha", 0.0),
        ("ridge", "alpha", math.nan),
        ("lasso", "alpha", -1.0),
        ("nearest_neighbours", "k", 0),
        ("gd_network", "hidden", 0),
        ("gd_network", "lr", 0.0),
        ("gd_network", "n_steps", -1),
        ("gd_network", "batch_size", 0),
        ("decision_tree", "max_depth", 0),
        ("xgboost", "n_estimators", 0),
        ("xgboost", "max_depth", 0),
        ("xgboost", "learning_rate", 0.0),
    ],
)
def test_wrong_options_are_named(kind: str, option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{kind}: {option}={value} must be"):
        make_baseline(kind, **{option: value})


def test_missing_package_is_said_and_does_not_stop_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgboost", None)
    missing = [b for b in baselines_for("decision_tree") if not b.is_available()]
    assert missing == [XGBoost(), XGBoost(signs=True)]
    assert "cannot import xgboost" in str(missing[0].why_unavailable)
    assert "pip install 'looped[tabular]'" in str(missing[0].why_unavailable)
    with pytest.raises(ImportError, match="pip install"):
        missing[0].predict(*pairs(1, 3, 2))


def test_available_baselines_say_nothing() -> None:
    assert LeastSquares().is_available()
    assert LeastSquares().why_unavailable is None
    assert Lasso().why_unavailable is None


def test_import_leaves_scikit_learn_xgboost_and_scipy_alone() -> None:
    code = "import sys, looped.icl.baselines; print({'sklearn', 'xgboost', 'scipy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"
