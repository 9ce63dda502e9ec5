"""Learning inside the loop as FLEQ programs: SGD for a linear model, and backpropagation (Giannou et al., 2023, section 9)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from looped.programs.algebra import check_count, counted, matrix_text, table

Array = NDArray[np.float64]


def linear_sgd_text(X: ArrayLike, y: ArrayLike, rate: float, n_epochs: int) -> str:
    """w <- w - rate (<w, x_i> - y_i) x_i over the rows of X [n, d], in order, with y [n]. Result: w, a column.

    Raises ValueError for other shapes, or no epoch.
    """
    X = table(X, "linear_sgd_text: X", (None, None))
    y = table(y, "linear_sgd_text: y", (len(X),))
    check_count(n_epochs, "linear_sgd_text: n_epochs")
    step = []
    for i in range(len(X)):
        step += [f"mm e, w, x{i}", f"sub e, e, y{i}", "mm e, e, rate", f"transpose row, x{i}", "mm g, row, e", "sub w, w, g"]
    lines = [
        f"; SGD for a linear model, {n_epochs} epochs: w <- w - rate (<w, x_i> - y_i) x_i",
        f"let w = ZEROS ({X.shape[1]}, 1)",
        f"let rate = {float(rate)!r}",
        f"let k = {n_epochs}",
        *(f"let x{i} = {matrix_text(x.reshape(-1, 1))}" for i, x in enumerate(X)),
        *(f"let y{i} = {float(value)!r}" for i, value in enumerate(y)),
        *counted("again", "k", step),
        "halt",
    ]
    return "\n".join(lines) + "\n"


def network_text(weights: Sequence[ArrayLike], X: ArrayLike, y: ArrayLike, rate: float, n_epochs: int) -> str:
    """SGD with backpropagation for a network of sigmoid layers and one output, with the squared loss (o - y)^2 / 2.

    weights: of every layer, [inputs + 1, outputs], the bias in the last row; the last has one output. X [n, d], y [n].
    Vectors are rows, so that `sig` and `emul` work on a whole layer at once. Results: W0 (with its bias), W1, b1, W2, b2, ...,
    and o, the outputs of a last pass over all rows, as a row. Raises ValueError for other shapes, or no epoch.
    """
    X = table(X, "network_text: X", (None, None))
    n, size = X.shape
    y = table(y, "network_text: y", (n,))
    check_count(len(weights), "network_text: layers")
    check_count(n_epochs, "network_text: n_epochs")
    Ws: list[Array] = []
    for i, W in enumerate(weights):
        is_last = i == len(weights) - 1
        Ws.append(table(W, f"network_text: weights[{i}]", (size + 1, 1 if is_last else None)))
        size = Ws[-1].shape[1]
    n_layers = len(Ws)
    inputs = np.column_stack([X, np.ones(n)])
    lines = [
        f"; Backpropagation, {n_epochs} epochs of {n} rows, through layers of {', '.join(str(len(W) - 1) for W in Ws)}, 1 units"
    ]
    lines.append(f"let W0 = {matrix_text(Ws[0])}")
    for layer in range(1, n_layers):
        lines += [f"let W{layer} = {matrix_text(Ws[layer][:-1])}", f"let b{layer} = {matrix_text(Ws[layer][-1])}"]
        lines.append(f"let ones{layer} = {matrix_text(np.ones(len(Ws[layer]) - 1))}")
    for i in range(n):
        lines += [f"let x{i} = {matrix_text(inputs[i])}", f"let xc{i} = {matrix_text(inputs[i].reshape(-1, 1))}"]
        lines.append(f"let y{i} = {float(y[i])!r}")
    lines += [f"let o = ZEROS (1, {n})", f"let rate = {float(rate)!r}", f"let k = {n_epochs}"]
    steps = [line for i in range(n) for line in (*_forward(i, n_layers, "out"), *_backward(i, n_layers))]
    lines += counted("again", "k", steps)
    lines += [line for i in range(n) for line in _forward(i, n_layers, f"o.{i}")]
    return "\n".join([*lines, "halt"]) + "\n"


def _forward(i: int, n_layers: int, out: str) -> list[str]:
    """a_1 = sig(x W_0), a_{l+1} = sig(a_l W_l + b_l), for row i."""
    lines = []
    for layer in range(n_layers):
        target = out if layer == n_layers - 1 else f"a{layer + 1}"
        if layer == 0:
            lines.append(f"mm h0, xc{i}, W0")
        else:
            lines += [
                f"transpose at{layer}, a{layer}",
                f"mm h{layer}, at{layer}, W{layer}",
                f"add h{layer}, h{layer}, b{layer}",
            ]
        lines.append(f"sig {target}, h{layer}")
    return lines


def _backward(i: int, n_layers: int) -> list[str]:
    """delta = rate (o - y) o (1 - o); downwards, W_l -= a_l^T delta and delta <- (delta W_l^T) a_l (1 - a_l)."""
    lines = [f"sub d, out, y{i}", "sub t, ONE, out", "emul t, t, out", "emul d, d, t", "mm d, rate, d"]
    delta = "d"
    for layer in reversed(range(1, n_layers)):
        lines += [f"mm g{layer}, a{layer}, {delta}", f"transpose dt{layer}, {delta}", f"transpose Wt{layer}, W{layer}"]
        lines += [f"mm d{layer}, dt{layer}, Wt{layer}", f"sub n{layer}, ones{layer}, a{layer}"]
        lines += [f"emul n{layer}, n{layer}, a{layer}", f"emul d{layer}, d{layer}, n{layer}"]
        lines += [f"sub W{layer}, W{layer}, g{layer}", f"sub b{layer}, b{layer}, {delta}"]
        delta = f"d{layer}"
    return [*lines, f"mm g0, x{i}, {delta}", "sub W0, W0, g0"]


def sgd_network(
    weights: Sequence[ArrayLike], X: ArrayLike, y: ArrayLike, rate: float, n_epochs: int
) -> tuple[list[Array], Array]:
    """Plain NumPy of `network_text`: the weights, and the outputs of a last pass."""
    Ws = [np.array(W, dtype=np.float64) for W in weights]
    inputs = np.asarray(X, dtype=np.float64)

    def forward(x: Array) -> list[Array]:
        rows = [x]
        for W in Ws:
            rows.append(1 / (1 + np.exp(-(rows[-1] @ W[:-1] + W[-1]))))
        return rows

    for _ in range(n_epochs):
        for x, target in zip(inputs, np.asarray(y, dtype=np.float64).reshape(-1), strict=True):
            rows = forward(x)
            delta = rate * (rows[-1] - target) * rows[-1] * (1 - rows[-1])
            for layer in reversed(range(len(Ws))):
                gradient = np.outer(np.append(rows[layer], 1.0), delta)
                delta = Ws[layer][:-1] @ delta * rows[layer] * (1 - rows[layer])
                Ws[layer] -= gradient
    return Ws, np.array([forward(x)[-1][0] for x in inputs])
