"""`EagerSession`: decoding in plain PyTorch, the truth that other sessions are tested against. Read it beside session.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looped.exits import PRECISION_OF, ROUNDING_LEVEL, ExitRule, Memory, Step, Watch
from looped.lm.exits import reads_logits
from looped.lm.policy import CachePolicy
from looped.lm.rows import Chunk
from looped.lm.session import SESSIONS, Extension
from looped.lm.slots import Slots
from looped.model import Block, LoopedTransformer


class EagerSession:
    """A `DecodeSession` over `Slots`. Tokens that have left cost nothing more than a copy of their last keys and values."""

    backend = "eager"

    def __init__(self, model: LoopedTransformer, policy: CachePolicy, gate: nn.Linear | None = None) -> None:
        self.model, self.policy, self.gate = model, policy, gate
        self.reset()

    def reset(self) -> None:
        self.slots = Slots(self.policy)
        self.last_state: Tensor | None = None  # [B, C], the state at which each row's last token left, for warm starts
        self._lengths: list[int] = []
        self._checks: int | None = None  # the check_every under which all cached tokens have keys and values of checks
        self._has_unlooped = False

    @property
    def lengths(self) -> list[int]:
        return list(self._lengths)

    def extend(
        self,
        embeds: Tensor,
        lengths: Sequence[int],
        *,
        n_loops: int,
        rule: ExitRule,
        positions: Tensor | None = None,
        warm_start: bool = False,
        return_states: bool = False,
    ) -> Extension:
        starts = self._lengths or [0] * len(lengths)
        self._check(rule, n_loops, starts)
        chunk = Chunk(starts, lengths, embeds.device)
        slots, model, config = self.slots, self.model, self.model.config
        slots.begin()
        slots.deepen("core", self.policy.n_slots(n_loops), config.n_core)
        slots.deepen("check", self.policy.n_slots(n_loops), config.n_coda)

        if positions is None and config.pos_kind == "learned":
            positions = chunk.place
        P = embeds
        if config.pos_when == "once" and positions is not None:
            P = P + model.positions(positions)
        for layer, block in enumerate(model.prelude):
            P = self._layer(block, P, "prelude", 0, layer, chunk)
        Y = self._first_state(P, chunk, warm_start)

        run = _Run(Y, P, positions if config.pos_when == "each_loop" else None, chunk, return_states)
        watch = Watch(rule)
        live = {} if rule.is_fixed else watch.start(torch.zeros(chunk.n_tokens, dtype=torch.float64, device=embeds.device))
        t = 0
        while t < n_loops and run.moving.n_tokens:
            t += 1
            self._carry("core", t, run.stopped)
            self._carry("check", t, run.stopped if t % rule.check_every == 0 else chunk)
            image = self._loop(t, run)
            leaving = None if rule.is_fixed else self._judge(t, run, image, watch, live)
            run.advance(t, image, leaving, live)
        run.finish(t, n_loops)
        for part in ("core", "check"):
            for later in range(t + 1, slots.n_loops(part) + 1):
                self._carry(part, later, chunk)

        hidden = self._close(run.final, "coda", 0, chunk)
        self._note(run.final, chunk, rule, n_loops)
        return Extension(hidden, run.n_loops, run.states)

    # The parts of a step ----------------------------------------------------------------------------------------------

    def _check(self, rule: ExitRule, n_loops: int, starts: Sequence[int]) -> None:
        if self._has_unlooped and n_loops and any(starts):
            raise ValueError("LoopedGPT2: tokens cached with n_loops=0 have no keys for a call with loops; start a new cache")
        if (
            reads_logits(rule)
            and not rule.is_fixed
            and self.model.config.n_coda
            and any(starts)
            and self._checks != rule.check_every
        ):
            raise ValueError(
                f"LoopedGPT2: exit {type(rule).__name__} runs the coda at every check, so all cached tokens must come from "
                f"calls with such a rule and check_every={rule.check_every}; start a new cache"
            )

    def _first_state(self, P: Tensor, chunk: Chunk, warm_start: bool) -> Tensor:
        Y = self.model.initial_state(P)
        if not warm_start or self.last_state is None or not any(chunk.starts):
            return Y
        has_past = torch.tensor([start > 0 for start in chunk.starts], device=P.device)[chunk.row]
        return torch.where(has_past[:, None], self.last_state[chunk.row].to(Y.dtype), Y)

    def _loop(self, t: int, run: _Run) -> Tensor:
        """F = M(Y) of the tokens that move."""
        X = self.model.inject(run.Y, run.P)
        if run.positions is not None:
            X = X + self.model.positions(run.positions)
        for layer, block in enumerate(self.model.core):
            X = self._layer(block, X, "core", t, layer, run.moving)
        return self.model.final_norm(X) if self.model.config.loop_norm == "each" else X

    def _layer(self, block: nn.Module, X: Tensor, part: str, t: int, layer: int, chunk: Chunk) -> Tensor:
        """One layer on packed tokens X [N, C], with the keys and values of everything that they may look at."""
        assert isinstance(block, Block)
        q, k, v = block.attn.project(block.norm_1(X))  # [N, H, head_dim] each
        keys, values = self.slots.write(part, t, layer, k, v, chunk)
        mixed = F.scaled_dot_product_attention(
            chunk.padded(q).transpose(1, 2),  # [B, H, seats, head_dim] over [B, H, places, head_dim]
            keys.transpose(1, 2).to(q.dtype),
            values.transpose(1, 2).to(q.dtype),
            attn_mask=None if chunk.is_causal_from_start else chunk.sees,
            is_causal=chunk.is_causal_from_start and chunk.n_seats > 1,
        )
        X = X + block.attn.proj(chunk.packed(mixed.transpose(1, 2)).flatten(1))
        return X + block.mlp(block.norm_2(X))

    def _close(self, Y: Tensor, part: str, t: int, chunk: Chunk) -> Tensor:
        """What the head reads of states Y."""
        for layer, block in enumerate(self.model.coda):
            Y = self._layer(block, Y, part, t, layer, chunk)
        return self.model.final_norm(Y) if self.model.config.loop_norm == "once" else Y

    @torch.no_grad()
    def _judge(self, t: int, run: _Run, image: Tensor, watch: Watch, live: Memory) -> Tensor:
        """bool [n]: which of the moving tokens leave after loop t. Updates live."""
        gate = self.gate

        @functools.cache
        def predict() -> Tensor:
            return self.model.head(self._close(image, "check", t, run.moving))[:, None]

        g, n = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64) for x in (image - run.Y, image))
        step = Step(
            t=torch.full_like(g, t, dtype=torch.int64),
            g=g,
            n=n,
            s=g,
            rho=torch.full_like(g, torch.nan),
            state=run.Y,
            image=image,
            predict=predict,
            phi=ROUNDING_LEVEL[PRECISION_OF.get(image.dtype, "bf16_states")],
            read_stride=1,
            gate=None if gate is None else lambda: gate(image).squeeze(-1),
        )
        return watch.enough(live, step)

    def _carry(self, part: str, t: int, chunk: Chunk | None) -> None:
        """Tokens for which loop t is not run, or not checked, keep the keys and values of the one before."""
        if chunk is None or t < 2:
            return
        for layer in range(len(self.model.core if part == "core" else self.model.coda)):
            self.slots.carry(part, t, layer, chunk)

    def _note(self, final: Tensor, chunk: Chunk, rule: ExitRule, n_loops: int) -> None:
        """Count the new tokens in."""
        if not any(chunk.starts):
            self._has_unlooped, self._checks = False, None
        self._has_unlooped |= n_loops == 0 and chunk.n_tokens > 0
        self._checks = rule.check_every if reads_logits(rule) and not rule.is_fixed else None
        if chunk.n_tokens:
            last = torch.tensor([max(end - 1, 0) for end in accumulate(chunk.counts)], device=final.device)
            is_new = torch.tensor([count > 0 for count in chunk.counts], device=final.device)[:, None]
            state = final.detach()[last]
            self.last_state = state if self.last_state is None else torch.where(is_new, state, self.last_state)
        self._lengths = [start + count for start, count in zip(chunk.starts, chunk.counts, strict=True)]

    # Rows -------------------------------------------------------------------------------------------------------------

    def crop(self, n_tokens: Sequence[int]) -> None:
        lengths = [length - n for length, n in zip(self._lengths, n_tokens, strict=True)]
        device = next(self.model.parameters()).device
        self.slots.clear(Chunk(lengths, n_tokens, device))
        self._lengths = lengths
        self.last_state = None

    def select(self, rows: Tensor) -> None:
        self._lengths = [self._lengths[row] for row in rows.tolist()]
        self.slots.select(rows)
        if self.last_state is not None:
            self.last_state = self.last_state.index_select(0, rows.to(self.last_state.device))

    def copy(self) -> EagerSession:
        session = EagerSession(self.model, self.policy, self.gate)
        session.slots = self.slots.copy()
        session.last_state = None if self.last_state is None else self.last_state.clone()
        session._lengths, session._checks, session._has_unlooped = list(self._lengths), self._checks, self._has_unlooped
        return session


class _Run:
    """The loops of one call: which tokens move, and what the others left with."""

    def __init__(self, Y: Tensor, P: Tensor, positions: Tensor | None, chunk: Chunk, keeps_states: bool) -> None:
        self.Y, self.P, self.positions = Y, P, positions  # of the tokens that move
        self.chunk = self.moving = chunk
        self.stopped: Chunk | None = None
        self.final = Y
        self.n_loops = torch.zeros(chunk.n_tokens, dtype=torch.int64, device=Y.device)
        self.index: Tensor | None = None  # int64, the moving tokens among all, once some have stopped
        self.states = [Y] if keeps_states else None

    def advance(self, t: int, image: Tensor, leaving: Tensor | None, live: Memory) -> None:
        """Go on from F, and let tokens leave."""
        self.Y = image
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
        live.update({name: tensor[stay] for name, tensor in live.items()})
        moves = torch.zeros(self.chunk.n_tokens, dtype=torch.bool, device=stay.device).index_fill(0, self.index, True)
        self.moving, self.stopped = self.chunk.part(moves), self.chunk.part(~moves)

    def finish(self, t: int, n_loops: int) -> None:
        """States after loops that nobody ran."""
        if self.states is not None:
            self.states += [self.final] * (n_loops - t)


SESSIONS["eager"] = EagerSession
