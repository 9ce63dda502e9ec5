"""A machine's state as a programmer sees it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Snapshot:
    """pc [...]: the number of the command that comes next. memory [..., cells], or [..., D, columns] of a FLEQ machine.

    off_grid [...]: how far a feature that should be -1 or 1 stands from it.
    """

    pc: np.ndarray
    memory: np.ndarray
    off_grid: np.ndarray
