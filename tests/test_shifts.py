"""Each distribution shift against its definition: by moments, and by hand."""

import math

import numpy as np
import pytest
import torch
from models import icl_model

from looped.icl.baselines import LeastSquares
from looped.icl.predictor import LoopedPredictor
from looped.icl.shifts import (
    SHIFTS,
    Draws,
    ShiftedPairs,
    half_subspace,
    make_shift,
    one_orthant,
    orthogonal,
    overlapping,
    predict_queries,
    random_rotation,
    shifted_batches,
    skewed,
)
from looped.icl.tasks import DecisionTree, LinearRegression

N = 20_000


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(name, n_dims=4, n_prompts=N, n_points=3, task=None, seed=0):
    U = random_rotation(n_dims, 5)
    return make_shift(name).sample(task or LinearRegression(n_dims), n_prompts, n_points, generator=seeded(seed), rotation=U)


@pytest.mark.parametrize("name", SHIFTS)
def test_variance_of_y_is_the_error_scale_and_inputs_keep_their_size(name):
    pairs, shift = draw(name), make_shift(name)
    scale = shift.error_scale(LinearRegression(4))
    there = pairs.query_ys[~pairs.query_ys.isnan()].double()
    assert pairs.ys.double().square().mean().item() == pytest.approx(scale, rel=0.06)
    assert there.square().mean().item() == pytest.approx(scale, rel=0.06)
    assert pairs.xs.double().square().sum(dim=2).mean().item() == pytest.approx(4 * shift.x_scale**2, rel=0.03)


@pytest.mark.parametrize("name", SHIFTS)
def test_prompts_do_not_depend_on_the_batch_and_share_their_function(name):
    shift, task, U = make_shift(name), LinearRegression(3), random_rotation(3, 1)
    whole = shift.sample(task, 7, 5, generator=seeded(3), rotation=U)
    parts = list(shifted_batches(shift, task, 7, 5, generator=seeded(3), rotation=U, batch_size=3))
    assert [len(part.ys) for part in parts] == [3, 3, 1]
    for i in range(4):
        torch.testing.assert_close(torch.cat([part[i] for part in parts]), whole[i], equal_nan=True)
    plain = make_shift("standard").sample(task, 7, 5, generator=seeded(3), rotation=U)
    if not shift.noise_std:  # the same w: y of the shifted points is w . x, with w from the plain prompt
        w = torch.linalg.lstsq(plain.xs.double(), plain.ys.double()[..., None]).solution
        expected = (whole.xs.double() @ w).squeeze(2) * shift.y_scale
        torch.testing.assert_close(whole.ys.double(), expected, rtol=1e-3, atol=1e-3)


def test_rotations_are_orthogonal_and_uniform():
    U = random_rotation(6, 3)
    torch.testing.assert_close(U @ U.T, torch.eye(6, dtype=torch.float64))
    assert torch.equal(U, random_rotation(6, 3))
    first = torch.stack([random_rotation(3, seed)[:, 0] for seed in range(3000)])
    np.testing.assert_allclose(first.mean(dim=0), 0, atol=0.05)
    np.testing.assert_allclose(first.T @ first / 3000, np.eye(3) / 3, atol=0.03)


