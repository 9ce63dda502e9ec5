"""Linear algebra as FLEQ programs: Newton's inverse, power iteration, Gauss-Seidel, QR (Giannou et al., 2023, section 8)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def matrix_text(matrix: ArrayLike) -> str:
    """A matrix as the assembler reads it, to the last bit."""
    rows = np.atleast_2d(np.asarray(matrix, dtype=np.float64)).tolist()
    return "[" + ", ".join("[" + ", ".join(repr(value) for value in row) for row in rows).replace(", [", "], [") + "]]"


def counted(label: str, counter: str, body: list[str]) -> list[str]:
    """The body as often as the counter says. A flag is read before its command writes, so a command of its own tests it."""
    first, *rest = body
    return [
        f"{label}: {first}",
        *rest,
        f"sub {counter}, {counter}, ONE",
        f"nop if {counter} -> {label}_end",
        f"jmp {label}",
        f"{label}_end:",
    ]


def inverse_text(A: ArrayLike, n_iterations: int) -> str:
    """Newton's inverse X <- X (2 I - A X), from X_0 = A^T / (|A|_1 |A|_inf), whose scale the host computes. Result: X."""
    A = np.asarray(A, dtype=np.float64)
    start = A.T / (np.abs(A).sum(axis=0).max() * np.abs(A).sum(axis=1).max())
    lines = [
        f"let At = {matrix_text(A.T)}",
        f"let X = {matrix_text(start)}",
        f"let two = {matrix_text(2 * np.eye(len(A)))}",
        f"let k = {n_iterations}",
        *counted("again", "k", ["mm T, At, X", "sub T, two, T", "transpose Xt, X", "mm X, Xt, T"]),
        "halt",
    ]
    return "\n".join(lines) + "\n"


def _inverse_root(label: str, n_iterations: int) -> list[str]:
    """z -> 1 / sqrt(s) by Newton's z <- z (1.5 - 0.5 s z^2), which converges from any z_0 with s z_0^2 < 3."""
    body = ["mm u, z, z", "mm u, s, u", "mm u, half, u", "sub u, three_halves, u", "mm z, z, u"]
    return ["copy j, n_newton", *counted(label, "j", body)]


def _newton_data(n_iterations: int, z: float) -> list[str]:
    return ["let half = 0.5", "let three_halves = 1.5", f"let n_newton = {n_iterations}", "let j = 0", f"let z = {z!r}"]


def power_text(A: ArrayLike, v: ArrayLike, n_iterations: int, n_newton: int = 6) -> str:
    """Power iteration v <- A v / |A v|, the root by Newton from the last step's. Result: v, the leading eigenvector."""
    A = np.asarray(A, dtype=np.float64)
    start = np.asarray(v, dtype=np.float64).reshape(-1, 1) / np.linalg.norm(v)
    lines = [
        f"let At = {matrix_text(A.T)}",
        f"let v = {matrix_text(start)}",
        f"let k = {n_iterations}",
        *_newton_data(n_newton, float(1 / np.linalg.norm(A))),
        *counted(
            "again", "k", ["mm y, At, v", "mm s, y, y", *_inverse_root("root", n_newton), "transpose yt, y", "mm v, yt, z"]
        ),
        "halt",
    ]
    return "\n".join(lines) + "\n"


def gauss_seidel_text(A: ArrayLike, b: ArrayLike, n_iterations: int) -> str:
    """Gauss-Seidel for A x = b: x_i <- x_i + (b_i - <A_i, x>) / A_ii, one unknown after the other. Result: x, a row.

    The reciprocals of the diagonal come from the `inv` block and two Newton steps d <- d (2 - a d).
    """
    A, b = np.asarray(A, dtype=np.float64), np.asarray(b, dtype=np.float64).reshape(1, -1)
    n = len(A)
    sweep = []
    for i in range(n):
        sweep += ["transpose xt, x", f"mm r, At.{i}, xt", f"sub r, b.{i}, r", f"emul r, r, d.{i}", f"add x.{i}, x.{i}, r"]
    lines = [
        f"let At = {matrix_text(A.T)}",
        f"let diagonal = {matrix_text(np.diag(A))}",
        f"let b = {matrix_text(b)}",
        f"let twos = {matrix_text(2 * np.ones((1, n)))}",
        f"let x = ZEROS (1, {n})",
        f"let k = {n_iterations}",
        "inv d, diagonal",
        *2 * ["emul t, diagonal, d", "sub t, twos, t", "emul d, d, t"],
        *counted("again", "k", sweep),
        "halt",
    ]
    return "\n".join(lines) + "\n"


def qr_text(A: ArrayLike, n_newton: int = 12) -> str:
    """QR by modified Gram-Schmidt, column by column, lengths by Newton. Results: Q, and R = Q^T A."""
    A = np.asarray(A, dtype=np.float64)
    n = A.shape[1]
    longest = float(np.linalg.norm(A, axis=0).max())
    lines = [
        f"let A = {matrix_text(A)}",
        f"let V = {matrix_text(A)}",
        f"let Q = ZEROS ({A.shape[0]}, {n})",
        f"let z_first = {1 / longest!r}",
        *_newton_data(n_newton, 1.0),
    ]
    for j in range(n):
        for i in range(j):
            lines += [f"mm r, Q.{i}, V.{j}", f"transpose row, Q.{i}", "mm part, row, r", f"sub V.{j}, V.{j}, part"]
        lines += [f"mm s, V.{j}, V.{j}", "copy z, z_first", *_inverse_root(f"root_{j}", n_newton)]
        lines += [f"transpose row, V.{j}", f"mm Q.{j}, row, z"]
    return "\n".join([*lines, "mm R, Q, A", "halt"]) + "\n"
