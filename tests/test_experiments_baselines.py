"""Baselines against closed forms that are written out here."""

import numpy as np
import pytest
import torch

from looped.icl.baselines import (
    Averaging,
    DecisionTreeBaseline,
    GradientDescentNetwork,
    KNearestNeighbours,
    Lasso,
    LeastSquares,
    Ridge,
    XGBoost,
)

CASES = [  # K28: least norm where the rank is lost
    ([[1, 2, 3], [1, 2, 3]], [1, 1], [1 / 14, 2 / 14, 3 / 14]),
    ([[1, 2, 3], [4, 5, 6], [7, 8, 9]], [1, 4, 7], [5 / 6, 1 / 3, -1 / 6]),
]


def last(baseline, X, y, query):
    """The prediction at `query` after the pairs X, y."""
    xs = torch.tensor([[*map(list, X), list(query)]], dtype=torch.float64)
    ys = torch.tensor([[*y, 99.0]], dtype=torch.float64)
    return baseline.predict(xs, ys)[0, -1].item()


@pytest.mark.parametrize(("X", "y", "w"), CASES)
def test_least_squares_of_least_norm(X, y, w):
    for j in range(3):
        assert last(LeastSquares(), X, y, np.eye(3)[j]) == pytest.approx(w[j], abs=1e-6)


def test_ridge_solves_its_normal_equations():
    rng = np.random.default_rng(0)
    X, y, q = rng.normal(size=(4, 3)), rng.normal(size=4), rng.normal(size=3)
    w = np.linalg.solve(X.T @ X + 0.7 * np.eye(3), X.T @ y)
    assert last(Ridge(alpha=0.7), X, y, q) == pytest.approx(w @ q, rel=1e-6)


@pytest.mark.parametrize("alpha", [0.01, 0.1, 1.0])
def test_lasso_on_an_orthogonal_design_is_the_soft_threshold(alpha):
    n = 4
    X = np.array([[1, 1, 1], [1, -1, 1], [1, 1, -1], [1, -1, -1]], dtype=float)  # X'X = n I
    y = np.array([0.9, -0.3, 2.0, 0.05])
    z = X.T @ y / n
    w = np.sign(z) * np.maximum(np.abs(z) - alpha, 0)
    for j in range(3):
        assert last(Lasso(alpha=alpha), X, y, np.eye(3)[j]) == pytest.approx(w[j], abs=1e-6)


def test_averaging_and_neighbours_by_hand():
    X, y = [[1.0, 0], [0, 2.0], [3.0, 3.0]], [2.0, 4.0, -6.0]
    w = np.array([(2 - 18) / 3, (8 - 18) / 3])
    assert last(Averaging(), X, y, [1.0, -1.0]) == pytest.approx(w[0] - w[1])
    assert last(KNearestNeighbours(k=2), X, y, [0.4, 0.9]) == pytest.approx(3.0)


def test_a_tree_of_one_split_is_the_best_stump():
    X, y = [[0.0], [1.0], [2.0], [10.0], [11.0]], [1.0, 1.2, 0.8, 5.0, 7.0]
    tree = DecisionTreeBaseline(max_depth=1)
    assert last(tree, X, y, [1.5]) == pytest.approx(1.0)
    assert last(tree, X, y, [6.1]) == pytest.approx(6.0), "the threshold is in the middle, at 6"
    assert last(DecisionTreeBaseline(), X, y, [9.0]) == pytest.approx(5.0), "grown until every leaf is pure"


def test_one_boosted_stump_is_the_mean_and_its_shrunken_leaf():
    X, y = [[0.0], [1.0], [2.0], [10.0], [11.0]], np.array([1.0, 1.2, 0.8, 5.0, 7.0])
    boosted = XGBoost(n_estimators=1, max_depth=1, learning_rate=0.5)
    if boosted.why_unavailable:
        pytest.skip(boosted.why_unavailable)
    residual = y - y.mean()
    for query, rows in ((1.0, slice(0, 3)), (12.0, slice(3, 5))):
        leaf = residual[rows].sum() / (len(residual[rows]) + 1)  # xgboost's lambda is 1
        assert last(boosted, X, y, [query]) == pytest.approx(y.mean() + 0.5 * leaf, rel=1e-4)


def test_one_step_of_the_trained_network_is_adams():
    """After one step of Adam every weight has moved by lr against the sign of its gradient."""
    X, y, q = torch.tensor([[[0.5, -1.0], [2.0, 0.3]]]), torch.tensor([[1.5]]), torch.tensor([[2.0, 0.3]])
    options = dict(hidden=3, lr=1e-3, batch_size=10, seed=4)
    generator = torch.Generator().manual_seed(4)

    def start(rows, columns, fan_in):
        return ((2 * torch.rand(rows, columns, dtype=torch.float64, generator=generator) - 1) / fan_in**0.5).requires_grad_()

    W1, b1, W2, b2 = start(2, 3, 2), start(1, 3, 2), start(3, 1, 3), start(1, 1, 3)

    def network(x, weights):
        return torch.relu(x @ weights[0] + weights[1]) @ weights[2] + weights[3]

    weights = [W1, b1, W2, b2]
    x, ys = X[:, :1].double(), torch.cat([y, torch.zeros(1, 1)], dim=1)
    before = GradientDescentNetwork(n_steps=0, **options).predict(X, ys)[0, 1].item()
    assert before == pytest.approx(network(q.double(), weights).item(), rel=1e-5)
    (network(x[0], weights) - 1.5).square().mean().backward()
    moved = [w.detach() - 1e-3 * w.grad.sign() for w in weights]
    after = GradientDescentNetwork(n_steps=1, **options).predict(X, ys)[0, 1].item()
    assert after == pytest.approx(network(q.double(), moved).item(), rel=1e-5)
