"""`Run`: the loops of some new tokens, and `Draft`: one that was stopped early and may be gone on with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from looped.exits import ExitRule, Memory
from looped.lm.rows import Chunk


class Run:
    """The loops of one call: which tokens move, what the others left with, and how many loops have been run."""

    def __init__(self, Y: Tensor, P: Tensor, positions: Tensor | None, chunk: Chunk, keeps_states: bool) -> None:
        self.Y, self.P, self.positions = Y, P, positions  # of the tokens that move
        self.chunk = self.moving = chunk
        self.stopped: Chunk | None = None
        self.t = 0
        self.live: Memory = {}  # the rule's memory of the tokens that move
        self.final = Y
        self.n_loops = torch.zeros(chunk.n_tokens, dtype=torch.int64, device=Y.device)
        self.index: Tensor | None = None  # int64, the moving tokens among all, once some have stopped
        self.states = [Y] if keeps_states else None

    @classmethod
    def joined(cls, runs: Sequence[Run], chunk: Chunk, t: int) -> Run:
        """The tokens of runs, which have run t loops or have no token that moves, as those of chunk."""
        Y, P = (torch.cat([getattr(run, name) for run in runs]) for name in ("Y", "P"))
        places = [run.positions for run in runs if run.positions is not None]
        run = cls(Y, P, torch.cat(places) if places else None, chunk, False)
        run.t, run.final, run.n_loops = t, torch.cat([r.final for r in runs]), torch.cat([r.n_loops for r in runs])
        memories = [r.live for r in runs if r.moving.n_tokens]  # a memory may grow with the first check
        run.live = {name: torch.cat([live[name] for live in memories]) for name in memories[0]} if memories else {}
        moves = torch.cat([r.moves for r in runs])
        if not moves.all():
            run.index = moves.nonzero().squeeze(-1)
            run.moving, run.stopped = chunk.part(moves), chunk.part(~moves)
        return run

    @property
    def moves(self) -> Tensor:
        """bool [N], which tokens move."""
        moves = torch.ones(self.chunk.n_tokens, dtype=torch.bool, device=self.Y.device)
        return moves if self.index is None else torch.zeros_like(moves).index_fill(0, self.index, True)

    def advance(self, t: int, image: Tensor, leaving: Tensor | None) -> None:
        """Go on from F, and let tokens leave."""
        self.t, self.Y = t, image
        if self.index is None:
            self.final = image
            self.n_loops = torch.full_like(self.n_loops, t)
        else:
            self.final = self.final.index_copy(0, self.index, image)
            self.n_loops = self.n_loops.index_fill(0, self.index, t)
        if self.states is not None:
            self.states.append(self.final)
        if leaving is None or not leaving.any():
            return
        stay = ~leaving
        everywhere = torch.arange(self.chunk.n_tokens, device=stay.device) if self.index is None else self.index
        self.index = everywhere[stay]
        self.Y, self.P = self.Y[stay], self.P[stay]
        self.positions = None if self.positions is None else self.positions[stay]
        self.live = {name: tensor[stay] for name, tensor in self.live.items()}
        self.moving, self.stopped = self.chunk.part(self.moves), self.chunk.part(~self.moves)

    def finish(self, n_loops: int) -> None:
        """States after loops that nobody ran."""
        if self.states is not None:
            self.states += [self.final] * (n_loops - self.t)


class Draft(NamedTuple):
    """Tokens that have been drafted, how, and where their loops stand."""

    embeds: Tensor
    positions: Tensor | None
    n_loops: int
    rule: ExitRule
    run: Run

    def is_of(self, embeds: Tensor, positions: Tensor | None, n_loops: int, rule: ExitRule) -> bool:
        """Whether the first loops of these tokens under this rule are what was drafted."""
        if positions is None or self.positions is None:
            same_places = positions is self.positions
        else:
            same_places = torch.equal(positions, self.positions)
        same_rule = self.rule == rule or (self.rule.is_fixed and rule.is_fixed)
        return self.n_loops == n_loops and same_rule and same_places and torch.equal(embeds, self.embeds)
