"""In-context baselines: what a classical estimator predicts at point i of a prompt from the pairs before it.

The sets and their options are those of Garg et al. (2022), "What Can Transformers Learn In-Context?", and Yang et al. (2024).
All look alike: `predict(xs, ys)` gives [B, n], entry i made from pairs 0 .. i-1 and x_i alone, and 0 at point 0.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from looped.icl import tasks
from looped.suggestion import suggestion

LASSO_ALPHAS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)


@dataclass(frozen=True)
class Baseline:
    """An estimator refitted at every point of a prompt. Subclasses say how, in `_next`."""

    kind: ClassVar[str]
    cost: ClassVar[Literal["cheap", "slow"]] = "cheap"
    needs: ClassVar[tuple[str, str] | None] = None  # module, and what installs it
    chunk: ClassVar[int] = 1024  # prompts handed to `_next` at once

    @property
    def name(self) -> str:
        """The kind, then every option that is not the default: `lasso`, `lasso_alpha=0.1`."""
        options = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return "_".join([self.kind, *(f"{option}={value}" for option, value in options)])

    @property
    def why_unavailable(self) -> str | None:
        """Why `predict` cannot run here, and what to do; None where it can."""
        if self.needs is None:
            return None
        module, remedy = self.needs
        try:
            importlib.import_module(module)
        except Exception as error:  # a package whose native library does not load raises an error of its own class
            return f"{self.kind}: cannot import {module} ({error}); {remedy}"
        return None

    def is_available(self) -> bool:
        """Whether `predict` can run here."""
        return self.why_unavailable is None

    def predict(self, xs: Tensor, ys: Tensor, *, progress: Callable[[int, int], None] | None = None) -> Tensor:
        """Predictions float32 [B, n] on the device of xs, for xs [B, n, d] and ys [B, n] of any real dtype.

        Arithmetic is float64. Prediction 0 is 0. Where x_0 .. x_i or y_0 .. y_{i-1} holds a value that float32 cannot (NaN,
        infinity, overflow), predictions i, i+1, ... of that prompt are NaN from the first such i >= 1; other prompts do not
        change. progress: called with (done, total) predictions; without it a bar appears on a terminal after two seconds.

        Raises TypeError for what is not a real tensor, ValueError for wrong shapes, ImportError if not available.
        """
        _check_pairs(self.kind, xs, ys)
        if (why := self.why_unavailable) is not None:
            raise ImportError(why)
        with torch.inference_mode(False), torch.no_grad():
            bad_x = ~xs.float().isfinite().all(dim=2)
            bad_pair = (bad_x | ~ys.float().isfinite()).cumsum(dim=1) > 0
            predictable = ~(bad_pair[:, :-1] | bad_x[:, 1:])
            total, done = int(predictable.sum()), 0
            xs, ys = xs.double(), ys.double()
            predictions = torch.full(ys.shape, math.nan, device=xs.device)
            predictions[:, :1] = 0
            with tqdm(total=total, desc=self.name, delay=2, leave=False, disable=None if progress is None else True) as bar:
                for i in range(1, xs.shape[1]):
                    for rows in predictable[:, i - 1].nonzero().squeeze(1).split(self.chunk):
                        predictions[rows, i] = self._next(xs[rows, :i], ys[rows, :i], xs[rows, i]).to(predictions)
                        done += len(rows)
                        bar.update(len(rows))
                        if progress is not None:
                            progress(done, total)
        return predictions

    def _next(self, xs: Tensor, ys: Tensor, query: Tensor) -> Tensor:
        """f(query) [B] from the pairs xs [B, i, d], ys [B, i], i >= 1, at query [B, d], all finite float64."""
        raise NotImplementedError

    def _require(self, allowed: bool, option: str, rule: str) -> None:
        if not allowed:
            raise ValueError(f"{self.kind}: {option}={getattr(self, option)} must be {rule}")


def _check_pairs(kind: str, xs: Tensor, ys: Tensor) -> None:
    if not (isinstance(xs, Tensor) and isinstance(ys, Tensor)) or xs.is_complex() or ys.is_complex():
        got = " and ".join(str(t.dtype) if isinstance(t, Tensor) else type(t).__name__ for t in (xs, ys))
        raise TypeError(f"{kind}: xs and ys must be real tensors, got {got}; wrap arrays with torch.as_tensor")
    if xs.dim() != 3 or xs.shape[2] < 1 or ys.shape != xs.shape[:2]:
        raise ValueError(
            f"{kind}: xs must be [B, n, d] with d >= 1 and ys [B, n], got {list(xs.shape)} and {list(ys.shape)}; "
            "add the missing dimension or pass the pairs of one `sample`"
        )


@dataclass(frozen=True)
class LeastSquares(Baseline):
    """The w of least norm among those that minimise ||y - Xw||, by the singular value decomposition X = U S V'.

    Singular values up to max(i, d) * 2^-23 times the largest count as zero: the convention of NumPy and PyTorch for float32,
    in which prompts are drawn, applied in float64. So a rank lost to repeated or dependent inputs stays lost after rounding.
    """

    kind: ClassVar[str] = "least_squares"

    def _next(self, xs: Tensor, ys: Tensor, query: Tensor) -> Tensor:
        U, S, Vh = torch.linalg.svd(xs, full_matrices=False)
        cutoff = torch.finfo(torch.float32).eps * max(xs.shape[1:]) * S[:, :1]
        return _linear(U, torch.where(cutoff < S, 1 / S, 0.0), Vh, ys, query)


@dataclass(frozen=True)
class Ridge(Baseline):
    """The w that minimises ||y - Xw||^2 + alpha ||w||^2, alpha > 0, in closed form: V S / (S^2 + alpha) U' y.

    For w ~ N(0, I) and noise of variance alpha this is the Bayes estimate.
    """

    alpha: float = 1.0
    kind: ClassVar[str] = "ridge"

    def __post_init__(self) -> None:
        self._require(0 < self.alpha < math.inf, "alpha", "positive and finite (least_squares is its limit at 0)")

    def _next(self, xs: Tensor, ys: Tensor, query: Tensor) -> Tensor:
        U, S, Vh = torch.linalg.svd(xs, full_matrices=False)
        return _linear(U, S / (S.square() + self.alpha), Vh, ys, query)


def _linear(U: Tensor, inverse: Tensor, Vh: Tensor, ys: Tensor, query: Tensor) -> Tensor:
    """query . V diag(inverse) U' y of every prompt."""
    targets = (U.mT @ ys[..., None]).squeeze(-1)
    directions = (Vh @ query[..., None]).squeeze(-1)
    return (directions * inverse * targets).sum(dim=1)


