"""Decoding on the fused Triton kernels: `TritonSession`, which runs new tokens through all loops in one launch.

It is a decode session as looped/lm/session.py defines one: ragged rows, embeddings without positions in, hidden states ready
for the head out, a slot of keys and values per (loop, layer). Arithmetic is that of looped/backends/triton.py. The kernels
judge a token by its state; rules that read the vocabulary head at every loop run on the eager session.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from looped.backends import triton
from looped.backends.device import is_interpreted, kernels
from looped.decoding import CachedKeys, Extension, Policy
from looped.exits import ROUNDING_LEVEL, Absolute, Contraction, Exact, ExitRule, Fixed, Relative
from looped.model import LoopedTransformer
from looped.weights import first_weight, weights_of

RULES = (Fixed, Exact, Absolute, Relative, Contraction)
GROWTH = 64  # tokens that room is made for at least

_decoders: weakref.WeakKeyDictionary[LoopedTransformer, tuple[Any, dict[Any, Any]]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _kernels() -> Any:
    """`loopkernels.decode_launch`, or the reason why it cannot be imported."""
    return kernels("decode_launch")


def why_not(model: LoopedTransformer) -> str | None:
    """Why this backend cannot decode with the model, and None where it can."""
    parameter, config, launches = first_weight(model), model.config, _kernels()
    precision = triton.precision_of(parameter)
    if parameter.device.type != "cuda" and not is_interpreted():
        return f"the Triton kernels run on a GPU and the model is on {parameter.device}"
    if isinstance(launches, str):
        return launches
    if precision is None:
        return f"the Triton kernels compute in float32 or bfloat16 and the model is {parameter.dtype}"
    if config.activation not in ("gelu_tanh", "relu"):
        return f"the Triton kernels have no {config.activation} activation"
    if config.mask_kind != "causal":
        return f"decoding needs a causal mask and the model's is {config.mask_kind}"
    if config.state_init not in launches.STATES:
        return f"decoding begins from {', '.join(launches.STATES)} and the model's state_init is {config.state_init}"
    target = kernels().target_of(parameter.device)
    too_old: str | None = kernels().why_not_compiled(target)
    if too_old:
        return too_old
    if launches.choose(_block_of(model), config.n_core, precision, target) is None:
        widths = [launch.width for launch in launches.LAUNCHES if target in launch.targets and launch.precision == precision]
        if not widths:
            return f"the decode kernels have no {precision} launch for {target} ({parameter.device})"
        if config.d_model > max(widths):
            return f"the decode kernels on {target} take widths up to {max(widths)} and the model is {config.d_model} wide"
        heads = [
            launch.widest_head for launch in launches.LAUNCHES if launch.width >= config.d_model and target in launch.targets
        ]
        within = f"heads up to {min(heads)} wide in a model of {config.d_model}"
        return f"the decode kernels on {target} take {within}, and its heads are {config.head_dim} wide"
    return model.why_not_as_configured()


def why_not_rule(rule: ExitRule) -> str | None:
    """Why the kernels cannot judge tokens by a rule, and None where they can."""
    if type(rule) in RULES or rule.is_fixed:
        return None
    names = ", ".join(kind.__name__ for kind in RULES)
    return (
        f"the kernels judge a token by its state ({names}); {type(rule).__name__} asks for the head, a gate or code of your "
        "own at every loop, which runs on the eager session"
    )


def _block_of(model: LoopedTransformer) -> Any:
    """The layers of prelude, core and coda one after the other, as `loopkernels` packs them."""
    config, weights = model.config, weights_of(model)
    core = triton.block_of(config, weights)
    layers = core.layers
    if config.n_prelude:
        layers = triton.block_of(config, weights, "prelude").layers + layers
    if config.n_coda:
        layers = layers + triton.block_of(config, weights, "coda").layers
    return dataclasses.replace(core, layers=layers, positions=None, read=None)


def decoder_of(model: LoopedTransformer, policy: Policy) -> Any:
    """The model's weights in tiles, packed again whenever a parameter has changed."""
    launches, config, precision = _kernels(), model.config, triton.precision_of(first_weight(model))
    layout = launches.Layout(
        n_prelude=config.n_prelude,
        n_core=config.n_core,
        n_coda=config.n_coda,
        state=config.state_init,
        positions="none" if config.pos_kind == "none" else config.pos_when,
        policy=policy.kind,
        period=policy.period,
    )
    with _lock:
        key = (config, precision, triton.marks_of(weights_of(model)))
        known = _decoders.get(model)
        if known is None or known[0] != key:
            known = (key, {})
            _decoders[model] = known
        if layout not in known[1]:
            other = next(iter(known[1].values()), None)
            if other is not None:  # policies share the weights
                known[1][layout] = dataclasses.replace(other, layout=layout)
            else:
                block, table = _block_of(model), model.positions.weight if config.pos_kind == "learned" else None
                target = kernels().target_of(first_weight(model).device)
                launch = launches.choose(block, config.n_core, precision, target)
                known[1][layout] = launches.decoder(block, layout, table, launch, emulate=is_interpreted())
        return known[1][layout]


