"""In-context tasks: families of random functions whose (x, f(x)) pairs make a prompt.

Definitions follow Garg et al. (2022), "What Can Transformers Learn In-Context?", and Yang et al. (2024); normalisations are
those of their figures. Every random number of a prompt comes from one block of uniforms drawn in prompt order, so prompt i
of a seed is the same whatever the batch size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from looped.integers import take_integers
from looped.suggestion import suggestion

Parameters = dict[str, Tensor]


class Pairs(NamedTuple):
    """In-context pairs: xs float32 [B, n, d], ys float32 [B, n]."""

    xs: Tensor
    ys: Tensor


def normals(uniforms: Tensor) -> Tensor:
    """Standard normal float64 of the same shape from uniforms in [0, 1), by the inverse distribution function."""
    return torch.special.ndtri(uniforms.clamp_min(2.0**-54))


@dataclass(frozen=True)
class Task:
    """A family of functions of n_dims inputs with Gaussian x. Subclasses say how a function is drawn and evaluated."""

    n_dims: int
    name: ClassVar[str]
    counts: ClassVar[tuple[str, ...]] = ()  # fields that are integers, beside n_dims

    def __post_init__(self) -> None:
        take_integers(self, ("n_dims", *self.counts))
        for field in ("n_dims", *self.counts):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{type(self).__name__}: {field}={value!r} must be an integer")
        if self.n_dims < 1:
            raise ValueError(f"{type(self).__name__}: n_dims={self.n_dims} must be at least 1")

    @property
    def options(self) -> dict[str, Any]:
        """The fields beside n_dims, such as a sparsity."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "n_dims"}

    @property
    def n_parameters(self) -> int:
        """Uniforms that one function takes."""
        raise NotImplementedError

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on y."""
        return 0.0

    @property
    def error_scale(self) -> float:
        """Squared errors are divided by this in figures: the variance of y."""
        return float(self.n_dims)

    def parameters(self, uniforms: Tensor, n_live: int) -> Parameters:
        """Functions from uniforms float64 [B, n_parameters], using the first n_live coordinates alone."""
        raise NotImplementedError

    def values(self, parameters: Parameters, xs: Tensor) -> Tensor:
        """f(x) [B, n] of xs [B, n, d], without noise."""
        raise NotImplementedError

    def sample(self, n_prompts: int, n_points: int, *, generator: torch.Generator, n_live: int | None = None) -> Pairs:
        """Draw prompts of n_points pairs.

        generator: a CPU generator; the k-th prompt drawn from it is the same for every way to split the draws into
        batches. n_live: coordinates in use (dimension curriculum); the others are exactly zero.
        """
        n_live = self.n_dims if n_live is None else n_live
        if not 1 <= n_live <= self.n_dims:
            raise ValueError(f"{self.name}: n_live={n_live} must lie in 1 .. n_dims={self.n_dims}")
        if n_prompts < 0 or n_points < 0:
            raise ValueError(f"{self.name}: n_prompts={n_prompts} and n_points={n_points} must not be negative")
        n_inputs, n_noise = n_points * self.n_dims, n_points if self.noise_std else 0
        sizes = [n_inputs, self.n_parameters, n_noise]
        uniforms = torch.rand(n_prompts, sum(sizes), dtype=torch.float64, generator=generator)
        for_inputs, for_parameters, for_noise = uniforms.split(sizes, dim=1)
        xs = normals(for_inputs).reshape(n_prompts, n_points, self.n_dims)
        xs[..., n_live:] = 0
        ys = self.values(self.parameters(for_parameters, n_live), xs)
        if n_noise:
            ys = ys + self.noise_std * normals(for_noise)
        return Pairs(xs.float(), ys.float())


@dataclass(frozen=True)
class LinearRegression(Task):
    """y = w . x with w ~ N(0, I)."""

    name: ClassVar[str] = "linear_regression"

    @property
    def n_parameters(self) -> int:
        return self.n_dims

    def parameters(self, uniforms: Tensor, n_live: int) -> Parameters:
        w = normals(uniforms)
        w[:, n_live:] = 0
        return {"w": w}

    def values(self, parameters: Parameters, xs: Tensor) -> Tensor:
        return (xs @ parameters["w"][..., None]).squeeze(-1)


MAX_STD = 1e37  # of noise: normals are within 8.3, and the largest float32 is 3.4e38


@dataclass(frozen=True)
class NoisyLinearRegression(LinearRegression):
    """Linear regression with Gaussian noise on y."""

    std: float = 0.1
    name: ClassVar[str] = "noisy_linear_regression"

    def __post_init__(self) -> None:
        super().__post_init__()
        std: Any = self.std
        if isinstance(std, bool) or not isinstance(std, Real):
            raise ValueError(f"{self.name}: std={std!r} must be a number")
        object.__setattr__(self, "std", float(std))  # it may have been NumPy's
        if not 0 <= self.std <= MAX_STD:
            raise ValueError(f"{self.name}: std={self.std} must lie in 0 .. {MAX_STD:g}, as y is float32")

    @property
    def noise_std(self) -> float:
        return self.std

    @property
    def error_scale(self) -> float:
        return super().error_scale + self.std**2


@dataclass(frozen=True)
class SparseLinearRegression(LinearRegression):
    """Linear regression whose w has `sparsity` non-zero coordinates, drawn among the live ones (Garg et al.)."""

    sparsity: int = 3
    name: ClassVar[str] = "sparse_linear_regression"
    counts: ClassVar[tuple[str, ...]] = ("sparsity",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.sparsity <= self.n_dims:
            raise ValueError(f"{self.name}: sparsity={self.sparsity} must lie in 1 .. n_dims={self.n_dims}")

    @property
    def n_parameters(self) -> int:
        return 2 * self.n_dims

    @property
    def error_scale(self) -> float:
        return float(self.sparsity)

    def parameters(self, uniforms: Tensor, n_live: int) -> Parameters:
        w = normals(uniforms[:, : self.n_dims])
        order = uniforms[:, self.n_dims : self.n_dims + n_live].argsort(dim=1)
        support = torch.zeros_like(w).scatter(1, order[:, : self.sparsity], 1.0)
        return {"w": w * support}


@dataclass(frozen=True)
class QuadraticRegression(LinearRegression):
    """y = sum_j w_j x_j^2 / sqrt(3)."""

    name: ClassVar[str] = "quadratic_regression"

    def values(self, parameters: Parameters, xs: Tensor) -> Tensor:
        return super().values(parameters, xs.square()) / math.sqrt(3)


@dataclass(frozen=True)
class ReLURegression(Task):
    """A two-layer ReLU network: y = sqrt(2 / hidden) * W2' relu(W1' x), all weights N(0, 1)."""

    hidden: int = 100
    name: ClassVar[str] = "relu_2nn_regression"
    counts: ClassVar[tuple[str, ...]] = ("hidden",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden < 1:
            raise ValueError(f"{self.name}: hidden={self.hidden} must be at least 1")

    @property
    def n_parameters(self) -> int:
        return (self.n_dims + 1) * self.hidden

    def parameters(self, uniforms: Tensor, n_live: int) -> Parameters:
        weights = normals(uniforms)
        split = self.n_dims * self.hidden
        return {"W1": weights[:, :split].reshape(-1, self.n_dims, self.hidden), "W2": weights[:, split:, None]}

    def values(self, parameters: Parameters, xs: Tensor) -> Tensor:
        W1, W2 = parameters["W1"].to(xs.dtype), parameters["W2"].to(xs.dtype)
        return (torch.relu(xs @ W1) @ W2).squeeze(-1) * math.sqrt(2 / self.hidden)


MAX_DEPTH = 20  # of a tree: every prompt draws all of its 2 million nodes


@dataclass(frozen=True)
class DecisionTree(Task):
    """A full binary tree: each inner node asks whether one live coordinate is above 0; leaves are N(0, 1).

    Nodes are numbered in heap order. x > 0 goes right, so exactly 0 goes left.
    """

    depth: int = 4
    name: ClassVar[str] = "decision_tree"
    counts: ClassVar[tuple[str, ...]] = ("depth",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.depth <= MAX_DEPTH:
            raise ValueError(f"{self.name}: depth={self.depth} must be in 0 .. {MAX_DEPTH}: a tree has 2^(depth + 1) - 1 nodes")

    @property
    def n_parameters(self) -> int:
        return 2 ** (self.depth + 1) - 1

    @property
    def error_scale(self) -> float:
        return 1.0

    def parameters(self, uniforms: Tensor, n_live: int) -> Parameters:
        n_inner = 2**self.depth - 1
        coordinates = (uniforms[:, :n_inner] * n_live).long().clamp_max(n_live - 1)
        return {"coordinates": coordinates, "leaves": normals(uniforms[:, n_inner:])}

    def values(self, parameters: Parameters, xs: Tensor) -> Tensor:
        coordinates, leaves = parameters["coordinates"], parameters["leaves"]
        node = torch.zeros(xs.shape[:2], dtype=torch.long)
        for _ in range(self.depth):
            coordinate = coordinates.gather(1, node)
            goes_right = xs.gather(2, coordinate[..., None]).squeeze(-1) > 0
            node = 2 * node + 1 + goes_right.long()
        return leaves.gather(1, node - (2**self.depth - 1))


@dataclass(frozen=True)
class PromptPool:
    """A fixed set of distinct prompts of a task; batches are drawn from it with replacement (sample efficiency).

    The authors' loader differs: it shuffles the set and goes through all of it before any prompt comes again.
    """

    pairs: Pairs

    @classmethod
    def of(cls, task: Task, size: int, n_points: int, *, seed: int) -> PromptPool:
        """The first `size` prompts of `seed`. Raises ValueError for an empty pool."""
        if size < 1:
            raise ValueError(f"PromptPool: size={size} must be at least 1")
        return cls(task.sample(size, n_points, generator=torch.Generator().manual_seed(seed)))

    def sample(self, n_prompts: int, *, generator: torch.Generator) -> Pairs:
        """n_prompts rows, drawn with replacement; n_prompts may exceed the pool."""
        rows = torch.randint(len(self.pairs.ys), (n_prompts,), generator=generator)
        return Pairs(self.pairs.xs[rows], self.pairs.ys[rows])


TASKS: dict[str, Callable[..., Task]] = {
    task.name: task
    for task in (
        LinearRegression,
        NoisyLinearRegression,
        SparseLinearRegression,
        QuadraticRegression,
        ReLURegression,
        DecisionTree,
    )
}


def make_task(name: str, n_dims: int, **options: Any) -> Task:
    """A task by its name in `TASKS`, or "tabular" (rows of real tables, `looped.icl.tabular`).

    Raises ValueError that names the nearest, or all, for an unknown one.
    """
    if name == "tabular":
        from looped.icl.tabular import TabularTask

        return _made(TabularTask, name, n_dims, options)
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}{suggestion(name, [*TASKS, 'tabular'], listed=True)}")
    return _made(TASKS[name], name, n_dims, options)


def _made(task: Callable[..., Task], name: str, n_dims: int, options: dict[str, Any]) -> Task:
    try:
        return task(n_dims, **options)
    except TypeError as error:
        raise ValueError(f"task {name}: options {options} do not fit it ({error})") from error
