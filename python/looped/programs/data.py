"""Matrices from data files, which may hold anything."""

from __future__ import annotations

import csv
import tokenize
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SUFFIXES = (".npy", ".csv")
MOST_BYTES = 2**24  # a matrix of 64 x 64 takes far less
# NumPy reads the header as text of Python, and lets out what that raises.
BROKEN = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, MemoryError, RecursionError, SyntaxError, TypeError),
    tokenize.TokenError,
)


def read_matrix(path: Path) -> NDArray[Any]:
    """The array of a .npy file, or the rows of numbers of a .csv file.

    Raises OSError for a file that cannot be read, ValueError for one that holds something else.
    """
    if (n_bytes := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"it has {n_bytes:,} bytes; at most {MOST_BYTES:,} are read")
    if path.suffix.lower() == ".csv":
        return _csv(path)
    with path.open("rb") as file:
        try:
            array: NDArray[Any] = np.lib.format.read_array(file, allow_pickle=False)
        except BROKEN as error:
            raise ValueError(f"its header or its data are broken: {error}") from None
    return array


def _csv(path: Path) -> NDArray[np.float64]:
    with path.open(newline="", encoding="utf-8") as file:
        try:
            rows = [[float(number) for number in row] for row in csv.reader(file) if row]
        except csv.Error as error:
            raise ValueError(str(error)) from None
    if len({len(row) for row in rows}) > 1:
        raise ValueError("its rows differ in length")
    return np.array(rows)
