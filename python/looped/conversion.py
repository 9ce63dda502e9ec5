"""`in_dtype`: a model to compute with in another dtype, its weights converted once and kept for as long as they hold."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from looped.backends import cpu
from looped.backends.triton import marks_of
from looped.exits import PRECISION_OF
from looped.model import LoopedTransformer
from looped.weights import first_weight, weights_of

KEPT = 4  # converted copies under one first weight

_converted: Any = WeakTensorKeyDictionary()  # the first weight: {slot: (marks, weights by name)}; goes with that weight
_lock = threading.Lock()


def in_dtype(model: LoopedTransformer, dtype: torch.dtype | None) -> LoopedTransformer:
    """The model itself where it is in this dtype, or None is given; else a copy of what it is now, whose weights are the same
    tensors at every call until one of the model's changes, so that what backends keep of them is kept.

    Raises ValueError for a dtype that no backend computes in.
    """
    own = first_weight(model).dtype
    if (dtype or own) not in PRECISION_OF:
        raise ValueError(f"solve: dtype={dtype or own} is not one of {', '.join(map(str, PRECISION_OF))}")
    if dtype is None or dtype == own:
        return model
    weights = weights_of(model)
    converted = _weights_in(weights, dtype)
    # Everything but the weights is copied anew: hooks and settings may have changed.
    return copy.deepcopy(model, {id(weight): converted[name] for name, weight in weights.items()}).to(dtype)


def forget(model: LoopedTransformer) -> None:
    """Drop the converted weights of a model, and with them what backends keep of them."""
    with _lock:
        _converted.pop(first_weight(model), None)


def _weights_in(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    first = next(iter(weights.values()))
    marks: tuple[Any, ...] = marks_of(weights)
    if first.device.type == "cpu":  # its numbers, too: edits through `.data` or NumPy have no version
        marks += (cpu.fingerprint(weights.values()),)
    slot = (dtype, tuple(weight.data_ptr() for weight in weights.values()))
    with _lock:
        kept = _converted.setdefault(first, {})
        known = kept.get(slot)
        if known is None or known[0] != marks:
            by_id = {id(weight): nn.Parameter(weight.detach().to(dtype), weight.requires_grad) for weight in weights.values()}
            known = (marks, {name: by_id[id(weight)] for name, weight in weights.items()})
            kept.pop(slot, None)
            kept[slot] = known
            if len(kept) > KEPT:
                del kept[next(iter(kept))]
        converted: dict[str, Tensor] = known[1]
        return converted


def _after_fork() -> None:
    """A child has a lock of its own: a thread of the parent that held the old one does not live in it."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