@dataclass(frozen=True)
class KNearestNeighbours(Baseline):
    """The plain mean of y over the k nearest x by Euclidean distance (over all while fewer are known; ties: earliest)."""

    k: int = 3
    kind: ClassVar[str] = "nearest_neighbours"

    def __post_init__(self) -> None:
        self._require(self.k >= 1, "k", "at least 1")

    def _next(self, xs: Tensor, ys: Tensor, query: Tensor) -> Tensor:
        distances = torch.linalg.vector_norm(xs - query[:, None], dim=2)
        nearest = distances.argsort(dim=1, stable=True)[:, : self.k]
        return ys.gather(1, nearest).mean(dim=1)


@dataclass(frozen=True)
class Averaging(Baseline):
    """w . x with w the mean of x_j y_j: one gradient step on the linear problem (Garg et al.)."""

    kind: ClassVar[str] = "averaging"

    def _next(self, xs: Tensor, ys: Tensor, query: Tensor) -> Tensor:
        w = (xs * ys[..., None]).mean(dim=1)
        return (w * query).sum(dim=1)


@dataclass(frozen=True)
class GradientDescentNetwork(Baseline):
    """A two-layer ReLU network with biases, trained from scratch on the pairs of every prefix by Adam on the squared error.

    Each step takes min(batch_size, i) pairs. Options are those of Garg et al.; their networks start from weights of their
    own and share one loss, averaged over the batch of prompts. Here the start (PyTorch's for a linear layer) and the pairs of
    each step come from `seed` and the shapes alone, the same for every prompt, and each prompt has its own loss: so its
    predictions do not depend on its batch.
    """

    hidden: int = 100
    lr: float = 5e-3
    n_steps: int = 100
    batch_size: int = 100
    seed: int = 0
    kind: ClassVar[str] = "gd_network"
    cost: ClassVar[Literal["cheap", "slow"]] = "slow"
    chunk: ClassVar[int] = 64

    def __post_init__(self) -> None:
        self._require(self.hidden >= 1, "hidden", "at least 1")
        self._require(0 < self.lr < math.inf, "lr", "positive and finite")
        self._require(self.n_steps >= 0, "n_steps", "at least 0")
        self._require(self.batch_size >= 1, "batch_size", "at least 1")

    def _next(self, xs: Tensor, ys: Tensor, query: Tensor) -> Tensor:
        n_prompts, n_pairs, n_dims = xs.shape
        generator = torch.Generator().manual_seed(self.seed)

        def start(rows: int, columns: int, fan_in: int) -> Tensor:
            uniforms = torch.rand(1, rows, columns, dtype=xs.dtype, generator=generator)
            return ((2 * uniforms - 1) / math.sqrt(fan_in)).to(xs.device).repeat(n_prompts, 1, 1).requires_grad_()

        W1, b1 = start(n_dims, self.hidden, n_dims), start(1, self.hidden, n_dims)
        W2, b2 = start(self.hidden, 1, self.hidden), start(1, 1, self.hidden)

        def network(x: Tensor) -> Tensor:  # [B, m, d] -> [B, m]
            return torch.baddbmm(b2, torch.baddbmm(b1, x, W1).relu(), W2).squeeze(2)

        optimizer = torch.optim.Adam([W1, b1, W2, b2], lr=self.lr, fused=True)
        batch = torch.arange(n_pairs)
        for _ in range(self.n_steps):
            if n_pairs > self.batch_size:
                batch = torch.randperm(n_pairs, generator=generator)[: self.batch_size]
            with torch.enable_grad():
                loss = (network(xs[:, batch]) - ys[:, batch]).square().mean(dim=1).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return network(query[:, None]).squeeze(1)


