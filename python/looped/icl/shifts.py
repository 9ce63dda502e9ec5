"""Distribution shifts: prompts unlike those that a model was trained on (Garg et al., 2022, 4; Yang et al., appendix D).

Every shift keeps the mean square of an input at n_dims, so that errors compare. Under any of them a prompt takes the same
random numbers, so that prompt i of a seed has the same function and the same Gaussian inputs, whatever the batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from looped.icl.tasks import Task, normals
from looped.suggestion import suggestion


class ShiftedPairs(NamedTuple):
    """Prompts whose prediction i is asked at query_xs[:, i] after the pairs 0 .. i-1.

    xs and query_xs float32 [B, n, d], ys and query_ys float32 [B, n].

    A query that cannot exist (orthogonal to as many examples as dimensions; equal to an example where there is none) is NaN, in
    query_xs and in query_ys. `is_plain`: the queries are the prompt's own points, so that one pass answers them all.
    """

    xs: Tensor
    ys: Tensor
    query_xs: Tensor
    query_ys: Tensor
    is_plain: bool


class Draws(NamedTuple):
    """The random numbers of B prompts, in float64: Gaussian inputs [B, n, d]; signs [B, d], -1 or 1; picks [B, n] in [0, 1);
    noise [B, n], standard normal."""

    xs: Tensor
    signs: Tensor
    picks: Tensor
    noise: Tensor


@dataclass(frozen=True)
class Shift:
    """A way to change prompts.

    inputs: the prompt's points from its random numbers and the rotation U [d, d] of the whole evaluation.
    queries: the queries from those points and the numbers; None for the points themselves.
    y_scale: what y is multiplied by. noise_std: of Gaussian noise on y, before y is brought back to the variance it had.
    x_scale: for the variance of y alone; `inputs` applies it.
    """

    name: str
    inputs: Callable[[Draws, Tensor], Tensor] = lambda draws, U: draws.xs
    queries: Callable[[Tensor, Draws], Tensor] | None = None
    x_scale: float = 1.0
    y_scale: float = 1.0
    noise_std: float = 0.0
    least_dims: int = 1

    def error_scale(self, task: Task) -> float:
        """The variance of y under the shift (of a function linear in x), by which squared errors are divided."""
        return task.error_scale * (self.x_scale * self.y_scale) ** 2

    def sample(
        self, task: Task, n_prompts: int, n_points: int, *, generator: torch.Generator, rotation: Tensor
    ) -> ShiftedPairs:
        """Draw prompts of n_points pairs of the task's functions.

        generator: a CPU generator; the k-th prompt drawn from it is the same for every way to split the draws into batches.
        rotation: U, orthogonal float64 [d, d], the same for all prompts of an evaluation: `random_rotation`.
        Raises ValueError where the task has too few dimensions for the shift.
        """
        d = task.n_dims
        if d < self.least_dims:
            raise ValueError(f"{self.name}: the task has n_dims={d}; this shift needs {self.least_dims} or more")
        if rotation.shape != (d, d):
            raise ValueError(f"{self.name}: rotation must be [{d}, {d}], got {list(rotation.shape)}")
        sizes = [n_points * d, task.n_parameters, d, n_points, n_points]
        uniforms = torch.rand(n_prompts, sum(sizes), dtype=torch.float64, generator=generator)
        for_xs, for_parameters, for_signs, picks, for_noise = uniforms.split(sizes, dim=1)
        signs = torch.where(for_signs < 0.5, -1.0, 1.0)
        draws = Draws(normals(for_xs).reshape(n_prompts, n_points, d), signs, picks, normals(for_noise))
        parameters = task.parameters(for_parameters, d)
        xs = self.inputs(draws, rotation)
        ys = self._values(task, parameters, xs, draws)
        if self.queries is None:
            return ShiftedPairs(xs.float(), ys.float(), xs.float(), ys.float(), True)
        query_xs = self.queries(xs, draws)
        query_ys = self._values(task, parameters, query_xs, draws).masked_fill(query_xs.isnan().any(dim=2), math.nan)
        return ShiftedPairs(xs.float(), ys.float(), query_xs.float(), query_ys.float(), False)

    def _values(self, task: Task, parameters: dict[str, Tensor], xs: Tensor, draws: Draws) -> Tensor:
        ys = task.values(parameters, xs) * self.y_scale
        if self.noise_std:
            variance = self.error_scale(task)
            ys = (ys + self.noise_std * draws.noise) * math.sqrt(variance / (variance + self.noise_std**2))
        return ys


def random_rotation(n_dims: int, seed: int) -> Tensor:
    """An orthogonal matrix float64 [d, d] from the uniform distribution over them, by its seed."""
    generator = torch.Generator().manual_seed(seed)
    Q, R = torch.linalg.qr(torch.randn(n_dims, n_dims, dtype=torch.float64, generator=generator))
    return Q * R.diagonal().sign()


def _stretched(xs: Tensor, U: Tensor, lengths: Tensor) -> Tensor:
    """x U diag(lengths) U', with lengths scaled so that the mean square of x stays n_dims."""
    lengths = lengths * math.sqrt(len(lengths) / float(lengths.square().sum()))
    return xs @ (U * lengths) @ U.T


