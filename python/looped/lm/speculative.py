"""Self-speculative decoding: a model drafts tokens with few of its loops and verifies them with all, in one pass.

The rule is that of Leviathan et al. (2023), algorithm 1, with one model on both sides. What makes it cheap for looped models:
the first loops of a token are the same whether or not more follow, so verifying goes on from where drafting stopped. The text
has the tokens that plain decoding has (greedy), or their distribution (sampling); stopping criteria and streamers are called
token by token, in the order of plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    LogitsProcessorList,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from looped.lm.cache import CACHE_NAME, LoopedCache
from looped.lm.drafter import Drafter, Drafting, Places

# Processors that count their calls: asked about drafts that are then rejected, they would answer wrongly ever after.
COUNTING = (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with drafts and ``return_dict_in_generate=True``: the usual fields, and of each of R rounds

    n_drafted: int64 [R], the tokens drafted.
    n_accepted: int64 [R], how many of these stand in the text. A round adds one token more, of the model with all its loops,
        unless the text ends with an accepted one.
    """

    n_drafted: Tensor | None = None
    n_accepted: Tensor | None = None

    @property
    def acceptance_rate(self) -> float:
        """Accepted among drafted tokens; NaN where none was drafted."""
        assert self.n_drafted is not None
        assert self.n_accepted is not None
        return (self.n_accepted.sum() / self.n_drafted.sum()).item()


def check_drafting(model: Any, config: GenerationConfig, kwargs: dict[str, Any], mode: str, n_rows: int) -> None:
    """The first look at a call with drafts. Raises ValueError for what cannot be had with them, before anything is computed."""
    drafting = Drafting.of(config)
    plan = model._plan(*(kwargs.get(name) for name in ("n_loops", "exit", "warm_start")))
    if mode != "assisted_generation":
        raise ValueError(f"generate: draft_loops goes with greedy decoding and sampling, got num_beams={config.num_beams}")
    if config.use_cache is False:
        raise ValueError("generate: draft_loops needs a cache, got use_cache=False")
    if n_rows != 1:
        raise ValueError(
            f"generate: draft_loops takes one row, as all assisted generation of transformers does, got {n_rows}; "
            "call it for each row, or leave draft_loops out"
        )
    if drafting.n_loops > plan.n_loops:
        raise ValueError(f"generate: draft_loops={drafting.n_loops} is more than n_loops={plan.n_loops}; drafts run fewer")
    check_exactness(model, "draft_loops", kwargs)


def check_exactness(model: Any, what: str, kwargs: dict[str, Any]) -> None:
    """Raises ValueError where tokens that are verified in one pass get another result than one by one."""
    plan = model._plan(*(kwargs.get(name) for name in ("n_loops", "exit", "warm_start")))
    cache = kwargs.get(CACHE_NAME)
    session = getattr(cache, "session", None)  # a cache of another kind is refused where it is used
    policy = model.config.cache_policy if session is None else session.policy
    if plan.warm_start:
        raise ValueError(
            "generate: with warm_start a token's first state depends on which tokens are computed together, so drafts would "
            f"change the text; leave one of {what} and warm_start out"
        )
    if str(policy) != "per_loop":
        raise ValueError(
            f"generate: {what} needs the cache policy per_loop, got {policy}: where loops share slots, tokens that are "
            "computed together read other keys and values than one by one"
        )


@torch.no_grad()
def speculate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: Any,
    config: GenerationConfig,
    streamer: Any,
    kwargs: dict[str, Any],
) -> Tensor | SpeculativeOutput:
    """The decoding loop of `generate` with drafts. kwargs: those of `forward`, `generate` has prepared them.

    An exception, of a streamer or Ctrl-C say, leaves the cache as it was after the last whole round.
    """
    if counting := [type(processor).__name__ for processor in logits_processor if isinstance(processor, COUNTING)]:
        raise ValueError(f"generate: draft_loops cannot be had with {counting[0]}, which counts its calls; leave one out")
    drafting, cache = Drafting.of(config), kwargs[CACHE_NAME]
    text = Text(input_ids, logits_processor, stopping_criteria, config, streamer)
    prefill = model._prefill(input_ids, config, dict(kwargs))
    n_decided = cache.get_seq_length()  # columns of the cache whose tokens are in the text for good
    verifier, drafter = _Verifier(model, cache, kwargs), Drafter(model, cache, kwargs, drafting)
    n_drafted: list[int] = []
    n_accepted: list[int] = []
    try:
        text.read(prefill.logits[0, -1:], prefill.hidden_states, [], is_prefill=True)
        while not text.has_ended:
            drafts = list(drafter.drafts(text))
            out = verifier.verify(torch.cat([text.ids[:, -1:], *(token[:, None] for token, _ in drafts)], dim=1))
            n_new = text.read(out.logits[0], out.hidden_states, drafts, is_prefill=False)
            n_decided += n_new
            cache.crop(n_decided - cache.get_seq_length())
            n_drafted.append(len(drafts))
            n_accepted.append(text.n_accepted)
            drafter.learn(len(drafts), text.n_accepted)
    except BaseException:
        _restore(cache, n_decided)
        raise
    if streamer is not None:
        streamer.end()
    if not config.return_dict_in_generate:
        return text.ids
    fields: dict[str, Any] = dict(sequences=text.ids, scores=text.scores, logits=text.logits, hidden_states=text.hidden_states)
    fields |= dict(n_drafted=torch.tensor(n_drafted, dtype=torch.int64), n_accepted=torch.tensor(n_accepted, dtype=torch.int64))
    return SpeculativeOutput(**fields, **{CACHE_NAME: cache})


