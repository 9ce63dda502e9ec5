"""`Columns`: which of a padded batch's new columns hold tokens, and the way between columns and packed tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from looped.lm.cache import LoopedCache
from looped.lm.config import LoopedGPT2Config
from looped.lm.reading import INTEGERS


@dataclass(frozen=True)
class Columns:
    """own: bool [B, T], True at a row's own tokens. counts: how many each row has. starts: how many it has in the cache."""

    own: Tensor
    counts: list[int]
    starts: list[int]

    @classmethod
    def of(cls, inputs: Tensor, mask: Tensor | None, cache: LoopedCache) -> Columns:
        """The new columns of inputs [B, T, ...]. Raises ValueError for a mask that does not fit them and the cache."""
        if inputs.dim() < 2 or inputs.shape[0] == 0 or inputs.shape[1] == 0:
            raise ValueError(f"LoopedGPT2: got inputs {list(inputs.shape)}; at least one row of one token is needed")
        n_rows, n_new = inputs.shape[:2]
        n_past = cache.get_seq_length()
        starts = cache.session.lengths
        if (n_past or starts) and not cache.batch_size == len(starts) == n_rows:
            raise ValueError(f"LoopedGPT2: got {n_rows} rows, but the cache holds {cache.batch_size}")
        starts = starts or [0] * n_rows
        if mask is None:
            return cls(torch.ones(n_rows, n_new, dtype=torch.bool, device=inputs.device), [n_new] * n_rows, starts)
        if mask.shape != (n_rows, n_past + n_new):
            raise ValueError(
                f"LoopedGPT2: attention_mask has shape {list(mask.shape)} but must be [{n_rows}, {n_past + n_new}]: "
                f"{n_past} cached columns and {n_new} new ones"
            )
        mask = mask.to(inputs.device)
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError("LoopedGPT2: attention_mask must be 1 at tokens and 0 at padding")
        own = mask[:, n_past:] == 1
        if n_past and not torch.equal(mask[:, :n_past] == 1, cache.own):
            raise ValueError("LoopedGPT2: attention_mask differs from that of the cached columns; start a new cache")
        return cls(own, own.sum(1).tolist(), starts)

    @property
    def is_full(self) -> bool:
        """Whether every column is a token."""
        return sum(self.counts) == self.own.numel()

    def packed(self, x: Tensor) -> Tensor:
        """[B, T, ...] to [N, ...]."""
        return x.flatten(0, 1) if self.is_full else x[self.own]

    def unpacked(self, x: Tensor) -> Tensor:
        """[N, ...] to [B, T, ...], zero where there is no token."""
        if self.is_full:
            return x.unflatten(0, self.own.shape)
        return x.new_zeros(*self.own.shape, *x.shape[1:]).index_put((self.own.nonzero(as_tuple=True)), x)

    def positions(self, position_ids: Tensor | None, config: LoopedGPT2Config) -> Tensor | None:
        """int64 [N], or None where rows count on from what they have. Raises ValueError where the table ends before."""
        if config.pos_kind == "none":
            return None
        if position_ids is None:
            for row, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
                if start + count > config.n_positions:
                    raise ValueError(
                        f"LoopedGPT2: row {row} has {start + count} tokens but the model has {config.n_positions} positions; "
                        "shorten it or use a model with more positions"
                    )
            return None
        n_rows, n_new = self.own.shape
        if position_ids.dim() != 2 or position_ids.shape[1] != n_new or position_ids.shape[0] not in (1, n_rows):
            raise ValueError(
                f"LoopedGPT2: position_ids has shape {list(position_ids.shape)} but must be [{n_rows}, {n_new}] or [1, {n_new}]"
            )
        if position_ids.dtype not in INTEGERS:
            raise ValueError(f"LoopedGPT2: position_ids are {position_ids.dtype} but must be int64")
        positions = self.packed(position_ids.to(self.own.device, torch.int64).expand(n_rows, n_new))
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < config.n_positions:
            raise ValueError(
                f"LoopedGPT2: position_ids lie in {int(positions.min())} .. {int(positions.max())} but the model has "
                f"{config.n_positions} positions; shorten the text or use a model with more positions"
            )
        usual = self.own.cumsum(1) - 1 + torch.tensor(self.starts, device=self.own.device)[:, None]
        return None if torch.equal(positions, self.packed(usual)) else positions


def check_inputs(inputs: Tensor, config: LoopedGPT2Config, *, are_ids: bool) -> None:
    """Raises ValueError for ids that are not integers [B, T], and for embeddings that are not floats [B, T, C]."""
    if are_ids and (inputs.dim() != 2 or inputs.dtype not in (torch.int32, torch.int64)):
        raise ValueError(f"LoopedGPT2: input_ids are {list(inputs.shape)}, {inputs.dtype}, but must be [B, T], int64 or int32")
    if not are_ids and (inputs.dim() != 3 or inputs.shape[2] != config.d_model or not inputs.is_floating_point()):
        raise ValueError(
            f"LoopedGPT2: inputs_embeds are {list(inputs.shape)}, {inputs.dtype}, but must be [B, T, {config.d_model}], floats"
        )