def skewed(draws: Draws, U: Tensor) -> Tensor:
    """Covariance with eigenvalues in proportion 1, 1/4, 1/9, ... along the columns of U."""
    return _stretched(draws.xs, U, 1 / torch.arange(1, len(U) + 1, dtype=torch.float64))


def half_subspace(draws: Draws, U: Tensor) -> Tensor:
    """Inputs in the span of the first d // 2 columns of U."""
    return _stretched(draws.xs, U, (torch.arange(len(U)) < len(U) // 2).double())


def one_orthant(draws: Draws, U: Tensor) -> Tensor:
    """Every example of a prompt in one random orthant."""
    return draws.xs.abs() * draws.signs[:, None]


def untouched(xs: Tensor, draws: Draws) -> Tensor:
    """Queries are the Gaussian points before the shift."""
    return draws.xs


def orthogonal(xs: Tensor, draws: Draws) -> Tensor:
    """Query i is the part of x_i outside the span of x_0 .. x_{i-1}, at the length of x_i; NaN from i = d on."""
    n_points, n_dims = xs.shape[1:]
    queries = torch.full_like(xs, math.nan)
    basis = xs[:, :0]  # [B, i, d], orthonormal
    for i in range(min(n_points, n_dims)):
        rest = xs[:, i]
        for _ in range(2):  # the second projection takes the rounding of the first
            rest = rest - ((rest[:, None] @ basis.mT) @ basis).squeeze(1)
        direction = rest / rest.norm(dim=1, keepdim=True)
        queries[:, i] = direction * xs[:, i].norm(dim=1, keepdim=True)
        basis = torch.cat([basis, direction[:, None]], dim=1)
    return queries


def overlapping(xs: Tensor, draws: Draws) -> Tensor:
    """Query i is one of the examples x_0 .. x_{i-1}, each as likely; NaN at i = 0."""
    places = torch.arange(xs.shape[1], dtype=torch.float64)
    earlier = (draws.picks * places).long()
    queries = xs.gather(1, earlier[..., None].expand_as(xs)).clone()
    queries[:, :1] = math.nan
    return queries


def _scaled(scale: float) -> Callable[[Draws, Tensor], Tensor]:
    return lambda draws, U: draws.xs * scale


SCALES = (Fraction(1, 3), Fraction(1, 2), Fraction(2), Fraction(3))
_ALL = (
    Shift("standard"),
    Shift("skewed", skewed),
    Shift("half_subspace", half_subspace, least_dims=2),
    Shift("random_orthants", one_orthant, untouched),
    Shift("orthogonal_query", queries=orthogonal),
    Shift("overlapping_query", queries=overlapping),
    Shift("noisy_output", noise_std=1.0),
    *(Shift(f"x_times_{scale}", _scaled(float(scale)), x_scale=float(scale)) for scale in SCALES),
    *(Shift(f"w_times_{scale}", y_scale=float(scale)) for scale in SCALES),
)
SHIFTS = {shift.name: shift for shift in _ALL}


def make_shift(name: str) -> Shift:
    """A shift by its name in `SHIFTS`. Raises ValueError that names the nearest, or all, for an unknown one."""
    if name not in SHIFTS:
        raise ValueError(f"unknown shift {name!r}{suggestion(name, SHIFTS, listed=True)}")
    return SHIFTS[name]


def shifted_batches(
    shift: Shift, task: Task, n_prompts: int, n_points: int, *, generator: torch.Generator, rotation: Tensor, batch_size: int
) -> Iterator[ShiftedPairs]:
    """n_prompts prompts in batches; the batch size does not change them."""
    for start in range(0, n_prompts, batch_size):
        n = min(batch_size, n_prompts - start)
        yield shift.sample(task, n, n_points, generator=generator, rotation=rotation)


def predict_queries(predict: Callable[[Tensor, Tensor], Tensor], pairs: ShiftedPairs) -> Tensor:
    """Predictions [B, n] at the queries: entry i from the pairs 0 .. i-1 and query i alone, NaN where there is no query.

    predict(xs, ys) gives [B, n] as the predictors of `looped.icl.evaluate` do. Where the queries are the prompt's own points
    this is one call, else one for each point, of prompts that end with its query.
    """
    if pairs.is_plain:
        return predict(pairs.xs, pairs.ys)
    predictions = torch.full_like(pairs.ys, math.nan)
    for i in range(pairs.ys.shape[1]):
        there = ~pairs.query_xs[:, i].isnan().any(dim=1)
        if there.any():
            xs = torch.cat([pairs.xs[there, :i], pairs.query_xs[there, i : i + 1]], dim=1)
            ys = torch.cat([pairs.ys[there, :i], pairs.ys.new_zeros(len(xs), 1)], dim=1)  # no prediction reads the last y
            predictions[there, i] = predict(xs, ys)[:, -1].to(predictions)
    return predictions
