"""`Slots`: the keys and values of cached tokens, by part of the model, slot and layer."""

from __future__ import annotations

import torch
from torch import Tensor

from looped.lm.policy import CachePolicy
from looped.lm.rows import Chunk

Name = tuple[str, int, int]  # part ("prelude", "core", "coda", "check"), slot, layer
GROWTH = 64  # places that room is made for at least


class Slots:
    """A pair of tensors [B, places, H, head_dim] per name. A row's tokens stand at its first places; the rest is unused.

    Where gradients are recorded, nothing is written in place.
    """

    def __init__(self, policy: CachePolicy) -> None:
        self.policy = policy
        self.pairs: dict[Name, tuple[Tensor, Tensor]] = {}
        self.written: set[tuple[str, int, int]] = set()

    # One step ---------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A new step: every (loop, layer) may be written once."""
        self.written.clear()

    def name(self, part: str, t: int, layer: int) -> Name:
        """Where the keys and values of loop t stand; parts outside the loop have t = 0."""
        return part, self.policy.slot(t) if t else 0, layer

    def write(self, part: str, t: int, layer: int, keys: Tensor, values: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Put keys and values [N, H, head_dim] of a chunk of loop t in their slot; gives the slot up to the last place seen.

        Raises RuntimeError where this loop and layer have been written in this step.
        """
        if (part, t, layer) in self.written:
            raise RuntimeError(f"LoopedCache: layer {layer} of the {part} is written twice at loop {t} of one step")
        self.written.add((part, t, layer))
        name = self.name(part, t, layer)
        pair = self._with_room(name, keys, chunk)
        self.pairs[name] = new = _put(pair[0], keys, chunk), _put(pair[1], values, chunk)
        return new[0][:, : chunk.n_seen], new[1][:, : chunk.n_seen]

    def carry(self, part: str, t: int, layer: int, chunk: Chunk) -> None:
        """Tokens that have no loop t keep what they had at loop t - 1: fills the slot of t, where that is new."""
        before, name = self.name(part, t - 1, layer), self.name(part, t, layer)
        if before == name or t > self.policy.n_slots(t) or before not in self.pairs:  # a slot used before holds an earlier loop
            return
        like, row, place = self.pairs[before][0][:1, 0], chunk.row, chunk.place
        source, target = self._with_room(before, like, chunk), self._with_room(name, like, chunk)
        self.pairs[name] = _put(target[0], source[0][row, place], chunk), _put(target[1], source[1][row, place], chunk)

    def _with_room(self, name: Name, like: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        pair = self.pairs.get(name)
        if pair is None:
            shape = (chunk.n_rows, max(GROWTH, chunk.n_seen), *like.shape[1:])
            return like.new_zeros(shape), like.new_zeros(shape)
        room = pair[0].shape[1]
        if room >= chunk.n_seen:
            return pair
        more = (pair[0].shape[0], max(2 * room, chunk.n_seen) - room, *pair[0].shape[2:])
        return torch.cat([pair[0], pair[0].new_zeros(more)], 1), torch.cat([pair[1], pair[1].new_zeros(more)], 1)

    # All of them ------------------------------------------------------------------------------------------------------

    def n_loops(self, part: str = "core") -> int:
        """Slots per layer of a part so far."""
        return 1 + max((slot for p, slot, _ in self.pairs if p == part), default=-1)

    def deepen(self, part: str, n_slots: int, n_layers: int) -> None:
        """Make slots up to n_slots, where there are any: a cached token has in a new one what it has in the last."""
        if (part, n_slots - 1, 0) in self.pairs:
            return
        have = self.n_loops(part)
        new = {}  # all or none: a slot of some layers would count as one of all
        for slot in range(have, n_slots if have else 0):
            for layer in range(n_layers):
                keys, values = self.pairs[part, have - 1, layer]
                new[part, slot, layer] = keys.clone(), values.clone()
        self.pairs |= new

    def clear(self, chunk: Chunk) -> None:
        """Zeros at the chunk's places: attention gives what lies behind a row's tokens no weight, but 0 * NaN is NaN."""
        for name, pair in self.pairs.items():
            zeros = pair[0].new_zeros(chunk.n_tokens, *pair[0].shape[2:])
            keys, values = self._with_room(name, zeros, chunk)
            self.pairs[name] = _put(keys, zeros, chunk), _put(values, zeros, chunk)

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was; nothing is changed where that fails."""
        self.pairs = {
            name: (keys.index_select(0, rows.to(keys.device)), values.index_select(0, rows.to(values.device)))
            for name, (keys, values) in self.pairs.items()
        }

    def copy(self) -> Slots:
        slots = Slots(self.policy)
        slots.pairs = {name: (keys.clone(), values.clone()) for name, (keys, values) in self.pairs.items()}
        return slots


def _put(target: Tensor, x: Tensor, chunk: Chunk) -> Tensor:
    """target [B, places, ...] with x [N, ...] at the chunk's places."""
    if x.requires_grad or target.requires_grad:
        return target.index_put((chunk.row, chunk.place), x.to(target.dtype))
    if target.is_inference() and not torch.is_inference_mode_enabled():
        target = target.clone()
    if chunk.is_even:
        target[:, chunk.starts[0] : chunk.n_seen] = x.unflatten(0, (chunk.n_rows, chunk.n_seats))
        return target
    return target.index_put_((chunk.row, chunk.place), x.to(target.dtype))
