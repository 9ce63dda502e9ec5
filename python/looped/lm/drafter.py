"""`Drafter`: chooses tokens with few of a model's loops. `Drafting`: how; and how a `GenerationConfig` says it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig

from looped.exits import ExitRule
from looped.lm.cache import LoopedCache
from looped.lm.session import DecodeSession, head_of

DRAFT_TOKENS = 4
SCHEDULES = ("constant", "heuristic_transient")


@dataclass(frozen=True)
class Drafting:
    """How to draft. The fields of a transformers `GenerationConfig` that say it are in brackets.

    n_loops (assistant_early_exit): loops of a draft.
    n_tokens (num_assistant_tokens): tokens drafted before they are verified.
    adapts (num_assistant_tokens_schedule="heuristic_transient"): two more after a round that accepted all, else one fewer.
    confidence (assistant_confidence_threshold): a round's drafts end with the first whose probability is below.
    """

    n_loops: int
    n_tokens: int
    adapts: bool
    confidence: float

    @classmethod
    def of(cls, config: GenerationConfig) -> Drafting:
        """Raises ValueError for fields that say nothing here."""
        loops, tokens, schedule = config.assistant_early_exit, config.num_assistant_tokens, config.num_assistant_tokens_schedule
        for name, value in (("draft_loops (assistant_early_exit)", loops), ("draft_tokens (num_assistant_tokens)", tokens)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"generate: {name} must be an integer of at least 1, got {value!r}")
        if schedule not in SCHEDULES:
            raise ValueError(
                f"generate: num_assistant_tokens_schedule={schedule!r} is not one of {', '.join(SCHEDULES)}; "
                "a looped model keeps no number of drafts between calls"
            )
        for name in ("assistant_ensemble_weight", "prompt_lookup_num_tokens", "use_mtp"):
            if getattr(config, name, None):  # not every version has them all
                raise ValueError(f"generate: {name} is another way of drafting than draft_loops; leave one of them out")
        return cls(loops, tokens, schedule == "heuristic_transient", config.assistant_confidence_threshold or 0.0)


def draft_fields(draft_loops: int, draft_tokens: int | None) -> dict[str, Any]:
    """The fields of a `GenerationConfig` that say ``draft_loops=, draft_tokens=``."""
    return {
        "assistant_early_exit": draft_loops,
        "num_assistant_tokens": DRAFT_TOKENS if draft_tokens is None else draft_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


class Text(Protocol):
    """What a drafter needs to know of the text: its ids [1, n], the processors of scores, its ends and how it chooses."""

    ids: Tensor
    processors: Any
    ends: set[int]
    max_length: int

    def pick(self, scores: Tensor) -> Tensor: ...


class Drafter:
    """Chooses tokens with few loops, behind the cached ones, and leaves the cache as it is."""

    def __init__(self, model: Any, cache: LoopedCache, kwargs: dict[str, Any], drafting: Drafting) -> None:
        self.model, self.cache, self.session = model, cache, cache.session
        self.rule: ExitRule = model._plan(kwargs.get("n_loops"), kwargs.get("exit"), False).rule
        self.drafting, self.n_tokens = drafting, drafting.n_tokens
        self.places = Places(model, cache, kwargs)

    def drafts(self, text: Text) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of a token [1] and the scores [1, V] it was chosen by."""
        n_columns = self.cache.get_seq_length()
        n_drafts = int(min(self.n_tokens, text.max_length - text.ids.shape[1] - 1, self.places.room(n_columns) - 1))
        provisional = provisional_tokens(self.session)
        ids = text.ids
        try:
            for i in range(n_drafts):
                embeds = self.model.transformer.embedding(ids[0, -1:].to(self.model.device))
                places = self.places.of(n_columns + i, 1)
                hidden = provisional.add(embeds, n_loops=self.drafting.n_loops, rule=self.rule, positions=places)
                logits = head_of(self.session, self.model.transformer)(hidden).to(ids.device, torch.float32)
                scores = text.processors(ids, logits)
                token = text.pick(scores)
                yield token, scores
                if token.item() in text.ends or self._doubts(scores, token):
                    break
                ids = torch.cat([ids, token[:, None]], dim=1)
        finally:
            provisional.end()

    def learn(self, n_drafted: int, n_accepted: int) -> None:
        """Follow the schedule after a round."""
        if self.drafting.adapts:
            self.n_tokens = self.n_tokens + 2 if n_accepted == n_drafted else max(1, self.n_tokens - 1)

    def _doubts(self, scores: Tensor, token: Tensor) -> bool:
        floor = self.drafting.confidence
        return floor > 0 and torch.softmax(scores[0], dim=-1)[token].item() < floor


class Places:
    """Rows of the position table, where the caller of `generate` gave others than the usual ones."""

    def __init__(self, model: Any, cache: LoopedCache, kwargs: dict[str, Any]) -> None:
        """After the prefill: the last position given is that of the last cached column."""
        given = None if model.config.pos_kind == "none" else kwargs.get("position_ids")
        last = None if given is None else int(given[0, -1])
        self.is_usual = last is None or last == cache.session.lengths[0] - 1
        self.first = 0 if last is None else last + 1 - cache.get_seq_length()  # of column 0
        self.n_positions, self.device = model.config.n_positions, cache.own.device

    def of(self, column: int, n: int) -> Tensor | None:
        """int64 [n], from a column on; None where they are the usual ones."""
        return None if self.is_usual else torch.arange(n, device=self.device) + self.first + column

    def room(self, column: int) -> float:
        """How many rows there are from a column on; `generate` has seen to it where they are the usual ones."""
        return math.inf if self.is_usual else self.n_positions - self.first - column


def provisional_tokens(session: DecodeSession) -> _Drafted | _Cropped:
    """The way in which a session computes tokens that may not stay: its own `draft`, or extending and cropping."""
    return _Drafted(session) if getattr(session, "draft", None) else _Cropped(session)


class _Drafted:
    """With `draft`: the session goes on from drafts when it is extended by the same tokens."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def add(self, embeds: Tensor, **how: Any) -> Tensor:
        """The hidden state [1, C] of one more token."""
        return self.session.draft(embeds, **how).hidden

    def end(self) -> None:
        """The session's lengths are those from before the first `add`."""


class _Cropped:
    """The plain way, with any session: drafts are extended by and cropped, and their first loops are run again."""

    def __init__(self, session: DecodeSession) -> None:
        self.session, self.n_tokens = session, session.lengths[0]

    def add(self, embeds: Tensor, *, n_loops: int, rule: ExitRule, positions: Tensor | None) -> Tensor:
        if rule.min_loops > n_loops:
            rule = dataclasses.replace(rule, min_loops=n_loops)
        return self.session.extend(embeds, [1], n_loops=n_loops, rule=rule, positions=positions).hidden

    def end(self) -> None:
        if surplus := self.session.lengths[0] - self.n_tokens:
            self.session.crop([surplus])
