"""Integers of any kind, Python's, NumPy's or a tensor's, taken as Python's."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def integer_of(value: Any) -> int | None:
    """The value as an int; None for what is no integer, and for booleans of any kind."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def take_integers(record: Any, names: Iterable[str]) -> None:
    """Make the integers among these fields of a frozen dataclass Python's; what is no integer stays for its own check."""
    for name in names:
        count = integer_of(getattr(record, name))
        if count is not None:
            object.__setattr__(record, name, count)
