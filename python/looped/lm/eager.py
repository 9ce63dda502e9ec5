"""`EagerSession`: decoding in plain PyTorch, the truth that other sessions are tested against. Read it beside session.py."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from looped.decoding import CachedKeys, Extension
from looped.exits import PRECISION_OF, ROUNDING_LEVEL, ExitRule, Step, Watch
from looped.lm.policy import CachePolicy
from looped.lm.rows import Chunk
from looped.lm.run import Draft, Run
from looped.lm.session import SESSIONS
from looped.lm.slots import Slots
from looped.model import Block, LoopedTransformer


class _Before(NamedTuple):
    """What a session had before an extend, beside the slots."""

    lengths: list[int]
    last_state: Tensor | None
    has_last: list[bool]
    keys: CachedKeys


class EagerSession:
    """A `DraftingSession` over `Slots`. Tokens that have left cost nothing more than a copy of their last keys and values."""

    backend = "eager"

    def __init__(self, model: LoopedTransformer, policy: CachePolicy, gate: nn.Linear | None = None) -> None:
        self.model, self.policy, self.gate = model, policy, gate
        self.reset()

    def reset(self) -> None:
        self.slots = Slots(self.policy)
        self.last_state: Tensor | None = None  # [B, C], the state at which each row's last token left, for warm starts
        self._has_last: list[bool] = []  # which rows have one
        self._lengths: list[int] = []
        self._keys = CachedKeys(self.model.config.n_coda > 0)
        self._before: _Before | None = None  # the last extend, where nothing has changed since
        self._drafts: list[Draft] = []
        self._behind: list[int] = []  # places behind each row's tokens that drafts and calls that failed may have written

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
        self._keys.check(rule, n_loops, has_tokens=any(starts))
        chunk = Chunk(starts, lengths, embeds.device)
        run = None if warm_start or return_states else self._resumed(embeds, positions, chunk, n_loops, rule)
        if run is None:
            self._clear_behind()
        self._drafts, self._behind = [], chunk.counts
        run = run or self._begun(embeds, positions, chunk, rule, warm_start, return_states)
        self._iterate(run, n_loops, rule)
        self._fill(run)
        run.finish(n_loops)
        hidden = self._close(run.final, "coda", 0, chunk)
        self._note(run.final, chunk, rule, n_loops)
        return Extension(hidden, run.n_loops, run.states)

    def draft(self, embeds: Tensor, *, n_loops: int, rule: ExitRule, positions: Tensor | None = None) -> Extension:
        if len(self._lengths) != 1 or not self.policy.is_exact:
            raise ValueError(f"draft: needs one row and the policy per_loop, got {len(self._lengths)} rows and {self.policy}")
        self._keys.check(rule, n_loops, has_tokens=any(self._lengths))
        run = self._draft(embeds, positions, n_loops, rule)
        return Extension(self._close(run.final, "coda", 0, run.chunk), run.n_loops)

    # Drafts -----------------------------------------------------------------------------------------------------------

    @property
    def _n_drafted(self) -> int:
        return sum(draft.run.chunk.n_tokens for draft in self._drafts)

    def _draft(self, embeds: Tensor, positions: Tensor | None, n_loops: int, rule: ExitRule) -> Run:
        n_drafted = self._n_drafted
        chunk = Chunk([self._lengths[0] + n_drafted], [len(embeds)], embeds.device)
        self._behind = [max(sum(self._behind), n_drafted + len(embeds))]
        run = self._begun(embeds, positions, chunk, rule, False, False)
        self._iterate(run, n_loops, rule)
        self._fill(run, n_loops)
        self._drafts.append(Draft(embeds, positions, n_loops, rule, run))
        return run

    def _resumed(self, embeds: Tensor, positions: Tensor | None, chunk: Chunk, n_loops: int, rule: ExitRule) -> Run | None:
        """The new tokens after the loops that drafts ran, where these are drafts of them; else None."""
        drafts = self._drafts
        if not drafts or len(chunk.counts) != 1 or drafts[0].n_loops > n_loops or embeds.requires_grad:
            return None
        if sum(self._behind) != self._n_drafted:  # a draft has failed
            return None
        done = 0
        for draft in drafts:
            part = slice(done, done + len(draft.embeds))
            places = None if positions is None else positions[part]
            if not draft.is_of(embeds[part], places, drafts[0].n_loops, rule):
                return None
            done = part.stop
        if done < chunk.n_tokens:
            self._draft(embeds[done:], None if positions is None else positions[done:], drafts[0].n_loops, rule)
        self.slots.begin()
        return Run.joined([draft.run for draft in drafts], chunk, drafts[0].n_loops)

    def _clear_behind(self) -> None:
        """Forget drafts. What they and calls that failed wrote goes too, for it may be NaN."""
        self._drafts = []
        if any(self._lengths) and any(self._behind):  # rows without a token begin with new slots
            self.slots.clear(Chunk(self._lengths, self._behind, next(self.model.parameters()).device))
        self._behind = []

    # The parts of a step ----------------------------------------------------------------------------------------------

    def _begun(
        self,
        embeds: Tensor,
        positions: Tensor | None,
        chunk: Chunk,
        rule: ExitRule,
        warm_start: bool,
        keeps_states: bool,
    ) -> Run:
        """The new tokens before their first loop."""
        model, config = self.model, self.model.config
        if not any(chunk.starts):
            self.slots = Slots(self.policy)  # of a first call that failed, or of rows that were cropped to nothing
        self.slots.begin()
        if positions is None and config.pos_kind == "learned":
            positions = chunk.place
        P = embeds
        if config.pos_when == "once" and positions is not None:
            P = P + model.positions(positions)
        for layer, block in enumerate(model.prelude):
            P = self._layer(block, P, "prelude", 0, layer, chunk)
        Y = self._first_state(P, chunk, warm_start)
        run = Run(Y, P, positions if config.pos_when == "each_loop" else None, chunk, keeps_states)
        if not rule.is_fixed:
            run.live = Watch(rule).start(torch.zeros(chunk.n_tokens, dtype=torch.float64, device=embeds.device))
        return run

    def _iterate(self, run: Run, n_loops: int, rule: ExitRule) -> None:
        """Loops up to n_loops, of the tokens that move."""
        watch = Watch(rule)
        while run.t < n_loops and run.moving.n_tokens:
            t = run.t + 1
            if any(run.chunk.starts) or run.stopped is not None:  # else all tokens write this loop
                self.slots.deepen("core", self.policy.slot(t) + 1, self.model.config.n_core)
                self.slots.deepen("check", self.policy.slot(t) + 1, self.model.config.n_coda)
            self._carry("core", t, run.stopped)
            self._carry("check", t, run.stopped if t % rule.check_every == 0 else run.chunk)
            image = self._loop(t, run)
            run.advance(t, image, None if rule.is_fixed else self._judge(t, run, image, watch))

    def _fill(self, run: Run, limit: int | None = None) -> None:
        """The slots there are of loops that nobody ran: all, or those up to loop `limit`."""
        for part in ("core", "check"):
            last = self.slots.n_loops(part)
            for t in range(run.t + 1, (last if limit is None else min(last, limit)) + 1):
                self._carry(part, t, run.chunk)

    def _first_state(self, P: Tensor, chunk: Chunk, warm_start: bool) -> Tensor:
        Y = self.model.initial_state(P)
        if not warm_start or self.last_state is None or not any(chunk.starts):
            return Y
        has_last = torch.tensor(self._has_last, device=P.device)[chunk.row]
        return torch.where(has_last[:, None], self.last_state[chunk.row].to(Y.dtype), Y)

    def _loop(self, t: int, run: Run) -> Tensor:
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
    def _judge(self, t: int, run: Run, image: Tensor, watch: Watch) -> Tensor:
        """bool [n]: which of the moving tokens leave after loop t. Updates their memory."""
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
        return watch.enough(run.live, step)

    def _carry(self, part: str, t: int, chunk: Chunk | None) -> None:
        """Tokens for which loop t is not run, or not checked, keep the keys and values of the one before."""
        if chunk is None or t < 2:
            return
        for layer in range(len(self.model.core if part == "core" else self.model.coda)):
            self.slots.carry(part, t, layer, chunk)

    def _note(self, final: Tensor, chunk: Chunk, rule: ExitRule, n_loops: int) -> None:
        """Count the new tokens in, after everything that can fail."""
        keys, last, has_last = dataclasses.replace(self._keys), self.last_state, self._has_last
        keys.add(rule, n_loops, chunk.n_tokens, starts=chunk.starts)
        if chunk.n_tokens:
            ends = torch.tensor([max(end - 1, 0) for end in accumulate(chunk.counts)], device=final.device)
            is_new = torch.tensor([count > 0 for count in chunk.counts], device=final.device)[:, None]
            state = final.detach()[ends]
            last = state if last is None else torch.where(is_new, state, last)
            had = has_last or [False] * chunk.n_rows
            has_last = [had_one or count > 0 for had_one, count in zip(had, chunk.counts, strict=True)]
        lengths = [start + count for start, count in zip(chunk.starts, chunk.counts, strict=True)]
        before = _Before(chunk.starts, self.last_state, self._has_last, self._keys)
        self._keys, self.last_state, self._has_last, self._lengths, self._behind = keys, last, has_last, lengths, []
        self._before = before

    # Rows -------------------------------------------------------------------------------------------------------------

    def crop(self, n_tokens: Sequence[int]) -> None:
        self._clear_behind()
        lengths = [length - n for length, n in zip(self._lengths, n_tokens, strict=True)]
        device = next(self.model.parameters()).device
        self.slots.clear(Chunk(lengths, n_tokens, device))
        self._lengths = lengths
        self._keys.crop(lengths)
        self.last_state, self._has_last, self._before = None, [], None

    def take_back(self, n_tokens: Sequence[int]) -> None:
        before = self._before
        self.crop(n_tokens)
        if before is not None and before.lengths == self._lengths:
            _, self.last_state, self._has_last, self._keys = before

    def select(self, rows: Tensor) -> None:
        numbers, n_rows = rows.tolist(), len(self._lengths)
        if missing := [row for row in numbers if not 0 <= row < n_rows]:
            raise ValueError(f"select: there is no row {missing[0]} among {n_rows}")
        self._clear_behind()
        last, has_last, lengths = self.last_state, self._has_last, [self._lengths[row] for row in numbers]
        if last is not None:
            last, has_last = last.index_select(0, rows.to(last.device)), [has_last[row] for row in numbers]
        self.slots.select(rows)  # what can fail comes before what changes
        self._keys.select()
        self._lengths, self.last_state, self._has_last, self._before = lengths, last, has_last, None

    def copy(self) -> EagerSession:
        session = EagerSession(self.model, self.policy, self.gate)
        session.slots = self.slots.copy()
        session.last_state = None if self.last_state is None else self.last_state.clone()
        session._has_last, session._lengths = list(self._has_last), list(self._lengths)
        session._keys, session._behind = dataclasses.replace(self._keys), list(self._behind)
        return session


SESSIONS["eager"] = EagerSession
