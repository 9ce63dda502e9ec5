"""Function blocks of the FLEQ machine: what one attention layer computes of the operands A and B in the scratchpad.

Each block writes rows of its own in the scratchpad's tokens. Each is a `Block`: it states `bound`, how far a result may be off,
and `valid`, where that holds. Blocks after Giannou et al. (2023), section 6; where they differ, docs/programs.md says why.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from looped.programs.circuit import Layer, Layout, Terms, merged, rows_of
from looped.programs.fleq_program import MOST_DATA

RIDGE = 1e-7  # on coefficients: as exact as without, and they stay small, which float32 needs
HIDE = 40.0  # exp(-40): below the rounding of float64 beside a weight that counts
Form = Literal["single", "pair", "richardson"]
Function = Literal["inv", "sqrt"]


class Block(Protocol):
    """What a function of the machine states of itself."""

    @property
    def of(self) -> str:
        """What numbers `valid` and `bound` speak of."""

    @property
    def valid(self) -> tuple[float, float]:
        """The least and the largest of these numbers; all numbers of memory must be below 1024 in size too."""

    def bound(self, s: float, width: int, eps: float) -> float:
        """The most that a result is off where they are at most s (of a sigmoid sum: are s), in a type of precision eps."""


def _query(code: list[Terms], layout: Layout, n_constants: int) -> list[Terms]:
    one = layout.row("ONE")
    return [*code, *([{one: 1.0}] * n_constants)]


@dataclass(frozen=True)
class MatrixProduct:
    """R = B^T A by softmax made linear (the paper's Lemma 7): one layer.

    A column a_i attends to the columns b_j with scores s / kappa, s = <b_j, a_i>, and to a sink with score C, so that
    exp(s / kappa) = 1 + s / kappa + ... is read over a denominator of about D0 = e^C + w.

    form: ``"single"``, one head as in the paper, error O(s^2 / kappa) and w s e^-C; ``"pair"``, a head for +s and one for -s,
    whose even terms cancel, with the denominator's first order put right by the feed-forward layer, error O(s^3 / kappa^2);
    ``"richardson"``, two pairs, 4/3 at 2 kappa - 1/3 at kappa, error O(s^5 / kappa^4).
    kappa must grow with |s| (|s| / kappa <= 1/2 is enforced) and be small for a coarse precision: rounding adds about
    kappa * ulp(C).
    """

    form: Form
    kappa: float
    sink: float

    of = "products of two columns"

    def __post_init__(self) -> None:
        if not 0 < self.kappa < math.inf:
            raise ValueError(
                f"MatrixProduct: kappa={self.kappa:g} must be a number above 0, at least twice the largest product"
            )

    @property
    def n_heads(self) -> int:
        return {"single": 1, "pair": 2, "richardson": 4}[self.form]

    @property
    def largest(self) -> float:
        """The largest |s| it takes."""
        return self.kappa / 2

    @property
    def valid(self) -> tuple[float, float]:
        return -self.largest, self.largest

    def bound(self, s: float, width: int, eps: float, size: float | None = None) -> float:
        """The most that an entry is off, for |<b_j, a_i>| up to s over all columns of matrices up to `width`.

        size: the largest sum of |b_jk a_ik|, which the rounding of a product is of; default s. Softmax is off by s^2 / 2 kappa
        and w s e^-C (single), s^3 / kappa^2 (pair; 1.2 of it for wide matrices and C below 2, a sixth for one column), s^5 /
        kappa^4 (richardson) at most. What is put right is multiplied by 1 + w e^-C.
        """
        x, loss = abs(s) / self.kappa, width * math.exp(-self.sink)
        terms = {"single": x + loss, "pair": 1.2 * x * x, "richardson": x**4}
        rounding = 4 * self.kappa * max(1.0, self.sink) + (width + 4) * abs(s if size is None else size)
        return abs(s) * terms[self.form] + eps * rounding * (1 if self.form == "single" else 1 + loss)

    def attend(self, layer: Layer, layout: Layout, width: int, out: range) -> None:
        """Heads that add s_k, up to what `fixed` mends, to out[k] of every scratchpad token."""
        levels = {
            "single": [(1.0, self.kappa, 1.0)],
            "pair": [(sign, self.kappa, 0.5 * sign) for sign in (1.0, -1.0)],
            "richardson": [
                (sign, kappa, 0.5 * sign * weight)
                for kappa, weight in ((2 * self.kappa, 4 / 3), (self.kappa, -1 / 3))
                for sign in (1.0, -1.0)
            ],
        }[self.form]
        one, own, sink = layout.row("ONE"), layout.row("IND"), layout.row("SINK")
        keys: list[Terms] = [*rows_of(layout["B"]), {sink: self.sink}, {one: -HIDE, own: HIDE, sink: HIDE}]
        for sign, kappa, weight in levels:
            query: list[Terms] = [{row: sign / kappa} for row in layout["A"]]
            value = weight * kappa * self._total(width)
            moves: list[tuple[Terms, Terms]] = [({oh: value}, {to: 1.0}) for oh, to in zip(layout["OH"], out, strict=True)]
            layer.attend(_query(query, layout, 2), keys, moves)
        if self.form == "single":
            for to in out:
                layer.unit({own: 1.0}, 0.0, {to: -self.kappa})

    def fixed(self, layout: Layout, width: int, raw: range, k: int) -> dict[int, float]:
        """Entry k of R from what the heads wrote: the loss of sum(s) / D0 comes back as sum(R) / (D0 - w)."""
        if self.form == "single":
            return {raw[k]: 1.0, layout.row("IND"): -self.kappa}
        share = 1.0 / (self._total(width) - width)
        return merged({row: share for row in raw}, {raw[k]: 1.0})

    def _total(self, width: int) -> float:
        return math.exp(self.sink) + width


@dataclass(frozen=True)
class SigmoidSum:
    """f(x) = c_0 + sum_t c_t sigmoid(a_t x + b_t), one head a term (the paper's Lemmas 5, 10, 11), on one number a column.

    function: ``"inv"``, 1 / x, or ``"sqrt"``. m: terms. lo, hi: where it is fitted; outside it goes flat, so arguments there
    are refused. Knots stand in a geometric row over [lo / 2, 1.5 hi] and slopes follow them, so the error falls far faster
    than the 1 / sqrt(m) of Barron's bound; coefficients are those of least relative squares.
    """

    function: Function
    m: int
    lo: float
    hi: float

    of = "numbers"

    @property
    def n_heads(self) -> int:
        return self.m

    @functools.cached_property
    def fit(self) -> tuple[float, NDArray[np.float64]]:
        """c_0, and rows (c_t, a_t, b_t)."""
        return _fit(self.function, self.m, self.lo, self.hi)

    def __call__(self, x: NDArray[np.float64]) -> NDArray[np.float64]:
        """The sum in float64."""
        c_0, terms = self.fit
        c, a, b = terms.T
        with np.errstate(over="ignore"):
            sums: NDArray[np.float64] = c_0 + (c / (1 + np.exp(-(a * np.asarray(x)[..., None] + b)))).sum(axis=-1)
        return sums

    @functools.cached_property
    def error(self) -> float:
        """The largest relative error over [lo, hi], in exact arithmetic, on 2,000 points."""
        x = np.geomspace(self.lo, self.hi, 2000)
        return float(np.abs(self(x) / FUNCTIONS[self.function](x) - 1).max())

    @property
    def valid(self) -> tuple[float, float]:
        return self.lo, self.hi

    def bound(self, s: float, width: int, eps: float) -> float:
        """The most that f(s) is off: the sum in exact arithmetic, and the rounding of scores, sigmoids and terms."""
        c_0, terms = self.fit
        c, a, b = terms.T
        z = a * s + b
        slopes = 1 / (4 * np.cosh(np.clip(z / 2, -300, 300)) ** 2)
        rounding = np.abs(c) @ (4 * slopes * (np.abs(a * s) + np.abs(b)) + 4 + self.m / 2) + 4 * abs(c_0)
        return float(self.error * abs(FUNCTIONS[self.function](s)) + eps * rounding)

    def attend(self, layer: Layer, layout: Layout, out: range) -> None:
        """Heads that add the sum for A's first row to out[0]."""
        c_0, terms = self.fit
        for c, a, b in terms:
            sigmoid_head(layer, layout, float(a), float(b), float(c), out[0])
        layer.unit({layout.row("IND"): 1.0}, 0.0, {out[0]: c_0})


@dataclass(frozen=True)
class Sigmoid:
    """1 / (1 + exp(-x)): one head, a softmax over two tokens."""

    of = "numbers"
    valid = (-MOST_DATA, MOST_DATA)

    def bound(self, s: float, width: int, eps: float) -> float:
        """Rounding: that of the score moves the sigmoid by |x| / (4 cosh(x / 2)^2) < 1/4 of it."""
        return 8 * eps

    def attend(self, layer: Layer, layout: Layout, out: range) -> None:
        """A head that adds the sigmoid of A's first row to out[0]."""
        sigmoid_head(layer, layout, 1.0, 0.0, 1.0, out[0])


@dataclass(frozen=True)
class Sum:
    """A + sign B, by the feed-forward layer."""

    sign: float

    of = "|a| + |b|"
    valid = (0.0, MOST_DATA)

    def bound(self, s: float, width: int, eps: float) -> float:
        """Rounding, and what reading and writing mix in of other tokens, which is below eps."""
        return eps * (1 + s)

    def add(self, layer: Layer, layout: Layout, out: range) -> None:
        """Units that add A + sign B to out."""
        for a, b, to in zip(layout["A"], layout["B"], out, strict=True):
            layer.add({a: 1.0, b: self.sign}, {to: 1.0})


@dataclass(frozen=True)
class Scaled:
    """The product times a factor, written by the feed-forward layer, which also puts the product's denominator right.

    `mm`; a transpose, which multiplies by the identity; `perc`, which multiplies by 1, and the factor is 1 / 100; and `emul`,
    which makes the products of all columns, keeps the diagonal, and so takes products larger than a number of memory.
    """

    product: MatrixProduct
    factor: float = 1.0
    of: str = MatrixProduct.of
    most: float = MOST_DATA

    @property
    def valid(self) -> tuple[float, float]:
        most = min(self.product.largest, self.most)
        return -most, most

    def bound(self, s: float, width: int, eps: float) -> float:
        """The product's, times the factor, and one more rounding where there is a factor."""
        return self.factor * (self.product.bound(s, width, eps) + (eps * abs(s) if self.factor != 1 else 0.0))

    def add(self, layer: Layer, layout: Layout, width: int, out: range) -> None:
        """Units that add the product to out."""
        for k, to in enumerate(out):
            layer.add(self.product.fixed(layout, width, layout["RAW"], k), {to: self.factor})


def sigmoid_head(layer: Layer, layout: Layout, a: float, b: float, c: float, out: int) -> None:
    """out += c sigmoid(a x + b): softmax over two tokens, the sink with that score and NUL with 0."""
    one, sink, nul = layout.row("ONE"), layout.row("SINK"), layout.row("NUL")
    query: list[Terms] = [{layout.row("A"): a, one: b}, {one: 1.0}]
    keys: list[Terms] = [{sink: 1.0}, {sink: 2 * HIDE, nul: 2 * HIDE, one: -2 * HIDE}]
    layer.attend(query, keys, [({sink: c}, {out: 1.0})])


FUNCTIONS: dict[str, Callable[[Any], Any]] = {"inv": lambda x: 1 / x, "sqrt": np.sqrt}


def _fit(function: str, m: int, lo: float, hi: float) -> tuple[float, NDArray[np.float64]]:
    if not (0 < lo < hi < math.inf and m >= 2):
        raise ValueError(f"SigmoidSum: needs 0 < lo < hi and m >= 2, got lo={lo}, hi={hi}, m={m}")
    knots = np.geomspace(lo / 2, 1.5 * hi, m)
    ratio = knots[1] / knots[0]
    slopes = 1 / (0.8 * knots * (ratio - 1))
    x = np.geomspace(lo, hi, max(2000, 20 * m))
    target = FUNCTIONS[function](x)
    columns = np.column_stack([np.ones_like(x), 1 / (1 + np.exp(-slopes * (x[:, None] - knots)))]) / target[:, None]
    # As an augmented least-squares problem: the normal equations would square the condition.
    system = np.vstack([columns, RIDGE * np.eye(m + 1)])
    right = np.concatenate([np.ones_like(x), np.zeros(m + 1)])
    coefficients = np.linalg.lstsq(system, right, rcond=None)[0]
    return float(coefficients[0]), np.column_stack([coefficients[1:], slopes, -slopes * knots])
