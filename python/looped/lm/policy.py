"""Cache policies: which loops of a token keep keys and values of their own.

| policy            | slots per core layer | what a token at loop t reads of a cached one that ran n loops                 |
|-------------------|----------------------|-------------------------------------------------------------------------------|
| per_loop          | n_loops              | its loop min(t, n): exact                                                     |
| last_only         | 1                    | its last loop (Zhu et al., 2025, Ouro)                                        |
| modulo(N)         | min(N, n_loops)      | its last loop that is t modulo N (Geiping et al., 2025, Huginn)               |
| first_then_shared | min(2, n_loops)      | its first loop at t = 1, its last loop at t > 1                               |

So it is between calls. Within one call tokens see each other as they stand in loop t, and of one that has left after n loops
what the table says; so one pass is exact under every policy, but for modulo(N) with an exit. Prelude and coda layers have one
slot each under every policy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from looped.config import LoopedConfig

POLICIES = ("per_loop", "last_only", "modulo(N)", "first_then_shared")


@dataclass(frozen=True)
class CachePolicy:
    """A policy by its parts; `parse` reads the name. period: N of modulo(N)."""

    kind: str = "per_loop"
    period: int = 1

    @classmethod
    def parse(cls, name: str | CachePolicy) -> CachePolicy:
        """The policy of a name such as ``"per_loop"`` or ``"modulo(4)"``. Raises ValueError for another."""
        if isinstance(name, CachePolicy):
            return name
        if isinstance(name, str):
            if name in ("per_loop", "last_only", "first_then_shared"):
                return cls(name)
            if (match := re.fullmatch(r"modulo\((\d+)\)", name)) and int(match[1]) > 0:
                return cls("modulo", int(match[1]))
        raise ValueError(f"cache_policy={name!r} is not one of {', '.join(POLICIES)}, N being 1 or more")

    def __str__(self) -> str:
        return f"modulo({self.period})" if self.kind == "modulo" else self.kind

    @property
    def is_exact(self) -> bool:
        """Whether decoding token by token gives what one pass over the whole text gives."""
        return self.kind == "per_loop"

    def slot(self, t: int) -> int:
        """The slot, from 0, that loop t = 1, 2, ... writes and reads."""
        if self.kind == "per_loop":
            return t - 1
        if self.kind == "modulo":
            return (t - 1) % self.period
        return 0 if self.kind == "last_only" else min(t, 2) - 1

    def n_slots(self, n_loops: int) -> int:
        """Slots per core layer of a model that runs n_loops."""
        most = {"per_loop": n_loops, "last_only": 1, "modulo": self.period, "first_then_shared": 2}[self.kind]
        return min(most, n_loops)

    def bytes_per_token(self, config: LoopedConfig, n_loops: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of keys and values that one cached token takes in all layers and slots."""
        n_layers = config.n_prelude + config.n_coda + self.n_slots(n_loops) * config.n_core
        return 2 * config.attention_width * dtype.itemsize * n_layers