@dataclass(frozen=True)
class _OneByOne(Baseline):
    """A baseline that another library fits to one prompt at a time, on the CPU."""

    cost: ClassVar[Literal["cheap", "slow"]] = "slow"
    needs: ClassVar[tuple[str, str] | None] = ("sklearn", "pip install scikit-learn")
    chunk: ClassVar[int] = 16

    def _next(self, xs: Tensor, ys: Tensor, query: Tensor) -> Tensor:
        import sklearn

        X, y, q = xs.cpu().numpy(), ys.cpu().numpy(), query.cpu().numpy()
        # `predict` has checked the values; on so few rows scikit-learn's checks cost as much as its fits.
        with sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
            return torch.tensor([self._fitted(X[b], y[b], q[b]) for b in range(len(y))], dtype=torch.float64)

    def _fitted(self, X: np.ndarray, y: np.ndarray, query: np.ndarray) -> float:
        """f(query) for query [d] from the pairs X [i, d], y [i] of one prompt."""
        raise NotImplementedError


@dataclass(frozen=True)
class Lasso(_OneByOne):
    """The w that minimises ||y - Xw||^2 / (2i) + alpha ||w||_1, no intercept, by scikit-learn's coordinate descent.

    The descent goes down the `LASSO_ALPHAS` above alpha, each started from the last, to a duality gap of 1e-10 ||y||^2 with
    at most 100,000 sweeps. That is the optimum: its conditions hold to 1e-5 of alpha down to alpha = 1e-4. The published
    curves run the descent from zero in float32 to a gap of 1e-4, far from it for small alpha below d pairs.
    Yang et al. plot alpha = 0.01.
    """

    alpha: float = 0.01
    kind: ClassVar[str] = "lasso"

    def __post_init__(self) -> None:
        self._require(0 < self.alpha < math.inf, "alpha", "positive and finite")

    def _fitted(self, X: np.ndarray, y: np.ndarray, query: np.ndarray) -> float:
        from sklearn.linear_model import lasso_path

        alphas = [*(alpha for alpha in LASSO_ALPHAS if alpha > self.alpha), self.alpha]
        _, coefficients, _ = lasso_path(X, y, alphas=alphas, max_iter=100_000, tol=1e-10)
        return float(coefficients[:, -1] @ query)


@dataclass(frozen=True)
class DecisionTreeBaseline(_OneByOne):
    """scikit-learn's regression tree, grown greedily on the squared error. max_depth None: until every leaf is pure.

    Splits of equal gain are common on few pairs and chosen by `seed`. signs: it sees the signs of x alone, which are all
    that the functions of `tasks.DecisionTree` look at.
    """

    max_depth: int | None = None
    seed: int = 0
    signs: bool = False
    kind: ClassVar[str] = "decision_tree"

    def __post_init__(self) -> None:
        self._require(self.max_depth is None or self.max_depth >= 1, "max_depth", "None or at least 1")

    def _fitted(self, X: np.ndarray, y: np.ndarray, query: np.ndarray) -> float:
        from sklearn.tree import DecisionTreeRegressor

        X, query = (np.sign(X), np.sign(query)) if self.signs else (X, query)
        tree = DecisionTreeRegressor(max_depth=self.max_depth, random_state=self.seed).fit(X, y)
        return float(tree.predict(query[None])[0])


