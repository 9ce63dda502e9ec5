"""The C++ engine (csrc/bindings.cpp)."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

version: str

class Engine:
    """A model's weights, packed for this machine. config: `LoopedConfig.to_dict`; weights: the state dict as arrays.

    Neither is changed nor kept: pack again after an edit.
    """

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> None: ...
    @property
    def dtype(self) -> str:
        """``"float32"`` or ``"float64"``."""

    def embed(self, prompts: np.ndarray, lengths: np.ndarray | None = None, n_threads: int = 1) -> np.ndarray:
        """The injected signals [B, T, C]; KeyboardInterrupt where Ctrl-C came meanwhile."""

    def run(
        self,
        signal: np.ndarray,
        state: np.ndarray,
        lengths: np.ndarray | None,
        spec: Mapping[str, Any],
        memory: Mapping[str, np.ndarray] | None = None,
        n_threads: int = 1,
        progress: Callable[[int], object] | None = None,
    ) -> dict[str, Any]:
        """y, prediction, predictions (when asked for), finished bool [B], memory by name, and interrupted: did Ctrl-C stop it?

        progress is called about every 20 ms with the number of prompts that have finished. What it raises comes through, but
        for a KeyboardInterrupt, which interrupts.
        """

def isa() -> str: ...
def fma_peak(n_threads: int = 1, seconds: float = 0.1, double: bool = False) -> float: ...
