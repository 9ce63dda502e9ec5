"""Linear algebra as FLEQ programs: Newton's inverse, power iteration, Gauss-Seidel, QR (Giannou et al., 2023, section 8)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def table(given: ArrayLike, what: str, shape: tuple[int | None, ...]) -> Array:
    """float64 of a shape, whose sizes are given or, where None, free but not 0. Raises ValueError for another, or NaN."""
    array = np.asarray(given, dtype=np.float64)
    fits = array.ndim == len(shape) and all(
        n == want or (want is None and n) for n, want in zip(array.shape, shape, strict=True)
    )
    if not fits:
        form = ", ".join("n" if want is None else str(want) for want in shape)
        raise ValueError(f"{what} must be [{form}], got {list(array.shape)}")
    if not np.isfinite(array).all():
        raise ValueError(f"{what} holds NaN or infinity")
    return array


def square(given: ArrayLike, what: str) -> Array:
    """float64 [n, n]. Raises ValueError for another shape, or NaN."""
    array = table(given, what, (None, None))
    return table(array, what, (len(array), len(array)))


def check_count(n: int, what: str) -> None:
    """Raises ValueError for less than one time: a counted loop runs its body before it counts."""
    if n < 1:
        raise ValueError(f"{what}={n} must be at least 1")


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
    """Newton's inverse X <- X (2 I - A X), from X_0 = A^T / (|A|_1 |A|_inf), whose scale the host computes. Result: X.

    A [n, n]. Raises ValueError for another shape, or no iteration.
    """
    A = square(A, "inverse_text: A")
    check_count(n_iterations, "inverse_text: n_iterations")
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
    """Power iteration v <- A v / |A v|, the root by Newton from the last step's. Result: v, the leading eigenvector.

    A [n, n], v [n], where it begins. Raises ValueError for other shapes, v = 0, or no iteration.
    """
    A = square(A, "power_text: A")
    start = table(v, "power_text: v", (len(A),)).reshape(-1, 1)
    if not start.any() or not A.any():
        raise ValueError("power_text: A and v must not be 0")
    start = start / np.linalg.norm(start)
    check_count(n_iterations, "power_text: n_iterations")
    check_count(n_newton, "power_text: n_newton")
    lines = [
        f"; Power iteration: v <- A v / |A v|, {n_iterations} times",
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

    The reciprocals of the diagonal come from the `inv` block, so it must lie where that is fitted, and two Newton steps
    d <- d (2 - a d). A [n, n], b [n]. Raises ValueError for other shapes, or no sweep.
    """
    A = square(A, "gauss_seidel_text: A")
    n = len(A)
    b = table(b, "gauss_seidel_text: b", (n,)).reshape(1, -1)
    check_count(n_iterations, "gauss_seidel_text: n_iterations")
    sweep = []
    for i in range(n):
        sweep += ["transpose xt, x", f"mm r, At.{i}, xt", f"sub r, b.{i}, r", f"emul r, r, d.{i}", f"add x.{i}, x.{i}, r"]
    lines = [
        f"; Gauss-Seidel for A x = b, {n_iterations} sweeps: x_i <- x_i + (b_i - <A_i, x>) / A_ii",
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
    """QR by modified Gram-Schmidt, column by column, lengths by Newton. Results: Q, and R = Q^T A.

    A [m, n] of full rank, n at most m. Raises ValueError for another, or no step of Newton's.
    """
    A = table(A, "qr_text: A", (None, None))
    n = A.shape[1]
    if np.linalg.matrix_rank(A) < n:
        raise ValueError(f"qr_text: A {list(A.shape)} must have columns that are independent")
    check_count(n_newton, "qr_text: n_newton")
    longest = float(np.linalg.norm(A, axis=0).max())
    lines = [
        "; QR by modified Gram-Schmidt: each column without its parts along those before, over its length",
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