@dataclass(frozen=True)
class XGBoost(_OneByOne):
    """Gradient-boosted trees; the defaults are xgboost's own, as in Garg et al. Computed in float32.

    Splits are searched exactly, which older releases chose by themselves for so few rows and is the faster way on them.
    signs: as of `DecisionTreeBaseline`.
    """

    n_estimators: int = 100
    max_depth: int = 6
    learning_rate: float = 0.3
    signs: bool = False
    kind: ClassVar[str] = "xgboost"
    needs: ClassVar[tuple[str, str] | None] = ("xgboost", "pip install 'looped[tabular]'")

    def __post_init__(self) -> None:
        self._require(self.n_estimators >= 1, "n_estimators", "at least 1")
        self._require(self.max_depth >= 1, "max_depth", "at least 1")
        self._require(0 < self.learning_rate <= 1, "learning_rate", "in (0, 1]")

    def _fitted(self, X: np.ndarray, y: np.ndarray, query: np.ndarray) -> float:
        from xgboost import XGBRegressor

        X, query = (np.sign(X), np.sign(query)) if self.signs else (X, query)
        options = {name: value for name, value in dataclasses.asdict(self).items() if name != "signs"}
        model = XGBRegressor(tree_method="exact", n_jobs=1, **options)
        return float(model.fit(X, y).predict(query[None])[0])


_ALL = (LeastSquares, Ridge, KNearestNeighbours, Averaging, GradientDescentNetwork, Lasso, DecisionTreeBaseline, XGBoost)
BASELINES: dict[str, Callable[..., Baseline]] = {baseline.kind: baseline for baseline in _ALL}

_FOR_ANY = (LeastSquares(), KNearestNeighbours(), Averaging())


def _of_noisy(task: tasks.NoisyLinearRegression) -> list[Baseline]:
    variance = float(f"{task.std**2:.12g}")  # 0.01 of 0.1, for its name
    return [Ridge(alpha=variance)] if variance else []  # the ridge of the posterior mean


def _of_network(task: tasks.ReLURegression) -> list[Baseline]:
    published = GradientDescentNetwork()
    return [published] if task.hidden == published.hidden else [published, GradientDescentNetwork(hidden=task.hidden)]


def _of_tree(task: tasks.DecisionTree) -> list[Baseline]:
    """Fig. 10 of Yang et al. has the tree of depth 2 on x and the one as deep as the task's on signs."""
    as_deep = [task.depth] if task.depth else []
    on_x = [DecisionTreeBaseline(max_depth=depth) for depth in dict.fromkeys([None, 2, *as_deep])]
    on_signs = [DecisionTreeBaseline(max_depth=depth, signs=True) for depth in [None, *as_deep]]
    return [*on_x, *on_signs, XGBoost(), XGBoost(signs=True)]


_MORE: dict[str, Callable[[Any], list[Baseline]]] = {
    tasks.LinearRegression.name: lambda _: [],
    tasks.NoisyLinearRegression.name: _of_noisy,
    tasks.SparseLinearRegression.name: lambda _: [Lasso()],
    tasks.QuadraticRegression.name: lambda _: [],
    tasks.ReLURegression.name: _of_network,
    tasks.DecisionTree.name: _of_tree,
}


def make_baseline(name: str, **options: Any) -> Baseline:
    """A baseline by its name in `BASELINES`. Raises ValueError that names the nearest, or all, for an unknown one."""
    return _lookup("baseline", BASELINES, name)(**options)


def baselines_for(task: tasks.Task | str) -> list[Baseline]:
    """The baselines published for a task (of a name: with the numbers that the papers give it), fitted to its numbers.

    Ridge has the variance of the noise; greedy trees have no limit, depth 2 and the depth of the task's on x, and no limit and
    the depth of the task's on its signs; networks have the published 100 units and as many as the task's. Those that need an
    optional package are listed where it is missing: ask `is_available`. Raises ValueError that names the nearest, or all, for
    an unknown task.
    """
    name = task if isinstance(task, str) else task.name
    more = _lookup("task", _MORE, name)
    return [*_FOR_ANY, *more(tasks.make_task(name, 20) if isinstance(task, str) else task)]


def _lookup(what: str, table: dict[str, Any], name: str) -> Any:
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}{suggestion(name, table, listed=True)}")
    return table[name]
