"""Prefix freezing on the eager backend: tokens that have come to rest stop being computed.

Under a causal mask the fixed point of token i depends on tokens 0..i alone, so the longest prefix whose tokens have all passed
can be frozen: its state, keys and values are kept, and later loops run on the suffix. Token-wise maps run on the packed
suffixes of all prompts; only attention is padded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from looped.exits import Memory
from looped.model import Block, LoopedTransformer, own_tokens


class PrefixScope:
    """A unit is a token; `prefix.frozen` int64 [n] tokens of each prompt no longer move."""

    def __init__(self, model: LoopedTransformer) -> None:
        self.model = model

    def start(self, P: Tensor, lengths: Tensor) -> Memory:
        n, T = P.shape[:2]
        config = self.model.config
        cache = P.new_zeros(n, config.n_core, T, config.n_heads, config.attention_width // config.n_heads)
        norms = torch.zeros(n, T, dtype=torch.float64, device=P.device)
        return {
            "prefix.lengths": lengths,
            "prefix.frozen": torch.zeros_like(lengths),
            "prefix.n_loops": torch.zeros(n, T, dtype=torch.int64, device=P.device),
            "prefix.keys": cache,
            "prefix.values": cache.clone(),
            "prefix.g": norms,
            "prefix.n": norms.clone(),
        }

    def moving(self, live: Memory) -> Tensor:
        """bool [n, T]: own tokens that are not frozen."""
        n_tokens = live["P"].shape[1]
        own, frozen = (own_tokens(n_tokens, live[name]) for name in ("prefix.lengths", "prefix.frozen"))
        assert own is not None
        assert frozen is not None
        return own & ~frozen

    def image(self, live: Memory) -> Tensor:
        """F [n, T, C]: M on the suffixes; frozen tokens keep their state."""
        model, config, Y = self.model, self.model.config, live["Y"]
        moving = self.moving(live)
        row, place = moving.nonzero(as_tuple=True)  # of every moving token, packed
        seat = place - live["prefix.frozen"][row]  # its place in the padded suffix
        n_seats = int(seat.max()) + 1 if len(seat) else 0
        keys, values = live["prefix.keys"].clone(), live["prefix.values"].clone()

        seat_place = live["prefix.frozen"][:, None] + torch.arange(n_seats, device=Y.device)
        sees = torch.arange(Y.shape[1], device=Y.device) <= seat_place[..., None]  # [n, seats, T]
        X = model.inject(Y[moving], live["P"][moving])
        if config.pos_when == "each_loop" and config.pos_kind == "learned":
            X = X + model.positions(place)
        for layer, block in enumerate(model.core):
            assert isinstance(block, Block)
            q, k, v = block.attn.project(block.norm_1(X))
            keys[row, layer, place], values[row, layer, place] = k, v
            queries = q.new_zeros(len(Y), n_seats, *q.shape[1:])
            queries[row, seat] = q
            mixed = F.scaled_dot_product_attention(
                queries.transpose(1, 2),  # [n, H, seats, head_dim] over [n, H, T, head_dim]
                keys[:, layer].transpose(1, 2),
                values[:, layer].transpose(1, 2),
                attn_mask=sees[:, None],
            ).transpose(1, 2)
            X = X + block.attn.proj(mixed[row, seat].flatten(1))
            X = X + block.mlp(block.norm_2(X))
        if config.loop_norm == "each":
            X = model.final_norm(X)
        live["prefix.keys"], live["prefix.values"] = keys, values
        image = Y.clone()
        image[moving] = X
        return image

    def norm(self, live: Memory, x: Tensor) -> Tensor:
        return torch.linalg.vector_norm(x, dim=2, dtype=torch.float64)

    def of_prompt(self, live: Memory, g: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        moving = self.moving(live)
        live["prefix.g"] = torch.where(moving, g, live["prefix.g"])  # a frozen token keeps that of its last loop
        live["prefix.n"] = torch.where(moving, n, live["prefix.n"])
        live["prefix.n_loops"] = torch.where(moving, live["t"][:, None] + 1, live["prefix.n_loops"])
        return g.norm(dim=1), live["prefix.g"].norm(dim=1), live["prefix.n"].norm(dim=1)

    def all_pass(self, live: Memory, passed: Tensor) -> Tensor:
        return (passed | ~self.moving(live)).all(dim=1)

    def at_rest(self, live: Memory, enough: Tensor) -> Tensor:
        frozen, lengths = live["prefix.frozen"], live["prefix.lengths"]
        place = torch.arange(enough.shape[1], device=enough.device)
        longest = (enough | (place < frozen[:, None])).long().cumprod(dim=1).sum(dim=1)
        live["prefix.frozen"] = now = torch.minimum(longest, lengths)
        is_empty_at_rest = (lengths == 0) & enough[:, 0]  # padding passes where the rule is asked
        return ((now > frozen) | is_empty_at_rest) & (now == lengths)
