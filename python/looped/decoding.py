"""What a decode session takes and gives, whichever engine it runs on. The session itself is defined in lm/session.py."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Policy(Protocol):
    """Which loops keep keys and values of their own: per_loop, last_only, modulo (of a period), first_then_shared."""

    @property
    def kind(self) -> str: ...
    @property
    def period(self) -> int: ...


class Extension(NamedTuple):
    """What `extend` gives for N new tokens, packed like its input.

    hidden: [N, C], after the coda and the final norm: what the head reads.
    n_loops: int64 [N], loops run by each token.
    states: Y_0 .. Y_n, each [N, C], when asked for; entries after a token's exit repeat its last state.
    """

    hidden: Tensor
    n_loops: Tensor
    states: list[Tensor] | None = None
