"""`LoopedCache`: a transformers `Cache` over a `DecodeSession`. It knows columns; the session knows tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from looped.lm.session import DecodeSession, take_back

# transformers renamed past_key_values on the way; outputs and calls of generate use whichever name this version has.
CACHE_NAME = next(f.name for f in dataclasses.fields(CausalLMOutputWithPast) if f.name in ("cache", "past_key_values"))


class LoopedCache(Cache):
    """What `LoopedGPT2` keeps between calls. Make one with `LoopedGPT2.make_cache`.

    A batch has columns; a row's own tokens stand in those where its attention mask is 1, and the others are never computed.

    own: bool [B, S], which columns hold a token of the row. n_loops: int64 [B, S], the loops each token ran, 0 where there is
    none. Both follow every reordering, so after `generate(..., return_dict_in_generate=True)` the loops used by each token are
    ``output.cache.n_loops`` (``past_key_values`` before transformers renamed it); the last token of a sequence is not in it,
    because no call has run it.
    """

    def __init__(self, session: DecodeSession) -> None:
        super().__init__(layers=[])
        self.session = session
        self.own = torch.zeros(0, 0, dtype=torch.bool)
        self.n_loops = torch.zeros(0, 0, dtype=torch.int64)

    def __repr__(self) -> str:
        rows, columns = self.own.shape
        return f"LoopedCache({self.session.policy}, {self.session.backend}, {rows} rows of {columns} columns)"

    def append(self, own: Tensor, n_loops: Tensor) -> None:
        """Count new columns in: bool and int64 [B, T]. The session has been extended by the own ones."""
        if self.own.shape[1]:
            own, n_loops = torch.cat([self.own, own], dim=1), torch.cat([self.n_loops, n_loops], dim=1)
        self.own, self.n_loops = own, n_loops

    def settle(self) -> None:
        """Have the session forget tokens without a column: Ctrl-C came after they were computed and before `append`."""
        if self.batch_size == 0:
            self.session.reset()
            return
        surplus = [length - n for length, n in zip(self.session.lengths, self.own.sum(1).tolist(), strict=True)]
        if any(surplus):
            take_back(self.session, surplus)

    # What generate asks -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return 1

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far."""
        return self.own.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit but the model's positions."""
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """The name of `get_max_length` in older versions."""
        return -1

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Columns that a mask for query_length new ones has, and the first of them."""
        return self.get_seq_length() + int(query_length), 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length()

    @property
    def batch_size(self) -> int:
        return self.own.shape[0]

    @property
    def max_batch_size(self) -> int:
        return self.batch_size

    @property
    def max_cache_len(self) -> int:
        return -1

    is_compileable = False
    is_croppable = True
    is_sliding = [False]  # noqa: RUF012
    is_linear = [False]  # noqa: RUF012
    is_dummy = [False]  # noqa: RUF012

    @property
    def is_initialized(self) -> bool:
        return self.get_seq_length() > 0

    # What generate does -----------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        if self.batch_size:
            rows = beam_idx.to(self.own.device).clamp(0, self.batch_size - 1)  # the session names rows that do not exist
            own, n_loops = self.own[rows], self.n_loops[rows]
            self.session.select(beam_idx)
            self.own, self.n_loops = own, n_loops

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, copies side by side."""
        self.reorder_cache(torch.arange(self.batch_size, device=self.own.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows: their numbers, or a bool mask [B]."""
        if indices.dtype == torch.bool and indices.shape != (self.batch_size,):
            raise ValueError(f"LoopedCache: a mask of rows must be [{self.batch_size}], got {list(indices.shape)}")
        self.reorder_cache(indices.nonzero().squeeze(-1) if indices.dtype == torch.bool else indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove columns. A positive number, as of old versions, is how many to keep."""
        n = self.get_seq_length()
        dropped = min(-tokens_to_remove, n) if tokens_to_remove <= 0 else max(n - tokens_to_remove, 0)
        if dropped:
            self.session.crop(self.own[:, n - dropped :].sum(1).tolist())
            self.own, self.n_loops = self.own[:, : n - dropped], self.n_loops[:, : n - dropped]

    def reset(self) -> None:
        self.session.reset()
        self.own, self.n_loops = self.own[:0, :0], self.n_loops[:0, :0]

    def __deepcopy__(self, memo: dict[int, Any]) -> LoopedCache:
        """A cache that goes on independently; the model is not copied."""
        cache = LoopedCache(self.session.copy())
        cache.own, cache.n_loops = self.own.clone(), self.n_loops.clone()
        return cache

    def __copy__(self) -> LoopedCache:
        """As deep as `__deepcopy__`: two caches of one session would outgrow each other."""
        return self.__deepcopy__({})

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: keys and values alone do not say of which loop they are."""
        raise TypeError("LoopedCache: is written by LoopedGPT2.forward alone; models of transformers need a cache of theirs")

    def early_initialization(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: there is nothing to make before the first tokens are known."""
        raise TypeError("LoopedCache: grows with its tokens and cannot be made beforehand; pass no static cache")
