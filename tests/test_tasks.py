"""In-context tasks against their definitions, and the draws behind them."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import scipy.special
import torch

from looped.icl.prompts import interleave
from looped.icl.tasks import TASKS, DecisionTree, LinearRegression, Pairs, PromptPool, Task, make_task, normals

every_task = pytest.mark.parametrize("name", TASKS)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniforms(task: Task, n_prompts: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n_prompts, task.n_parameters, dtype=torch.float64, generator=seeded(seed))


def assert_same_pairs(got: Pairs, expected: Pairs) -> None:
    torch.testing.assert_close(got.xs, expected.xs, rtol=0, atol=0)
    # y is a float64 sum whose order the library may choose by the number of prompts, so the last float32 bit may differ.
    torch.testing.assert_close(got.ys, expected.ys, rtol=2**-23, atol=1e-12)


# Draws


def test_normals_invert_the_distribution_function() -> None:
    u = torch.tensor([0.0, 2.0**-54, 1e-9, 0.025, 0.5, 0.975, 1 - 2.0**-53], dtype=torch.float64)
    np.testing.assert_allclose(normals(u)[1:], scipy.special.ndtri(u[1:].numpy()), rtol=1e-9, atol=1e-12)
    assert normals(u)[0] == normals(u)[1], "0 must not give minus infinity"


@every_task
@pytest.mark.parametrize(("n_dims", "n_points"), [(20, 5), (3, 2)])
def test_prompt_does_not_depend_on_the_batch_it_is_drawn_in(name: str, n_dims: int, n_points: int) -> None:
    task = make_task(name, n_dims)
    whole = task.sample(8, n_points, generator=seeded(3))
    for sizes in ([3, 5], [1] * 8, [0, 8]):
        generator = seeded(3)
        parts = [task.sample(size, n_points, generator=generator) for size in sizes]
        assert_same_pairs(Pairs(torch.cat([p.xs for p in parts]), torch.cat([p.ys for p in parts])), whole)


@every_task
def test_same_seed_gives_the_same_prompts_and_another_seed_others(name: str) -> None:
    task = make_task(name, 20)
    first, second, other = (task.sample(4, 7, generator=seeded(seed)) for seed in (5, 5, 6))
    assert_same_pairs(second, first)
    assert not (first.xs == other.xs).any()
    assert (first.ys != other.ys).any(dim=1).all()


@every_task
def test_prompts_of_a_batch_have_functions_of_their_own(name: str) -> None:
    task = make_task(name, 4)
    xs = torch.randn(1, 12, 4, generator=seeded(), dtype=torch.float64).expand(9, -1, -1)
    ys = task.values(task.parameters(uniforms(task, 9), 4), xs)
    for i, j in itertools.combinations(range(9), 2):
        assert not torch.allclose(ys[i], ys[j])


@every_task
@pytest.mark.parametrize(("n_prompts", "n_points"), [(0, 4), (2, 0), (0, 0), (1, 1)])
def test_empty_batches_and_prompts(name: str, n_prompts: int, n_points: int) -> None:
    xs, ys = make_task(name, 20).sample(n_prompts, n_points, generator=seeded())
    assert xs.shape == (n_prompts, n_points, 20)
    assert ys.shape == (n_prompts, n_points)
    assert xs.dtype == ys.dtype == torch.float32


@every_task
def test_one_dimension(name: str) -> None:
    task = make_task(name, 1, **({"sparsity": 1} if name == "sparse_linear_regression" else {}))
    xs, ys = task.sample(50, 3, generator=seeded())
    assert xs.shape == (50, 3, 1)
    assert ys.isfinite().all()
    assert (ys != 0).all()


# Statistics: means over prompts, within five standard errors (pairs of one prompt are dependent, prompts are not)


def assert_mean(per_prompt: torch.Tensor, expected: float, within: float) -> None:
    error = per_prompt.std().item() / math.sqrt(len(per_prompt))
    assert error < within, "too few draws to tell"
    assert abs(per_prompt.mean().item() - expected) < 5 * error


@every_task
def test_inputs_are_standard_normal(name: str) -> None:
    xs = make_task(name, 5).sample(4000, 4, generator=seeded(1)).xs
    assert_mean(xs.mean(dim=(1, 2)), 0, within=0.01)
    assert_mean(xs.square().mean(dim=(1, 2)), 1, within=0.01)
    assert_mean(xs.pow(4).mean(dim=(1, 2)), 3, within=0.1)
    assert_mean((xs[:, 0, 0] * xs[:, 1, 0]), 0, within=0.02)  # points
    assert_mean((xs[:, 0, 0] * xs[:, 0, 1]), 0, within=0.02)  # coordinates


@every_task
def test_error_scale_is_the_variance_of_y(name: str) -> None:
    task = make_task(name, 6)
    ys = task.sample(6000, 8, generator=seeded(2)).ys
    assert_mean(ys.square().mean(dim=1) / task.error_scale, 1, within=0.04)
    assert_mean(ys.mean(dim=1), 0, within=0.05)


def test_error_scale_of_noisy_regression_counts_its_noise() -> None:
    task = make_task("noisy_linear_regression", 6, std=3.0)
    assert task.error_scale == 6 + 9
    assert_mean(task.sample(6000, 8, generator=seeded(2)).ys.square().mean(dim=1) / task.error_scale, 1, within=0.04)


def test_weights_of_linear_regression_are_standard_normal() -> None:
    task = LinearRegression(5)
    w = task.parameters(uniforms(task, 4000), 5)["w"]
    assert_mean(w.mean(dim=1), 0, within=0.01)
    assert_mean(w.square().mean(dim=1), 1, within=0.02)
    assert_mean(w[:, 0] * w[:, 1], 0, within=0.02)


# Dimension curriculum


@every_task
def test_live_dimensions_alone_are_used(name: str) -> None:
    task = make_task(name, 20)
    xs, ys = task.sample(2000, 6, generator=seeded(), n_live=5)
    assert (xs[..., 5:] == 0).all()
    assert (xs[..., :5] != 0).all()
    assert (ys != 0).any(dim=1).all(), "a target row is all zero"


@pytest.mark.parametrize("name", ["linear_regression", "noisy_linear_regression", "quadratic_regression"])
def test_weights_outside_the_live_dimensions_are_zero(name: str) -> None:
    task = make_task(name, 20)
    w = task.parameters(uniforms(task, 100), 5)["w"]
    assert (w[:, 5:] == 0).all()
    assert (w[:, :5] != 0).all()


@pytest.mark.parametrize(("n_live", "expected"), [(20, 3), (5, 3), (3, 3), (2, 2), (1, 1)])
def test_sparse_support_is_drawn_evenly_from_the_live_dimensions(n_live: int, expected: int) -> None:
    task = make_task("sparse_linear_regression", 20)
    support = task.parameters(uniforms(task, 2000), n_live)["w"] != 0
    assert (support.sum(dim=1) == expected).all()
    assert not support[:, n_live:].any()
    share = expected / n_live
    for coordinate in range(n_live):
        assert abs(support[:, coordinate].double().mean() - share) <= 5 * math.sqrt(share * (1 - share) / 2000)


@pytest.mark.parametrize(("n_dims", "n_live"), [(20, 20), (20, 5), (2, 2), (1, 1)])
def test_tree_asks_for_every_live_coordinate(n_dims: int, n_live: int) -> None:
    task = DecisionTree(n_dims)
    coordinates = task.parameters(uniforms(task, 2000), n_live)["coordinates"]
    counts = torch.bincount(coordinates.flatten(), minlength=n_dims)
    expected = coordinates.numel() / n_live
    assert (counts[n_live:] == 0).all()
    assert ((counts[:n_live] - expected).abs() < 5 * math.sqrt(expected)).all()


def test_tree_coordinate_of_the_largest_uniform_exists() -> None:
    task = DecisionTree(20)
    largest = torch.full((1, task.n_parameters), 1 - 2.0**-53, dtype=torch.float64)
    for n_live in (1, 7, 20):
        assert (task.parameters(largest, n_live)["coordinates"] == n_live - 1).all()


# Values by hand


def test_linear_values() -> None:
    xs = torch.tensor([[[1.0, 2.0], [0.5, -1.0]]], dtype=torch.float64)
    ys = LinearRegression(2).values({"w": torch.tensor([[3.0, -1.0]], dtype=torch.float64)}, xs)
    assert ys.tolist() == [[1.0, 2.5]]


def test_quadratic_values() -> None:
    xs = torch.tensor([[[3.0, -1.0], [0.0, 2.0]]], dtype=torch.float64)
    ys = make_task("quadratic_regression", 2).values({"w": torch.tensor([[1.0, 2.0]], dtype=torch.float64)}, xs)
    np.testing.assert_allclose(ys, [[11 / math.sqrt(3), 8 / math.sqrt(3)]], rtol=1e-15)


def test_relu_network_with_default_arguments() -> None:
    task = make_task("relu_2nn_regression", 3)
    parameters = task.parameters(uniforms(task, 2), 3)
    W1, W2 = parameters["W1"].numpy(), parameters["W2"].numpy()
    assert W1.shape == (2, 3, 100)
    assert W2.shape == (2, 100, 1)
    xs = torch.randn(2, 4, 3, dtype=torch.float64, generator=seeded())
    expected = [
        [sum(W2[b, h, 0] * max(0.0, xs[b, i].numpy() @ W1[b, :, h]) for h in range(100)) * math.sqrt(2 / 100) for i in range(4)]
        for b in range(2)
    ]
    np.testing.assert_allclose(task.values(parameters, xs), expected, rtol=1e-12)


def test_tree_goes_right_above_zero_only() -> None:
    parameters = {
        "coordinates": torch.tensor([[0, 1, 2]]),
        "leaves": torch.tensor([[10.0, 20.0, 30.0, 40.0]], dtype=torch.float64),
    }
    xs = torch.tensor([[[1.0, 0, 1], [-1, 1, 0], [0, -1, 5], [0.5, 9, 0]]], dtype=torch.float64)
    assert DecisionTree(3, depth=2).values(parameters, xs).tolist() == [[40.0, 20.0, 10.0, 30.0]]


def test_tree_of_depth_zero_is_a_constant() -> None:
    ys = DecisionTree(3, depth=0).sample(5, 4, generator=seeded()).ys
    assert (ys == ys[:, :1]).all()
    assert len(ys[:, 0].unique()) == 5


@pytest.mark.parametrize("std", [0.1, 0.5])
def test_noise_has_the_standard_deviation_asked_for(std: float) -> None:
    n_points = 4000  # the clean task draws the same inputs and weights for the first prompt
    clean = LinearRegression(3).sample(1, n_points, generator=seeded(4))
    noisy = make_task("noisy_linear_regression", 3, std=std).sample(1, n_points, generator=seeded(4))
    torch.testing.assert_close(noisy.xs, clean.xs, rtol=0, atol=0)
    noise = (noisy.ys - clean.ys).flatten() / std
    assert_mean(noise, 0, within=0.02)
    assert_mean(noise.square(), 1, within=0.03)


def test_noise_is_a_tenth_by_default_and_may_be_none() -> None:
    assert make_task("noisy_linear_regression", 3).noise_std == 0.1
    silent = make_task("noisy_linear_regression", 3, std=0.0).sample(4, 5, generator=seeded())
    assert_same_pairs(silent, LinearRegression(3).sample(4, 5, generator=seeded()))


# Pools


def test_pool_smaller_than_the_batch_is_drawn_with_replacement() -> None:
    task = LinearRegression(3)
    pool = PromptPool.of(task, 4, 5, seed=7)
    assert_same_pairs(pool.pairs, task.sample(4, 5, generator=seeded(7)))
    drawn = pool.sample(200, generator=seeded())
    rows = (drawn.xs[:, None] == pool.pairs.xs).all(dim=(2, 3))
    assert (rows.sum(dim=1) == 1).all()
    assert rows.any(dim=0).all(), "a prompt of the pool is never drawn"
    assert (drawn.ys == pool.pairs.ys[rows.int().argmax(dim=1)]).all()
    assert pool.sample(8, generator=seeded()).xs.shape == (8, 5, 3)
    assert pool.sample(0, generator=seeded()).xs.shape == (0, 5, 3)


# Wrong arguments


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("linear_regression", {"n_dims": 0}, "n_dims=0 must be at least 1"),
        ("sparse_linear_regression", {"n_dims": 2}, r"sparsity=3 must lie in 1 \.\. n_dims=2"),
        ("sparse_linear_regression", {"n_dims": 5, "sparsity": 0}, "sparsity=0"),
        ("noisy_linear_regression", {"n_dims": 5, "std": -0.1}, "std=-0.1"),
        ("noisy_linear_regression", {"n_dims": 5, "std": math.nan}, "std=nan"),
        ("relu_2nn_regression", {"n_dims": 5, "hidden": 0}, "hidden=0"),
        ("decision_tree", {"n_dims": 5, "depth": -1}, "depth=-1"),
        ("decision_tree", {"n_dims": 5, "depth": 30}, r"depth=30 must be in 0 \.\. 20"),
        ("linear_regresion", {"n_dims": 5}, "did you mean 'linear_regression'"),
    ],
)
def test_wrong_options_are_named(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task(name, **options)


@every_task
@pytest.mark.parametrize(
    ("counts", "n_live", "message"),
    [
        ((2, 3), 0, r"n_live=0 must lie in 1 \.\. n_dims=4"),
        ((2, 3), 5, r"n_live=5 must lie in 1 \.\. n_dims=4"),
        ((-1, 3), None, "n_prompts=-1"),
        ((2, -3), None, "n_points=-3"),
    ],
)
def test_wrong_draws_are_named(name: str, counts: tuple[int, int], n_live: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_task(name, 4).sample(*counts, generator=seeded(), n_live=n_live)


def test_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="size=0 must be at least 1"):
        PromptPool.of(LinearRegression(3), 0, 5, seed=0)


def test_tasks_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LinearRegression(3).n_dims = 4  # type: ignore[misc]


# Prompts


def test_interleave_by_hand() -> None:
    xs = torch.tensor([[[1.0, 2, 3], [4, 5, 6]]])
    ys = torch.tensor([[7.0, 8.0]])
    rows = [[1.0, 2, 3], [7, 0, 0], [4, 5, 6], [8, 0, 0]]
    assert interleave(xs, ys).tolist() == [rows[:3]]
    assert interleave(xs, ys, keep_last_y=True).tolist() == [rows]
    assert interleave(xs.double(), ys.double()).dtype == torch.float64


def test_interleave_in_one_dimension_and_beside_nan() -> None:
    xs, ys = torch.tensor([[[1.0], [math.nan]], [[3.0], [4.0]]]), torch.tensor([[5.0, math.nan], [6.0, 7.0]])
    tokens = interleave(xs, ys, keep_last_y=True).squeeze(-1)
    np.testing.assert_array_equal(tokens, [[1, 5, math.nan, math.nan], [3, 6, 4, 7]])


@pytest.mark.parametrize(("shape", "n_tokens"), [((0, 4, 20), 7), ((2, 0, 20), 0), ((2, 1, 20), 1)])
def test_interleave_of_empty_batches_and_prompts(shape: tuple[int, int, int], n_tokens: int) -> None:
    tokens = interleave(torch.ones(shape), torch.ones(shape[:2]))
    assert tokens.shape == (shape[0], n_tokens, 20)
    assert interleave(torch.ones(shape), torch.ones(shape[:2]), keep_last_y=True).shape == (shape[0], 2 * shape[1], 20)


@pytest.mark.parametrize(("xs", "ys"), [((2, 3), (2, 3)), ((2, 3, 4), (2, 4)), ((2, 3, 4), (2, 3, 1)), ((2, 3, 4), (3,))])
def test_interleave_names_wrong_shapes(xs: tuple[int, ...], ys: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"interleave: xs must be \[B, n, d\] and ys \[B, n\] or \[B, n - 1\], got"):
        interleave(torch.ones(xs), torch.ones(ys))
    with pytest.raises(ValueError, match=r"ys \[B, n\], got"):
        interleave(torch.ones(xs), torch.ones(ys), keep_last_y=True)


def test_interleave_of_numpy_and_without_the_answer() -> None:
    pairs = LinearRegression(3).sample(2, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(interleave(pairs.xs.numpy(), pairs.ys.numpy()), interleave(*pairs))
    assert torch.equal(interleave(pairs.xs, pairs.ys[:, :-1]), interleave(*pairs))
    with pytest.raises(ValueError, match=r"ys \[B, n\], got"):
        interleave(pairs.xs, pairs.ys[:, :-1], keep_last_y=True)
