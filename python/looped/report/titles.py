"""What was measured, in the words of a title."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def task_title(task: str, options: Mapping[str, Any], n_dims: int) -> str:
    """A family of functions with its numbers: ``sparse_linear_regression, sparsity 2, 8 dimensions``."""
    numbers = [f"{name} {value}" for name, value in options.items()]
    return ", ".join([task, *numbers, f"{n_dims} dimension{'s' * (n_dims != 1)}"])
