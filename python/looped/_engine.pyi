"""The C++ engine (csrc/bindings.cpp and csrc/bindings/)."""

from collections.abc import Callable, Mapping, Sequence
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

    def session(
        self,
        policy: str = "per_loop",
        period: int = 1,
        n_rows: int = 0,
        gate_weight: np.ndarray | None = None,
        gate_bias: np.ndarray | None = None,
    ) -> Session32 | Session64:
        """An empty session of this model, for n_rows rows or (0) as many as the first call has.

        policy: per_loop, last_only, modulo (of period) or first_then_shared. gate: [C] and [1]. Raises ValueError for a model
        that cannot decode.
        """

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

        progress is called about every 50 ms with the number of prompts that have finished. What it raises comes through, but
        for a KeyboardInterrupt, which interrupts.
        """

class Session32:
    """Rows of tokens and what is kept of them. Calls from two threads at once are a RuntimeError."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""

    def extend(
        self,
        embeds: np.ndarray,
        lengths: Sequence[int],
        spec: Mapping[str, Any],
        positions: np.ndarray | None = None,
        return_states: bool = False,
        n_threads: int = 1,
    ) -> dict[str, np.ndarray]:
        """Append lengths[b] tokens to row b. hidden [N, C], n_loops int64 [N], and states [n_loops + 1, N, C] when asked for.

        spec: rule (the name of its class in small letters), n_loops, check_every, min_loops, phi, warm_start, and what the rule
        has of tol, patience and threshold. What Ctrl-C raises comes through and leaves the rows as they were.
        """

    def read(self, hidden: np.ndarray, n_threads: int = 1) -> np.ndarray:
        """The head: logits [N, read-out width] of hidden [N, C]."""

    def crop(self, dropped: Sequence[int]) -> None:
        """Forget the last dropped[b] tokens of row b."""

    def select(self, rows: Sequence[int]) -> None:
        """New row i is what row rows[i] was."""

    def reset(self) -> None:
        """Forget all rows."""

    def copy(self) -> Session32:
        """The same rows, independent from here on."""

class Session64(Session32):
    """The same in float64."""

def isa() -> str: ...
def read_bandwidth(n_threads: int = 1, bytes: int = 1 << 28, seconds: float = 0.2) -> float:
    """GB/s that all threads together read, each over and over from its share of the bytes. seconds: at most 60."""

def fingerprint(pieces: Sequence[tuple[int, int]]) -> int:
    """A number that tells whether the memory of any piece, (address, bytes), has changed."""

def fma_peak(n_threads: int = 1, seconds: float = 0.1, double: bool = False) -> float:
    """GFLOP/s of all threads together, over the time from their common start to the end of the last. seconds: at most 60."""

class Group:
    """Prompts that take equally many rows of a GPU kernel's tiles: one launch."""

    @property
    def slot_rows(self) -> int:
        """The power of two of at least 16 that holds each of them, or whole tiles where they are longer than one."""

    @property
    def order(self) -> np.ndarray:
        """int32 [n]: numbers of the prompts, longest first."""

    @property
    def places(self) -> np.ndarray:
        """int64 [n, 2]: tile and row at which each begins while all wait."""

def pack(lengths: np.ndarray, tile_rows: int) -> list[Group]:
    """How ragged prompts (int64 [B]) share tiles: every prompt in one group, groups of most rows first.

    Raises ValueError for a negative length, or tile_rows that are not a power of two of at least 16.
    """

class kernels:  # noqa: N801  a module
    """The kernels of this processor one by one, for tests and benchmarks (csrc/bindings/kernels.cpp).

    Each is there for float32 and float64, and takes matrices of one dtype. Results are written into `out`. Raises ValueError
    for shapes that do not fit, TypeError for mixed dtypes.
    """

    class Matrix32:
        """Float32 rows in the engine's layout, with room beyond the width that kernels may write to; NaN at first."""

        def __init__(self, n_rows: int, width: int) -> None: ...
        @property
        def array(self) -> np.ndarray:
            """The same memory, [n_rows, width]: writing to it changes the matrix."""

    class Matrix64(Matrix32):
        """The same in float64."""

    class Packed32:
        """A weight in panels, with its bias."""

        n_in: int
        n_out: int

    class Packed64(Packed32): ...

    @staticmethod
    def tile(double: bool = False) -> tuple[int, int]:
        """Rows of the register tile, and columns of a packed panel."""

    @staticmethod
    def matrix(values: np.ndarray) -> Matrix32:
        """A copy of an array [rows, width] of float32 or float64."""

    @staticmethod
    def pack(weight: np.ndarray, bias: np.ndarray | None = None) -> Packed32:
        """weight [n_out, n_in] and bias [n_out], packed."""

    @staticmethod
    def product(a: Matrix32, w: Packed32, out: Matrix32, activation: str = "none", adds_to_out: bool = False) -> None:
        """out [M, n_out] = activation(a [M, n_in] w' + bias), or out += a w' + bias. none, relu, gelu_tanh or gelu."""

    @staticmethod
    def attend(
        qkv: Matrix32,
        out: Matrix32,
        keys: Matrix32,
        scores: Matrix32,
        n_heads: int,
        first: int = 0,
        is_causal: bool = True,
        end: int | None = None,
    ) -> None:
        """Attention of the tokens `first` .. `end` - 1, by default of all from `first` on.

        out [T, H head_dim] of qkv [T, 3 H head_dim], softmax to the base 2.

        The scores are q k', not scaled. Scratch: keys [head_dim, n_keys] and scores [tile rows, n_keys], with n_keys = T
        rounded up to whole panels.
        """

    @staticmethod
    def normalize(
        x: Matrix32,
        out: Matrix32,
        eps: float,
        gain: np.ndarray | None = None,
        shift: np.ndarray | None = None,
        norm: str = "layernorm",
    ) -> None:
        """out = (x - mean) / sqrt(variance + eps), then * gain + shift, row by row; "rms" leaves out mean and shift."""

    @staticmethod
    def inject(how: str, state: Matrix32, signal: Matrix32, positions: Matrix32 | None, out: Matrix32) -> None:
        """out = state + signal (add), state * signal (mul) or state (none), + positions where these are given."""

    @staticmethod
    def squares(a: Matrix32, b: Matrix32) -> tuple[np.ndarray, np.ndarray]:
        """Per row, in float64: the sums of squares of a - b and of a."""