def _restore(cache: LoopedCache, n_columns: int) -> None:
    """The cache with its first columns alone, wherever the work stopped."""
    uncounted = cache.session.lengths[0] - int(cache.own.sum())
    if uncounted > 0:
        cache.session.crop([uncounted])
    cache.crop(n_columns - cache.get_seq_length())


def accept(draft: Tensor, drafted_from: Tensor, wanted: Tensor) -> tuple[Tensor, bool]:
    """A token that is distributed as p, given one that is distributed as q: (the draft, True) or (another, False).

    draft: int64 [1], a token drawn from q. drafted_from, wanted: scores [1, V], of which q and p are the softmax. Leviathan et
    al. (2023): the draft is kept with probability min(1, p / q), else the token is drawn from max(p - q, 0), scaled to 1.
    """
    q, p = (torch.softmax(scores[0], dim=-1, dtype=torch.float64) for scores in (drafted_from, wanted))
    if torch.rand((), dtype=torch.float64, device=p.device) * q[draft] < p[draft]:
        return draft, True
    rest = (p - q).clamp(min=0)
    return torch.multinomial(rest if rest.any() else p, 1), False


class Text:
    """The sequence, and what belongs to its new tokens. It grows as in plain decoding: a token, its criteria, the next."""

    def __init__(self, ids: Tensor, processors: Any, criteria: Any, config: GenerationConfig, streamer: Any) -> None:
        self.ids, self.processors, self.criteria, self.streamer = ids, processors, criteria, streamer
        self.samples, self.max_length = bool(config.do_sample), config.max_length
        ends = config.eos_token_id
        self.ends = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
        returns = config.return_dict_in_generate
        self.scores: tuple[Tensor, ...] | None = () if returns and config.output_scores else None
        self.logits: tuple[Tensor, ...] | None = () if returns and config.output_logits else None
        self.hidden_states: tuple[Any, ...] | None = () if returns and config.output_hidden_states else None
        self.has_ended = False
        self.n_accepted = 0

    def read(self, logits: Tensor, states: Any, drafts: list[tuple[Tensor, Tensor]], *, is_prefill: bool) -> int:
        """Append tokens as long as drafts are accepted, and one more; gives how many.

        logits: [K + 1, V] after the last token and after each of K drafts. drafts: pairs of a token [1] and the scores [1, V]
        by which it was chosen. states: what the model's pass has as hidden_states.
        """
        self.n_accepted = 0
        for i, raw in enumerate(logits.split(1)):
            raw = raw.to(self.ids.device, torch.float32, copy=True)
            scores = self.processors(self.ids, raw)
            token, accepted = self._choose(scores, *drafts[i]) if i < len(drafts) else (self.pick(scores), False)
            self.n_accepted += accepted
            if self.scores is not None:
                self.scores += (scores,)
            if self.logits is not None:
                self.logits += (raw,)
            if self.hidden_states is not None:
                self.hidden_states += (states if is_prefill else tuple(state[:, i : i + 1] for state in states),)
            self.ids = torch.cat([self.ids, token[:, None]], dim=1)
            if self.streamer is not None:
                self.streamer.put(token.cpu())
            self.has_ended = bool(self.criteria(self.ids, self.scores).all())
            if self.has_ended or not accepted:
                break
        return i + 1

    def pick(self, scores: Tensor) -> Tensor:
        """A token [1] by scores [1, V]."""
        if not self.samples:
            return scores.argmax(-1)
        return torch.multinomial(torch.softmax(scores[0], dim=-1, dtype=torch.float64), 1)

    def _choose(self, scores: Tensor, draft: Tensor, drafted_from: Tensor) -> tuple[Tensor, bool]:
        if self.samples:
            return accept(draft, drafted_from, scores)
        token = scores.argmax(-1)
        return token, bool(token == draft)


class _Verifier:
    """The model's pass over the last token and its drafts."""

    def __init__(self, model: Any, cache: LoopedCache, kwargs: dict[str, Any]) -> None:
        self.model, self.cache = model, cache
        own = ("attention_mask", "position_ids", "inputs_embeds", "logits_to_keep", CACHE_NAME)
        self.kwargs = {name: value for name, value in kwargs.items() if name not in own}
        self.kwargs |= {CACHE_NAME: cache, "return_dict": True}
        self.mask = kwargs.get("attention_mask")
        self.places = Places(model, cache, kwargs)

    def verify(self, ids: Tensor) -> Any:
        """`LoopedOutput` with the logits [1, K + 1, V] of ids [1, K + 1]."""
        n_new, mask = ids.shape[1], self.mask
        if mask is not None:
            mask = F.pad(mask, (0, self.cache.get_seq_length() + n_new - mask.shape[1]), value=1)
        places = self.places.of(self.cache.get_seq_length(), n_new)
        ids = ids.to(self.model.device)
        return self.model(ids, attention_mask=mask, position_ids=None if places is None else places[None], **self.kwargs)
