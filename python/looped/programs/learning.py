"""Learning inside the loop as FLEQ programs: SGD for a linear model, and backpropagation (Giannou et al., 2023, section 9)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from looped.programs.algebra import counted, matrix_text

Array = NDArray[np.float64]


def linear_sgd_text(X: ArrayLike, y: ArrayLike, rate: float, n_epochs: int) -> str:
    """w <- w - rate (<w, x_i> - y_i) x_i over the rows of X [n, d], in order. Result: w, a column."""
    X, y = np.asarray(X, dtype=np.float64), np.asarray(y, dtype=np.float64).reshape(1, -1)
    step = []
    for i in range(len(X)):
        step += [f"mm e, w, x{i}", f"sub e, e, y{i}", "mm e, e, rate", f"transpose row, x{i}", "mm g, row, e", "sub w, w, g"]
    lines = [
        f"let w = ZEROS ({X.shape[1]}, 1)",
        f"let rate = {rate!r}",
        f"let k = {n_epochs}",
        *(f"let x{i} = {matrix_text(x.reshape(-1, 1))}" for i, x in enumerate(X)),
        *(f"let y{i} = {float(value)!r}" for i, value in enumerate(y[0])),
        *counted("again", "k", step),
        "halt",
    ]
    return "\n".join(lines) + "\n"


def network_text(
    weights: Sequence[ArrayLike], X: ArrayLike, y: ArrayLike, rate: float, n_epochs: int
) -> str:
    """SGD with backpropagation for a network of sigmoid layers and one output, with the squared loss (o - y)^2 / 2.

    weights: of every layer, [inputs + 1, outputs], the bias in the last row; the last has one output. X [n, d], y [n]. Vectors are
    rows, so that `sig` and `emul` work on a whole layer at once; a layer's input is a row with a 1 at its end. Results: W0, W1, ...
    and o, the outputs of a last pass over all rows, as a row.
    """
    Ws = [np.asarray(W, dtype=np.float64) for W in weights]
    X, y = np.asarray(X, dtype=np.float64), np.asarray(y, dtype=np.float64).reshape(-1)
    n_layers, n = len(Ws), len(X)
    inputs = np.column_stack([X, np.ones(n)])
    lines = [f"let W{layer} = {matrix_text(W)}" for layer, W in enumerate(Ws)]
    for layer in range(1, n_layers):  # a layer's output, as a row with a 1 at its end
        lines.append(f"let a{layer} = {matrix_text(np.append(np.zeros(Ws[layer].shape[0] - 1), 1.0))}")
        lines.append(f"let keep{layer} = {matrix_text(np.eye(Ws[layer].shape[0] - 1, Ws[layer].shape[0]))}")
        lines.append(f"let last{layer} = {matrix_text(np.eye(1, Ws[layer].shape[0], Ws[layer].shape[0] - 1))}")
        lines.append(f"let ones{layer} = {matrix_text(np.ones(Ws[layer].shape[0]))}")
    for i in range(n):
        lines += [f"let x{i} = {matrix_text(inputs[i])}", f"let y{i} = {float(y[i])!r}"]
    lines += [f"let o = ZEROS (1, {n})", f"let rate = {rate!r}", f"let k = {n_epochs}"]
    steps: list[str] = []
    for i in range(n):
        steps += _forward(i, n_layers, "out") + _backward(i, n_layers)
    lines += counted("again", "k", steps)
    for i in range(n):
        lines += _forward(i, n_layers, f"o.{i}")
    return "\n".join([*lines, "halt"]) + "\n"


def _forward(i: int, n_layers: int, out: str) -> list[str]:
    """The outputs of all layers for row i; a layer's input is a column there, W^T of it its sum."""
    lines = []
    for layer in range(n_layers):
        source = f"x{i}" if layer == 0 else f"a{layer}"
        lines += [f"transpose in{layer}, {source}", f"mm h{layer}, in{layer}, W{layer}"]
        if layer == n_layers - 1:
            lines.append(f"sig {out}, h{layer}")
        else:  # sig(h) beside the 1 of the bias: keep^T moves it into a wider row
            up = layer + 1
            lines += [f"sig s{up}, h{layer}", f"transpose st{up}, s{up}", f"mm a{up}, st{up}, keep{up}"]
            lines.append(f"add a{up}, a{up}, last{up}")
    return lines


def _backward(i: int, n_layers: int) -> list[str]:
    """delta <- (o - y) o (1 - o); for every layer downwards W -= rate in^T delta, and delta <- delta W^T a (1 - a)."""
    lines = [f"sub delta, out, y{i}", "sub t, ONE, out", "emul t, t, out", "emul delta, delta, t", "mm delta, rate, delta"]
    delta = "delta"
    for layer in reversed(range(n_layers)):
        row = f"x{i}" if layer == 0 else f"a{layer}"
        lines.append(f"mm g{layer}, {row}, {delta}")
        if layer:
            lines += [f"transpose dt{layer}, {delta}", f"transpose Wt{layer}, W{layer}", f"mm b{layer}, dt{layer}, Wt{layer}"]
            lines += [f"sub n{layer}, ones{layer}, a{layer}", f"emul n{layer}, n{layer}, a{layer}"]
            lines += [f"emul b{layer}, b{layer}, n{layer}"]
            lines += [f"transpose bt{layer}, b{layer}", f"transpose kt{layer}, keep{layer}", f"mm d{layer}, bt{layer}, kt{layer}"]
            delta = f"d{layer}"
        lines.append(f"sub W{layer}, W{layer}, g{layer}")
    return lines


def sgd_network(
    weights: Sequence[ArrayLike], X: ArrayLike, y: ArrayLike, rate: float, n_epochs: int
) -> tuple[list[Array], Array]:
    """Plain NumPy of `network_text`: the weights, and the outputs of a last pass."""
    Ws = [np.array(W, dtype=np.float64) for W in weights]
    inputs = np.column_stack([np.asarray(X, dtype=np.float64), np.ones(len(np.asarray(X)))])

    def forward(x: Array) -> list[Array]:
        rows = [x]
        for layer, W in enumerate(Ws):
            out = 1 / (1 + np.exp(-rows[-1] @ W))
            rows.append(out if layer == len(Ws) - 1 else np.append(out, 1.0))
        return rows

    for _ in range(n_epochs):
        for x, target in zip(inputs, np.asarray(y, dtype=np.float64).reshape(-1), strict=True):
            rows = forward(x)
            delta = rate * (rows[-1] - target) * rows[-1] * (1 - rows[-1])
            for layer in reversed(range(len(Ws))):
                gradient = np.outer(rows[layer], delta)
                if layer:
                    delta = (Ws[layer] @ delta * rows[layer] * (1 - rows[layer]))[:-1]
                Ws[layer] -= gradient
    return Ws, np.array([forward(x)[-1][0] for x in inputs])
