"""`Chunk`: some tokens of ragged rows, packed one row after another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor


class Chunk:
    """N tokens of B rows. Row b has counts[b] of them, at the places starts[b], starts[b] + 1, ... of the row.

    Packed tensors are [N, ...]. Padded ones are [B, seats, ...], a token's seat being its number in the chunk within its row.
    Where all rows are alike, one is a view of the other.
    """

    def __init__(self, starts: Sequence[int], counts: Sequence[int], device: torch.device) -> None:
        self.device = device
        self.starts, self.counts = list(starts), list(counts)
        self.n_rows, self.n_tokens, self.n_seats = len(self.counts), sum(self.counts), max(self.counts, default=0)
        self.n_seen = max((start + count for start, count in zip(starts, counts, strict=True)), default=0)
        self.is_even = len(set(self.starts)) == 1 and len(set(self.counts)) == 1
        self._of: tuple[Tensor, Tensor] | None = None  # row and place of a part of a chunk

    def part(self, keep: Tensor) -> Chunk:
        """The tokens where keep, bool [N], is true."""
        row, place = self.row[keep], self.place[keep]
        chunk = Chunk(self.starts, torch.bincount(row, minlength=self.n_rows).tolist(), self.device)
        chunk.is_even, chunk.n_seen, chunk._of = False, self.n_seen, (row, place)
        return chunk

    @cached_property
    def row(self) -> Tensor:
        """int64 [N], the row of each token."""
        if self._of is not None:
            return self._of[0]
        counts = torch.tensor(self.counts, device=self.device)
        return torch.arange(self.n_rows, device=self.device).repeat_interleave(counts, output_size=self.n_tokens)

    @cached_property
    def place(self) -> Tensor:
        """int64 [N], the place of each token in its row."""
        if self._of is not None:
            return self._of[1]
        return torch.tensor(self.starts, device=self.device)[self.row] + self.seat

    @cached_property
    def seat(self) -> Tensor:
        """int64 [N], the number of each token in the chunk within its row."""
        counts = torch.tensor(self.counts, device=self.device)
        before = counts.cumsum(0) - counts
        return torch.arange(self.n_tokens, device=self.device) - before[self.row]

    def padded(self, x: Tensor) -> Tensor:
        """[N, ...] to [B, seats, ...], zero where there is no token."""
        if self.is_even:
            return x.unflatten(0, (self.n_rows, self.n_seats))
        return x.new_zeros(self.n_rows, self.n_seats, *x.shape[1:]).index_put((self.row, self.seat), x)

    def packed(self, x: Tensor) -> Tensor:
        """[B, seats, ...] to [N, ...]."""
        return x.flatten(0, 1) if self.is_even else x[self.row, self.seat]

    @property
    def is_causal_from_start(self) -> bool:
        """Whether the plain causal mask is this chunk's."""
        return self.is_even and self.starts[0] == 0

    @cached_property
    def sees(self) -> Tensor | None:
        """bool [B or 1, 1, seats, places], True where a token may look: in its row, up to its own place. None: everywhere.

        A seat without a token sees place 0, so that its row of the softmax is finite.
        """
        if self.is_even and self.n_seats == 1:
            return None
        places = torch.arange(self.n_seen, device=self.device)
        if self.is_even:
            seats = torch.arange(self.starts[0], self.n_seen, device=self.device)
            return (places <= seats[:, None])[None, None]
        at = torch.zeros(self.n_rows, self.n_seats, dtype=torch.int64, device=self.device)
        at = at.index_put((self.row, self.seat), self.place)
        return (places <= at[..., None])[:, None]
