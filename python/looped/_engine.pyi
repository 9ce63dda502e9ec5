"""The C++ engine (csrc/bindings.cpp)."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

class Engine:
    """A model's weights, packed for this machine. config: `LoopedConfig.to_dict`; weights: the state dict as arrays."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> None: ...
    def embed(self, prompts: np.ndarray, lengths: np.ndarray | None, n_threads: int) -> np.ndarray: ...
    def run(
        self,
        signal: np.ndarray,
        state: np.ndarray,
        lengths: np.ndarray | None,
        spec: Mapping[str, Any],
        memory: Mapping[str, np.ndarray] | None = None,
        n_threads: int = 1,
        progress: Callable[[int], object] | None = None,
    ) -> dict[str, Any]: ...

def isa() -> str: ...
def fma_peak(n_threads: int = 1, seconds: float = 0.1) -> float: ...