def test_skewed_covariance_has_the_eigenvalues_of_the_paper():
    pairs = draw("skewed")
    flat = pairs.xs.flatten(0, 1).double()
    values, vectors = np.linalg.eigh((flat.T @ flat / len(flat)).numpy())
    expected = np.array([1, 1 / 4, 1 / 9, 1 / 16])
    np.testing.assert_allclose(values[::-1], 4 * expected / expected.sum(), rtol=0.05)
    np.testing.assert_allclose(np.abs(vectors[:, -1] @ random_rotation(4, 5)[:, 0].numpy()), 1, atol=0.01)
    by_hand = skewed(_draws(torch.tensor([[[1.0, 1.0]]])), torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(by_hand, torch.tensor([[[1.0, 0.5]]], dtype=torch.float64) * math.sqrt(2 / 1.25))


@pytest.mark.parametrize(("n_dims", "rank"), [(4, 2), (5, 2), (2, 1)])
def test_half_subspace_has_half_the_rank(n_dims, rank):
    pairs = draw("half_subspace", n_dims=n_dims, n_prompts=50, n_points=n_dims + 3)
    assert (torch.linalg.matrix_rank(pairs.xs, rtol=1e-4) == rank).all()
    assert torch.linalg.matrix_rank(pairs.xs.flatten(0, 1), rtol=1e-4) == rank, "one subspace for the whole evaluation"
    by_hand = half_subspace(_draws(torch.tensor([[[3.0, 7.0]]])), torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(by_hand, torch.tensor([[[3.0 * math.sqrt(2), 0.0]]], dtype=torch.float64))
    with pytest.raises(ValueError, match="needs 2 or more"):
        draw("half_subspace", n_dims=1)


def test_orthants_are_one_a_prompt_and_each_as_likely_and_queries_are_gaussian():
    pairs = draw("random_orthants", n_dims=3)
    signs = pairs.xs.sign()
    assert (signs == signs[:, :1]).all()
    codes = ((signs[:, 0] > 0).long() * torch.tensor([1, 2, 4])).sum(dim=1)
    np.testing.assert_allclose(torch.bincount(codes, minlength=8) / N, 1 / 8, atol=0.01)
    np.testing.assert_allclose(pairs.query_xs.mean(dim=(0, 1)), 0, atol=0.03)
    torch.testing.assert_close(pairs.query_xs.abs(), pairs.xs.abs())
    by_hand = one_orthant(_draws(torch.tensor([[[1.0, -2.0]]]), signs=torch.tensor([[-1.0, 1.0]])), torch.eye(2))
    assert by_hand.tolist() == [[[-1.0, 2.0]]]


def test_orthogonal_queries_are_orthogonal_keep_their_length_and_end_at_d():
    pairs = draw("orthogonal_query", n_dims=4, n_prompts=30, n_points=7)
    xs, queries = pairs.xs.double(), pairs.query_xs.double()
    for i in range(4):
        products = (xs[:, :i] @ queries[:, i, :, None]).squeeze(2) / xs[:, :i].norm(dim=2)
        np.testing.assert_allclose(products, 0, atol=1e-5)
        torch.testing.assert_close(queries[:, i].norm(dim=1), xs[:, i].norm(dim=1))
        assert ((queries[:, i] * xs[:, i]).sum(dim=1) > 0).all(), "the part of x_i itself"
    assert queries[:, 4:].isnan().all()
    assert pairs.query_ys[:, 4:].isnan().all()
    assert not pairs.query_ys[:, :4].isnan().any()
    by_hand = orthogonal(torch.tensor([[[2.0, 0.0], [3.0, 4.0], [1.0, 1.0]]], dtype=torch.float64), None)
    torch.testing.assert_close(by_hand[0, :2], torch.tensor([[2.0, 0.0], [0.0, 5.0]], dtype=torch.float64))
    assert by_hand[0, 2].isnan().all()


def test_overlapping_queries_are_earlier_points_each_as_likely():
    pairs = draw("overlapping_query", n_dims=2, n_points=4)
    assert pairs.query_xs[:, 0].isnan().all()
    assert pairs.query_ys[:, 0].isnan().all()
    for i in range(1, 4):
        same = (pairs.query_xs[:, i, None] == pairs.xs).all(dim=2)
        assert (same.sum(dim=1) == 1).all()
        place = same.long().argmax(dim=1)
        assert (place < i).all()
        np.testing.assert_allclose(torch.bincount(place, minlength=i) / N, 1 / i, atol=0.015)
        torch.testing.assert_close(pairs.query_ys[:, i], pairs.ys.gather(1, place[:, None]).squeeze(1))
    xs = torch.tensor([[[1.0], [2.0], [3.0]]], dtype=torch.float64)
    assert overlapping(xs, _draws(xs, picks=torch.tensor([[0.9, 0.9, 0.6]])))[0, 1:].flatten().tolist() == [1.0, 2.0]


def test_noise_is_as_large_as_asked_and_y_keeps_its_variance():
    task = LinearRegression(4)
    clean, noisy = draw("standard", seed=2), draw("noisy_output", seed=2)
    assert torch.equal(clean.xs, noisy.xs)
    noise = noisy.ys.double() * math.sqrt(5 / 4) - clean.ys.double()
    assert noise.std().item() == pytest.approx(1, rel=0.02)
    assert abs((noise * clean.ys).mean().item()) < 0.03
    assert noisy.ys.double().square().mean().item() == pytest.approx(task.error_scale, rel=0.05)


def test_scales_scale_x_or_y():
    plain, x_scaled, w_scaled = (draw(name, seed=4) for name in ("standard", "x_times_1/3", "w_times_3"))
    torch.testing.assert_close(x_scaled.xs, plain.xs / 3)
    torch.testing.assert_close(x_scaled.ys, plain.ys / 3)
    assert torch.equal(w_scaled.xs, plain.xs)
    torch.testing.assert_close(w_scaled.ys, plain.ys * 3)


def test_queries_are_asked_one_by_one():
    model = LoopedPredictor(icl_model(std=0.1, dtype=torch.float32, n_dims=3, n_points=6))
    pairs = draw("random_orthants", n_dims=3, n_prompts=4, n_points=5)
    got = predict_queries(model.predict, pairs)
    for b in range(4):
        for i in range(5):
            xs = torch.cat([pairs.xs[b, :i], pairs.query_xs[b, i : i + 1]])[None]
            ys = torch.cat([pairs.ys[b, :i], torch.tensor([99.0])])[None]
            torch.testing.assert_close(got[b, i], model.predict(xs, ys)[0, -1], rtol=1e-5, atol=1e-6)
    plain = draw("skewed", n_dims=3, n_prompts=4, n_points=5)
    assert torch.equal(predict_queries(model.predict, plain), model.predict(plain.xs, plain.ys))


def test_impossible_queries_are_absent():
    pairs = draw("orthogonal_query", n_dims=4, n_prompts=6, n_points=7)
    predictions = predict_queries(lambda xs, ys: LeastSquares().predict(xs, ys), pairs)
    assert predictions[:, 4:].isnan().all()
    np.testing.assert_allclose(predictions[:, :4], 0, atol=1e-4)  # orthogonal to all that is known: least norm says 0
    overlap = draw("overlapping_query", n_dims=4, n_prompts=6, n_points=7)
    found = predict_queries(lambda xs, ys: LeastSquares().predict(xs, ys), overlap)
    assert found[:, 0].isnan().all()
    torch.testing.assert_close(found[:, 1:], overlap.query_ys[:, 1:], rtol=1e-4, atol=1e-4)


def test_other_tasks_and_wrong_uses():
    assert draw("random_orthants", n_dims=3, n_prompts=5, task=DecisionTree(3, depth=2)).query_ys.isfinite().all()
    with pytest.raises(ValueError, match="did you mean 'skewed'"):
        make_shift("skew")
    with pytest.raises(ValueError, match=r"rotation must be \[3, 3\], got \[4, 4\]"):
        make_shift("skewed").sample(LinearRegression(3), 1, 1, generator=seeded(), rotation=random_rotation(4, 0))
    assert isinstance(draw("noisy_output", n_prompts=2), ShiftedPairs)


def _draws(xs, signs=None, picks=None):
    return Draws(xs.double(), signs, picks, None)