def forget(model: LoopedTransformer) -> None:
    """Drop the packed weights of a model."""
    with _lock:
        _decoders.pop(model, None)


def stop_of(rule: ExitRule, n_loops: int, precision: str) -> Any:
    """A rule that judges tokens, as the kernels take it."""
    return _kernels().Stop(
        n_loops=n_loops,
        rule="fixed" if rule.is_fixed else type(rule).__name__.lower(),
        tol=getattr(rule, "tol", 0.0),
        phi=ROUNDING_LEVEL[precision],
        n_passes=rule.n_passes,
        check_every=rule.check_every,
        min_loops=rule.min_loops,
    )


class TritonSession:
    """Rows of tokens and their cache on the Triton kernels.

    model: a causal `LoopedTransformer` on a GPU. policy: which loops keep keys and values, with `kind` one of per_loop,
    last_only, modulo, first_then_shared and its `period`. Raises ValueError where the kernels cannot run the model.

    A row's result has the same bits alone and in any batch: one new token of a row goes through the decode kernel, several go
    through the prefill kernel, whatever the other rows have. Splits of a row into calls agree to rounding under per_loop.
    """

    backend = "triton"

    def __init__(self, model: LoopedTransformer, policy: Policy, gate: nn.Linear | None = None) -> None:
        obstacle = why_not(model)
        if obstacle is not None:
            raise ValueError(f'decoding with backend="triton" cannot run this: {obstacle}')
        self.model, self.policy = model, policy
        self.reset()

    def reset(self) -> None:
        """Forget all rows."""
        self._lengths: list[int] = []
        self._cache: Any = None
        self._cold: set[int] = set()  # rows that were cropped and have had no token since: they begin like new ones
        self._keys = CachedKeys(self.model.config.n_coda > 0)

    @property
    def lengths(self) -> list[int]:
        """Tokens kept of each row; empty before the first `extend`, which fixes the number of rows."""
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
        """Append tokens to the rows and compute them.

        embeds: [N, C], token embeddings without positions, the lengths[0] tokens of row 0 first; any float dtype. lengths: new
        tokens of each row, 0 allowed. n_loops: loops to run at most. rule: judges every token by itself. positions:
        int64 [N] rows of the position table; by default each row counts on. warm_start: tokens of a row that has cached tokens
        start from the last state of the last of them, unless the row has been cropped since. return_states: see `Extension`.

        Raises NotImplementedError for a rule that the kernels do not judge, ValueError for a gradient that embeds or weights
        ask for, sizes that do not fit, positions beyond the table, or loops after tokens that ran none; nothing is changed
        then.
        """
        if torch.is_grad_enabled() and (embeds.requires_grad or any(p.requires_grad for p in self.model.parameters())):
            raise ValueError('backend="triton" records no gradient; decode under torch.no_grad(), or use backend="eager"')
        with torch.no_grad():
            return self._extend(embeds, lengths, n_loops, rule, positions, warm_start, return_states)

    def _extend(
        self,
        embeds: Tensor,
        lengths: Sequence[int],
        n_loops: int,
        rule: ExitRule,
        positions: Tensor | None,
        warm_start: bool,
        return_states: bool,
    ) -> Extension:
        obstacle = why_not_rule(rule)
        if obstacle is not None:
            raise NotImplementedError(f'decoding with backend="triton": {obstacle}')
        self._keys.check(rule, n_loops, has_tokens=any(self._lengths))
        counts = [int(n) for n in lengths]
        self._check(embeds, counts, positions)
        decoder = decoder_of(self.model, self.policy)
        have = self._lengths or [0] * len(counts)
        self._make_room(decoder, have, counts, n_loops)
        if not len(embeds):
            states = [embeds] * (n_loops + 1) if return_states else None
            self._lengths = have
            return Extension(embeds, torch.zeros(0, dtype=torch.int64, device=embeds.device), states)
        with torch.autocast(embeds.device.type, enabled=False):
            out = _kernels().extend(
                decoder,
                self._cache,
                embeds.float(),
                counts,
                have,
                stop_of(rule, n_loops, decoder.launch.precision),
                seats=positions,
                warm=[warm_start and row not in self._cold for row in range(len(counts))],
                keep=return_states,
            )
        extension = Extension(out.hidden.to(embeds.dtype), out.loops.long(), self._states(out, embeds.dtype))
        self._keys.add(rule, n_loops, len(embeds), starts=have)
        self._cold -= {row for row, new in enumerate(counts) if new}
        self._lengths = [had + new for had, new in zip(have, counts, strict=True)]
        return extension

    def _states(self, out: Any, dtype: torch.dtype) -> list[Tensor] | None:
        if out.history is None:
            return None
        token = torch.arange(len(out.loops), device=out.loops.device)
        return [out.history[out.loops.clamp(max=t).long(), token].to(dtype) for t in range(len(out.history))]

    def _check(self, embeds: Tensor, counts: list[int], positions: Tensor | None) -> None:
        config, device = self.model.config, next(self.model.parameters()).device
        if embeds.dim() != 2 or embeds.shape[1] != config.d_model or embeds.device != device:
            raise ValueError(
                f"extend: embeds are {list(embeds.shape)} on {embeds.device}; they must be [N, {config.d_model}] on {device}"
            )
        if min(counts, default=0) < 0 or sum(counts) != len(embeds):
            raise ValueError(f"extend: lengths {counts} must be 0 or more and sum to the {len(embeds)} tokens given")
        if self._lengths and len(self._lengths) != len(counts):
            raise ValueError(f"extend: {len(counts)} lengths for a session of {len(self._lengths)} rows; reset it for others")
        if positions is not None and positions.shape != (len(embeds),):
            raise ValueError(f"extend: positions are {list(positions.shape)}; they must be [{len(embeds)}], one a token")
        if positions is not None and config.pos_kind == "learned" and len(positions):
            least, most = int(positions.min()), int(positions.max())
            if not 0 <= least <= most < config.n_positions:
                raise ValueError(
                    f"extend: positions lie in {least} .. {most} but the model has {config.n_positions} positions; "
                    "shorten the text or use a model with more positions"
                )
        if config.pos_kind == "learned" and positions is None:
            have = self._lengths or [0] * len(counts)
            longest = max((had + new for had, new in zip(have, counts, strict=True)), default=0)
            if longest > config.n_positions:
                raise ValueError(
                    f"extend: a row would have {longest} tokens but the model has {config.n_positions} positions; "
                    "shorten it or use a model with more positions"
                )

    def _make_room(self, decoder: Any, have: list[int], counts: list[int], n_loops: int) -> None:
        """A cache with a place for every new token and a slot for every loop."""
        needed = max((had + new for had, new in zip(have, counts, strict=True)), default=0)
        n_slots = decoder.layout.slots(n_loops)
        old = self._cache
        if old is not None and old.capacity >= needed and len(old.keys) >= n_slots:
            return
        capacity = max(GROWTH, needed) if old is None else old.capacity
        if needed > capacity:
            capacity = max(2 * capacity, needed)
        device = next(self.model.parameters()).device
        n_slots = n_slots if old is None else max(n_slots, len(old.keys))
        cache = _kernels().empty_cache(decoder, len(counts), capacity, n_slots, device)
        if old is not None:
            longest = max(have, default=0)
            for name, axis in (("keys", 3), ("values", 3), ("used", 1), ("rest", 1)):
                new, kept = getattr(cache, name), getattr(old, name).narrow(axis, 0, longest)
                (new[: len(kept)] if axis == 3 else new).narrow(axis, 0, longest).copy_(kept)
        self._cache = cache  # with all that was cached, or not at all

    def crop(self, n_tokens: Sequence[int]) -> None:
        """Forget the last n_tokens[b] tokens of row b. Raises ValueError for more than it has, or another number of rows."""
        drop = [int(n) for n in n_tokens]
        if len(drop) != len(self._lengths) or any(not 0 <= n <= had for n, had in zip(drop, self._lengths, strict=True)):
            raise ValueError(f"crop: {drop} tokens of rows that have {self._lengths}; each must lie in 0 .. what its row has")
        self._lengths = [had - n for had, n in zip(self._lengths, drop, strict=True)]
        self._keys.crop(self._lengths)
        self._cold = set(range(len(drop)))

    def select(self, rows: Tensor) -> None:
        """New row i is what row rows[i] was (int64): reorders for beams, repeats and drops rows."""
        chosen = [int(row) for row in rows.tolist()]
        if any(not 0 <= row < len(self._lengths) for row in chosen):
            raise ValueError(f"select: rows {chosen} must lie in 0 .. {len(self._lengths) - 1}")
        if not chosen:
            self.reset()
        elif self._cache is not None and chosen != list(range(len(self._lengths))):
            index = rows.to(self._cache.used.device)
            kept = {name: getattr(self._cache, name).index_select(1, index) for name in ("keys", "values")}
            kept |= {name: getattr(self._cache, name).index_select(0, index) for name in ("used", "rest")}
            self._cache = dataclasses.replace(self._cache, **kept)
        self._keys.select()
        self._lengths = [self._lengths[row] for row in chosen]
        self._cold = {i for i, row in enumerate(chosen) if row in self._cold}

    def copy(self) -> TritonSession:
        """A session of the same model that goes on independently from here."""
        other = TritonSession(self.model, self.policy)
        other._lengths, other._cold, other._keys = list(self._lengths), set(self._cold), dataclasses.replace(self._keys)
        if self._cache is not None:
            names = ("keys", "values", "used", "rest")
            other._cache = dataclasses.replace(self._cache, **{name: getattr(self._cache, name).clone() for name in names})
        return other
